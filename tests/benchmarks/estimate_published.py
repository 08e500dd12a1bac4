"""The closed form of `memprof estimate` against published figures, and the bands that follow.

    python -m tests.benchmarks.estimate_published [FILE.csv]    # the tables
    python -m tests.benchmarks.estimate_published --write       # ... into bands.json and docs/estimate.md
    python -m tests.benchmarks.estimate_published --rows        # ... and every row

FILE.csv: a table of published figures (tests/accuracy/published/rows.py has its columns); without it, that of
shared/published_memory.csv beside the checkout. Every row becomes the question that a user would put, or is counted by
the reason why there is none. A band is measured over all sources, each of which weighs the same; beside it stands how
many figures of a source are within a band that was measured without that source.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from memprof.device.catalog import find_gpu
from memprof.device.context import CONTEXT_BYTES, LARGEST_CONTEXT_BYTES
from memprof.estimate.geometry import EstimatedModel, build_from_model
from memprof.estimate.methods import BANDED_KINDS
from memprof.estimate.options import EstimateOptions
from memprof.estimate.table import ALLOCATED, DEVICE_USED, MEMORY_KINDS, RESERVED, _read_bands, build_estimate
from memprof.workload.catalog import find_model
from tests.accuracy.published.rows import UNITS, Row, TableError, read_rows
from tests.benchmarks.estimate import BANDS, PAGE

TABLE = Path(__file__).resolve().parents[3] / "shared" / "published_memory.csv"
BEGIN, END = "<!-- table of: python -m tests.benchmarks.estimate_published --write -->\n", "<!-- end of table -->"
COVERED = 0.9  # The share of figures that a band is made for.
# No band is narrower than the largest errors against simulated runs (the table of docs/estimate.md, and
# tests/accuracy/first_line.json): of what is allocated, and, by kind of method, of what a GPU that never releases a
# cached block needs beyond the estimate of what is reserved.
SIMULATED_ERROR = 0.05
SIMULATED_NEED = {"inference": 0.14, "lora": 0.13, "full": 0.10, "mixed": 0.18, "adamw-8bit": 0.13}
TRAINED = ("full", "mixed", "adamw-8bit")  # Methods that share published figures.


@dataclass(frozen=True)
class Question:
    model: str | Mapping[str, Any]  # A name of the catalog, or a configuration.
    method: str
    dtype: str
    kind: str
    unit_bytes: int = 0  # 0: as the table has it.
    gpu: str = ""  # Whose cuBLAS workspaces count.
    moment: str = ""  # The moment that was measured, where it is not the peak.
    asked: dict[str, Any] = field(default_factory=dict)  # Arguments of `build_estimate`.


@dataclass(frozen=True)
class Asked:
    row: Row
    source: str
    kind: str
    method: str  # `Method.kind`.
    published_bytes: float
    estimated_bytes: int
    least_bytes: int  # Of the band that is stated.
    most_bytes: int
    allocated_bytes: int
    context: tuple[int, int]  # What the CUDA context is in it, at the least and at the most.

    @property
    def error(self) -> float:
        return self.estimated_bytes / self.published_bytes - 1

    @property
    def inside(self) -> bool:
        """Whether the figure is within the band that is stated."""
        return self.least_bytes <= self.published_bytes <= self.most_bytes


GPUS = "several GPUs"
OPERATOR = "one operator, not a model"
VISION = "a vision transformer"
ENCODER = "an encoder"
RECIPE = "a loss in chunks, an optimizer step in the backward, or offloading"
UNKNOWN = "the source does not say what was run"
NOT_A_PEAK = "not a peak: a mean over steps, or what remains after one"
EVALUATION = "another run is in the figure: an evaluation that generates 50 texts at once"
EMBEDDING = "PEFT's modules_to_save"
LEARNING = "reinforcement learning"
CONTEXT = "no model: the CUDA context alone"
COMPILED = "compiled"
FLOAT32_QLORA = "QLoRA without autocast"
SMALL = "a model of a few MiB: segments are most of what is reserved"

ALPACA = "lognormal:120,0.5"  # Not published; the figures below depend little on it.
# Their mean is published (tokens per second), the spread fits the published 99th percentile.
META_MATH = "lognormal:209,0.315,bucket=20"
# config.json of Qwen/Qwen-7B, whose layers are those of Qwen 2.
QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11_008, "vocab_size": 151_936, "max_position_embeddings": 8192,
}  # fmt: skip
ATTENTION = "q_proj,k_proj,v_proj,o_proj"
_FORMATS = {
    "BF16": "bfloat16",
    "FP8": "fp8",
    "GPTQ-Int8": "gptq-int8",
    "GPTQ-Int4": "gptq-int4",
    "AWQ-INT4": "awq-int4",
}


def question_of(row: Row) -> Question | str:
    """What is asked of a row, or why nothing is."""
    if row.task.startswith("op "):
        return OPERATOR
    if row.model.startswith("ViT"):
        return VISION
    if "x1" not in row.parallel.replace(" ", "") and ("2 node" in row.parallel or "FSDP" in row.parallel + row.model):
        return GPUS
    if row.gpu[:2] in ("2x", "4x", "8x") or "torchtitan" in row.source or "cosmos" in row.source:
        return GPUS
    return next(ask for marker, ask in _SOURCES.items() if marker in row.source)(row)


def _peft(row: Row) -> Question | str:
    if "whole run" in row.metric:
        return EVALUATION
    if "p99" not in row.metric:
        return NOT_A_PEAK
    asked: dict[str, Any] = {"batch_size": 4, "context_length": 768, "lengths": META_MATH}
    asked |= {"lora_rank": 32, "empties_cache": True}  # each ten steps
    return Question("llama-3.2-3b", "lora" if row.method == "lora" else "full", "bfloat16", RESERVED, asked=asked)


def _torchtune(row: Row) -> Question | str:
    if row.model == "Llama-3.1-8B":
        return UNKNOWN if row.gpu == "1x A6000" else RECIPE
    if row.model == "Llama-3.2-3B":
        shapes: dict[str, dict[str, Any]] = {
            "baseline full FT": {"lengths": ALPACA, "context_length": 4096},
            "+ packed": {"context_length": 4096},
        }
        if row.method not in shapes:
            return COMPILED if row.method == "+ compile" else RECIPE
        # recipes/configs/llama3_2/3B_full.yaml
        asked = {"batch_size": 2, "optimizer_impl": "fused", **shapes[row.method]}
        return Question("llama-3.2-3b", "full", "bfloat16", ALLOCATED, asked=asked)
    if row.method == "full FT":
        return RECIPE
    packed = {"batch_size": 4, "context_length": 2048}
    return _torchtune_lora(row, ALLOCATED, packed, "all-linear" if row.method == "QLoRA" else None)


def _torchtune_lora(row: Row, kind: str, shape: Mapping[str, Any], targets: str | None) -> Question:
    model = "llama-3-8b" if "Llama-3-8B" in row.model else "llama-2-7b"
    dtype = "int4" if "QLoRA" in row.method + row.model else "bfloat16"
    asked = {**shape, "lora_rank": 64 if "r64" in row.method else 8, "lora_targets": targets}
    unit = 2**30 if row.unit == "GiB" else 10**9  # torchtune/utils/memory.py until September 2024
    return Question(model, "lora-checkpointing", dtype, kind, unit, asked=asked)


def _alpaca(row: Row) -> Question:
    """torchtune's LoRA on Alpaca: its tutorial, and issue 1185."""
    targets = "q_proj,v_proj" if "q,v" in row.method else "all-linear"
    shape = {"batch_size": 2, "lengths": ALPACA, "empties_cache": row.method == "expandable_segments"}
    return _torchtune_lora(row, RESERVED, shape, targets)


