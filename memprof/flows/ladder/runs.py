"""Runs of one program with different remedies in force, each made once: every row of a ladder is a run of the whole
pipeline, and nothing is added up from estimates.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from memprof.catalog import Gpu
from memprof.command_line import profile_command
from memprof.errors import MemprofError, UsageError
from memprof.flows.account import analyze, with_settings
from memprof.flows.cards import virtual_card
from memprof.flows.cost import StepWork, bottleneck_of, cost_of, step_work
from memprof.flows.profile import profile
from memprof.flows.several import at_once
from memprof.remedies.catalog import in_force
from memprof.remedies.fixes import Fix, edit_spec, worst_numerics
from memprof.report.documents.ladder import Rung
from memprof.report.documents.report import Document
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.trace.facts import target_to_json
from memprof.workload.plan import parse_plan


@dataclass(frozen=True, slots=True)
class LadderRun:
    """One run, with some remedies or none."""

    trace: Trace
    document: Document
    work: StepWork | None

    def explained(self) -> Document:
        """Its report with all findings, of which a search asks for those that lead it."""
        return self.document if self.document.ledger is not None else analyze(self.trace)

    @property
    def needed_bytes(self) -> int:
        """Of the card, so that nothing is ever refused."""
        return self.document.verdict.required_bytes

    @property
    def fits(self) -> bool:
        """It came to its end on the card, and on its host if that was asked, as a real one would."""
        return bool(self.document.verdict.fits) and not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Whatever the card has, a real run ends where tensors of two devices meet."""
        return any(finding.id == "device-mismatch" for finding in self.document.findings)

    @property
    def seconds(self) -> float:
        """The least time of a step on this card."""
        return 0.0 if self.work is None else self.work.seconds


