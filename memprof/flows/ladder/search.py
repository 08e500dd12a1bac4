"""The cheapest fixes that make a run fit (`--fix auto`), found among simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memprof.errors import MemprofError, RunFailedError, UsageError
from memprof.fixes.catalog import FIXES, Numerics, conflict_reason, find_helpful, tiers
from memprof.fixes.chosen import ChosenFix
from memprof.flows.ladder.climb import MAX_RUNS, next_step
from memprof.flows.ladder.runs import LadderRun, Runs, RunsWith, with_ladder
from memprof.report.documents.report import Report
from memprof.trace.events import Trace
from memprof.units import format_bytes

AnyRuns = Runs | RunsWith
CHEAPER = 0.005  # a set is cheaper than another if its step takes less time by this share
# Categories of which a fix that keeps the numbers frees nothing but what it says that it saves.
_LASTING = ("activations", "logits and loss")
_MISMATCH = "tensors of two devices meet"


@dataclass(frozen=True, slots=True)
class ChosenFixes:
    """Steps up to a set of fixes, why it was taken, and what was left out."""

    steps: Sequence[Sequence[ChosenFix]]
    reason: str
    left_out: dict[str, str] = field(default_factory=dict)


def search(runs: Runs, sets: Sequence[tuple[str, Sequence[str]]] | None = None) -> tuple[Trace, Report]:
    """Return the run with the cheapest set of fixes that was found to fit the GPU (`find`), with its ladder."""
    found = find(runs, sets)
    return with_ladder(runs, found.steps, found.reason, found.left_out)


def find(runs: AnyRuns, sets: Sequence[tuple[str, Sequence[str]]] | None = None) -> ChosenFixes:
    """Return the cheapest set of fixes that was found to fit the GPU.

    Of the first kind of set that fits, fixes are taken one by one against what is in the way, until it fits; then
    those that proved needless go, and those that make a step longer are replaced if others do. Cheap is what adds
    least to the time of a step at the GPU's published rates. Of the first kind the one by one is tried at once, since
    it is most often enough; of those after it, and where it was not, a run with all of the kind says whether it can be.
    """
    if runs.original.fits:
        return ChosenFixes((), "it fits without fixes")
    not_applied: dict[str, str] = {}
    least: tuple[LadderRun, list[ChosenFix]] | None = None
    sets = tiers() if sets is None else sets
    mending = {fix.name for fix in find_helpful("device-mismatch")}
    if runs.original.is_stopped and not any(mending & {*names} for _, names in sets):
        return ChosenFixes((), f"{_MISMATCH}, and no fix here mends that: the findings say where")
    for place, (_, names) in enumerate(sets):
        left = [name for name in names if name not in runs.active_fixes()]
        together, among = _compatible_fixes(runs, left, not_applied)
        chosen = None
        if place == 0 and not _cannot_fit(runs, together):
            passed_over: dict[str, str] = {}
            chosen = _add_until_fits(runs, among, passed_over)
            not_applied |= {} if chosen is None else passed_over
        if chosen is None:
            everything, among, run = _most_of(runs, left, not_applied)
            if run is None:
                continue
            if not run.fits:
                if least is None or run.needed_bytes < least[0].needed_bytes:
                    least = run, everything
                continue
            chosen = (_add_until_fits(runs, among, not_applied) if place else None) or everything
        applying = [fix for fix in among if not not_applied.get(fix.fix.name, "").startswith(fix.fix.name)]
        chosen = _cheaper(runs, _needed(runs, chosen), applying)
        for fix in chosen:
            not_applied.pop(fix.fix.name, None)
        steps = [chosen[:count] for count in range(1, len(chosen) + 1)]
        taken = {fix.fix.name for fix in chosen}
        not_applied |= {name: said for name in left if name not in taken and (said := _conflict(name, chosen))}
        given_up = next(given_up for given_up, names in sets if taken <= {*names})
        return ChosenFixes(_applicable_steps(runs, steps), _reason(runs, chosen, given_up), not_applied)
    if least is None:
        return ChosenFixes((), "no fix applies to this run", not_applied)
    needed = format_bytes(least[0].needed_bytes)
    why_none = f"nothing fits: the least that any set needs is {needed}"
    if least[0].is_stopped:
        why_none = f"{_MISMATCH} with each set: the findings say where"
    return ChosenFixes([least[1]], f"{why_none}, with all of these", not_applied)


def _most_of(
    runs: AnyRuns, names: Sequence[str], not_applied: dict[str, str]
) -> tuple[list[ChosenFix], list[ChosenFix], LadderRun | None]:
    """Return as many of `names` as apply together, all that apply, and the run with the former.

    What does not go with the rest may save more, or be cheaper, than what it does not go with.
    """
    everything, run = _all_of(runs, names, not_applied)
    others = [name for name in names if _conflict(name, everything)]
    if run is not None and others and not run.fits:
        instead = _all_of(runs, sorted(names, key=lambda name: name not in others), not_applied)
        if instead[1] is not None and instead[1].needed_bytes < run.needed_bytes:
            everything, run = instead
            others = [name for name in names if _conflict(name, everything)]
    return everything, [*everything, *(ChosenFix(FIXES[name]) for name in others)], run


def _conflict(name: str, fixes: Sequence[ChosenFix]) -> str:
    """Return with which of these it does not go, and why; empty if it goes with all."""
    found = ((fix.fix.name, conflict_reason(FIXES[name], fix.fix.name)) for fix in fixes)
    return next((f"does not go with {other}: {reason}" for other, reason in found if reason), "")


def _add_until_fits(runs: AnyRuns, among: list[ChosenFix], not_applied: dict[str, str]) -> list[ChosenFix] | None:
    """Return one fix of `among` after another against what is in the way, until it fits; None if it never does."""
    left = [fix.fix.name for fix in among]
    fixes: list[ChosenFix] = []
    run, most = runs.original, len(runs) + MAX_RUNS
    asked: dict[str, int] = {}
    while not run.fits:
        step = next_step(runs, run, fixes, left, asked, not_applied, most)
        if step is None:
            return None
        fix, run = step
        fixes.append(fix)
        left.remove(fix.fix.name)
    return fixes


def _least_bytes(runs: AnyRuns, fixes: Sequence[ChosenFix]) -> int:
    """Return what a run with these holds at once at least: at the original's peak, what none of them frees."""
    if any(fix.fix.numerics is not Numerics.EXACT for fix in fixes):
        return 0  # tensors of another dtype are smaller, whatever they are for
    freed = {category for fix in fixes for category in (*fix.fix.saves, *fix.fix.ladder_against)}
    held = runs.original.document.peak.categories
    return sum(held.get(category, 0) for category in _LASTING if category not in freed)


