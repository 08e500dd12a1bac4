"""The ladder of fixes (`--ladder`): each row adds the cheapest fix for the current bottleneck."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memprof.errors import MemprofError
from memprof.fixes.catalog import STEPS, ladder
from memprof.fixes.chosen import ChosenFix
from memprof.flows.cost import bottleneck_of
from memprof.flows.ladder.runs import LadderRun, Runs, RunsWith
from memprof.report.documents.report import Report
from memprof.trace.events import Trace
from memprof.units import format_bytes

WORTH = 0.01  # a fix that saves less than this share of the required memory gets no row
MAX_RUNGS = 9
MAX_RUNS = 16  # so that a ladder takes less than a minute


def climb(runs: Runs, names: Sequence[str] | None = None) -> tuple[Trace, Report]:
    """Return the original run, with a ladder of the fixes `names` (None: all fixes of the catalog's ladder).

    The ladder continues past the row that fits, as long as a fix saves enough for a row and trains the same model.
    Fixes that train another model (LoRA) are tried only while the run does not fit.
    """
    run, fixes = runs.original, list[ChosenFix]()
    rungs = [runs.rung((), run, None)]
    not_applied: dict[str, str] = {}
    num_tries: dict[str, int] = {}
    left = [name for name in (ladder() if names is None else names) if name not in runs.active_fixes()]
    while len(rungs) < MAX_RUNGS and len(runs) < MAX_RUNS:
        step = next_step(runs, run, fixes, left, num_tries, not_applied)
        if step is None:
            break
        fix, better = step
        fixes.append(fix)
        left.remove(fix.fix.name)
        rungs.append(runs.rung(fixes, better, run))
        run = better
    document = dataclasses.replace(runs.original.explained(), ladder=tuple(rungs), ladder_left_out=not_applied)
    return runs.original.trace, document


def next_step(
    runs: Runs | RunsWith,
    run: LadderRun,
    fixes: Sequence[ChosenFix],
    left: Sequence[str],
    num_tries: dict[str, int],
    not_applied: dict[str, str],
    most: int = MAX_RUNS,
) -> tuple[ChosenFix, LadderRun] | None:
    """Return the first candidate fix that saves enough, and the run with this fix; None if no candidate does.

    At most `most` runs are made. A fix that saved nothing is tried once more at a later row, when the peak has moved.
    """
    candidates = [name for name in _order_of_trial(run, left) if num_tries.get(name, 0) < 2]
    candidates.sort(key=lambda name: num_tries.get(name, 0))  # stable: untried fixes first
    for name in candidates:
        if (run.fits and STEPS[name].trains_another) or len(runs) >= most:
            continue
        fix = ChosenFix(STEPS[name])
        num_tries[name] = num_tries.get(name, 0) + 1
        try:
            better = runs.with_fixes([*fixes, fix])
        except MemprofError as error:
            not_applied[name] = error.line
            num_tries[name] = 2
            continue
        saved = run.needed_bytes - better.needed_bytes
        if saved >= WORTH * run.needed_bytes or (better.fits and not run.fits):
            not_applied.pop(name, None)
            return fix, better
        after = f" after {fixes[-1].fix.name}" if fixes else ""
        what = f"saves {format_bytes(saved)}" if saved >= 0 else f"takes {format_bytes(-saved)} more"
        not_applied[name] = what + after
    return None


def _order_of_trial(run: LadderRun, left: Sequence[str]) -> list[str]:
    """Return the fixes of `left` that may help, those against the largest category of the peak first."""
    peak, first = run.document.peak, bottleneck_of(run.document).category
    found: list[str] = []
    for finding in run.document.findings:
        if finding.id in ("device-mismatch", "weight-delta-per-token"):
            found += [name for name in finding.fixes if name in left]
    for category, size in {first: 0, **peak.categories}.items():
        if category == first or size >= WORTH * peak.allocated_bytes:
            found += [name for name in left if category in (*STEPS[name].saves, *STEPS[name].ladder_against)]
    return list(dict.fromkeys(found))
