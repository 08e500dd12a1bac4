"""The closed form's first line against the run that it announces, for every published figure that it can be asked of.

    python -m tests.benchmarks.first_line [FILE.csv] [--write]

FILE.csv: a table of published figures (tests/accuracy/published/rows.py); without it, shared/published_memory.csv
beside the checkout. (The rows of published_2026.csv are of diffusion models, servers, single operators and Megatron:
the closed form has none of them.) What a row describes becomes a spec of `memprof profile` (estimate_published.py has
the questions), which is run on a virtual GPU of unlimited capacity, or for fp8 on the row's own. A verdict of the
closed form contradicts no run, on any capacity, if its band begins at or below what the run allocates, and ends at or
above what it reserves without releasing anything. --write keeps the runs in tests/accuracy/first_line.json, which
tests/accuracy/test_first_line.py reads. Exit code 1: a verdict is contradicted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memprof.estimate.methods import METHOD_BY_KEY, MethodPlan
from memprof.estimate.table import find_column
from memprof.flows.estimate import UNLIMITED_BYTES
from memprof.flows.first_estimate import FirstEstimate, estimate_spec
from memprof.spec import TargetSpec
from tests.accuracy.published.rows import Row, read_rows
from tests.benchmarks.estimate_published import TABLE, Question, question_of

RUNS = Path(__file__).resolve().parents[1] / "accuracy" / "first_line.json"


@dataclass(frozen=True)
class Run:
    """A run that nothing limits: the fields of its spec, and what it takes of the GPU with the CUDA context."""

    spec: Mapping[str, Any]
    config: Mapping[str, Any] | None  # of a model that is not in the catalog
    allocated_bytes: int
    required_bytes: int

    @property
    def key(self) -> str:
        """Return the text by which the run is found among others."""
        return make_key(self.spec, self.config)

    def estimate(self) -> FirstEstimate | None:
        """Return the closed form's estimate of the run."""
        with tempfile.TemporaryDirectory() as folder:
            return estimate_spec(make_spec(self.spec, self.config, folder))

    def find_contradiction(self) -> str:
        """Return the verdict that the run would contradict on some GPU; empty if there is none."""
        estimate = self.estimate()
        assert estimate is not None, self.spec
        if estimate.low_bytes > self.allocated_bytes:
            return "does not fit"
        return "fits" if estimate.high_bytes < self.required_bytes else ""


def make_key(fields: Mapping[str, Any], config: Mapping[str, Any] | None) -> str:
    """Return a text that is the same for equal specs."""
    return json.dumps([fields, config], sort_keys=True, default=str)


def read_runs() -> list[Run]:
    """Return the runs that were kept."""
    return [Run(**fields) for fields in json.loads(RUNS.read_text(encoding="utf-8"))] if RUNS.exists() else []


def make_spec(fields: Mapping[str, Any], config: Mapping[str, Any] | None, folder: str) -> TargetSpec:
    """Return the spec of a run, on a GPU without limit unless `fields` name one.

    The configuration of its model is written into `folder`.
    """
    model = str(fields["model"])
    if config is not None:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(dict(config)), encoding="utf-8")
        model = str(path)
    gpu = {} if "gpu" in fields else {"gpu_vram_bytes": UNLIMITED_BYTES}
    return TargetSpec(**{**fields, "model": model, **gpu})


def build_fields(question: Question) -> dict[str, Any] | None:
    """Return the fields of the spec that a question is about; None if `memprof profile` runs nothing for it."""
    asked = dict(question.asked)
    plan = MethodPlan(
        METHOD_BY_KEY[question.method], find_column(question.dtype), asked.get("lora_rank", 8),
        asked.get("lora_targets"), asked.get("optimizer", "adamw"), asked.get("optimizer_impl") == "fused",
        asked.get("new_tokens", 1),
    )  # fmt: skip
    if plan.method.kind == "weights":
        return None
    names = ("batch_size", "context_length", "lengths")
    fields = {name: asked[name] for name in names if name in asked} | plan.build_spec_fields()
    if question.dtype == "fp8":  # which the GPU without limit does not have
        fields["gpu"] = question.gpu
    return {**fields, "model": question.model if isinstance(question.model, str) else "published"}


def measure(fields: Mapping[str, Any], config: Mapping[str, Any] | None) -> Run:
    """Run the spec that the fields are of."""
    from memprof.flows.profile import profile

    with tempfile.TemporaryDirectory() as folder:
        _, document = profile(make_spec(fields, config, folder), with_details=False)
    context_bytes = document.device.context_bytes
    return Run(dict(fields), config, document.peak.allocated_bytes + context_bytes, document.verdict.required_bytes)


def list_questions(table: Path) -> list[tuple[Row, Question]]:
    """Return the rows of which something can be asked."""
    questions = [(row, question_of(row)) for row in read_rows(table)]
    asked = [(row, question) for row, question in questions if isinstance(question, Question)]
    return sorted(asked, key=lambda pair: "lengths" in pair[1].asked)  # those of 200 steps come last


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each run; 1 if it contradicts the closed form."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path, nargs="?", default=TABLE, metavar="FILE.csv")
    parser.add_argument("--again", action="store_true", help="run what was kept, too")
    parser.add_argument("--write", action="store_true", help=f"keep the runs in {RUNS.name}")
    options = parser.parse_args(arguments)
    asked = list_questions(options.table)
    recorded = {} if options.again else {run.key: run for run in read_runs()}
    runs: dict[str, Run] = {}
    silent = 0
    for row, question in asked:
        fields = build_fields(question)
        config = None if isinstance(question.model, str) else question.model
        with tempfile.TemporaryDirectory() as folder:
            is_known = fields is not None and estimate_spec(make_spec(fields, config, folder)) is not None
        if not is_known or fields is None:
            silent += 1
            print(f"{row.line:4} {row.title[:70]}: no first line")
        elif (key := make_key(fields, config)) not in runs:
            run = runs[key] = recorded.get(key) or measure(fields, config)
            estimate = run.estimate()
            assert estimate is not None
            sizes = (estimate.low_bytes, run.allocated_bytes, run.required_bytes, estimate.high_bytes)
            print(
                f"{row.line:4} {row.title[:60]:60} {' '.join(f'{size / 2**30:8.2f}' for size in sizes)} "
                f"{run.find_contradiction()}", flush=True,
            )  # fmt: skip
            if options.write:
                RUNS.write_text(json.dumps([asdict(run) for run in runs.values()], indent=1) + "\n", encoding="utf-8")
    wrong = sum(bool(run.find_contradiction()) for run in runs.values())
    print(f"{len(asked)} figures, {silent} without a first line; {len(runs)} runs, {wrong} contradicted")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