def _cannot_fit(runs: AnyRuns, fixes: Sequence[ChosenFix]) -> bool:
    """Say whether a run with these need not be made to know that it does not fit."""
    usable = runs.original.document.device.usable_bytes
    return usable is not None and _least_bytes(runs, fixes) > usable


def _needed(runs: AnyRuns, fixes: list[ChosenFix]) -> list[ChosenFix]:
    """Return those without which it does not fit; what was put on last is asked first, for the others led there."""
    without_one = [[other for other in fixes if other is not fix] for fix in fixes] if len(fixes) > 1 else []
    runs.make(rest for rest in without_one if not _cannot_fit(runs, rest))
    for fix in reversed(fixes):
        rest = [other for other in fixes if other is not fix]
        if rest and _answers(runs, rest) is not None:
            fixes = rest
    return fixes


def _cheaper(runs: AnyRuns, fixes: list[ChosenFix], among: list[ChosenFix]) -> list[ChosenFix]:
    """Return the fixes with what makes a step longer replaced by, or joined by, what makes it shorter and fits as well.

    One may make another cheaper: what is computed again need not wait in host memory.
    """
    best = runs.with_fixes(fixes)
    others = [fix for fix in among if fix not in fixes]
    instead = [(fix, [other for other in others if {*other.fix.saves} & {*fix.fix.saves}]) for fix in fixes]
    least = CHEAPER * best.seconds
    for dear, alike in [(fix, alike) for fix, alike in instead if alike and _price(runs, fix, fixes) > least]:
        rest = [fix for fix in fixes if fix is not dear]
        for other in alike:
            candidates = ([*rest, other], [*fixes, other])
            runs.make(candidate for candidate in candidates if not _cannot_fit(runs, candidate))
            for candidate in candidates:
                run = _answers(runs, candidate)
                if run is not None and run.seconds < best.seconds * (1 - CHEAPER):
                    fixes, best = candidate, run
    return fixes


