"""The closed form of `memprof estimate` against the virtual GPU, over the catalog.

    python -m tests.benchmarks.estimate            # the table
    python -m tests.benchmarks.estimate --write    # ... and memprof/estimate/bands.json and docs/estimate.md
    python -m tests.benchmarks.estimate --models gpt2,llama-3.2-1b --methods full

Each case is a simulated run of two training steps, of a prompt, or of 200 steps over samples of different lengths, on a
GPU without limit. The error is estimate / simulated - 1, of what is allocated at the peak. From the same runs is what
the allocator keeps beyond that: bands.json, "cached". Exit code 1 if a run reserves more than the stated band.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from memprof.estimate.geometry import build_from_model
from memprof.estimate.methods import METHOD_BY_KEY, MethodPlan
from memprof.estimate.options import EstimateOptions
from memprof.estimate.table import DEVICE_USED, Cell, build_estimate

ROOT = Path(__file__).resolve().parents[2]
BANDS = ROOT / "memprof" / "estimate" / "bands.json"
PAGE = ROOT / "docs" / "estimate.md"
BEGIN, END = "<!-- table of: python -m tests.benchmarks.estimate --write -->\n", "<!-- end of table -->"

MODELS = (
    "gpt2", "gpt2-medium", "gpt2-xl", "pythia-70m", "pythia-410m", "pythia-1.4b", "pythia-6.9b", "pythia-12b",
    "llama-2-7b", "llama-2-13b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "llama-3.2-3b", "tinyllama-1.1b",
    "smollm-135m", "smollm2-1.7b", "mistral-7b-v0.3", "mistral-nemo-12b", "qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-32b",
    "qwen3-0.6b", "qwen3-4b", "qwen3-14b", "gemma-2-2b", "gemma-3-1b", "phi-2", "phi-3-mini", "olmo-2-1b", "opt-1.3b",
)  # fmt: skip
CASES = (
    ("full", "bfloat16"), ("lora", "bfloat16"), ("inference", "bfloat16"), ("lora", "int4"), ("mixed", "bfloat16"),
    ("full-checkpointing", "bfloat16"), ("adamw-8bit", "bfloat16"), ("inference", "int4"),
    ("lora-checkpointing", "bfloat16"), ("mixed-checkpointing", "bfloat16"), ("lora-checkpointing", "int4"),
    ("adamw-8bit-checkpointing", "bfloat16"), ("full", "float32"), ("inference", "int8"),
)  # fmt: skip
SHAPES = ((1, 1024), (4, 1024), (2, 2048))  # Sequences and tokens of each; the models take them in turn.
# Samples whose lengths vary: sequences of a batch, what longer ones are cut to, and `--lengths`.
WITH_LENGTHS = (
    ("smollm-135m", "full", "bfloat16", 4, 1024, "lognormal:250,0.6"),
    ("gpt2", "full-checkpointing", "bfloat16", 4, 768, "lognormal:212,0.5"),
    ("qwen2.5-0.5b", "lora", "bfloat16", 4, 768, "lognormal:212,0.5"),
    ("llama-3.2-1b", "lora-checkpointing", "bfloat16", 2, 512, "lognormal:110,0.6"),
    ("pythia-160m", "full", "float32", 8, 1024, "lognormal:150,0.8"),
    ("opt-125m", "mixed", "bfloat16", 4, 2048, "lognormal:400,0.7"),
    ("qwen2.5-0.5b", "lora-checkpointing", "int4", 2, 2048, "lognormal:300,0.7"),
    ("llama-3.2-1b", "full", "bfloat16", 4, 768, "lognormal:212,0.4"),
    ("smollm-135m", "lora", "bfloat16", 8, 2048, "lognormal:500,0.5"),
    ("gpt2", "adamw-8bit", "bfloat16", 2, 512, "lognormal:110,0.6"),
    ("gpt2", "lora", "int4", 4, 1024, "lognormal:300,0.9"),
    ("pythia-160m", "full-checkpointing", "bfloat16", 4, 2048, "lognormal:600,0.5"),
)


@dataclass(frozen=True)
class Row:
    """One case: the closed form beside the virtual GPU."""

    model: str
    method: str
    dtype: str
    batch_size: int
    context_length: int
    estimated_bytes: int
    allocated_bytes: int
    required_bytes: int
    estimated_moment: str
    stage: str
    lengths: str = ""

    @property
    def case(self) -> tuple[str, str, str, int, int, str]:
        return self.model, self.method, self.dtype, self.batch_size, self.context_length, self.lengths

    @property
    def error(self) -> float:
        return self.estimated_bytes / self.allocated_bytes - 1

    @property
    def limits(self) -> tuple[float, float]:
        """What a GPU must have at the least, and at the most, relative to the estimate."""
        from memprof.device.context import CONTEXT_BYTES

        device = self.estimated_bytes + CONTEXT_BYTES
        return (self.allocated_bytes + CONTEXT_BYTES) / device - 1, self.required_bytes / device - 1


def cell_of(model: str, method: str, dtype: str, batch_size: int, context: int, lengths: str = "") -> Cell:
    subject = build_from_model(model)
    shape = {"context_length": context, "batch_size": batch_size, "lengths": lengths or None}
    return build_estimate(subject, EstimateOptions(**shape)).cells[method, dtype]  # type: ignore[arg-type]


def measure(model: str, method: str, dtype: str, batch_size: int, context_length: int, lengths: str = "") -> Row:
    from memprof.flows.estimate import simulate

    subject = build_from_model(model)
    cell = cell_of(model, method, dtype, batch_size, context_length, lengths)
    run = simulate(
        subject, MethodPlan(METHOD_BY_KEY[method], dtype), batch_size, context_length, lengths=lengths or None
    )
    gc.collect()
    sizes = (cell.allocated_bytes, run.allocated_bytes, run.required_bytes)
    return Row(model, method, dtype, batch_size, context_length, *sizes, cell.peak.name, run.stage, lengths)


def read_rows(path: Path) -> list[Row]:
    """Results of an earlier run, beside the closed form as it is now."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        cell = cell_of(*Row(**fields).case)
        rows.append(Row(**{**fields, "estimated_bytes": cell.allocated_bytes, "estimated_moment": cell.peak.name}))
    return rows