def _qwen_7b(row: Row) -> Question | str:
    if row.method != "LoRA":
        return EMBEDDING
    asked = {"context_length": int(row.seq), "lora_rank": 64, "lora_targets": "all-linear"}
    return Question(QWEN_7B, "lora-checkpointing", "bfloat16", DEVICE_USED, 2**30, asked=asked)


def _torchao(row: Row) -> Question:
    """torchtune's full fine-tuning: Alpaca, checkpointed (recipes/configs/llama2/7B_full_low_memory.yaml)."""
    optimizers = {"bnb 8-bit": "adamw-8bit", "ao 8-bit": "torchao-adamw-8bit", "ao 4-bit": "torchao-adamw-4bit"}
    optimizer = optimizers.get(row.method, "adamw")
    implementation = "fused" if "fused" in row.method else None
    asked = {"batch_size": 2, "lengths": ALPACA, "optimizer": optimizer, "optimizer_impl": implementation}
    return Question("llama-2-7b", "full-checkpointing", "bfloat16", ALLOCATED, 2**30, asked=asked)


def _adapters(row: Row) -> Question | str:
    method = "lora-checkpointing" if row.ckpt == "on" else "lora"
    kind = RESERVED if "reserved" in row.metric else ALLOCATED
    asked: dict[str, Any] = {"context_length": int(row.seq), "optimizer": "paged-adamw-8bit", "lora_rank": 16}
    if "tiny" in row.model:
        return SMALL
    if row.method == "qlora":
        return FLOAT32_QLORA
    asked |= {"lora_targets": ATTENTION}
    model = row.model.split("/")[1].removesuffix("-Instruct").lower()
    return Question(model, method, "bfloat16", kind, asked=asked)


