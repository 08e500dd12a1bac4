"""Simulated runs of one program with different fixes: each row of a ladder is a run, not an estimate."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from memprof.command_line import make_profile_command
from memprof.device.catalog import Gpu
from memprof.errors import MemprofError, UsageError
from memprof.findings.evidence import is_inference
from memprof.fixes.catalog import ALL_FIXES, check_device, find_precision_reason, list_active_fixes
from memprof.fixes.chosen import ChosenFix, combine_numerics, edit_spec
from memprof.flows.account import analyze, replace_allocator_settings
from memprof.flows.cost import StepWork, compute_cost, compute_step_work, find_bottleneck
from memprof.flows.gpus import find_spec_gpu
from memprof.flows.profile import count_parallel_runs, profile
from memprof.report.documents.ladder import LadderRow
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.trace.facts import target_to_json
from memprof.workload.plan import parse_plan


@dataclass(frozen=True, slots=True)
class LadderRun:
    """A run of the program with one set of fixes, or without fixes: trace, report and work of a step."""

    trace: Trace
    document: Report
    work: StepWork | None

    def complete_report(self) -> Report:
        """Return the report with all findings: during a search a report has only the findings that guide the search."""
        return self.document if self.document.ledger is not None else analyze(self.trace)

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of GPU memory that the run requires to never fail an allocation."""
        return self.document.verdict.required_bytes

    @property
    def fits(self) -> bool:
        """Return whether the run fits the GPU (and the host, if judged) without paging, and does not mix tensors of two
        devices."""
        return bool(self.document.fits_in_memory) and not self.has_device_mismatch

    @property
    def has_device_mismatch(self) -> bool:
        """Return whether tensors of two devices meet in an operator, where a real run would end."""
        return any(finding.id == "device-mismatch" for finding in self.document.findings)

    @property
    def seconds(self) -> float:
        """Return a lower bound of the step time in seconds on this GPU; 0 if unknown."""
        return 0.0 if self.work is None else self.work.seconds


def _fix_key(fixes: Sequence[ChosenFix]) -> tuple[str, ...]:
    return tuple(sorted(map(str, fixes)))