def cached(rows: Iterable[Row]) -> dict[str, float]:
    """What the allocator kept beyond what it had handed out at the peak, by `Cell.cached_fraction_key`: medians.

    A share of what it had handed out; where lengths vary, of what depends on the number of tokens.
    """
    from memprof.device.context import CONTEXT_BYTES

    found: dict[str, list[float]] = {"weights": [0.0]}
    for row in rows:
        cell = cell_of(*row.case)
        kept = row.required_bytes - CONTEXT_BYTES - row.allocated_bytes
        whole = cell.token_bytes if row.lengths else row.allocated_bytes
        found.setdefault(cell.cached_fraction_key, []).append(kept / whole)
    return {key: round(statistics.median(shares), 3) for key, shares in sorted(found.items())}


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| method | dtype | runs | median error | middle 90% | largest | a GPU needs, by the estimate |",
        "| --- | --- | ---: | ---: | --- | ---: | --- |",
    ]
    groups = {
        (method, dtype): [row for row in rows if (row.method, row.dtype) == (method, dtype) and not row.lengths]
        for method, dtype in CASES
    }
    groups["lengths that vary", "all"] = [row for row in rows if row.lengths]
    for (method, dtype), mine in groups.items():
        if not mine:
            continue
        errors = sorted(row.error for row in mine)
        cut = len(errors) // 20
        largest = max(errors, key=abs)
        low, high = min(row.limits[0] for row in mine), max(row.limits[1] for row in mine)
        lines.append(
            f"| {method} | {dtype} | {len(mine)} | {statistics.median(errors):+.2%} | {errors[cut]:+.2%} to "
            f"{errors[len(errors) - 1 - cut]:+.2%} | {largest:+.2%} | {low:+.1%} to {high:+.1%} |"
        )
    return "\n".join(lines)


def page_with(text: str, rows: Sequence[Row]) -> str:
    before, found, rest = text.partition(BEGIN)
    assert found, f"{PAGE} has no table"
    _, end, after = rest.partition(END)
    models = len({row.model for row in rows})
    return f"{before}{BEGIN}{len(rows)} runs of {models} models:\n\n{table(rows)}\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--methods", help="separated by commas; all of them by default")
    parser.add_argument("--rows", type=Path, help="a file of results to go on with, and to add to")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop measuring after so long")
    parser.add_argument("--write", action="store_true", help="write bands.json and docs/estimate.md")
    options = parser.parse_args(arguments)
    chosen = options.methods.split(",") if options.methods else [method for method, _ in CASES]
    rows: list[Row] = []
    if options.rows and options.rows.exists():
        rows = read_rows(options.rows)
    done = {row.case for row in rows}
    begin = time.monotonic()
    gc.disable()
    models = options.models.split(",")
    shapes = {model: SHAPES[number % len(SHAPES)] for number, model in enumerate(MODELS)}
    cases = [(model, method, dtype, *shapes.get(model, SHAPES[0]), "") for method, dtype in CASES for model in models]
    for case in (*cases, *(case for case in WITH_LENGTHS if case[0] in models)):
        if case[1] not in chosen or case in done or time.monotonic() - begin > options.seconds:
            continue
        row = measure(*case)
        rows.append(row)
        print(
            f"{row.model:18} {row.method:26} {row.dtype:9} {row.batch_size} x {row.context_length:<5} {row.lengths} "
            f"{row.error:+8.2%} {row.estimated_moment} / {row.stage}", flush=True,
        )  # fmt: skip
        if options.rows:
            with options.rows.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    print(table(rows))
    if options.write:
        bands = json.loads(BANDS.read_text(encoding="utf-8")) | {"cached": cached(rows)}
        BANDS.write_text(json.dumps(bands, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
        return 0
    beyond = [row for row in rows if row.required_bytes > cell_of(*row.case).compute_ranges()[DEVICE_USED][2]]
    for row in beyond:
        print(f"beyond the stated band: {row.case}: {row.limits[1]:+.2%}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
