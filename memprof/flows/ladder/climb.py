"""Runs with remedies in force: one after another (`--ladder`), or as named (`--fix A,B`). Every row is a run of the
whole pipeline; nothing is added up from estimates.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memprof.catalog import Gpu
from memprof.errors import MemprofError
from memprof.flows.account import analyze, with_settings
from memprof.flows.cards import virtual_card
from memprof.flows.profile import profile
from memprof.ledger.categories import Category
from memprof.remedies.fixes import Fix, edit_spec, in_force, worst_numerics
from memprof.remedy_catalog import REMEDIES
from memprof.report.documents.ladder import Rung, StepWork, bottleneck_of, cost_of, step_work
from memprof.report.documents.report import Document
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.trace.facts import target_to_json
from memprof.units import GIB, format_bytes

LADDER = (
    "device-placement", "expandable-segments", "low-rank-npt", "cpu-offload-npt-delta", "sdpa-attention",
    "chunked-loss", "fused-optimizer", "optimizer-in-backward", "micro-batch", "activation-checkpointing",
    "8-bit-optimizer", "cpu-offload-optimizer", "cpu-offload-activations", "lora", "qlora",
)  # fmt: skip
"""What a ladder tries: of the remedies against one and the same bottleneck the first is taken first."""

TRAIN_ANOTHER = frozenset({"lora", "qlora", "8-bit-weights", "4-bit-weights", "freeze", "vocabulary-cap"})
"""These change what is learnt: only where nothing else is enough."""

WORTH = 0.01
"""A remedy that saves less than this share of what is needed is no rung."""
MAX_RUNGS = 9
MAX_RUNS = 16
"""A ladder is to be there within a minute."""

HOST_BYTES = 256 * GIB
"""Host memory that the search takes for granted: a node with eight large cards has about 2 TiB."""

_BY_CATEGORY: dict[str, tuple[str, ...]] = {
    Category.FRAGMENTATION.value: ("expandable-segments",),
    Category.TEMPORARIES.value: ("fused-optimizer", "chunked-loss", "micro-batch"),
    Category.KV_CACHE.value: ("micro-batch",),
    Category.INPUTS.value: ("micro-batch",),
}
"""What helps against a category, where the catalog's `saves` do not tell."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run."""

    trace: Trace
    document: Document
    work: StepWork | None

    @property
    def needed_bytes(self) -> int:
        """Of the card, so that nothing is ever refused."""
        return self.document.verdict.required_bytes

    @property
    def fits(self) -> bool:
        """It came to its end on the card."""
        return bool(self.document.verdict.fits)

    @property
    def is_answer(self) -> bool:
        """It fits, and what waits in host memory does too, as hosts of such cards go."""
        return self.fits and self.document.host_peak_bytes <= HOST_BYTES

    @property
    def seconds(self) -> float:
        """The least time of a step on this card."""
        return 0.0 if self.work is None else self.work.seconds