def _price(runs: AnyRuns, fix: ChosenFix, fixes: list[ChosenFix]) -> float:
    """Return the seconds that a fix adds to a step, those before it being on: their runs are rows of the answer."""
    before = fixes[: fixes.index(fix)]
    try:
        return runs.with_fixes([*before, fix]).seconds - (runs.with_fixes(before) if before else runs.original).seconds
    except MemprofError:
        return 0.0


def _answers(runs: AnyRuns, fixes: list[ChosenFix]) -> LadderRun | None:
    """Return the run with these fixes if it fits; None if it does not, or they do not apply together."""
    if _cannot_fit(runs, fixes):
        return None
    try:
        run = runs.with_fixes(fixes)
    except MemprofError:
        return None
    return run if run.fits else None


def _reason(runs: AnyRuns, chosen: list[ChosenFix], given_up: str) -> str:
    names = " and ".join(fix.fix.name for fix in chosen)
    if len(chosen) == 1:
        return f"{names} is enough ({given_up})"
    needed = all(_answers(runs, [other for other in chosen if other is not fix]) is None for fix in chosen)
    each = ", and without any one of them it does not" if needed else ""
    return f"it fits with {names}{each} ({given_up}); no dearer fix is on that a cheaper one could replace"


def _applicable_steps(runs: AnyRuns, steps: Sequence[Sequence[ChosenFix]]) -> list[Sequence[ChosenFix]]:
    """Return the steps without those that cannot run without what comes later; the last stays."""
    kept: list[Sequence[ChosenFix]] = []
    for fixes in steps[:-1]:
        try:
            runs.with_fixes(fixes)
        except (UsageError, RunFailedError):
            continue
        kept.append(fixes)
    return [*kept, *steps[-1:]]


def _compatible_fixes(
    runs: AnyRuns, names: Sequence[str], not_applied: dict[str, str]
) -> tuple[list[ChosenFix], list[ChosenFix]]:
    """Return as many of `names` as go together, as far as that can be told without a run, and all that apply."""
    fixes: list[ChosenFix] = []
    for name in names:
        if _conflict(name, fixes):
            continue
        try:
            runs.check([*fixes, ChosenFix(FIXES[name])])
        except UsageError as error:
            not_applied[name] = error.line
            continue
        fixes.append(ChosenFix(FIXES[name]))
    return fixes, [*fixes, *(ChosenFix(FIXES[name]) for name in names if _conflict(name, fixes))]


def _all_of(
    runs: AnyRuns, names: Sequence[str], not_applied: dict[str, str]
) -> tuple[list[ChosenFix], LadderRun | None]:
    """Return as many of `names` as apply together, and the run with them."""
    fixes, _ = _compatible_fixes(runs, names, not_applied)
    while fixes:
        try:
            return fixes, runs.with_fixes(fixes)
        except UsageError as error:
            # The message begins with the name of the one that does not apply to this model, here and in `find`.
            guilty = next((fix for fix in fixes if fix.fix.name in str(error)), fixes[-1])
            not_applied[guilty.fix.name] = error.line
            fixes.remove(guilty)
        except RunFailedError as error:
            # What this kind adds comes last in its list.
            not_applied[fixes[-1].fix.name] = error.line
            return [], None
    return [], None
