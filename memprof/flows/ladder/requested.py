"""The run that `--fix` and `--ladder` ask for: as it is, with fixes by name, with a ladder, or with a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memprof.fixes.catalog import ALL_FIXES, BASE_PLAN, PARALLEL_FIXES, list_ladder
from memprof.fixes.chosen import ChosenFix, check_fix, parse_fixes
from memprof.flows.account import analyze
from memprof.flows.gpus import find_host_bytes, find_spec_gpu
from memprof.flows.ladder.build import build_ladder
from memprof.flows.ladder.plans import search_plans
from memprof.flows.ladder.runs import SpecRuns, apply_fixes
from memprof.flows.ladder.search import search_fixes
from memprof.flows.profile import check_inputs, profile
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.trace.events import Trace

SEARCH = "auto"  # the value of --fix that searches


def resolve_fixes(spec: TargetSpec, fix: str | None, *, ladder: bool = False) -> tuple[TargetSpec, list[ChosenFix]]:
    """Return `spec` as the run begins, and the fixes that `fix` (`--fix`) names: none for a search.

    Raises UsageError, without importing torch: an input of `spec` does not exist, or a fix does not apply."""
    fixes = [] if fix in (None, SEARCH) else parse_fixes(fix or "", ALL_FIXES)
    uses_all_gpus = ladder if fix is None else any(chosen.fix.name in PARALLEL_FIXES for chosen in fixes)
    if spec.gpus > 1 and spec.parallel is None and uses_all_gpus:
        spec = spec.edit(parallel=BASE_PLAN)
    check_inputs(spec)
    for chosen in fixes:
        check_fix(spec, chosen)
    return spec, fixes


def run_requested(
    spec: TargetSpec,
    fixes: Sequence[ChosenFix],
    progress: Callable[[str], None] = lambda _: None,
    *,
    searches: bool = False,
    ladder: bool = False,
    simulated: Trace | None = None,
) -> tuple[Trace, Report]:
    """Return trace and report of `spec` as it is, with `fixes`, with a ladder of fixes (with `ladder` and no fixes), or
    with the fixes that a search finds (`searches`). `simulated` is the trace of the run without fixes, if there is one.
    """
    if not (fixes or searches or ladder):
        return profile(spec, progress) if simulated is None else (simulated, analyze(simulated))
    if searches and spec.host_memory_bytes is None:
        spec, simulated = spec.edit(host_memory_bytes=find_host_bytes(find_spec_gpu(spec))), None
    if searches and spec.gpus > 1 and spec.parallel is None:
        return search_plans(spec, progress)
    runs = SpecRuns(spec, progress, simulated)
    if searches:
        return search_fixes(runs)
    return apply_fixes(runs, fixes, row_per_fix=ladder) if fixes else build_ladder(runs, list_ladder(spec.gpus))
