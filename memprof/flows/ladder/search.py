"""Search for the cheapest set of fixes that makes a run fit (`--fix auto`), by simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memprof.errors import MemprofError, RunFailedError, UsageError
from memprof.fixes.catalog import FIXES, Numerics, find_conflict, find_fixes_for, list_headroom_fixes, list_tiers
from memprof.fixes.chosen import ChosenFix
from memprof.flows.ladder.build import MAX_RUNS, find_next_fix
from memprof.flows.ladder.runs import LadderRun, Runs, RunsWithFixes, run_with_ladder
from memprof.report.documents.report import Report
from memprof.trace.events import Trace
from memprof.units import format_bytes

AnyRuns = Runs | RunsWithFixes
MIN_SPEEDUP = 0.005  # a set of fixes is cheaper than another if its step is quicker by this share
# Share of the GPU that a run should leave: closer to its limit, the allocator releases its cache and asks again.
MIN_HEADROOM = 0.05
# Categories that an exact fix reduces only if the catalog lists them for the fix (`saves`, `ladder_against`).
_IRREDUCIBLE_CATEGORIES = ("activations", "logits and loss")
_MISMATCH_MESSAGE = "tensors of two devices meet"


@dataclass(frozen=True, slots=True)
class ChosenFixes:
    """A set of fixes, as steps that add one fix each; the reason for the choice; and a reason per rejected fix."""

    steps: Sequence[Sequence[ChosenFix]]
    reason: str
    rejected_fixes: dict[str, str] = field(default_factory=dict)


def search_fixes(runs: Runs, fix_tiers: Sequence[tuple[str, Sequence[str]]] | None = None) -> tuple[Trace, Report]:
    """Return the run with the cheapest set of fixes that fits the GPU (see `find_cheapest_fixes`), with its ladder."""
    chosen = find_cheapest_fixes(runs, fix_tiers)
    return run_with_ladder(runs, chosen.steps, chosen.reason, chosen.rejected_fixes)


def find_cheapest_fixes(runs: AnyRuns, fix_tiers: Sequence[tuple[str, Sequence[str]]] | None = None) -> ChosenFixes:
    """Return the set of fixes with which the run fits the GPU and a step takes the least added time.

    `fix_tiers` are pairs of a loss of precision and names of fixes, the least loss first. In the first tier that fits,
    fixes are added one by one against the bottleneck until the run fits; needless fixes are then removed, and costly
    fixes replaced by cheaper ones.
    """
    if runs.original.fits:
        return ChosenFixes((), "it fits without fixes")
    rejections: dict[str, str] = {}
    leanest: tuple[LadderRun, list[ChosenFix]] | None = None
    fix_tiers = list_tiers() if fix_tiers is None else fix_tiers
    mismatch_fixes = {fix.name for fix in find_fixes_for("device-mismatch")}
    if runs.original.has_device_mismatch and not any(mismatch_fixes & {*names} for _, names in fix_tiers):
        return ChosenFixes((), f"{_MISMATCH_MESSAGE}, and no fix here mends that: the findings say where")
    for tier_index, (_, names) in enumerate(fix_tiers):
        left = runs.select_for_search(names, rejections)
        compatible, candidates = _select_compatible_fixes(runs, left, rejections)
        chosen = None
        if tier_index == 0 and not _cannot_fit(runs, compatible):
            tier_errors: dict[str, str] = {}
            chosen = _add_until_fits(runs, candidates, tier_errors)
            rejections |= {} if chosen is None else tier_errors
        if chosen is None:
            all_fixes, candidates, run = _combine_with_conflicts(runs, left, rejections)
            if run is None:
                continue
            if not run.fits:
                if leanest is None or run.needed_bytes < leanest[0].needed_bytes:
                    leanest = run, all_fixes
                continue
            chosen = (_add_until_fits(runs, candidates, rejections) if tier_index else None) or all_fixes
        applicable_fixes = [fix for fix in candidates if not rejections.get(fix.fix.name, "").startswith(fix.fix.name)]
        chosen = _replace_costly_fixes(runs, _drop_needless_fixes(runs, chosen), applicable_fixes)
        loss = next(loss for loss, names in fix_tiers if {fix.fix.name for fix in chosen} <= {*names})
        reason = _describe_choice(runs, chosen, loss)
        added = _find_headroom(runs, chosen)
        if added:
            reason += f"; with {' and '.join(fix.fix.name for fix in added)} more of the GPU is left, in no slower step"
        chosen = [*chosen, *added]
        for fix in chosen:
            rejections.pop(fix.fix.name, None)
        steps = [chosen[:count] for count in range(1, len(chosen) + 1)]
        taken = {fix.fix.name for fix in chosen}
        rejections |= {name: said for name in left if name not in taken and (said := _describe_conflict(name, chosen))}
        return ChosenFixes(_select_applicable_steps(runs, steps), reason, rejections)
    if leanest is None:
        return ChosenFixes((), "no fix applies to this run", rejections)
    needed_text = format_bytes(leanest[0].needed_bytes)
    explanation = f"nothing fits: the least that any set needs is {needed_text}"
    if leanest[0].has_device_mismatch:
        explanation = f"{_MISMATCH_MESSAGE} with each set: the findings say where"
    return ChosenFixes([leanest[1]], f"{explanation}, with all of these", rejections)


def _combine_with_conflicts(
    runs: AnyRuns, names: Sequence[str], rejections: dict[str, str]
) -> tuple[list[ChosenFix], list[ChosenFix], LadderRun | None]:
    """Return a set of `names` that apply together, all fixes that apply alone, and the run with the set.

    If fixes conflict, two sets are run, each with other fixes of the conflicts; the one with less memory is returned.
    """
    all_fixes, run = _run_compatible_fixes(runs, names, rejections)
    conflicting = [name for name in names if _describe_conflict(name, all_fixes)]
    if run is not None and conflicting and not run.fits:
        swapped = _run_compatible_fixes(runs, sorted(names, key=lambda name: name not in conflicting), rejections)
        if swapped[1] is not None and swapped[1].needed_bytes < run.needed_bytes:
            all_fixes, run = swapped
            conflicting = [name for name in names if _describe_conflict(name, all_fixes)]
    return all_fixes, [*all_fixes, *(ChosenFix(FIXES[name]) for name in conflicting)], run


def _describe_conflict(name: str, fixes: Sequence[ChosenFix]) -> str:
    """Return a sentence on the first of `fixes` that conflicts with fix `name`; empty if no fix conflicts."""
    reasons = ((fix.fix.name, find_conflict(FIXES[name], fix.fix.name)) for fix in fixes)
    return next((f"does not go with {other}: {reason}" for other, reason in reasons if reason), "")


def _add_until_fits(runs: AnyRuns, candidates: list[ChosenFix], rejections: dict[str, str]) -> list[ChosenFix] | None:
    """Add fixes of `candidates` one by one against the bottleneck until the run fits; None if the run never fits."""
    remaining_fixes = [fix.fix.name for fix in candidates]
    fixes: list[ChosenFix] = []
    run, max_runs = runs.original, len(runs) + MAX_RUNS
    num_tries: dict[str, int] = {}
    while not run.fits:
        found_step = find_next_fix(runs, run, fixes, remaining_fixes, num_tries, rejections, max_runs)
        if found_step is None:
            return None
        fix, run = found_step
        fixes.append(fix)
        remaining_fixes.remove(fix.fix.name)
    return fixes


def _bound_peak_bytes(runs: AnyRuns, fixes: Sequence[ChosenFix]) -> int:
    """Return a lower bound in bytes of the peak with `fixes`: categories of the original's peak that no fix reduces."""
    if any(fix.fix.numerics is not Numerics.EXACT for fix in fixes):
        return 0  # tensors of all categories may get a smaller dtype
    freed_categories = {category for fix in fixes for category in (*fix.fix.saves, *fix.fix.ladder_against)}
    held = runs.original.document.peak.categories
    return sum(held.get(category, 0) for category in _IRREDUCIBLE_CATEGORIES if category not in freed_categories)


