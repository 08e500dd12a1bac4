"""Runs with remedies in force: one after another (`--ladder`), as named (`--fix A,B`), or the cheapest that fit
(`--fix auto`). Every row is a run of the whole pipeline; nothing is added up from estimates.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memprof import pipeline
from memprof.catalog import Gpu
from memprof.errors import MemprofError, RunFailedError, UsageError
from memprof.ledger.categories import Category
from memprof.remedies.catalog import REMEDIES
from memprof.remedies.fixes import Fix, edit_spec, in_force, worst_numerics
from memprof.report.document import Document
from memprof.report.ladder import Rung, StepWork, bottleneck_of, cost_of, step_work
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
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
CHEAPER = 0.005
"""A set is cheaper than another if its step takes less time by this share."""

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
        document = pipeline.analyze(before.trace, self._alloc_conf(fixes))
        self._known[key] = Run(before.trace, document, before.work)
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
        super().__init__(pipeline.virtual_card(spec))

    def in_force(self, fixes: Sequence[Fix]) -> TargetSpec:
        """The spec with `fixes`.

        Raises:
            UsageError: one of them does not go with it.
        """
        spec = self._spec
        for fix in fixes:
            spec = edit_spec(spec, fix, self.original.document.target)
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
        return pipeline.profile(spec, lambda doing: self._progress(f"{what}: {doing}"))


def apply_fixes(
    spec: TargetSpec, fixes: Sequence[Fix], progress: Callable[[str], None], *, each: bool = False
) -> tuple[Trace, Document]:
    """The run with `fixes` in force; its report has a ladder of two rows, or of one for each fix.

    Raises:
        UsageError: a fix does not apply.
        RunFailedError: as `pipeline.profile`.
    """
    runs = SpecRuns(spec, progress)
    steps = [fixes[:count] for count in range(1, len(fixes) + 1)] if each else [fixes]
    return _with_ladder(runs, steps)


def _with_ladder(
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
        RunFailedError: as `pipeline.profile`.
    """
    run, fixes = runs.original, list[Fix]()
    rungs = [runs.rung((), run, None)]
    not_applied: dict[str, str] = {}
    asked: dict[str, int] = {}
    left = [name for name in names if name in REMEDIES and name not in runs.on_now()]
    while len(rungs) < MAX_RUNGS and len(runs) < MAX_RUNS:
        step = _next_step(runs, run, fixes, left, asked, not_applied)
        if step is None:
            break
        fix, better = step
        fixes.append(fix)
        left.remove(fix.remedy.name)
        rungs.append(runs.rung(fixes, better, run))
        run = better
    document = dataclasses.replace(runs.original.document, ladder=tuple(rungs), ladder_left_out=not_applied)
    return runs.original.trace, document


def _next_step(
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
            not_applied[name] = _why(error)
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


def _why(error: MemprofError) -> str:
    return error.problem if error.value is None else f"{error.problem} ({error.value})"


# -- the cheapest that fit --------------------------------------------------------------------------------------------

_EXACT = (
    "device-placement", "low-rank-npt", "sdpa-attention", "expandable-segments", "chunked-loss",
    "optimizer-in-backward", "fused-optimizer", "micro-batch", "activation-checkpointing", "cpu-offload-activations",
)  # fmt: skip
_TIERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("the same numbers", _EXACT),
    ("the same numbers, the optimizer on the CPU", (*_EXACT[:5], *_EXACT[7:], "cpu-offload-optimizer")),
    (
        "the same numbers but for the optimizer's states",
        (*(name for name in _EXACT if name not in ("optimizer-in-backward", "fused-optimizer")), "8-bit-optimizer"),
    ),
    ("the same numbers, weights streamed from host memory", (*_EXACT[:5], "micro-batch", "cpu-offload-weights")),
    ("an adapter on the frozen model", (*_EXACT[:5], *_EXACT[7:], "lora")),
    ("an adapter on the frozen model in 4 bits", (*_EXACT[:5], *_EXACT[7:], "qlora")),
)
"""Sets of remedies, what is given up in words; the first that fits when all of it is on is searched."""


def search(runs: Runs, tiers: Sequence[tuple[str, Sequence[str]]] = _TIERS) -> tuple[Trace, Document]:
    """The run with the cheapest set of remedies that was found to fit the card, and how.

    Of the first kind of set that fits with all of it on, remedies are taken one by one against what is in the way,
    until it fits; then those that proved needless go, and those that make a step longer are replaced if others do.
    Cheap is what adds least to the time of a step at the card's published rates.

    Raises:
        RunFailedError: as `pipeline.profile`.
    """
    if runs.original.fits:
        return _with_ladder(runs, (), "it fits as it is: nothing is to be changed")
    not_applied: dict[str, str] = {}
    least: tuple[Run, list[Fix]] | None = None
    for given_up, names in tiers:
        left = [name for name in names if name in REMEDIES and name not in runs.on_now()]
        everything, run = _all_of(runs, left, not_applied)
        if run is None:
            continue
        if run.is_answer:
            chosen = _cheaper(runs, _needed(runs, _enough(runs, everything, not_applied)), everything)
            for fix in chosen:
                not_applied.pop(fix.remedy.name, None)
            steps = [chosen[:count] for count in range(1, len(chosen) + 1)]
            return _with_ladder(runs, _that_apply(runs, steps), _reason(runs, chosen, given_up), not_applied)
        if least is None or run.needed_bytes < least[0].needed_bytes:
            least = run, everything
    if least is None:
        return _with_ladder(runs, (), "no remedy applies to this run", not_applied)
    needed = format_bytes(least[0].needed_bytes)
    return _with_ladder(
        runs, [least[1]], f"nothing fits: the least that any set needs is {needed}, with all of these", not_applied
    )


