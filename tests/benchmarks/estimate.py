"""The closed form of `memprof estimate` against the virtual GPU, over the catalog.

    python -m tests.benchmarks.estimate            # the table
    python -m tests.benchmarks.estimate --write    # ... and memprof/estimate/bands.json and docs/estimate.md
    python -m tests.benchmarks.estimate --models gpt2,llama-3.2-1b --methods full

Each case is a simulated run of two training steps, or of a prompt, on a card without limit. The error is
estimate / simulated - 1, of what is allocated at the peak. The band is what `memprof estimate` states: see
memprof/estimate/table.py. Exit code 1 if a verdict would be more optimistic than its stated band.
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
SHAPES = ((1, 1024), (4, 1024), (2, 2048))
"""Sequences and tokens of each; the models take them in turn."""


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

    @property
    def error(self) -> float:
        return self.estimated_bytes / self.allocated_bytes - 1

    @property
    def limits(self) -> tuple[float, float]:
        """What a card must have at the least, and at the most, relative to the estimate."""
        from memprof.device.context import CONTEXT_BYTES

        device = self.estimated_bytes + CONTEXT_BYTES
        return (self.allocated_bytes + CONTEXT_BYTES) / device - 1, self.required_bytes / device - 1


def closed_form(model: str, method: str, dtype: str, batch_size: int, context: int) -> tuple[int, str]:
    """Bytes at the peak, and the moment."""
    from memprof.estimate.geometry import from_model
    from memprof.estimate.table import build_estimate

    subject = from_model(model)
    cell = build_estimate(subject, context_length=context, batch_size=batch_size).cells[method, dtype]
    return cell.allocated_bytes, cell.peak.name


def measure(model: str, method: str, dtype: str, batch_size: int, context_length: int) -> Row:
    """One case, simulated."""
    from memprof.estimate.geometry import from_model
    from memprof.estimate.methods import BY_KEY, Plan
    from memprof.flows.estimate import simulate

    subject = from_model(model)
    limit = subject.geometry.max_positions if subject.geometry is not None else None
    context = min(context_length, limit or context_length)
    estimated, moment = closed_form(model, method, dtype, batch_size, context)
    run = simulate(subject, Plan(BY_KEY[method], dtype), batch_size, context)
    gc.collect()
    return Row(
        model, method, dtype, batch_size, context, estimated, run.allocated_bytes, run.required_bytes, moment, run.stage
    )


def read_rows(path: Path) -> list[Row]:
    """Results of an earlier run, beside the closed form as it is now."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        case = [fields[name] for name in ("model", "method", "dtype", "batch_size", "context_length")]
        estimated, moment = closed_form(*case)
        rows.append(Row(**{**fields, "estimated_bytes": estimated, "estimated_moment": moment}))
    return rows


def bands(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """By method, rounded outwards to a thousandth."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault(row.method, []).append(row.limits)
    return {
        method: {
            "low": int(1000 * min(0.0, *(low for low, _ in limits)) - 1) / 1000,
            "high": int(1000 * max(0.0, *(high for _, high in limits)) + 1) / 1000,
            "runs": len(limits),
        }
        for method, limits in found.items()
    }


def table(rows: Sequence[Row]) -> str:
    """The distribution of the errors, in Markdown."""
    lines = [
        "| method | dtype | runs | median error | middle 90% | largest | a card needs, by the estimate |",
        "| --- | --- | ---: | ---: | --- | ---: | --- |",
    ]
    for method, dtype in CASES:
        mine = [row for row in rows if (row.method, row.dtype) == (method, dtype)]
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
    """The page with its table replaced."""
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
    done = {(row.model, row.method, row.dtype) for row in rows}
    begin = time.monotonic()
    gc.disable()
    for method, dtype in CASES:
        for model in options.models.split(","):
            if method not in chosen or (model, method, dtype) in done or time.monotonic() - begin > options.seconds:
                continue
            row = measure(model, method, dtype, *SHAPES[MODELS.index(model) % len(SHAPES) if model in MODELS else 0])
            rows.append(row)
            print(
                f"{model:18} {method:26} {dtype:9} {row.batch_size} x {row.context_length:<5} {row.error:+8.2%} "
                f"{row.estimated_moment} / {row.stage}", flush=True,
            )  # fmt: skip
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    print(table(rows))
    if options.write:
        BANDS.write_text(json.dumps(bands(rows), indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
        return 0
    from memprof.estimate.table import band_of

    beyond = [row for row in rows if row.limits[1] > band_of(row.method).high]
    for row in beyond:
        print(f"beyond the stated band: {row.model} {row.method} {row.dtype} {row.batch_size}: {row.limits[1]:+.2%}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
