"""Search for the cheapest set of fixes that makes a run fit (`--fix auto`), by simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memprof.errors import MemprofError, RunFailedError, UsageError
from memprof.fixes.catalog import FIXES, Numerics, find_conflict, find_fixes_for, list_tiers
from memprof.fixes.chosen import ChosenFix
from memprof.flows.ladder.build import MAX_RUNS, find_next_fix
from memprof.flows.ladder.runs import LadderRun, Runs, RunsWithFixes, run_with_ladder
from memprof.report.documents.report import Report
from memprof.trace.events import Trace
from memprof.units import format_bytes

AnyRuns = Runs | RunsWithFixes
MIN_SPEEDUP = 0.005  # a set of fixes is cheaper than another if its step is quicker by this share
# Categories that an exact fix reduces only if the catalog lists them for the fix (`saves`, `ladder_against`).
_IRREDUCIBLE_CATEGORIES = ("activations", "logits and loss")
_MISMATCH = "tensors of two devices meet"


@dataclass(frozen=True, slots=True)
class ChosenFixes:
    """A chosen set of fixes as steps that add one fix each, the reason for the choice, and the fixes rejected."""

    steps: Sequence[Sequence[ChosenFix]]
    reason: str
    rejected_fixes: dict[str, str] = field(default_factory=dict)


def search_fixes(runs: Runs, fix_tiers: Sequence[tuple[str, Sequence[str]]] | None = None) -> tuple[Trace, Report]:
    """Return the run with the cheapest set of fixes that fits the GPU (see `find_cheapest_fixes`), with its ladder."""
    found = find_cheapest_fixes(runs, fix_tiers)
    return run_with_ladder(runs, found.steps, found.reason, found.rejected_fixes)


def find_cheapest_fixes(runs: AnyRuns, fix_tiers: Sequence[tuple[str, Sequence[str]]] | None = None) -> ChosenFixes:
    """Return the cheapest set of fixes found that fits the GPU; the cost is seconds added to a step at published rates.

    `fix_tiers` are (loss of precision, names of fixes), the least loss first. In the first tier that fits, fixes are
    added one by one against the current bottleneck until the run fits; then needless fixes are removed, and costly
    fixes replaced by cheaper ones. Before later tiers, a run with all fixes of the tier shows whether the tier can fit.
    """
    if runs.original.fits:
        return ChosenFixes((), "it fits without fixes")
    not_applied: dict[str, str] = {}
    least: tuple[LadderRun, list[ChosenFix]] | None = None
    fix_tiers = list_tiers() if fix_tiers is None else fix_tiers
    mending = {fix.name for fix in find_fixes_for("device-mismatch")}
    if runs.original.has_device_mismatch and not any(mending & {*names} for _, names in fix_tiers):
        return ChosenFixes((), f"{_MISMATCH}, and no fix here mends that: the findings say where")
    for place, (_, names) in enumerate(fix_tiers):
        left = [name for name in names if name not in runs.in_force()]
        compatible, among = _select_compatible_fixes(runs, left, not_applied)
        chosen = None
        if place == 0 and not _cannot_fit(runs, compatible):
            rejected: dict[str, str] = {}
            chosen = _add_until_fits(runs, among, rejected)
            not_applied |= {} if chosen is None else rejected
        if chosen is None:
            all_fixes, among, run = _combine_with_conflicts(runs, left, not_applied)
            if run is None:
                continue
            if not run.fits:
                if least is None or run.needed_bytes < least[0].needed_bytes:
                    least = run, all_fixes
                continue
            chosen = (_add_until_fits(runs, among, not_applied) if place else None) or all_fixes
        applicable = [fix for fix in among if not not_applied.get(fix.fix.name, "").startswith(fix.fix.name)]
        chosen = _replace_costly(runs, _drop_needless(runs, chosen), applicable)
        for fix in chosen:
            not_applied.pop(fix.fix.name, None)
        steps = [chosen[:count] for count in range(1, len(chosen) + 1)]
        taken = {fix.fix.name for fix in chosen}
        not_applied |= {name: said for name in left if name not in taken and (said := _describe_conflict(name, chosen))}
        given_up = next(given_up for given_up, names in fix_tiers if taken <= {*names})
        return ChosenFixes(_select_applicable_steps(runs, steps), _describe_choice(runs, chosen, given_up), not_applied)
    if least is None:
        return ChosenFixes((), "no fix applies to this run", not_applied)
    needed = format_bytes(least[0].needed_bytes)
    why_none = f"nothing fits: the least that any set needs is {needed}"
    if least[0].has_device_mismatch:
        why_none = f"{_MISMATCH} with each set: the findings say where"
    return ChosenFixes([least[1]], f"{why_none}, with all of these", not_applied)


def _combine_with_conflicts(
    runs: AnyRuns, names: Sequence[str], not_applied: dict[str, str]
) -> tuple[list[ChosenFix], list[ChosenFix], LadderRun | None]:
    """Return a set of `names` that apply together, all fixes that apply, and the run with the set.

    Of two conflicting fixes, both orders are tried, and the set that needs less memory is returned.
    """
    all_fixes, run = _run_compatible_fixes(runs, names, not_applied)
    others = [name for name in names if _describe_conflict(name, all_fixes)]
    if run is not None and others and not run.fits:
        swapped = _run_compatible_fixes(runs, sorted(names, key=lambda name: name not in others), not_applied)
        if swapped[1] is not None and swapped[1].needed_bytes < run.needed_bytes:
            all_fixes, run = swapped
            others = [name for name in names if _describe_conflict(name, all_fixes)]
    return all_fixes, [*all_fixes, *(ChosenFix(FIXES[name]) for name in others)], run


def _describe_conflict(name: str, fixes: Sequence[ChosenFix]) -> str:
    """Return the first of `fixes` that conflicts with fix `name`, and the reason; empty if no fix conflicts."""
    found = ((fix.fix.name, find_conflict(FIXES[name], fix.fix.name)) for fix in fixes)
    return next((f"does not go with {other}: {reason}" for other, reason in found if reason), "")


def _add_until_fits(runs: AnyRuns, candidates: list[ChosenFix], not_applied: dict[str, str]) -> list[ChosenFix] | None:
    """Add fixes of `candidates` one by one against the bottleneck until the run fits; None if the run never fits."""
    left = [fix.fix.name for fix in candidates]
    fixes: list[ChosenFix] = []
    run, most = runs.original, len(runs) + MAX_RUNS
    num_tries: dict[str, int] = {}
    while not run.fits:
        step = find_next_fix(runs, run, fixes, left, num_tries, not_applied, most)
        if step is None:
            return None
        fix, run = step
        fixes.append(fix)
        left.remove(fix.fix.name)
    return fixes


def _bound_peak_bytes(runs: AnyRuns, fixes: Sequence[ChosenFix]) -> int:
    """Return a lower bound in bytes of the peak with `fixes`: what no fix frees of the original's peak."""
    if any(fix.fix.numerics is not Numerics.EXACT for fix in fixes):
        return 0  # tensors of all categories may get a smaller dtype
    freed = {category for fix in fixes for category in (*fix.fix.saves, *fix.fix.ladder_against)}
    held = runs.original.document.peak.categories
    return sum(held.get(category, 0) for category in _IRREDUCIBLE_CATEGORIES if category not in freed)