def _cannot_fit(runs: AnyRuns, fixes: Sequence[ChosenFix]) -> bool:
    """Return whether a run with `fixes` cannot fit, by its lower bounds, without a run: of the GPU, and of the GPU and
    the host together, where what leaves the GPU is moved to."""
    device = runs.original.document.device
    usable_bytes, host_bytes = device.resident_bytes, device.host_memory_bytes
    if usable_bytes is None:
        return False
    if _bound_peak_bytes(runs, fixes) > usable_bytes:
        return True
    staying_fixes = [fix for fix in fixes if not fix.fix.moves_to_host]
    return host_bytes is not None and _bound_peak_bytes(runs, staying_fixes) > usable_bytes + host_bytes


def _drop_needless_fixes(runs: AnyRuns, fixes: list[ChosenFix]) -> list[ChosenFix]:
    """Return `fixes` without those that the run does not need to fit; the fix added last is tried first."""
    reduced_sets = [[other for other in fixes if other is not fix] for fix in fixes] if len(fixes) > 1 else []
    runs.run_in_parallel(reduced_set for reduced_set in reduced_sets if not _cannot_fit(runs, reduced_set))
    for fix in reversed(fixes):
        reduced_set = [other for other in fixes if other is not fix]
        if reduced_set and _run_if_fits(runs, reduced_set) is not None:
            fixes = reduced_set
    return fixes


