"""Simulated runs of one program with different fixes: each row of a ladder is a run, not an estimate."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from memprof.command_line import profile_command
from memprof.device.catalog import Gpu
from memprof.errors import MemprofError, UsageError
from memprof.fixes.catalog import in_force
from memprof.fixes.chosen import ChosenFix, combined_numerics, edit_spec
from memprof.flows.account import analyze, with_settings
from memprof.flows.cost import StepWork, bottleneck_of, cost_of, step_work
from memprof.flows.gpus import find_gpu_of
from memprof.flows.profile import count_parallel_runs, profile
from memprof.report.documents.ladder import LadderRow
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.trace.facts import target_to_json
from memprof.workload.plan import parse_plan


@dataclass(frozen=True, slots=True)
class LadderRun:
    """One run, with fixes or without."""

    trace: Trace
    document: Report
    work: StepWork | None

    def explained(self) -> Report:
        """Return the report with all findings: during a search a report has only the findings that guide the search."""
        return self.document if self.document.ledger is not None else analyze(self.trace)

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of GPU memory that the run requires to never fail an allocation."""
        return self.document.verdict.required_bytes

    @property
    def fits(self) -> bool:
        """Return whether the run fits the GPU (and the host, if judged) and does not mix tensors of two devices."""
        return bool(self.document.verdict.fits) and not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Return whether tensors of two devices meet in an operator, where a real run would end."""
        return any(finding.id == "device-mismatch" for finding in self.document.findings)

    @property
    def seconds(self) -> float:
        """Return the lower bound of the time of a step on this GPU, in seconds."""
        return 0.0 if self.work is None else self.work.seconds


def _fix_key(fixes: Sequence[ChosenFix]) -> tuple[str, ...]:
    return tuple(sorted(map(str, fixes)))


class Runs(abc.ABC):
    """Runs of one program with different sets of fixes; each set is run once."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._known: dict[tuple[str, ...], LadderRun] = {}
        self.original = self._add(())

    @abc.abstractmethod
    def _run(self, fixes: Sequence[ChosenFix]) -> tuple[Trace, Report]:
        """Run the program with `fixes`."""

    @abc.abstractmethod
    def command(self, fixes: Sequence[ChosenFix], *, fits: bool | None) -> str:
        """Return the command of the run with `fixes`; `fits` is the verdict of this run."""

    @abc.abstractmethod
    def _trace_with(self, trace: Trace, fixes: Sequence[ChosenFix]) -> Trace:
        """Return `trace` as if run with `fixes`, which add only allocator settings to the fixes of `trace`."""

    def _work(self, trace: Trace, fixes: Sequence[ChosenFix]) -> StepWork | None:
        """Return the work of a step of the run with `fixes`; None if the work was not counted."""
        return step_work(trace, self._gpu)

    def _plan(self, fixes: Sequence[ChosenFix]) -> str | None:
        """Return the parallel plan of the run with `fixes`; None: one GPU."""
        return None

    @abc.abstractmethod
    def check(self, fixes: Sequence[ChosenFix]) -> None:
        """Raise UsageError if `fixes` do not apply, as far as this is known without a run."""

    @abc.abstractmethod
    def active_fixes(self) -> frozenset[str]:
        """Return the names of the fixes that the original run already has."""

    @abc.abstractmethod
    def make(self, sets: Iterable[Sequence[ChosenFix]]) -> None:
        """Run the program with each set of fixes, in parallel where possible."""

    def add_runs(self, rows: Iterable[tuple[Sequence[ChosenFix], LadderRun]]) -> None:
        """Add runs that were made in another process."""
        self._known |= {_fix_key(fixes): run for fixes, run in rows}

    def __len__(self) -> int:
        """Return the number of runs requested so far."""
        return len(self._known)

    def with_fixes(self, fixes: Sequence[ChosenFix]) -> LadderRun:
        """Return the run with `fixes`; raise UsageError if a fix does not apply."""
        key = _fix_key(fixes)
        if key in self._known:
            return self._known[key]
        others = [fix for fix in fixes if not fix.fix.alloc_conf]
        if len(others) == len(fixes):
            return self._add(fixes)
        # The requests are the same in the same order: only the allocator's replay differs.
        self.check(fixes)
        before = self.with_fixes(others) if others else self.original
        trace = self._trace_with(before.trace, fixes)
        self._known[key] = LadderRun(trace, analyze(trace, explained=False), before.work)
        return self._known[key]

    def _add(self, fixes: Sequence[ChosenFix]) -> LadderRun:
        trace, document = self._run(fixes)
        run = self._known[_fix_key(fixes)] = LadderRun(trace, document, self._work(trace, fixes))
        return run

    def rung(self, fixes: Sequence[ChosenFix], run: LadderRun, before: LadderRun | None) -> LadderRow:
        """Return the ladder row of `run`; `before` is the run of the row above."""
        document = run.document
        names = tuple(str(fix) for fix in fixes)
        numerics = combined_numerics([fix.fix.name for fix in fixes]).value
        last = fixes[-1].fix if fixes else None
        note = "" if last is None else last.cost
        cost = cost_of(run.work, self.original.work, numerics, note, run.trace.compiling)
        if last is not None and last.compiles:
            cost = dataclasses.replace(cost, note=f"{note}: {cost.compile_note}")
        return LadderRow(
            fixes=names,
            added=names[-1] if names else None,
            peak_allocated_bytes=document.peak.allocated_bytes,
            reserved_bytes=document.peak.reserved_bytes,
            device_used_bytes=run.needed_bytes,
            host_peak_bytes=document.host_peak_bytes,
            saved_bytes=before.needed_bytes - run.needed_bytes if before is not None else 0,
            fits=None if run.is_stopped else document.verdict.fits,
            next_bottleneck=bottleneck_of(document),
            cost=cost,
            parallel=self._plan(fixes),
            command=self.command(fixes, fits=document.verdict.fits),
        )