class Runs(abc.ABC):
    """Runs of one program with different sets of fixes; each set is run once."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._run_by_fixes: dict[tuple[str, ...], LadderRun] = {}
        self.original = self._add(())

    @abc.abstractmethod
    def _run(self, fixes: Sequence[ChosenFix]) -> tuple[Trace, Report]:
        """Run the program with `fixes`; return its trace and report."""

    @abc.abstractmethod
    def format_command(self, fixes: Sequence[ChosenFix], *, fits: bool | None) -> str:
        """Return the command of the run with `fixes`; `fits` is the verdict of this run."""

    @abc.abstractmethod
    def _replay_with_fixes(self, trace: Trace, fixes: Sequence[ChosenFix]) -> Trace:
        """Return `trace` as if the run had `fixes`, which differ from its fixes only in allocator settings."""

    def _compute_work(self, trace: Trace, fixes: Sequence[ChosenFix]) -> StepWork | None:
        """Return the work of a step of the run with `fixes`; None if the work was not counted."""
        return compute_step_work(trace, self._gpu)

    def _get_parallel_plan(self, fixes: Sequence[ChosenFix]) -> str | None:
        """Return the parallel plan of the run with `fixes`; None: one GPU."""
        return None

    def check_fixes(self, fixes: Sequence[ChosenFix]) -> None:
        """Raise UsageError if `fixes` do not apply, as far as this is known without a run: to this GPU."""
        check_device([fix.fix for fix in fixes], self._gpu)

    @abc.abstractmethod
    def in_force(self) -> frozenset[str]:
        """Return the names of the fixes that the original run already has."""

    def select_for_search(self, names: Iterable[str], rejections: dict[str, str]) -> list[str]:
        """Return those of `names` that a search takes: they are not in force, and in the half precision of this GPU.
        On a GPU that is slow in bfloat16, `rejections` gets why it does not take others."""
        trains = not is_inference(self.original.trace)
        in_force = self.in_force()
        reasons = {name: find_precision_reason(ALL_FIXES[name], self._gpu, trains=trains) for name in names}
        if not self._gpu.has_bfloat16:
            rejections |= {name: reason for name, reason in reasons.items() if reason and name not in in_force}
        return [name for name, reason in reasons.items() if reason is None and name not in in_force]

    @abc.abstractmethod
    def run_in_parallel(self, fix_sets: Iterable[Sequence[ChosenFix]]) -> None:
        """Run the program with each set of fixes, in parallel where possible."""

    def add_runs(self, rows: Iterable[tuple[Sequence[ChosenFix], LadderRun]]) -> None:
        """Add runs of another process, as pairs of the fixes and the run."""
        self._run_by_fixes |= {_fix_key(fixes): run for fixes, run in rows}

    def __len__(self) -> int:
        """Return the number of runs requested so far."""
        return len(self._run_by_fixes)

    def run_with_fixes(self, fixes: Sequence[ChosenFix]) -> LadderRun:
        """Return the run with `fixes`; raise UsageError if a fix does not apply."""
        key = _fix_key(fixes)
        if key in self._run_by_fixes:
            return self._run_by_fixes[key]
        other_fixes = [fix for fix in fixes if not fix.fix.alloc_conf]
        if len(other_fixes) == len(fixes):
            return self._add(fixes)
        # The requests are the same in the same order: only the allocator's replay differs.
        self.check_fixes(fixes)
        base_run = self.run_with_fixes(other_fixes) if other_fixes else self.original
        trace = self._replay_with_fixes(base_run.trace, fixes)
        self._run_by_fixes[key] = LadderRun(trace, analyze(trace, with_details=False), base_run.work)
        return self._run_by_fixes[key]

    def _add(self, fixes: Sequence[ChosenFix]) -> LadderRun:
        Runs.check_fixes(self, fixes)
        trace, document = self._run(fixes)
        run = self._run_by_fixes[_fix_key(fixes)] = LadderRun(trace, document, self._compute_work(trace, fixes))
        return run

    def build_row(self, fixes: Sequence[ChosenFix], run: LadderRun, previous_run: LadderRun | None) -> LadderRow:
        """Return the ladder row of `run`; `previous_run` is the run of the row above (None: the first row)."""
        document = run.document
        names = tuple(str(fix) for fix in fixes)
        numerics = combine_numerics([fix.fix.name for fix in fixes]).value
        last_fix = fixes[-1].fix if fixes else None
        note = "" if last_fix is None else last_fix.cost
        cost = compute_cost(run.work, self.original.work, numerics, note, run.trace.compiling)
        if last_fix is not None and last_fix.compiles:
            cost = dataclasses.replace(cost, note=f"{note}: {cost.compile_note}")
        return LadderRow(
            fixes=names,
            added=names[-1] if names else None,
            peak_allocated_bytes=document.peak.allocated_bytes,
            reserved_bytes=document.peak.reserved_bytes,
            device_used_bytes=run.needed_bytes,
            host_peak_bytes=document.host_peak_bytes,
            saved_bytes=previous_run.needed_bytes - run.needed_bytes if previous_run is not None else 0,
            fits=None if run.has_device_mismatch else document.fits_in_memory,
            next_bottleneck=find_bottleneck(document),
            cost=cost,
            parallel=self._get_parallel_plan(fixes),
            command=self.format_command(fixes, fits=document.verdict.fits),
        )


class SpecRuns(Runs):
    """Runs of one spec; `original_trace` is the trace of the run without further fixes, if it exists already."""

    def __init__(
        self, spec: TargetSpec, progress: Callable[[str], None] = lambda _: None, original_trace: Trace | None = None
    ) -> None:
        self._spec, self._progress, self._original_trace = spec, progress, original_trace
        # Runs made in parallel and not yet requested: trace and report without ledger, or the error of the run.
        self._prefetched_runs: dict[TargetSpec, tuple[Trace, Report] | MemprofError] = {}
        super().__init__(find_spec_gpu(spec))

    def add_fixes(self, fixes: Sequence[ChosenFix]) -> TargetSpec:
        """Return the spec with `fixes`; raise UsageError if a fix does not apply to the spec."""
        if not fixes:  # the original run may not exist yet
            return self._spec
        spec, original = self._spec, self.original
        classes = {module.class_name for module in original.trace.modules}
        target = {**target_to_json(original.document.target), "classes": classes}
        for fix in fixes:
            spec = edit_spec(spec, fix, target)
        return spec

    def format_command(self, fixes: Sequence[ChosenFix], *, fits: bool | None) -> str:
        """Return the command of the run with `fixes`."""
        return make_profile_command(self._spec.edit(fixes=(*self._spec.fixes, *map(str, fixes))))

    def check_fixes(self, fixes: Sequence[ChosenFix]) -> None:
        """Raise UsageError if `fixes` do not apply to the GPU and the spec."""
        super().check_fixes(fixes)
        self.add_fixes(fixes)

    def run_in_parallel(self, fix_sets: Iterable[Sequence[ChosenFix]]) -> None:
        """Run the spec with each set of fixes, in worker processes."""
        specs: list[TargetSpec] = []
        for fixes in fix_sets:
            run_fixes = [fix for fix in fixes if not fix.fix.alloc_conf]
            if run_fixes and _fix_key(run_fixes) not in self._run_by_fixes:
                with contextlib.suppress(UsageError):
                    specs.append(self.add_fixes(run_fixes))
        pending_specs = [spec for spec in dict.fromkeys(specs) if spec not in self._prefetched_runs]
        if len(pending_specs) < 2 or count_parallel_runs(self._spec) < 2:
            return
        from memprof.workload.pool import run_all  # needs torch

        tasks = [functools.partial(profile, spec, with_details=False) for spec in pending_specs]
        results = run_all(tasks, lambda done: self._progress(f"sets of fixes: {done}"))
        self._prefetched_runs |= zip(pending_specs, results, strict=True)

    def in_force(self) -> frozenset[str]:
        """Return the names of the fixes that the spec already has."""
        return frozenset(list_active_fixes(self._spec))

    def _replay_with_fixes(self, trace: Trace, fixes: Sequence[ChosenFix]) -> Trace:
        spec = self.add_fixes(fixes)
        trace = trace if spec.alloc_conf is None else replace_allocator_settings(trace, spec.alloc_conf)
        assert trace.facts.target is not None
        target = dataclasses.replace(trace.facts.target, asked=spec)
        return dataclasses.replace(trace, facts=dataclasses.replace(trace.facts, target=target))

    def _get_parallel_plan(self, fixes: Sequence[ChosenFix]) -> str | None:
        return self.add_fixes(fixes).parallel

    def _compute_work(self, trace: Trace, fixes: Sequence[ChosenFix]) -> StepWork | None:
        # For the same number of sequences as the original: GPUs that share a sequence run them one after another.
        spec = self.add_fixes(fixes)
        rank_ratio = _count_sequence_ranks(spec) // _count_sequence_ranks(self._spec)
        return compute_step_work(trace, self._gpu, spec.gradient_accumulation * rank_ratio if rank_ratio > 1 else 0)

    def _run(self, fixes: Sequence[ChosenFix]) -> tuple[Trace, Report]:
        if not fixes and self._original_trace is not None:
            return self._original_trace, analyze(self._original_trace, with_details=False)
        description = "with " + ", ".join(fix.fix.name for fix in fixes) if fixes else "unchanged"
        return self.profile(self.add_fixes(fixes), description)

    def profile(self, spec: TargetSpec, description: str) -> tuple[Trace, Report]:
        """Return the run of `spec`, with `description` in progress lines; raise MemprofError if the run fails."""
        made = self._prefetched_runs.pop(spec, None)
        if isinstance(made, MemprofError):
            raise made
        return made or profile(spec, lambda message: self._progress(f"{description}: {message}"), with_details=False)


def _count_sequence_ranks(spec: TargetSpec) -> int:
    return 1 if spec.parallel is None else parse_plan(spec.parallel, spec.gpus).sharing


class RunsWithFixes:
    """A view of `runs` in which every run also has the fixes `base_fixes`."""

    def __init__(self, runs: Runs, base_fixes: Sequence[ChosenFix]) -> None:
        self._runs, self._base_fixes = runs, list(base_fixes)
        self._requested_keys: set[tuple[str, ...]] = set()
        self.original = self.run_with_fixes(())

    def __len__(self) -> int:
        """Return the number of runs requested through this view."""
        return len(self._requested_keys)

    def run_in_parallel(self, fix_sets: Iterable[Sequence[ChosenFix]]) -> None:
        """Run the program with each set of fixes plus `base_fixes`, in parallel where possible."""
        self._runs.run_in_parallel([*self._base_fixes, *fixes] for fixes in fix_sets)

    def run_with_fixes(self, fixes: Sequence[ChosenFix]) -> LadderRun:
        """Return the run with `fixes` plus `base_fixes`; raise UsageError if a fix does not apply."""
        self._requested_keys.add(_fix_key(fixes))
        all_fixes = [*self._base_fixes, *fixes]
        return self._runs.run_with_fixes(all_fixes) if all_fixes else self._runs.original

    def check_fixes(self, fixes: Sequence[ChosenFix]) -> None:
        """Raise UsageError if `fixes` do not apply together with `base_fixes`."""
        self._runs.check_fixes([*self._base_fixes, *fixes])

    def in_force(self) -> frozenset[str]:
        """Return the names of the original run's fixes and of `base_fixes`."""
        return self._runs.in_force() | {fix.fix.name for fix in self._base_fixes}

    def select_for_search(self, names: Iterable[str], rejections: dict[str, str]) -> list[str]:
        """Return those of `names` that a search takes (see `Runs.select_for_search`), without `base_fixes`."""
        selected = self._runs.select_for_search(names, rejections)
        return [name for name in selected if name not in self.in_force()]


def apply_fixes(runs: Runs, fixes: Sequence[ChosenFix], *, row_per_fix: bool = False) -> tuple[Trace, Report]:
    """Return trace and report with `fixes`; the ladder has two rows, or with `row_per_fix` one row for each fix."""
    steps = [fixes[:count] for count in range(1, len(fixes) + 1)] if row_per_fix else [fixes]
    return run_with_ladder(runs, steps)


def run_with_ladder(
    runs: Runs, steps: Sequence[Sequence[ChosenFix]], reason: str = "", rejections: dict[str, str] | None = None
) -> tuple[Trace, Report]:
    """Return trace and report of the last set of fixes in `steps`; the ladder has the original run and each set."""
    previous_run = runs.original
    rows = [runs.build_row((), previous_run, None)]
    for fixes in steps:
        run = runs.run_with_fixes(fixes)
        rows.append(runs.build_row(fixes, run, previous_run))
        previous_run = run
    return previous_run.trace, dataclasses.replace(
        previous_run.complete_report(), ladder=tuple(rows), ladder_reason=reason, ladder_left_out=rejections or {}
    )