class Runs(abc.ABC):
    """Runs of one program with different remedies; each is made once."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._known: dict[tuple[str, ...], LadderRun] = {}
        self.original = self._made(())

    @abc.abstractmethod
    def _run(self, fixes: Sequence[Fix]) -> tuple[Trace, Document]:
        """Run it with these in force."""

    @abc.abstractmethod
    def command(self, fixes: Sequence[Fix], *, fits: bool | None) -> str:
        """Return the command that makes the run with these, of which it is known whether it `fits`."""

    @abc.abstractmethod
    def _alloc_conf(self, fixes: Sequence[Fix]) -> str | None:
        """The allocator's settings with these in force."""

    def _retold(self, trace: Trace, fixes: Sequence[Fix]) -> Trace:
        """A run's trace as one with `fixes` would be, which differ from the run's in the allocator's settings alone."""
        settings = self._alloc_conf(fixes)
        return trace if settings is None else with_settings(trace, settings)

    def _work(self, trace: Trace, fixes: Sequence[Fix]) -> StepWork | None:
        """What a step of the run takes, with these in force."""
        return step_work(trace, self._gpu)

    def _plan(self, fixes: Sequence[Fix]) -> str | None:
        """How the run with these is spread over cards."""
        return None

    @abc.abstractmethod
    def check(self, fixes: Sequence[Fix]) -> None:
        """Raises UsageError if it can be told without a run that they do not apply."""

    @abc.abstractmethod
    def on_now(self) -> frozenset[str]:
        """Remedies that are in force as it is."""

    @abc.abstractmethod
    def make(self, sets: Iterable[Sequence[Fix]]) -> None:
        """Make the runs with each of these, none of which waits for another: at once where that is possible."""

    def know(self, rows: Iterable[tuple[Sequence[Fix], LadderRun]]) -> None:
        """These were made elsewhere."""
        self._known |= {tuple(sorted(map(str, fixes))): run for fixes, run in rows}

    def __len__(self) -> int:
        """How many were asked for."""
        return len(self._known)

    def with_fixes(self, fixes: Sequence[Fix]) -> LadderRun:
        """The run with these in force.

        Raises:
            UsageError: one of them does not apply.
        """
        key = tuple(sorted(map(str, fixes)))
        if key in self._known:
            return self._known[key]
        others = [fix for fix in fixes if not fix.remedy.alloc_conf]
        if len(others) == len(fixes):
            return self._made(fixes)
        # The same requests in the same order: only the allocator does otherwise with them.
        self.check(fixes)
        before = self.with_fixes(others) if others else self.original
        trace = self._retold(before.trace, fixes)
        self._known[key] = LadderRun(trace, analyze(trace, explained=False), before.work)
        return self._known[key]

    def _made(self, fixes: Sequence[Fix]) -> LadderRun:
        trace, document = self._run(fixes)
        run = self._known[tuple(sorted(map(str, fixes)))] = LadderRun(trace, document, self._work(trace, fixes))
        return run

    def rung(self, fixes: Sequence[Fix], run: LadderRun, before: LadderRun | None) -> Rung:
        """The row of a run; `before` is the row above."""
        document = run.document
        names = tuple(str(fix) for fix in fixes)
        numerics = worst_numerics([fix.remedy.name for fix in fixes]).value
        last = fixes[-1].remedy if fixes else None
        note = "" if last is None else last.cost
        cost = cost_of(run.work, self.original.work, numerics, note, run.trace.compiling)
        if last is not None and last.compiles:
            cost = dataclasses.replace(cost, note=f"{note}: {cost.compiling}")
        return Rung(
            remedies=names,
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
    """Runs of one spec.

    Args:
        simulated: the run as it is, if it was made already.
    """

    def __init__(
        self,
        spec: TargetSpec,
        progress: Callable[[str], None] = lambda doing: None,
        simulated: Trace | None = None,
    ) -> None:
        self._progress = progress
        self._spec = spec
        self._simulated = simulated
        self._ready: dict[TargetSpec, tuple[Trace, Document] | MemprofError] = {}
        """What was made at once and not yet asked for: a run without its ledger, or why it cannot be made."""
        super().__init__(virtual_card(spec))

    def in_force(self, fixes: Sequence[Fix]) -> TargetSpec:
        """The spec with `fixes`.

        Raises:
            UsageError: one of them does not go with it.
        """
        spec, original = self._spec, self.original
        classes = {module.class_name for module in original.trace.modules}
        target = {**target_to_json(original.document.target), "classes": classes}
        for fix in fixes:
            spec = edit_spec(spec, fix, target)
        return spec

    def command(self, fixes: Sequence[Fix], *, fits: bool | None) -> str:
        """Return the command that makes the run with these."""
        return profile_command(self._spec.edit(fixes=(*self._spec.fixes, *map(str, fixes))))

    def check(self, fixes: Sequence[Fix]) -> None:
        """Raises UsageError if they do not go with the spec."""
        self.in_force(fixes)

    def make(self, sets: Iterable[Sequence[Fix]]) -> None:
        """Make the runs with each of these, in workers."""
        specs: list[TargetSpec] = []
        for fixes in sets:
            made = [fix for fix in fixes if not fix.remedy.alloc_conf]
            if made and tuple(sorted(map(str, made))) not in self._known:
                with contextlib.suppress(UsageError):
                    specs.append(self.in_force(made))
        left = [spec for spec in dict.fromkeys(specs) if spec not in self._ready]
        if len(left) < 2 or at_once(self._spec) < 2:
            return
        from memprof.workload.pool import run_all  # needs torch

        works = [functools.partial(profile, spec, explained=False) for spec in left]
        self._ready |= zip(left, run_all(works, self._progress), strict=True)

    def report(self, spec: TargetSpec, what: str) -> Document:
        """The report on a run of another spec, `what` in a few words.

        Raises:
            MemprofError: it cannot be run.
        """
        return self._profiled(spec, what)[1]

    def on_now(self) -> frozenset[str]:
        """What the spec has already."""
        return frozenset(in_force(self._spec))

    def _alloc_conf(self, fixes: Sequence[Fix]) -> str | None:
        return self.in_force(fixes).alloc_conf

    def _retold(self, trace: Trace, fixes: Sequence[Fix]) -> Trace:
        trace = super()._retold(trace, fixes)
        assert trace.facts.target is not None
        target = dataclasses.replace(trace.facts.target, asked=self.in_force(fixes))
        return dataclasses.replace(trace, facts=dataclasses.replace(trace.facts, target=target))

    def _plan(self, fixes: Sequence[Fix]) -> str | None:
        return (self.in_force(fixes) if fixes else self._spec).parallel

    def _work(self, trace: Trace, fixes: Sequence[Fix]) -> StepWork | None:
        """Of as many sequences as the run has as it is: cards that share them take one after another."""
        spec = self.in_force(fixes) if fixes else self._spec
        times = _sharing(spec) // _sharing(self._spec)
        return step_work(trace, self._gpu, spec.gradient_accumulation * times if times > 1 else 0)

    def _run(self, fixes: Sequence[Fix]) -> tuple[Trace, Document]:
        if not fixes and self._simulated is not None:
            return self._simulated, analyze(self._simulated, explained=False)
        what = "with " + ", ".join(fix.remedy.name for fix in fixes) if fixes else "as it is"
        return self._profiled(self.in_force(fixes) if fixes else self._spec, what)

    def _profiled(self, spec: TargetSpec, what: str) -> tuple[Trace, Document]:
        made = self._ready.pop(spec, None)
        if isinstance(made, MemprofError):
            raise made
        return made or profile(spec, lambda doing: self._progress(f"{what}: {doing}"), explained=False)


def _sharing(spec: TargetSpec) -> int:
    return 1 if spec.parallel is None else parse_plan(spec.parallel, spec.gpus).sharing


class RunsWith(Runs):
    """Runs of `runs` with some remedies always on; nothing is run twice."""

    def __init__(self, runs: Runs, always: Sequence[Fix]) -> None:
        self._runs, self._always = runs, list(always)
        self._asked: set[tuple[str, ...]] = set()
        """How many runs a search may make is of those with these on."""
        super().__init__(runs._gpu)

    def __len__(self) -> int:
        return len(self._asked)

    def make(self, sets: Iterable[Sequence[Fix]]) -> None:
        """Make the runs with each of these and those that are always on."""
        self._runs.make([*self._always, *fixes] for fixes in sets)

    def with_fixes(self, fixes: Sequence[Fix]) -> LadderRun:
        """The run with these in force, and those that always are."""
        self._asked.add(tuple(sorted(map(str, fixes))))
        together = [*self._always, *fixes]
        return self._runs.with_fixes(together) if together else self._runs.original

    def _made(self, fixes: Sequence[Fix]) -> LadderRun:
        return self.with_fixes(fixes)

    def check(self, fixes: Sequence[Fix]) -> None:
        """Raises UsageError if they do not go together."""
        self._runs.check([*self._always, *fixes])

    def on_now(self) -> frozenset[str]:
        """What is in force before any is added."""
        return self._runs.on_now() | {fix.remedy.name for fix in self._always}

    def _run(self, fixes: Sequence[Fix]) -> tuple[Trace, Document]:
        run = self.with_fixes(fixes)
        return run.trace, run.document

    def command(self, fixes: Sequence[Fix], *, fits: bool | None) -> str:
        """Return the command that makes the run with these, and those that are always on."""
        return self._runs.command([*self._always, *fixes], fits=fits)

    def _alloc_conf(self, fixes: Sequence[Fix]) -> str | None:
        return self._runs._alloc_conf([*self._always, *fixes])


def apply_fixes(runs: Runs, fixes: Sequence[Fix], *, each: bool = False) -> tuple[Trace, Document]:
    """The run with `fixes` in force; its report has a ladder of two rows, or of one for each fix.

    Raises:
        UsageError: a fix does not apply.
        RunFailedError: as `profile`.
    """
    steps = [fixes[:count] for count in range(1, len(fixes) + 1)] if each else [fixes]
    return with_ladder(runs, steps)


def with_ladder(
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
        before.explained(), ladder=tuple(rungs), ladder_reason=reason, ladder_left_out=not_applied or {}
    )