def _cannot_fit(runs: AnyRuns, fixes: Sequence[ChosenFix]) -> bool:
    """Return whether a run with `fixes` cannot fit, by its lower bound, without a run."""
    usable = runs.original.document.device.usable_bytes
    return usable is not None and _bound_peak_bytes(runs, fixes) > usable


def _drop_needless(runs: AnyRuns, fixes: list[ChosenFix]) -> list[ChosenFix]:
    """Return the fixes without which the run does not fit; removal is tried from the last added on."""
    without_one = [[other for other in fixes if other is not fix] for fix in fixes] if len(fixes) > 1 else []
    runs.run_in_parallel(rest for rest in without_one if not _cannot_fit(runs, rest))
    for fix in reversed(fixes):
        rest = [other for other in fixes if other is not fix]
        if rest and _run_if_fits(runs, rest) is not None:
            fixes = rest
    return fixes


def _replace_costly(runs: AnyRuns, fixes: list[ChosenFix], applicable_fixes: list[ChosenFix]) -> list[ChosenFix]:
    """Return the fixes with costly ones replaced, or joined, by fixes with which the step is quicker and the run fits.

    A fix may make another cheaper: recomputed activations need not be offloaded to host memory.
    """
    best = runs.run_with_fixes(fixes)
    others = [fix for fix in applicable_fixes if fix not in fixes]
    swaps = [(fix, [other for other in others if {*other.fix.saves} & {*fix.fix.saves}]) for fix in fixes]
    least = MIN_SPEEDUP * best.seconds
    for costly, alike in [
        (fix, alike) for fix, alike in swaps if alike and _measure_fix_seconds(runs, fix, fixes) > least
    ]:
        rest = [fix for fix in fixes if fix is not costly]
        for other in alike:
            candidates = ([*rest, other], [*fixes, other])
            runs.run_in_parallel(candidate for candidate in candidates if not _cannot_fit(runs, candidate))
            for candidate in candidates:
                run = _run_if_fits(runs, candidate)
                if run is not None and run.seconds < best.seconds * (1 - MIN_SPEEDUP):
                    fixes, best = candidate, run
    return fixes