class SpecRuns(Runs):
    """Runs of one spec; `simulated` is the trace of the original run, if known."""

    def __init__(
        self, spec: TargetSpec, progress: Callable[[str], None] = lambda doing: None, simulated: Trace | None = None
    ) -> None:
        self._spec, self._progress, self._simulated = spec, progress, simulated
        # Runs made in parallel and not yet requested: trace and report without ledger, or the error of the run.
        self._ready: dict[TargetSpec, tuple[Trace, Report] | MemprofError] = {}
        super().__init__(find_gpu_of(spec))

    def in_force(self, fixes: Sequence[ChosenFix]) -> TargetSpec:
        """Return the spec with `fixes`; raise UsageError if a fix does not apply to the spec."""
        if not fixes:  # the original run may not exist yet
            return self._spec
        spec, original = self._spec, self.original
        classes = {module.class_name for module in original.trace.modules}
        target = {**target_to_json(original.document.target), "classes": classes}
        for fix in fixes:
            spec = edit_spec(spec, fix, target)
        return spec

    def command(self, fixes: Sequence[ChosenFix], *, fits: bool | None) -> str:
        """Return the command of the run with `fixes`."""
        return profile_command(self._spec.edit(fixes=(*self._spec.fixes, *map(str, fixes))))

    def check(self, fixes: Sequence[ChosenFix]) -> None:
        """Raise UsageError if `fixes` do not apply to the spec."""
        self.in_force(fixes)

    def make(self, sets: Iterable[Sequence[ChosenFix]]) -> None:
        """Run the spec with each set of fixes, in worker processes."""
        specs: list[TargetSpec] = []
        for fixes in sets:
            made = [fix for fix in fixes if not fix.fix.alloc_conf]
            if made and _fix_key(made) not in self._known:
                with contextlib.suppress(UsageError):
                    specs.append(self.in_force(made))
        left = [spec for spec in dict.fromkeys(specs) if spec not in self._ready]
        if len(left) < 2 or count_parallel_runs(self._spec) < 2:
            return
        from memprof.workload.pool import run_all  # needs torch

        tasks = [functools.partial(profile, spec, explained=False) for spec in left]
        self._ready |= zip(left, run_all(tasks, self._progress), strict=True)

    def active_fixes(self) -> frozenset[str]:
        """Return the names of the fixes that the spec already has."""
        return frozenset(in_force(self._spec))

    def _trace_with(self, trace: Trace, fixes: Sequence[ChosenFix]) -> Trace:
        spec = self.in_force(fixes)
        trace = trace if spec.alloc_conf is None else with_settings(trace, spec.alloc_conf)
        assert trace.facts.target is not None
        target = dataclasses.replace(trace.facts.target, asked=spec)
        return dataclasses.replace(trace, facts=dataclasses.replace(trace.facts, target=target))

    def _plan(self, fixes: Sequence[ChosenFix]) -> str | None:
        return self.in_force(fixes).parallel

    def _work(self, trace: Trace, fixes: Sequence[ChosenFix]) -> StepWork | None:
        # For the same number of sequences as the original: GPUs that share a sequence run them one after another.
        spec = self.in_force(fixes)
        times = _sequence_ranks(spec) // _sequence_ranks(self._spec)
        return step_work(trace, self._gpu, spec.gradient_accumulation * times if times > 1 else 0)

    def _run(self, fixes: Sequence[ChosenFix]) -> tuple[Trace, Report]:
        if not fixes and self._simulated is not None:
            return self._simulated, analyze(self._simulated, explained=False)
        what = "with " + ", ".join(fix.fix.name for fix in fixes) if fixes else "unchanged"
        return self.profile(self.in_force(fixes), what)

    def profile(self, spec: TargetSpec, what: str) -> tuple[Trace, Report]:
        """Return the run of `spec`, described as `what` in progress lines; raise MemprofError if the run fails."""
        made = self._ready.pop(spec, None)
        if isinstance(made, MemprofError):
            raise made
        return made or profile(spec, lambda doing: self._progress(f"{what}: {doing}"), explained=False)


