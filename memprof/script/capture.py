"""Capture of a script: the user's own program, unmodified, on a virtual GPU or measured on a real device."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from torch import nn
from torch.optim import Optimizer

from memprof.device.catalog import Gpu
from memprof.measured import MeasuredDevice
from memprof.patching import PatchSet
from memprof.script import EndReason, Program, ScriptOutcome, StopRule
from memprof.script.exits import ExitHandlers
from memprof.script.launchers import ProcessSelection, ProcessStart
from memprof.script.loops import Position, planned_steps, position
from memprof.script.stop import RunProgress, StopRun, stopping_from_threads
from memprof.script.threads import ThreadWatch
from memprof.script.worst_batch import WorstBatch
from memprof.stubs.extension import extensions
from memprof.trace.events import NOT_SIMULATED, EventKind, Failure, FailureKind, Trace, is_gpu
from memprof.virtual import VirtualGpu
from memprof.virtual.peers.channel import Channel
from memprof.watch.failure import is_caused_by_oom, make_refusal, measured_failure
from memprof.watch.program_code import is_program


class _StopRecord:
    """The record at the moment the script was stopped: what its clean-up does then is not part of the run."""

    def __init__(self, device: VirtualGpu | MeasuredDevice, rule: StopRule, channel: Channel | None) -> None:
        self._device = device
        self._rule = rule
        self._channel = channel
        self._held: list[int] = []  # bytes on the GPU at the end of each training step
        self._due: float | None = None  # when the steps that were requested had ended
        self._events: int | None = None
        self._storages = 0
        self._refused: Failure | None = None
        self._positions: list[Position] = []  # in the program's loops, at ever fewer of its steps
        # Training steps that the program makes in all, where it was stopped before.
        self.planned_steps: int | None = None

    @property
    def stopped(self) -> bool:
        """Return whether it was, after its steps."""
        return self._events is not None

    def step(self, optimizer: object) -> None:
        """See an optimizer make a step."""
        completed = self._device.phases.completed
        self._held += [self._device.held_bytes] * (completed - len(self._held))
        if self._rule.steps is None:
            return
        if not self._positions or completed >= 2 * self._positions[-1].step:
            self._positions.append(position(completed, sys._getframe(1)))
        if completed < self._rule.steps:
            return
        now = time.monotonic()
        self._due = now if self._due is None else self._due
        progress = RunProgress(completed, self._held, self._device.num_events, now - self._due)
        try:
            with self.noted():
                self._rule.after_step(progress, bool if self._channel is None else self._channel.agrees)
        except StopRun:
            self.planned_steps = planned_steps(self._positions, position(completed, sys._getframe(1)))
            raise

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note that the run ends where the script is stopped inside."""
        try:
            yield
        except StopRun as stop:
            if self._events is None and stop.why is EndReason.STEPS:
                self._events = len(self._device.trace.events)
                self._storages = len(self._device.trace.storages)
                self._refused = self._device.refused if isinstance(self._device, VirtualGpu) else None
            raise

    def noting(self, stop: Callable[[str], NoReturn]) -> Callable[[str], NoReturn]:
        """Return `stop`, which then notes that the run ends."""

        def noted_stop(why: str) -> NoReturn:
            with self.noted():
                stop(why)
            raise AssertionError

        return noted_stop

    def cut(self, trace: Trace) -> None:
        """Take away what came after."""
        events, storages = self._events, self._storages
        if events is None or trace.source != "simulated":
            return
        trace.failure = self._refused
        del trace.events[events:], trace.storages[storages:]
        trace.owners = {index: owner for index, owner in trace.owners.items() if index < storages}
        trace.refused = [index for index in trace.refused if index < storages]
        trace.mismatches = [found for found in trace.mismatches if found.event <= events]
        trace.forwards = [forward for forward in trace.forwards if forward.end <= events]
        trace.holders = [holder for holder in trace.holders if max(holder.storages, default=0) < storages]