class Runs(abc.ABC):
    """Runs of one program with different remedies; each is made once.

    Args:
        gpu: the card.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._known: dict[tuple[str, ...], Run] = {}
        self.original = self._made(())

    @abc.abstractmethod
    def _run(self, fixes: Sequence[Fix]) -> tuple[Trace, Document]:
        """Run it with these in force."""

    @abc.abstractmethod
    def _alloc_conf(self, fixes: Sequence[Fix]) -> str | None:
        """The allocator's settings with these in force."""

    def _retold(self, trace: Trace, fixes: Sequence[Fix]) -> Trace:
        """A run's trace as one with `fixes` would be, which differ from the run's in the allocator's settings alone."""
        settings = self._alloc_conf(fixes)
        return trace if settings is None else with_settings(trace, settings)

    @abc.abstractmethod
    def check(self, fixes: Sequence[Fix]) -> None:
        """Raises UsageError if it can be told without a run that they do not apply."""

    @abc.abstractmethod
    def on_now(self) -> frozenset[str]:
        """Remedies that are in force as it is."""

    def __len__(self) -> int:
        """How many were made."""
        return len(self._known)

    def with_fixes(self, fixes: Sequence[Fix]) -> Run:
        """The run with these in force.

        Raises:
            UsageError: one of them does not apply.
        """
        key = tuple(sorted(map(str, fixes)))
        if key in self._known:
            return self._known[key]
        others = [fix for fix in fixes if fix.remedy.name != "expandable-segments"]
        if len(others) == len(fixes):
            return self._made(fixes)
        # The same requests in the same order: only the allocator does otherwise with them.
        self.check(fixes)
        before = self.with_fixes(others) if others else self.original
        trace = self._retold(before.trace, fixes)
        self._known[key] = Run(trace, analyze(trace), before.work)
        return self._known[key]

    def _made(self, fixes: Sequence[Fix]) -> Run:
        trace, document = self._run(fixes)
        run = self._known[tuple(sorted(map(str, fixes)))] = Run(trace, document, step_work(trace, self._gpu))
        return run

    def rung(self, fixes: Sequence[Fix], run: Run, before: Run | None) -> Rung:
        """The row of a run; `before` is the row above."""
        document = run.document
        names = tuple(str(fix) for fix in fixes)
        numerics = worst_numerics([fix.remedy.name for fix in fixes]).value
        return Rung(
            remedies=names,
            added=names[-1] if names else None,
            peak_allocated_bytes=document.peak.allocated_bytes,
            reserved_bytes=document.peak.reserved_bytes,
            device_used_bytes=run.needed_bytes,
            host_peak_bytes=document.host_peak_bytes,
            saved_bytes=before.needed_bytes - run.needed_bytes if before is not None else 0,
            fits=document.verdict.fits,
            next_bottleneck=bottleneck_of(document),
            cost=cost_of(run.work, self.original.work, numerics, fixes[-1].remedy.cost if fixes else ""),
        )