def _anatomy(row: Row) -> Question | str:
    if "weights" in row.method:
        return Question("bert-large-uncased", "weights", "float32", DEVICE_USED, 2**20)
    return CONTEXT if "context" in row.method else ENCODER


def _qwen3(row: Row) -> Question:
    """Return the question of the last token: the figures do not include the prompt (docs/accuracy-tables.md). Those of
    float8 have a head of its own at every length, though the two smaller models tie theirs."""
    asked = {"context_length": int(row.seq.split()[1]), "new_tokens": 2048}
    model: str | dict[str, Any] = row.model.lower()
    if row.weights == "FP8":
        model = {**find_model(row.model).load_config(), "tie_word_embeddings": False}
    dtype = _FORMATS[row.weights]
    return Question(model, "inference", dtype, ALLOCATED, 2**20, "h20-96gb", "last token", asked)


_SOURCES: dict[str, Callable[[Row], Question | str]] = {
    "huggingface/peft": _peft,
    "torchtune README": _torchtune,
    "torchtune docs": _alpaca,
    "torchtune#1185": _alpaca,
    "QwenLM/Qwen README": _qwen_7b,
    "pytorch/ao": _torchao,
    "can-i-finetune-this": _adapters,
    "model_memory_anatomy": _anatomy,
    "QwenLM/Qwen3": _qwen3,
    "trl#3456": lambda row: LEARNING,
    "": lambda row: UNKNOWN,
}


@cache
def _configured(text: str) -> EstimatedModel:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(text, encoding="utf-8")
        return build_from_model(str(path))


def answer(row: Row, question: Question) -> Asked:
    model = question.model
    subject = build_from_model(model) if isinstance(model, str) else _configured(json.dumps(model))
    answer = build_estimate(subject, EstimateOptions(dtype=question.dtype, **question.asked))
    cell = answer.cells[question.method, question.dtype]
    if question.moment:
        moments = tuple(moment for moment in cell.moments if moment.name == question.moment)
        cell = dataclasses.replace(cell, moments=moments)
    gpu = find_gpu(question.gpu) if question.gpu else None
    figures = cell.compute_ranges(gpu)
    source = next(marker for marker in _SOURCES if marker in row.source)
    published = row.figure * (question.unit_bytes or UNITS[row.unit.split()[0]])
    context = (CONTEXT_BYTES, LARGEST_CONTEXT_BYTES) if question.kind == DEVICE_USED else (0, 0)
    kind = "inference" if cell.method.kind == "weights" else cell.method.kind
    return Asked(row, source, question.kind, kind, published, *figures[question.kind], figures[ALLOCATED][0], context)


# -- bands -------------------------------------------------------------------------------------------------------------


def share_of(row: Asked) -> float:
    """How far the figure is from the estimate, as a share of it, the context left out: what a band is made of."""
    estimated = row.estimated_bytes - row.context[0]
    least, most = (row.published_bytes - context for context in reversed(row.context))
    return max(least / estimated - 1, 0.0) or min(most / estimated - 1, 0.0)


def limits(rows: Sequence[Asked], kind: str, method: str) -> tuple[float, float]:
    """The band: shares of the estimate that leave out as much above as below, each source weighing the same; at least
    as wide as the errors against simulated runs."""
    least = (-SIMULATED_ERROR, SIMULATED_ERROR) if kind == ALLOCATED else (0.0, SIMULATED_NEED[method])
    if not rows:
        return least
    per_source = Counter(row.source for row in rows)
    shares = sorted((share_of(row), 1 / per_source[row.source]) for row in rows)
    left_out = (1 - COVERED) / 2 * len(per_source)

    def quantile(ordered: Sequence[tuple[float, float]]) -> float:
        weight = 0.0
        for share, own in ordered:
            weight += own
            if weight > left_out:
                return share
        return ordered[-1][0]

    low, high = int(100 * quantile(shares) - 0.999) / 100, int(100 * quantile(shares[::-1]) + 0.999) / 100
    return min(least[0], low), max(least[1], high)


def _within(row: Asked, band: tuple[float, float]) -> bool:
    emptied = 0.0 if row.kind == ALLOCATED else row.allocated_bytes / (row.estimated_bytes - row.context[0]) - 1
    return min(band[0], emptied) <= share_of(row) <= band[1]


