"""The closed form of `memprof estimate --parallel` against simulated ranks, over the catalog.

    python -m tests.benchmarks.estimate_ranks            # the table
    python -m tests.benchmarks.estimate_ranks --write    # ... and into docs/accuracy-tables.md
    python -m tests.benchmarks.estimate_ranks --models llama-3.2-1b --plans fsdp,tp=2

Each case is two simulated training steps of one rank of each kind that the plan has, on GPUs without limit. The error
is estimate / simulated - 1, of what is allocated at the peak of the rank that has the highest.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from memprof.errors import UsageError
from memprof.estimate.geometry import build_from_model
from memprof.estimate.methods import METHOD_BY_KEY, MethodPlan
from memprof.estimate.table import find_highest_cell

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "accuracy-tables.md"
BEGIN, END = "<!-- table of: python -m tests.benchmarks.estimate_ranks --write -->\n", "<!-- end of table -->"

MODELS = (
    "gpt2", "pythia-410m", "llama-3.1-8b", "llama-3.2-1b", "tinyllama-1.1b", "smollm2-1.7b", "mistral-7b-v0.3",
    "qwen2.5-7b", "qwen3-0.6b", "qwen3-4b", "gemma-2-2b", "phi-3-mini", "olmo-2-1b", "opt-1.3b",
)  # fmt: skip
PLANS = (
    ("ddp", 4), ("fsdp", 8), ("fsdp:shard_grad_op", 4), ("tp=2", 2), ("tp=2,fsdp=2", 4), ("ulysses=2,fsdp=2", 4),
    ("cp=2,fsdp=2", 4), ("pp=4:1f1b", 4), ("pp=2:gpipe", 2), ("hsdp:2x2", 4),
)  # fmt: skip
# Taken in turn, with whether the loss is in chunks.
METHODS = (("full", False), ("full-checkpointing", True), ("mixed", False), ("full-checkpointing", False))
SHAPES = ((1, 1024), (4, 1024), (2, 2048))  # Sequences and tokens of each; taken in turn.


@dataclass(frozen=True)
class Row:
    """One case: the closed form beside the simulated rank."""

    model: str
    plan: str
    gpus: int
    method: str
    chunked_loss: bool
    batch_size: int
    context_length: int
    estimated_bytes: int
    allocated_bytes: int
    estimated_moment: str
    stage: str

    @property
    def error(self) -> float:
        return self.estimated_bytes / self.allocated_bytes - 1


Case = tuple[str, str, int, str, bool, int, int]


def cases(models: Sequence[str], plans: Sequence[str]) -> list[Case]:
    """Model, plan, GPUs, method, whether the loss is in chunks, sequences, tokens."""
    found: list[Case] = []
    for number, model in enumerate(MODELS):
        for place, (plan, gpus) in enumerate(PLANS):
            method, chunked = METHODS[(number + place) % len(METHODS)]
            if plan.startswith(("tp", "pp")):
                chunked = False  # the fix does not go with them
            batch, context = SHAPES[(number + place) % len(SHAPES)]
            if model in models and plan in plans:
                found.append((model, plan, gpus, method, chunked, batch, context))
    return found


def measure(case: Case) -> Row | None:
    """One case, simulated; None where the model cannot be spread so."""
    from memprof.flows.estimate import simulate

    model, parallel, gpus, method, chunked, batch, context = case
    subject = build_from_model(model)
    plan = MethodPlan(METHOD_BY_KEY[method], "bfloat16", chunked_loss=chunked)
    try:
        cell = find_highest_cell(subject, plan, batch, context, parallel, gpus)
        run = simulate(subject, plan, batch, context, parallel=parallel, gpus=gpus)
    except UsageError as error:
        print(f"{model:18} {parallel:18} {error.line}", flush=True)
        return None
    gc.collect()
    return Row(*case, cell.allocated_bytes, run.allocated_bytes, cell.peak.name, run.stage)


def read_rows(path: Path) -> list[Row]:
    """Results of an earlier run, beside the closed form as it is now."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = Row(**json.loads(line))
        plan = MethodPlan(METHOD_BY_KEY[row.method], "bfloat16", chunked_loss=row.chunked_loss)
        cell = find_highest_cell(
            build_from_model(row.model), plan, row.batch_size, row.context_length, row.plan, row.gpus
        )
        rows.append(Row(**{**asdict(row), "estimated_bytes": cell.allocated_bytes, "estimated_moment": cell.peak.name}))
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = ["| plan | GPUs | runs | median error | 90% within | from | to |", "|---|---:|---:|---:|---:|---:|---:|"]
    groups = {(plan, gpus): [row for row in rows if (row.plan, row.gpus) == (plan, gpus)] for plan, gpus in PLANS}
    for name, mine in [*((f"`{plan}` | {gpus}", mine) for (plan, gpus), mine in groups.items()), ("**all** |", rows)]:
        if not mine:
            continue
        errors = sorted((row.error for row in mine), key=abs)
        within = abs(errors[-(-len(errors) * 9 // 10) - 1])
        lines.append(
            f"| {name} | {len(mine)} | {statistics.median(errors):+.1%} | {within:.1%} | {min(errors):+.1%} | "
            f"{max(errors):+.1%} |"
        )
    return "\n".join(lines)


def page_with(text: str, rows: Sequence[Row]) -> str:
    before, found, rest = text.partition(BEGIN)
    assert found, f"{PAGE} has no table"
    _, end, after = rest.partition(END)
    models, plans = len({row.model for row in rows}), len({row.plan for row in rows})
    return f"{before}{BEGIN}{len(rows)} runs of {models} models in {plans} plans:\n\n{table(rows)}\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--plans", default=";".join(plan for plan, _ in PLANS), help="separated by semicolons")
    parser.add_argument("--rows", type=Path, help="a file of results to go on with, and to add to")
    parser.add_argument("--write", action="store_true", help="write docs/accuracy-tables.md")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    if options.rows and options.rows.exists():
        rows = read_rows(options.rows)
    done = {tuple(asdict(row).values())[:7] for row in rows}
    gc.disable()
    for row in rows:
        print(_line(row))
    for case in cases(options.models.split(","), options.plans.split(";")):
        row = None if case in done else measure(case)
        if row is None:
            continue
        rows.append(row)
        print(_line(row), flush=True)
        if options.rows:
            with options.rows.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    print(table(rows))
    if options.write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 0


def _line(row: Row) -> str:
    how = row.method + (", chunked" if row.chunked_loss else "")
    return (
        f"{row.model:16} {row.plan:18} {how:28} {row.batch_size} x {row.context_length:<5} {row.error:+8.2%} "
        f"{row.estimated_moment} / {row.stage}"
    )


if __name__ == "__main__":
    sys.exit(main())
