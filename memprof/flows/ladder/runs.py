"""Runs of one program with different fixes in force: each row of a ladder is one, and none an estimate."""

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
from memprof.flows.profile import at_once, profile
from memprof.report.documents.ladder import Rung
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.trace.facts import target_to_json
from memprof.workload.plan import parse_plan


@dataclass(frozen=True, slots=True)
class LadderRun:
    """One run, with some fixes or none."""

    trace: Trace
    document: Report
    work: StepWork | None

    def explained(self) -> Report:
        """Return its report with all findings, of which a search asks for those that lead it."""
        return self.document if self.document.ledger is not None else analyze(self.trace)

    @property
    def needed_bytes(self) -> int:
        """Return what it needs of the GPU, so that nothing is ever refused."""
        return self.document.verdict.required_bytes

    @property
    def fits(self) -> bool:
        """Say whether it came to its end on the GPU, and on its host if that was asked, as a real one would."""
        return bool(self.document.verdict.fits) and not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Say whether tensors of two devices meet: a real run ends there, whatever the GPU has."""
        return any(finding.id == "device-mismatch" for finding in self.document.findings)

    @property
    def seconds(self) -> float:
        """Return the least time of a step on this GPU."""
        return 0.0 if self.work is None else self.work.seconds


def _key(fixes: Sequence[ChosenFix]) -> tuple[str, ...]:
    return tuple(sorted(map(str, fixes)))


class Runs(abc.ABC):
    """Runs of one program with different fixes; each is made once."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._known: dict[tuple[str, ...], LadderRun] = {}
        self.original = self._add(())

    @abc.abstractmethod
    def _run(self, fixes: Sequence[ChosenFix]) -> tuple[Trace, Report]:
        """Run the program with these in force."""

    @abc.abstractmethod
    def command(self, fixes: Sequence[ChosenFix], *, fits: bool | None) -> str:
        """Return the command that makes the run with these, of which it is known whether it `fits`."""

    @abc.abstractmethod
    def _trace_with(self, trace: Trace, fixes: Sequence[ChosenFix]) -> Trace:
        """Return the trace of a run with `fixes`, which differ from its own in the allocator's settings alone."""

    def _work(self, trace: Trace, fixes: Sequence[ChosenFix]) -> StepWork | None:
        """Return what a step of the run takes, with these in force."""
        return step_work(trace, self._gpu)

    def _plan(self, fixes: Sequence[ChosenFix]) -> str | None:
        """Return how the run with these is spread over GPUs."""
        return None

    @abc.abstractmethod
    def check(self, fixes: Sequence[ChosenFix]) -> None:
        """Raise UsageError if it can be told without a run that they do not apply."""

    @abc.abstractmethod
    def active_fixes(self) -> frozenset[str]:
        """Return the names of the fixes that are in force as it is."""

    @abc.abstractmethod
    def make(self, sets: Iterable[Sequence[ChosenFix]]) -> None:
        """Make the runs with each of these, none of which waits for another: at once where that is possible."""

    def know(self, rows: Iterable[tuple[Sequence[ChosenFix], LadderRun]]) -> None:
        """Take runs that were made elsewhere."""
        self._known |= {_key(fixes): run for fixes, run in rows}

    def __len__(self) -> int:
        """Return how many were requested."""
        return len(self._known)

    def with_fixes(self, fixes: Sequence[ChosenFix]) -> LadderRun:
        """Return the run with these in force; raise UsageError if one of them does not apply."""
        key = _key(fixes)
        if key in self._known:
            return self._known[key]
        others = [fix for fix in fixes if not fix.fix.alloc_conf]
        if len(others) == len(fixes):
            return self._add(fixes)
        # The same requests in the same order: only the allocator does otherwise with them.
        self.check(fixes)
        before = self.with_fixes(others) if others else self.original
        trace = self._trace_with(before.trace, fixes)
        self._known[key] = LadderRun(trace, analyze(trace, explained=False), before.work)
        return self._known[key]

    def _add(self, fixes: Sequence[ChosenFix]) -> LadderRun:
        trace, document = self._run(fixes)
        run = self._known[_key(fixes)] = LadderRun(trace, document, self._work(trace, fixes))
        return run

    def rung(self, fixes: Sequence[ChosenFix], run: LadderRun, before: LadderRun | None) -> Rung:
        """Return the row of a run; `before` is the row above."""
        document = run.document
        names = tuple(str(fix) for fix in fixes)
        numerics = combined_numerics([fix.fix.name for fix in fixes]).value
        last = fixes[-1].fix if fixes else None
        note = "" if last is None else last.cost
        cost = cost_of(run.work, self.original.work, numerics, note, run.trace.compiling)
        if last is not None and last.compiles:
            cost = dataclasses.replace(cost, note=f"{note}: {cost.compiling}")
        return Rung(
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
    """Runs of one spec; `simulated` is the original, if it was made already."""

    def __init__(
        self, spec: TargetSpec, progress: Callable[[str], None] = lambda doing: None, simulated: Trace | None = None
    ) -> None:
        self._spec, self._progress, self._simulated = spec, progress, simulated
        # What was made at once and not yet requested: a run without its ledger, or why it cannot be made.
        self._ready: dict[TargetSpec, tuple[Trace, Report] | MemprofError] = {}
        super().__init__(find_gpu_of(spec))

    def in_force(self, fixes: Sequence[ChosenFix]) -> TargetSpec:
        """Return the spec with `fixes`; raise UsageError if one of them does not go with it."""
        if not fixes:  # the original may not have been made yet
            return self._spec
        spec, original = self._spec, self.original
        classes = {module.class_name for module in original.trace.modules}
        target = {**target_to_json(original.document.target), "classes": classes}
        for fix in fixes:
            spec = edit_spec(spec, fix, target)
        return spec

    def command(self, fixes: Sequence[ChosenFix], *, fits: bool | None) -> str:
        """Return the command that makes the run with these."""
        return profile_command(self._spec.edit(fixes=(*self._spec.fixes, *map(str, fixes))))

    def check(self, fixes: Sequence[ChosenFix]) -> None:
        """Raise UsageError if they do not go with the spec."""
        self.in_force(fixes)

    def make(self, sets: Iterable[Sequence[ChosenFix]]) -> None:
        """Make the runs with each of these, in workers."""
        specs: list[TargetSpec] = []
        for fixes in sets:
            made = [fix for fix in fixes if not fix.fix.alloc_conf]
            if made and _key(made) not in self._known:
                with contextlib.suppress(UsageError):
                    specs.append(self.in_force(made))
        left = [spec for spec in dict.fromkeys(specs) if spec not in self._ready]
        if len(left) < 2 or at_once(self._spec) < 2:
            return
        from memprof.workload.pool import run_all  # needs torch

        works = [functools.partial(profile, spec, explained=False) for spec in left]
        self._ready |= zip(left, run_all(works, self._progress), strict=True)

    def active_fixes(self) -> frozenset[str]:
        """Return what the spec has already."""
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
        # Of as many sequences as the original has: GPUs that share them take one after another.
        spec = self.in_force(fixes)
        times = _sharing(spec) // _sharing(self._spec)
        return step_work(trace, self._gpu, spec.gradient_accumulation * times if times > 1 else 0)

    def _run(self, fixes: Sequence[ChosenFix]) -> tuple[Trace, Report]:
        if not fixes and self._simulated is not None:
            return self._simulated, analyze(self._simulated, explained=False)
        what = "with " + ", ".join(fix.fix.name for fix in fixes) if fixes else "unchanged"
        return self.profile(self.in_force(fixes), what)

    def profile(self, spec: TargetSpec, what: str) -> tuple[Trace, Report]:
        """Run a spec, `what` in a few words, if that was not made already; raise MemprofError if it cannot be run."""
        made = self._ready.pop(spec, None)
        if isinstance(made, MemprofError):
            raise made
        return made or profile(spec, lambda doing: self._progress(f"{what}: {doing}"), explained=False)


def _sharing(spec: TargetSpec) -> int:
    return 1 if spec.parallel is None else parse_plan(spec.parallel, spec.gpus).sharing


class RunsWith:
    """Runs of `runs` with some fixes always on; nothing is run twice."""

    def __init__(self, runs: Runs, always: Sequence[ChosenFix]) -> None:
        self._runs, self._always = runs, list(always)
        self._asked: set[tuple[str, ...]] = set()
        self.original = self.with_fixes(())

    def __len__(self) -> int:
        """Return how many were requested with these on: a search may make so many."""
        return len(self._asked)

    def make(self, sets: Iterable[Sequence[ChosenFix]]) -> None:
        """Make the runs with each of these and those that are always on."""
        self._runs.make([*self._always, *fixes] for fixes in sets)

    def with_fixes(self, fixes: Sequence[ChosenFix]) -> LadderRun:
        """Return the run with these in force; raise UsageError if one of them does not apply."""
        self._asked.add(_key(fixes))
        together = [*self._always, *fixes]
        return self._runs.with_fixes(together) if together else self._runs.original

    def check(self, fixes: Sequence[ChosenFix]) -> None:
        """Raise UsageError if they do not go together."""
        self._runs.check([*self._always, *fixes])

    def active_fixes(self) -> frozenset[str]:
        """Return what is in force before any is added."""
        return self._runs.active_fixes() | {fix.fix.name for fix in self._always}


def apply_fixes(runs: Runs, fixes: Sequence[ChosenFix], *, each: bool = False) -> tuple[Trace, Report]:
    """Return the run with `fixes`; its report has a ladder of two rows, or of one for each fix."""
    steps = [fixes[:count] for count in range(1, len(fixes) + 1)] if each else [fixes]
    return with_ladder(runs, steps)


def with_ladder(
    runs: Runs, steps: Sequence[Sequence[ChosenFix]], reason: str = "", not_applied: dict[str, str] | None = None
) -> tuple[Trace, Report]:
    """Return the last step's run; the rows before it are in its ladder."""
    before = runs.original
    rungs = [runs.rung((), before, None)]
    for fixes in steps:
        run = runs.with_fixes(fixes)
        rungs.append(runs.rung(fixes, run, before))
        before = run
    return before.trace, dataclasses.replace(
        before.explained(), ladder=tuple(rungs), ladder_reason=reason, ladder_left_out=not_applied or {}
    )