def measured(rows: Sequence[Asked]) -> dict[str, dict[str, dict[str, float]]]:
    """The bands by kind of method and of figure, as bands.json has them.

    What is in use is what is reserved and the context: they share a band. Methods that train all weights share figures.
    """
    return {method: dict(_measure_method(rows, method)) for method in BANDED_KINDS}


def _measure_method(rows: Sequence[Asked], method: str) -> Iterator[tuple[str, dict[str, float]]]:
    methods = TRAINED if method in TRAINED else (method,)
    # Loaded weights alone have no band: what is beside them is the context.
    own = [row for row in rows if row.method in methods and not (row.kind == DEVICE_USED and row.method == "inference")]
    for kind in MEMORY_KINDS:
        alike = [row for row in own if (row.kind == ALLOCATED) == (kind == ALLOCATED)]
        mine = [row for row in own if row.kind == kind]
        sources = {row.source for row in mine}
        without = {source: limits([row for row in alike if row.source != source], kind, method) for source in sources}
        low, high = limits(alike, kind, method)
        yield (
            kind,
            {
                "low": low,
                "high": high,
                "figures": len(mine),
                "sources": len(sources),
                "inside": round(statistics.mean(_within(row, (low, high)) for row in mine), 3) if mine else 0,
                "held_out": round(statistics.mean(_within(row, without[row.source]) for row in mine), 3) if mine else 0,
            },
        )


def table(asked: Sequence[Asked], reasons: Mapping[str, int]) -> str:
    """Errors by kind and by source, and the rows that have no question, in Markdown."""
    lines = [
        f"{len(asked)} of {len(asked) + sum(reasons.values())} published figures can be asked:", "",
        "| kind of figure | source | figures | median | from | to | within the band |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for kind in MEMORY_KINDS:
        mine = [row for row in asked if row.kind == kind]
        for source in (*dict.fromkeys(row.source for row in mine), ""):
            rows = [row for row in mine if source in ("", row.source)]
            errors = [row.error for row in rows]
            inside = sum(row.inside for row in rows)
            name = source.removesuffix(" README") or "**all**"
            lines.append(
                f"| {kind} | {name} | {len(rows)} | {statistics.median(errors):+.1%} | {min(errors):+.1%} | "
                f"{max(errors):+.1%} | {inside} |"
            )
    lines += ["", "| bands | allocated | reserved, device used | figures | within | held out |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for method, bands in measured(asked).items():
        widths = [f"{bands[kind]['low']:+.0%} to {bands[kind]['high']:+.0%}" for kind in (ALLOCATED, RESERVED)]
        count = sum(band["figures"] for band in bands.values())
        inside, held_out = (
            round(sum(band["figures"] * band[name] for band in bands.values())) for name in ("inside", "held_out")
        )
        lines.append(f"| {method} | {' | '.join(widths)} | {count:.0f} | {inside} | {held_out} |")
    lines += ["", "| not asked, because of | figures |", "| --- | ---: |"]
    lines += [f"| {reason} | {count} |" for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1])]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path, nargs="?", default=TABLE, metavar="FILE.csv")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--write", action="store_true", help="write bands.json and docs/estimate.md")
    options = parser.parse_args(arguments)
    try:
        rows = read_rows(options.table)
    except (TableError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    asked, reasons = ask(rows)
    bands = json.loads(BANDS.read_text(encoding="utf-8"))
    bands["published"] = measured(asked)
    if options.write:
        BANDS.write_text(json.dumps(bands, indent=1) + "\n", encoding="utf-8")
        _read_bands.cache_clear()
        asked, reasons = ask(rows)
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{table(asked, reasons)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    if options.rows:
        for row in asked:
            print(
                f"{row.row.line:4} {row.row.title[:60]:60} {row.kind:12} {row.published_bytes / 2**30:8.2f} "
                f"{row.estimated_bytes / 2**30:8.2f} {row.error:+8.1%} {'' if row.inside else 'outside'}"
            )
    print(table(asked, reasons))
    print(json.dumps(bands["published"], indent=1))
    return 0


def ask(rows: Sequence[Row]) -> tuple[list[Asked], Counter[str]]:
    """Every row's answer, and how many have no question, by the reason."""
    questions = [(row, question_of(row)) for row in rows]
    asked = [answer(row, question) for row, question in questions if isinstance(question, Question)]
    return asked, Counter(question for _, question in questions if isinstance(question, str))


if __name__ == "__main__":
    sys.exit(main())