def _replace_costly_fixes(runs: AnyRuns, fixes: list[ChosenFix], applicable_fixes: list[ChosenFix]) -> list[ChosenFix]:
    """Return `fixes` with costly ones replaced, if the run then still fits and its step is quicker.

    Beside a fix that moves memory to the host, another may make it cheaper: recomputed activations need not be moved.
    """
    best_run = runs.run_with_fixes(fixes)
    unused_fixes = [fix for fix in applicable_fixes if fix not in fixes]
    swaps = [(fix, [other for other in unused_fixes if {*other.fix.saves} & {*fix.fix.saves}]) for fix in fixes]
    min_seconds = MIN_SPEEDUP * best_run.seconds
    for costly, similar in [
        (fix, similar) for fix, similar in swaps if similar and _measure_fix_seconds(runs, fix, fixes) > min_seconds
    ]:
        other_fixes = [fix for fix in fixes if fix is not costly]
        for other in similar:
            candidates = [[*other_fixes, other], *([[*fixes, other]] if costly.fix.moves_to_host else [])]
            runs.run_in_parallel(candidate for candidate in candidates if not _cannot_fit(runs, candidate))
            for candidate in candidates:
                run = _run_if_fits(runs, candidate)
                if run is not None and run.seconds < best_run.seconds * (1 - MIN_SPEEDUP):
                    fixes, best_run = candidate, run
    return fixes


def _find_headroom(runs: AnyRuns, fixes: list[ChosenFix]) -> list[ChosenFix]:
    """Return fixes to add to `fixes` while these leave less than `MIN_HEADROOM` of the GPU, which leave more of it and
    slow no step down."""
    added: list[ChosenFix] = []
    for name in list_headroom_fixes():
        run = runs.run_with_fixes([*fixes, *added])
        if run.needed_bytes <= (1 - MIN_HEADROOM) * (run.document.device.total_bytes or 0):
            break
        is_on = name in runs.in_force() or name in {fix.fix.name for fix in fixes}
        if is_on or _describe_conflict(name, fixes):
            continue
        more = [*added, ChosenFix(FIXES[name])]
        better_run = _run_if_fits(runs, [*fixes, *more])
        if better_run is None or better_run.seconds > run.seconds * (1 + MIN_SPEEDUP):
            continue
        if better_run.needed_bytes < run.needed_bytes:
            added = more
    return added


def _measure_fix_seconds(runs: AnyRuns, fix: ChosenFix, fixes: list[ChosenFix]) -> float:
    """Return the seconds that `fix` adds to a step on top of the fixes before it in `fixes`."""
    earlier_fixes = fixes[: fixes.index(fix)]
    try:
        return (
            runs.run_with_fixes([*earlier_fixes, fix]).seconds
            - (runs.run_with_fixes(earlier_fixes) if earlier_fixes else runs.original).seconds
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


def _describe_choice(runs: AnyRuns, fixes: list[ChosenFix], loss: str) -> str:
    names = " and ".join(fix.fix.name for fix in fixes)
    if len(fixes) == 1:
        return f"{names} is enough ({loss})"
    is_minimal = all(_run_if_fits(runs, [other for other in fixes if other is not fix]) is None for fix in fixes)
    suffix = ", and without any one of them it does not" if is_minimal else ""
    return f"it fits with {names}{suffix} ({loss}); no dearer fix is on that a cheaper one could replace"


def _select_applicable_steps(runs: AnyRuns, steps: Sequence[Sequence[ChosenFix]]) -> list[Sequence[ChosenFix]]:
    """Return the last step, and the earlier steps that can run without the fixes of later steps."""
    applicable_steps: list[Sequence[ChosenFix]] = []
    for fixes in steps[:-1]:
        try:
            runs.run_with_fixes(fixes)
        except (UsageError, RunFailedError):
            continue
        applicable_steps.append(fixes)
    return [*applicable_steps, *steps[-1:]]


def _select_compatible_fixes(
    runs: AnyRuns, names: Sequence[str], rejections: dict[str, str]
) -> tuple[list[ChosenFix], list[ChosenFix]]:
    """Return a set of `names` that apply together, as far as known without a run, and all fixes that apply."""
    fixes: list[ChosenFix] = []
    for name in names:
        if _describe_conflict(name, fixes):
            continue
        try:
            runs.check_fixes([*fixes, ChosenFix(FIXES[name])])
        except UsageError as error:
            rejections[name] = error.line
            continue
        fixes.append(ChosenFix(FIXES[name]))
    return fixes, [*fixes, *(ChosenFix(FIXES[name]) for name in names if _describe_conflict(name, fixes))]


def _run_compatible_fixes(
    runs: AnyRuns, names: Sequence[str], rejections: dict[str, str]
) -> tuple[list[ChosenFix], LadderRun | None]:
    """Return a set of `names` that apply together, and the run with this set (None: no set runs)."""
    fixes, _ = _select_compatible_fixes(runs, names, rejections)
    while fixes:
        try:
            return fixes, runs.run_with_fixes(fixes)
        except UsageError as error:
            # The message begins with the name of the fix that does not apply to this model.
            failing_fix = next((fix for fix in fixes if fix.fix.name in str(error)), fixes[-1])
            rejections[failing_fix.fix.name] = error.line
            fixes.remove(failing_fix)
        except RunFailedError as error:
            # The fixes that this tier adds are last in its list.
            rejections[fixes[-1].fix.name] = error.line
            return [], None
    return [], None