class SpecRuns(Runs):
    """Runs of one spec.

    Args:
        spec: the run as it is.
        progress: told what is being done.
    """

    def __init__(self, spec: TargetSpec, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._spec = spec
        super().__init__(virtual_card(spec))

    def in_force(self, fixes: Sequence[Fix]) -> TargetSpec:
        """The spec with `fixes`.

        Raises:
            UsageError: one of them does not go with it.
        """
        spec = self._spec
        for fix in fixes:
            spec = edit_spec(spec, fix, target_to_json(self.original.document.target))
        return spec

    def check(self, fixes: Sequence[Fix]) -> None:
        """Raises UsageError if they do not go with the spec."""
        self.in_force(fixes)

    def on_now(self) -> frozenset[str]:
        """What the spec has already."""
        return frozenset(in_force(self._spec))

    def _alloc_conf(self, fixes: Sequence[Fix]) -> str | None:
        return self.in_force(fixes).alloc_conf

    def _run(self, fixes: Sequence[Fix]) -> tuple[Trace, Document]:
        what = "with " + ", ".join(fix.remedy.name for fix in fixes) if fixes else "as it is"
        spec = self.in_force(fixes) if fixes else self._spec
        return profile(spec, lambda doing: self._progress(f"{what}: {doing}"))


def apply_fixes(
    spec: TargetSpec, fixes: Sequence[Fix], progress: Callable[[str], None], *, each: bool = False
) -> tuple[Trace, Document]:
    """The run with `fixes` in force; its report has a ladder of two rows, or of one for each fix.

    Raises:
        UsageError: a fix does not apply.
        RunFailedError: as `profile`.
    """
    runs = SpecRuns(spec, progress)
    steps = [fixes[:count] for count in range(1, len(fixes) + 1)] if each else [fixes]
    return with_ladder(runs, steps)


def with_ladder(
    runs: Runs, steps: Sequence[Sequence[Fix]], reason: str = "", not_applied: dict[str, str] | None = None
) -> tuple[Trace, Document]:
    """The last step's run; the rows before it are in its ladder."""
    before = runs.original
    rungs = [runs.rung((), before, None)]
    for fixes in steps:
        run = runs.with_fixes(fixes)
        rungs.append(runs.rung(fixes, run, before))
        before = run
    return before.trace, dataclasses.replace(
        before.document, ladder=tuple(rungs), ladder_reason=reason, ladder_left_out=not_applied or {}
    )


# -- one after another ------------------------------------------------------------------------------------------------


def climb(runs: Runs, names: Sequence[str] = LADDER) -> tuple[Trace, Document]:
    """The run as it is, with a ladder of `names`: at each row the cheapest remedy against what is then in the way.

    It goes on past the row that fits, as long as a remedy saves something that is worth a row and trains the same
    model. What trains another model (LoRA) is tried only where nothing else is enough.

    Raises:
        RunFailedError: as `profile`.
    """
    run, fixes = runs.original, list[Fix]()
    rungs = [runs.rung((), run, None)]
    not_applied: dict[str, str] = {}
    asked: dict[str, int] = {}
    left = [name for name in names if name in REMEDIES and name not in runs.on_now()]
    while len(rungs) < MAX_RUNGS and len(runs) < MAX_RUNS:
        step = next_step(runs, run, fixes, left, asked, not_applied)
        if step is None:
            break
        fix, better = step
        fixes.append(fix)
        left.remove(fix.remedy.name)
        rungs.append(runs.rung(fixes, better, run))
        run = better
    document = dataclasses.replace(runs.original.document, ladder=tuple(rungs), ladder_left_out=not_applied)
    return runs.original.trace, document


def next_step(
    runs: Runs, run: Run, fixes: Sequence[Fix], left: Sequence[str], asked: dict[str, int], not_applied: dict[str, str]
) -> tuple[Fix, Run] | None:
    """The first remedy in question that saves something, and the run with it.

    One that saved nothing is asked once more at a later row, when something else decides the peak.
    """
    candidates = [name for name in _in_question(run, left) if asked.get(name, 0) < 2]
    candidates.sort(key=lambda name: asked.get(name, 0))  # stable: those never asked first
    for name in candidates:
        if (run.fits and name in TRAIN_ANOTHER) or len(runs) >= MAX_RUNS:
            continue
        fix = Fix(REMEDIES[name])
        asked[name] = asked.get(name, 0) + 1
        try:
            better = runs.with_fixes([*fixes, fix])
        except MemprofError as error:
            not_applied[name] = why(error)
            asked[name] = 2
            continue
        saved = run.needed_bytes - better.needed_bytes
        if saved >= WORTH * run.needed_bytes or (better.fits and not run.fits):
            not_applied.pop(name, None)
            return fix, better
        after = f" after {fixes[-1].remedy.name}" if fixes else ""
        not_applied[name] = f"saves {format_bytes(max(saved, 0))}{after}"
    return None


def _in_question(run: Run, left: Sequence[str]) -> list[str]:
    """What is left, in the order in which it is worth trying: against the largest category of the peak first."""
    document = run.document
    bottleneck = bottleneck_of(document)
    categories = dict.fromkeys([bottleneck.category, *document.peak.categories])
    found: dict[str, None] = {}
    for finding in document.findings:
        if finding.id in ("device-mismatch", "weight-delta-per-token"):
            found |= dict.fromkeys(name for name in finding.remedies if name in left)
    for category in categories:
        size = document.peak.categories.get(category, 0)
        if category != bottleneck.category and size < WORTH * document.peak.allocated_bytes:
            continue
        special = _BY_CATEGORY.get(category, ())
        against = [name for name in left if name in special or category in REMEDIES[name].saves]
        found |= dict.fromkeys(against)
    return list(found)


def why(error: MemprofError) -> str:
    """What an error says of a remedy that does not apply, in a line."""
    return error.problem if error.value is None else f"{error.problem} ({error.value})"