def _sequence_ranks(spec: TargetSpec) -> int:
    return 1 if spec.parallel is None else parse_plan(spec.parallel, spec.gpus).sharing


class RunsWith:
    """Runs of `runs` with the fixes `always` on top; no set is run twice."""

    def __init__(self, runs: Runs, always: Sequence[ChosenFix]) -> None:
        self._runs, self._always = runs, list(always)
        self._requested_keys: set[tuple[str, ...]] = set()
        self.original = self.with_fixes(())

    def __len__(self) -> int:
        """Return the number of runs requested through this view: a search has a budget of runs."""
        return len(self._requested_keys)

    def make(self, sets: Iterable[Sequence[ChosenFix]]) -> None:
        """Run the program with each set of fixes plus `always`, in parallel where possible."""
        self._runs.make([*self._always, *fixes] for fixes in sets)

    def with_fixes(self, fixes: Sequence[ChosenFix]) -> LadderRun:
        """Return the run with `fixes` plus `always`; raise UsageError if a fix does not apply."""
        self._requested_keys.add(_fix_key(fixes))
        all_fixes = [*self._always, *fixes]
        return self._runs.with_fixes(all_fixes) if all_fixes else self._runs.original

    def check(self, fixes: Sequence[ChosenFix]) -> None:
        """Raise UsageError if `fixes` do not apply together with `always`."""
        self._runs.check([*self._always, *fixes])

    def active_fixes(self) -> frozenset[str]:
        """Return the names of the fixes that are on before a search adds any."""
        return self._runs.active_fixes() | {fix.fix.name for fix in self._always}


def apply_fixes(runs: Runs, fixes: Sequence[ChosenFix], *, each: bool = False) -> tuple[Trace, Report]:
    """Return the run with `fixes`; its ladder has two rows, or with `each` a row per fix."""
    steps = [fixes[:count] for count in range(1, len(fixes) + 1)] if each else [fixes]
    return run_with_ladder(runs, steps)


def run_with_ladder(
    runs: Runs, steps: Sequence[Sequence[ChosenFix]], reason: str = "", not_applied: dict[str, str] | None = None
) -> tuple[Trace, Report]:
    """Return the run of the last set of fixes in `steps`; its ladder has the original and a row per set."""
    before = runs.original
    rungs = [runs.rung((), before, None)]
    for fixes in steps:
        run = runs.with_fixes(fixes)
        rungs.append(runs.rung(fixes, run, before))
        before = run
    return before.trace, dataclasses.replace(
        before.explained(), ladder=tuple(rungs), ladder_reason=reason, ladder_left_out=not_applied or {}
    )