def _enough(runs: Runs, everything: list[Fix], not_applied: dict[str, str]) -> list[Fix]:
    """One fix after another against what is in the way, until it fits; all of them if nothing less does."""
    left = [fix.remedy.name for fix in everything]
    fixes: list[Fix] = []
    run = runs.original
    asked: dict[str, int] = {}
    while not run.is_answer:
        step = _next_step(runs, run, fixes, left, asked, not_applied)
        if step is None:
            return everything
        fix, run = step
        fixes.append(fix)
        left.remove(fix.remedy.name)
    return fixes


def _needed(runs: Runs, fixes: list[Fix]) -> list[Fix]:
    """Without those that it fits without; what was put on last is asked first, for the others led there."""
    for fix in reversed(fixes):
        rest = [other for other in fixes if other is not fix]
        if rest and _answers(runs, rest) is not None:
            fixes = rest
    return fixes


def _cheaper(runs: Runs, fixes: list[Fix], everything: list[Fix]) -> list[Fix]:
    """With what makes a step longer replaced by, or joined by, what makes it shorter and fits as well.

    One may make another cheaper: what is computed again need not wait in host memory.
    """
    best = runs.with_fixes(fixes)
    others = [fix for fix in everything if fix not in fixes]
    for dear in [fix for fix in fixes if _price(runs, fix, fixes) > CHEAPER * best.seconds]:
        rest = [fix for fix in fixes if fix is not dear]
        for other in others:
            if not set(other.remedy.saves) & set(dear.remedy.saves):
                continue
            for candidate in ([*rest, other], [*fixes, other]):
                run = _answers(runs, candidate)
                if run is not None and run.seconds < best.seconds * (1 - CHEAPER):
                    fixes, best = candidate, run
    return fixes


def _price(runs: Runs, fix: Fix, fixes: list[Fix]) -> float:
    """What a fix adds to the time of a step, the others being on."""
    rest = [other for other in fixes if other is not fix]
    try:
        return runs.with_fixes(fixes).seconds - (runs.with_fixes(rest) if rest else runs.original).seconds
    except MemprofError:
        return 0.0


def _answers(runs: Runs, fixes: list[Fix]) -> Run | None:
    """The run with these, if it is an answer; None if it is none, or they do not apply together."""
    try:
        run = runs.with_fixes(fixes)
    except MemprofError:
        return None
    return run if run.is_answer else None


def _reason(runs: Runs, chosen: list[Fix], given_up: str) -> str:
    names = " and ".join(fix.remedy.name for fix in chosen)
    if len(chosen) == 1:
        return f"{names} is enough ({given_up})"
    needed = all(_answers(runs, [other for other in chosen if other is not fix]) is None for fix in chosen)
    each = ", and without any one of them it does not" if needed else ""
    return f"it fits with {names}{each} ({given_up}); no dearer remedy is on that a cheaper one could replace"


def _that_apply(runs: Runs, steps: Sequence[Sequence[Fix]]) -> list[Sequence[Fix]]:
    """The steps without those that cannot run without what comes later; the last is kept."""
    kept: list[Sequence[Fix]] = []
    for fixes in steps[:-1]:
        try:
            runs.with_fixes(fixes)
        except (UsageError, RunFailedError):
            continue
        kept.append(fixes)
    return [*kept, *steps[-1:]]


def _all_of(runs: Runs, names: Sequence[str], not_applied: dict[str, str]) -> tuple[list[Fix], Run | None]:
    """As many of `names` as apply together, and the run with them."""
    fixes: list[Fix] = []
    for name in names:
        try:
            runs.check([*fixes, Fix(REMEDIES[name])])
        except UsageError as error:
            not_applied[name] = _why(error)
            continue
        fixes.append(Fix(REMEDIES[name]))
    while fixes:
        try:
            return fixes, runs.with_fixes(fixes)
        except UsageError as error:
            # The message begins with the name of the one that does not apply to this model.
            guilty = next((fix for fix in fixes if fix.remedy.name in str(error)), fixes[-1])
            not_applied[guilty.remedy.name] = _why(error)
            fixes.remove(guilty)
        except RunFailedError as error:
            # What this kind adds comes last in its list.
            not_applied[fixes[-1].remedy.name] = _why(error)
            return [], None
    return [], None