def _measure_fix_seconds(runs: AnyRuns, fix: ChosenFix, fixes: list[ChosenFix]) -> float:
    """Return the seconds that `fix` adds to a step on top of the fixes before it in `fixes`."""
    before = fixes[: fixes.index(fix)]
    try:
        return (
            runs.run_with_fixes([*before, fix]).seconds
            - (runs.run_with_fixes(before) if before else runs.original).seconds
        )
    except MemprofError:
        return 0.0


def _run_if_fits(runs: AnyRuns, fixes: list[ChosenFix]) -> LadderRun | None:
    """Return the run with these fixes if the run fits; None if not, or if the fixes do not apply together."""
    if _cannot_fit(runs, fixes):
        return None
    try:
        run = runs.run_with_fixes(fixes)
    except MemprofError:
        return None
    return run if run.fits else None


def _describe_choice(runs: AnyRuns, chosen: list[ChosenFix], given_up: str) -> str:
    names = " and ".join(fix.fix.name for fix in chosen)
    if len(chosen) == 1:
        return f"{names} is enough ({given_up})"
    needed = all(_run_if_fits(runs, [other for other in chosen if other is not fix]) is None for fix in chosen)
    each = ", and without any one of them it does not" if needed else ""
    return f"it fits with {names}{each} ({given_up}); no dearer fix is on that a cheaper one could replace"


def _select_applicable_steps(runs: AnyRuns, steps: Sequence[Sequence[ChosenFix]]) -> list[Sequence[ChosenFix]]:
    """Return the last step, and the earlier steps that can run without the fixes of later steps."""
    kept: list[Sequence[ChosenFix]] = []
    for fixes in steps[:-1]:
        try:
            runs.run_with_fixes(fixes)
        except (UsageError, RunFailedError):
            continue
        kept.append(fixes)
    return [*kept, *steps[-1:]]


def _select_compatible_fixes(
    runs: AnyRuns, names: Sequence[str], not_applied: dict[str, str]
) -> tuple[list[ChosenFix], list[ChosenFix]]:
    """Return a set of `names` that apply together, as far as known without a run, and all fixes that apply."""
    fixes: list[ChosenFix] = []
    for name in names:
        if _describe_conflict(name, fixes):
            continue
        try:
            runs.check_fixes([*fixes, ChosenFix(FIXES[name])])
        except UsageError as error:
            not_applied[name] = error.line
            continue
        fixes.append(ChosenFix(FIXES[name]))
    return fixes, [*fixes, *(ChosenFix(FIXES[name]) for name in names if _describe_conflict(name, fixes))]


def _run_compatible_fixes(
    runs: AnyRuns, names: Sequence[str], not_applied: dict[str, str]
) -> tuple[list[ChosenFix], LadderRun | None]:
    """Return a set of `names` that apply together, and the run with this set (None: no set runs)."""
    fixes, _ = _select_compatible_fixes(runs, names, not_applied)
    while fixes:
        try:
            return fixes, runs.run_with_fixes(fixes)
        except UsageError as error:
            # The message begins with the name of the fix that does not apply to this model.
            guilty = next((fix for fix in fixes if fix.fix.name in str(error)), fixes[-1])
            not_applied[guilty.fix.name] = error.line
            fixes.remove(guilty)
        except RunFailedError as error:
            # The fixes that this tier adds are last in its list.
            not_applied[fixes[-1].fix.name] = error.line
            return [], None
    return [], None
