"""The ladder of fixes (`--ladder`): each row adds the cheapest fix for the current bottleneck."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memprof.errors import MemprofError
from memprof.fixes.catalog import ALL_FIXES, list_ladder
from memprof.fixes.chosen import ChosenFix
from memprof.flows.cost import find_bottleneck
from memprof.flows.ladder.runs import LadderRun, Runs, RunsWithFixes
from memprof.report.documents.report import Report
from memprof.trace.events import Trace
from memprof.units import format_bytes

MIN_SAVED_SHARE = 0.01  # a fix that saves less than this share of the required memory gets no row
MAX_ROWS = 9
MAX_RUNS = 16  # so that a ladder takes less than a minute


def build_ladder(runs: Runs, names: Sequence[str] | None = None) -> tuple[Trace, Report]:
    """Return the trace of the original run, and its report with a ladder of the fixes `names` (None: all).

    The ladder continues past the first row that fits, while fixes save enough. Fixes that train another model (LoRA)
    are tried only while the run does not fit.
    """
    run, fixes = runs.original, list[ChosenFix]()
    rows = [runs.build_row((), run, None)]
    rejections: dict[str, str] = {}
    num_tries: dict[str, int] = {}
    remaining_fixes = runs.select_for_search(list_ladder() if names is None else names, rejections)
    while len(rows) < MAX_ROWS and len(runs) < MAX_RUNS:
        found_step = find_next_fix(runs, run, fixes, remaining_fixes, num_tries, rejections)
        if found_step is None:
            break
        fix, better_run = found_step
        fixes.append(fix)
        remaining_fixes.remove(fix.fix.name)
        rows.append(runs.build_row(fixes, better_run, run))
        run = better_run
    document = dataclasses.replace(runs.original.complete_report(), ladder=tuple(rows), ladder_left_out=rejections)
    return runs.original.trace, document


def find_next_fix(
    runs: Runs | RunsWithFixes,
    run: LadderRun,
    fixes: Sequence[ChosenFix],
    remaining_fixes: Sequence[str],
    num_tries: dict[str, int],
    rejections: dict[str, str],
    max_runs: int = MAX_RUNS,
) -> tuple[ChosenFix, LadderRun] | None:
    """Return the first of `remaining_fixes` that saves enough on top of `fixes`, and the run with it; else None.

    `runs` has at most `max_runs` runs afterwards. A fix that saves too little is tried once more in a later row.
    """
    candidates = [name for name in _order_candidates(run, remaining_fixes) if num_tries.get(name, 0) < 2]
    candidates.sort(key=lambda name: num_tries.get(name, 0))  # stable: untried fixes first
    for name in candidates:
        if (run.fits and ALL_FIXES[name].trains_another) or len(runs) >= max_runs:
            continue
        fix = ChosenFix(ALL_FIXES[name])
        num_tries[name] = num_tries.get(name, 0) + 1
        try:
            better_run = runs.run_with_fixes([*fixes, fix])
        except MemprofError as error:
            rejections[name] = error.line
            num_tries[name] = 2
            continue
        saved_bytes = run.needed_bytes - better_run.needed_bytes
        if saved_bytes >= MIN_SAVED_SHARE * run.needed_bytes or (better_run.fits and not run.fits):
            rejections.pop(name, None)
            return fix, better_run
        condition = f" after {fixes[-1].fix.name}" if fixes else ""
        what = f"saves {format_bytes(saved_bytes)}" if saved_bytes >= 0 else f"takes {format_bytes(-saved_bytes)} more"
        rejections[name] = what + condition
    return None


def _order_candidates(run: LadderRun, remaining_fixes: Sequence[str]) -> list[str]:
    """Return the fixes that may reduce the peak, those against the largest category of memory first."""
    peak, largest_category = run.document.peak, find_bottleneck(run.document).category
    names: list[str] = []
    for finding in run.document.findings:
        if finding.id in ("device-mismatch", "weight-delta-per-token"):
            names += [name for name in finding.fixes if name in remaining_fixes]
    for category, category_bytes in {largest_category: 0, **peak.categories}.items():
        if category == largest_category or category_bytes >= MIN_SAVED_SHARE * peak.allocated_bytes:
            names += [
                name
                for name in remaining_fixes
                if category in (*ALL_FIXES[name].saves, *ALL_FIXES[name].ladder_against)
            ]
    return list(dict.fromkeys(names))