def capture_script(
    program: Program,
    device: VirtualGpu | MeasuredDevice,
    rule: StopRule,
    before_forward: Callable[[nn.Module, Iterable[Optimizer]], None] = lambda model, optimizers: None,
    *,
    worst_batch: bool = False,
    start: ProcessStart | None = None,
    channel: Channel | None = None,
) -> tuple[Trace, ScriptOutcome]:
    """Run `program` on `device` until `rule` stops it, it ends, or it raises.

    Args:
        device: what it finds as "cuda", or is measured on.
        before_forward: told each model that is called from outside all others, before it runs, and the optimizers.
        worst_batch: feed the largest batch of each data loader first, and to whole steps until the second has ended.
        start: the process of the program that is run, if it was requested before.
        channel: to the other ranks that run together with this one; it stops the script where they have ended.
    """
    if isinstance(device, VirtualGpu):
        device.instead_of_another = "memprof run has made it: run this script with plain python instead"
    seen = _StopRecord(device, rule, channel)
    if channel is not None:
        channel.stop = seen.noting(channel.stop)
    device.phases.on_step = seen.step
    device.phases.before_forward = lambda model: before_forward(model, device.phases.optimizers)
    # What memprof has imported lives for good: the program's own garbage is found as fast as without it.
    is_frozen = gc.get_freeze_count() > 0  # by whoever called this: it stays so
    gc.collect()
    if not is_frozen:
        gc.freeze()
    error: BaseException | None = None
    try:
        device.__enter__()
        patches = PatchSet()
        handlers = ExitHandlers(is_program)
        try:
            patches.set_all(handlers.patches())
            if worst_batch:
                patches.set_all(WorstBatch(device.assume, device.phases).patches())
            device.phases.building()
            outcome = _run(program, device, rule, handlers, start)
            told = None if channel is None else channel.told
            if seen.stopped or told is not None:  # whatever a program does that goes on after that
                why = EndReason.STEPS if seen.stopped or told is None else EndReason(told)
                outcome = ScriptOutcome(why, 0, kept=(outcome.kept, outcome.error), planned_steps=seen.planned_steps)
            error = outcome.error
        finally:
            patches.undo()
            device.__exit__(type(error), error, None if error is None else error.__traceback__)
    finally:
        if not is_frozen:
            gc.unfreeze()
    if error is None and isinstance(device, MeasuredDevice) and device.error is not None:
        outcome = ScriptOutcome(EndReason.ERROR, 1, device.error, kept=outcome.kept)
        error = device.error
    trace = device.trace
    if outcome.ended is EndReason.ERROR and trace.failure is not None and trace.failure.kind in NOT_SIMULATED:
        outcome = dataclasses.replace(outcome, ended=EndReason.NOT_SIMULATED)
    full = is_caused_by_oom(error)
    if isinstance(device, MeasuredDevice) and isinstance(error, (Exception, KeyboardInterrupt)):
        trace.failure = measured_failure(error, device.phase_of(error))
        full = trace.failure.kind is FailureKind.OUT_OF_MEMORY
    seen.cut(trace)
    if outcome.ended is EndReason.PEER:  # what that was is known once all have ended
        trace.failure = make_refusal("", None, None, trace.phases[-1])._replace(kind=FailureKind.OTHER_RANK)
    elif outcome.ended is EndReason.INTERRUPTED and trace.failure is None:  # while it waited for another rank
        trace.failure = make_refusal("", None, None, trace.phases[-1])._replace(
            kind=FailureKind.INTERRUPTED, error=KeyboardInterrupt.__name__
        )
    if outcome.ended is EndReason.EXIT and _was_last_refused(trace):
        # Its own handler caught that, and it gave up.
        trace.refused.pop()
        trace.ended_out_of_memory = full = True
    if full:
        outcome = ScriptOutcome(EndReason.REFUSED, outcome.exit_code, error, kept=outcome.kept)
    return trace, outcome


def resolve_process(program: Program, place: ProcessSelection, gpu: Gpu) -> ProcessStart | ScriptOutcome:
    """Return the process of `program` that is run, as its launcher says; UsageError: none such, or too few GPUs."""
    if not program.has_launcher:
        return program.start(place)
    with VirtualGpu(gpu, gpus=place.gpus or 1, extensions=extensions()):
        return program.start(place)


def _run(
    program: Program,
    device: VirtualGpu | MeasuredDevice,
    rule: StopRule,
    handlers: ExitHandlers,
    start: ProcessStart | None,
) -> ScriptOutcome:
    """Run `program` until it ends, or until a thread of its own ends of what memprof raised."""
    if isinstance(device, MeasuredDevice):
        return program.run(rule, handlers, start)
    with stopping_from_threads() as stop:
        watch = ThreadWatch(stop)
        with PatchSet() as patches:
            patches.set_all(watch.patches())
            outcome = program.run(rule, handlers, start)
    if watch.error is None:
        return outcome
    return ScriptOutcome(EndReason.ERROR, 1, watch.error, kept=(outcome.kept, outcome.error))


def _was_last_refused(trace: Trace) -> bool:
    """Return whether the last that was asked of the GPU was refused."""
    for kind, ref in reversed(trace.events):
        if kind is EventKind.ALLOC and is_gpu(trace.storages[ref].device):
            return bool(trace.refused) and trace.refused[-1] == ref
    return False
