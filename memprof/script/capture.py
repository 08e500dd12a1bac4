"""Capture of the user's unmodified script: on a virtual GPU, or measured on a real device."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from memprof.measured import MeasuredDevice
from memprof.patching import PatchSet
from memprof.script import EndReason, Program, ScriptOutcome, StopRule
from memprof.script.exits import ExitHandlers
from memprof.script.first_rounds import FirstRounds
from memprof.script.launchers import ProcessStart
from memprof.script.loops import (
    Position,
    count_loops_that_repeat,
    count_rounds_left,
    estimate_total_steps,
    find_position,
    is_last_round,
)
from memprof.script.own_code import (
    find_evaluation_step,
    has_evaluation,
    has_later_evaluation,
    has_training,
    has_unfreezing,
    may_train,
)
from memprof.script.stop import RunProgress, StopRun, allow_stop_from_threads
from memprof.script.threads import ThreadWatch
from memprof.script.worst_batch import WorstBatch
from memprof.serving.budget import EngineBudget
from memprof.trace.events import NOT_SIMULATED, Failure, FailureKind, Role, Trace
from memprof.virtual import VirtualGpu
from memprof.virtual.peers.channel import Channel
from memprof.watch.failure import (
    describe_measured_failure,
    has_last_allocation_failed,
    is_caused_by_oom,
    make_refused_failure,
)
from memprof.watch.program_code import is_program


@dataclasses.dataclass(slots=True)
class _Clock:
    """A point in time, from which seconds are counted."""

    _begin: tuple[float, float] = dataclasses.field(default_factory=lambda: (time.monotonic(), time.process_time()))

    def count_seconds(self) -> float:
        """Return the seconds of a processor since then, or a quarter of those on the clock if these are more: a busy
        machine is not to change the answer, and a program that waits for data is waited for as well."""
        return max(time.process_time() - self._begin[1], (time.monotonic() - self._begin[0]) / 4)


@dataclasses.dataclass(slots=True)
class _Calls:
    """Calls of models behind a training step: the events before them, when they begin, and bytes held at each."""

    events: int | None = None
    begin: _Clock = dataclasses.field(default_factory=_Clock)
    held_bytes: list[int] = dataclasses.field(default_factory=list)


class _StopRecord:
    """Record of the point in the trace at which the script was stopped; the script's clean-up comes after it."""

    def __init__(self, device: VirtualGpu | MeasuredDevice, rule: StopRule, channel: Channel | None) -> None:
        self._device = device
        self._rule = rule
        self._channel = channel
        self._live_bytes: list[int] = []  # bytes on the GPU at the end of each training step
        self._requested_end: _Clock | None = None  # as the requested steps ended
        self._events: int | None = None
        self._reason = EndReason.STEPS
        self._storages = 0
        self.engine: EngineBudget | None = None  # of the inference engine that the program has started last
        self._failure: Failure | None = None
        self._rounds = FirstRounds()
        # Total training steps of the program, where it was stopped before its end.
        self.planned_steps: int | None = None
        self._has_evaluation: bool | None = None  # whether its code evaluates; None: not looked for yet
        self.evaluation_step: int | None = None  # after which the evaluation comes that the program was stopped before
        self.misses_evaluation = False  # whether the program was stopped before it came to that
        self.misses_unfreezing = False  # whether its training loop unfreezes parameters that are frozen still
        self.misses_model = False  # whether a loop around its steps builds another model later
        self._built: tuple[int, set[tuple[str, int]]] | None = None  # what `_list_built` returned at first
        self.idle_optimizers = 0  # that had made no step then
        self.misses_calls = False  # whether it was stopped among the calls of models behind its last step
        self._calls = _Calls()

    @property
    def is_stopped(self) -> bool:
        """Return whether the script was stopped after its steps."""
        return self._events is not None

    def step(self, optimizer: object) -> None:
        """Record a step of `optimizer`; raise StopRun if the rule stops the script now."""
        completed = self._device.phases.num_completed_steps
        self._live_bytes += [self._device.held_bytes] * (completed - len(self._live_bytes))
        if self._rule.steps is None:
            return
        self._rounds.record_step(completed, sys._getframe(1))
        if completed < self._rule.steps:
            return
        self._requested_end = self._requested_end or _Clock()
        self._calls = _Calls(self._device.num_events)
        frame = sys._getframe(1)
        progress = RunProgress(
            completed,
            self._live_bytes,
            self._device.num_events,
            self._requested_end.count_seconds(),
            self._device.room_bytes,
            bool(self._device.phases.list_optimizers_without_step()),
            lambda: self._nears_end(completed, frame),
            lambda: self._count_events_to_next_model(completed, frame),
            lambda: self._count_events_to_new_code(completed),
        )
        try:
            with self.record_stop():
                self._rule.check_step(progress, bool if self._channel is None else self._channel.are_all_ranks_done)
        except StopRun:
            self._describe_stop(completed, frame)
            raise

    def call_model(self, model: nn.Module) -> None:
        """Record an outermost call of `model` that is not trained by it; raise StopRun if the rule stops the script."""
        num_events = self._device.num_events
        if self._requested_end is None or self._channel is not None or num_events is None:
            return
        is_trained = torch.is_grad_enabled() and model.training
        if is_trained or threading.current_thread() is not threading.main_thread():
            return
        calls = self._calls
        calls.held_bytes.append(self._device.held_bytes)
        seconds = calls.begin.count_seconds()
        progress = RunProgress(len(calls.held_bytes), calls.held_bytes, num_events - (calls.events or 0), seconds)
        try:
            with self.record_stop():
                self._rule.check_call(progress)
        except StopRun:
            self._describe_stop(self._device.phases.num_completed_steps, sys._getframe(1))
            self.misses_calls = True
            raise

    def _describe_stop(self, completed: int, frame: FrameType) -> None:
        """Record what the program, stopped after `completed` steps, has not come to."""
        self.planned_steps = estimate_total_steps(self._rounds.positions, find_position(completed, frame))
        self.misses_evaluation = self._awaits_evaluation(frame) or has_later_evaluation(frame)
        if self.misses_evaluation:
            self.evaluation_step = find_evaluation_step(frame, completed)
        self.idle_optimizers = len(self._device.phases.list_optimizers_without_step())
        self.misses_unfreezing = _has_frozen_parameters(self._device.trace) and has_unfreezing(frame)
        self.misses_model = self._find_steps_of_round(completed, frame) is not None

    def _count_events_to_next_model(self, completed: int, frame: FrameType) -> int | None:
        """Return the events of the steps to come before a loop around them builds the next model; None if none does, or
        their number is unknown."""
        inner = self._find_steps_of_round(completed, frame)
        if inner is None or self._device.num_events is None:
            return None
        steps = estimate_total_steps(*inner) if inner[1].loops else completed
        return None if steps is None else (steps + 1 - completed) * self._device.num_events // completed

    def _find_steps_of_round(self, completed: int, frame: FrameType) -> tuple[list[Position], Position] | None:
        """Return the positions in the loops of one model's steps, earlier ones and that of `frame`, if a loop around
        these builds a model in each round, and has not built a second one; None if not."""
        if self._built is None:
            self._built = _list_built(self._device.trace)
        num_built, lines = self._built
        count, position = count_loops_that_repeat(frame, lines), find_position(completed, frame)
        if not count or is_last_round(position.loops[count - 1]) or _list_built(self._device.trace)[0] > num_built:
            return None
        earlier = [dataclasses.replace(one, loops=one.loops[count:]) for one in self._rounds.positions]
        return earlier, dataclasses.replace(position, loops=position.loops[count:])

    def _nears_end(self, completed: int, frame: FrameType) -> bool:
        """Return whether an evaluation that is awaited, or the program's end, comes after at most `completed` steps."""
        position = find_position(completed, frame)
        planned_steps = estimate_total_steps(self._rounds.positions, position)
        is_half_done = planned_steps is not None and planned_steps <= 2 * completed
        rounds = count_rounds_left(position)
        return is_half_done or (rounds is not None and rounds[0] >= rounds[1] and self._awaits_evaluation(frame))

    def _count_events_to_new_code(self, completed: int) -> int | None:
        """Return the events of the steps to come before the program's loops do the next thing for the first time."""
        steps = self._rounds.count_steps_to_come(completed)
        if steps is None or self._device.num_events is None:
            return None
        return steps * self._device.num_events // completed

    def _awaits_evaluation(self, frame: FrameType) -> bool:
        """Return whether the program, which runs `frame`, has code that evaluates, and has called no model to do so."""
        if self._has_evaluation is None:
            self._has_evaluation = has_evaluation(frame)
        return self._has_evaluation and not self._device.phases.has_evaluated

    @property
    def reason(self) -> EndReason:
        """Return why the script was stopped."""
        return self._reason

    def record_engine(self, budget: EngineBudget) -> None:
        """Record the start of an inference engine; raise StopRun if it is ready and the rule stops the script then,
        unless the script trains beside it, or will (TRL's trainers make their engine first)."""
        self.engine = budget
        if not budget.starts or not self._rule.stops_at_ready:
            return
        if not self._device.phases.optimizers and not has_training(sys._getframe(1)):
            with self.record_stop():
                raise StopRun(EndReason.READY)

    @contextlib.contextmanager
    def record_stop(self) -> Iterator[None]:
        """Context manager: record the current end of the trace if the body raises StopRun."""
        try:
            yield
        except StopRun as stop:
            if self._events is None and stop.reason in (EndReason.STEPS, EndReason.READY):
                self._reason = stop.reason
                self._events = len(self._device.trace.events)
                self._storages = len(self._device.trace.storages)
                self._failure = self._device.unsupported if isinstance(self._device, VirtualGpu) else None
            raise

    def wrap_stop(self, stop: Callable[[str], NoReturn]) -> Callable[[str], NoReturn]:
        """Return a function that calls `stop` and records the current end of the trace."""

        def stop_and_note(reason: str) -> NoReturn:
            with self.record_stop():
                stop(reason)
            raise AssertionError

        return stop_and_note

    def truncate(self, trace: Trace) -> None:
        """Remove from `trace` all events and storages after the stop; a measured trace is left unchanged."""
        num_events, num_storages = self._events, self._storages
        if num_events is None or trace.source != "simulated":
            return
        trace.failure = self._failure
        del trace.events[num_events:], trace.storages[num_storages:], trace.last_uses[num_storages:]
        trace.last_uses = [min(used, num_events) for used in trace.last_uses]
        trace.owners = {index: owner for index, owner in trace.owners.items() if index < num_storages}
        trace.refused = [index for index in trace.refused if index < num_storages]
        trace.untrained_gradients = [index for index in trace.untrained_gradients if index < num_storages]
        trace.discarded_gradients = [index for index in trace.discarded_gradients if index < num_storages]
        trace.first_steps, trace.moved_model = [], None
        trace.untrained_spans = [span for span in trace.untrained_spans if span.end <= num_events]
        trace.mismatches = [mismatch for mismatch in trace.mismatches if mismatch.event <= num_events]
        trace.forwards = [forward for forward in trace.forwards if forward.end <= num_events]
        trace.failed_forward = None  # the program went on
        trace.eval_calls = [call for call in trace.eval_calls if call.event <= num_events]
        trace.column_broadcasts = [index for index in trace.column_broadcasts if index < num_storages]
        trace.repeats = [index for index in trace.repeats if index < num_storages]
        trace.frozen_in_vain = [one for one in trace.frozen_in_vain if max(one.parameters, default=0) < num_storages]
        trace.vmaps = [call for call in trace.vmaps if call.end <= num_events]
        trace.graph_backwards = [call for call in trace.graph_backwards if call.end <= num_events]
        trace.holders, trace.idle_holders, trace.error_holders = (
            [holder for holder in holders if max(holder.storages, default=0) < num_storages]
            for holders in (trace.holders, trace.idle_holders, trace.error_holders)
        )


def _list_built(trace: Trace) -> tuple[int, set[tuple[str, int]]]:
    """Return the number of parameters' storages, and (file, number) of the program's lines that have made them."""
    built = [index for index, owner in trace.owners.items() if owner.role is Role.PARAMETER]
    sources = {trace.storages[index].source for index in built}
    sources |= {caller.source for index in built for caller in trace.list_callers(index)}
    lines = (trace.source_at(source) for source in sources)
    places = (line.rpartition(" ")[0].rpartition(":") for line in lines if line is not None)
    return len(built), {(file, int(number)) for file, _, number in places if number.isdecimal()}


def _has_frozen_parameters(trace: Trace) -> bool:
    """Return whether there are parameters that never had a gradient."""
    names = {
        role: {one.name for one in trace.owners.values() if one.role is role}
        for role in (Role.PARAMETER, Role.GRADIENT)
    }
    return not names[Role.PARAMETER] <= names[Role.GRADIENT]


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
    """Run `program` on `device` until `rule` stops the program, or the program ends or raises.

    Args:
        device: the virtual GPU that is the program's "cuda", or the device on which the run is measured.
        before_forward: called with the model and the optimizers before each outermost call of a model.
        worst_batch: whether data loaders yield their largest batch first, and only that in the first two steps.
        start: the process of the program to run; None: `Program.start` determines it.
        channel: connection to the other ranks, which can stop the script; None: a single process.
    """
    if isinstance(device, VirtualGpu):
        device.advice_if_active = "memprof run has made it: run this script with plain python instead"
    stop_record = _StopRecord(device, rule, channel)
    if channel is not None:
        channel.on_stop = stop_record.wrap_stop(channel.on_stop)
    device.phases.on_step = stop_record.step
    if isinstance(device, VirtualGpu):
        device.on_engine_start = stop_record.record_engine

    def record_call(model: nn.Module) -> None:
        stop_record.call_model(model)
        before_forward(model, device.phases.optimizers)

    device.phases.before_forward = record_call
    # memprof's imports stay live: frozen, they do not slow down the collection of the program's garbage.
    is_frozen = gc.get_freeze_count() > 0  # frozen by the caller, who unfreezes
    gc.collect()
    if not is_frozen:
        gc.freeze()
    error: BaseException | None = None
    try:
        device.__enter__()
        patches = PatchSet()
        handlers = ExitHandlers(is_program)
        try:
            patches.apply_all(handlers.patches())
            if worst_batch:
                patches.apply_all(WorstBatch(device.assume, device.phases).patches())
            device.phases.begin_model_building()
            outcome = _run(program, device, rule, handlers, start)
            peer_reason = None if channel is None else channel.stop_reason
            if stop_record.is_stopped or peer_reason is not None:  # overrides the outcome of a program that goes on
                reason = stop_record.reason if stop_record.is_stopped or peer_reason is None else EndReason(peer_reason)
                outcome = ScriptOutcome(
                    reason,
                    0,
                    live_state=(outcome.live_state, outcome.error),
                    planned_steps=stop_record.planned_steps,
                    misses_evaluation=stop_record.misses_evaluation,
                    evaluation_step=stop_record.evaluation_step,
                    misses_unfreezing=stop_record.misses_unfreezing,
                    misses_model=stop_record.misses_model,
                    misses_calls=stop_record.misses_calls,
                    idle_optimizers=stop_record.idle_optimizers,
                )
            error = outcome.error
        finally:
            patches.undo()
            device.__exit__(type(error), error, None if error is None else error.__traceback__)
    finally:
        if not is_frozen:
            gc.unfreeze()
    if error is None and isinstance(device, MeasuredDevice) and device.error is not None:
        outcome = ScriptOutcome(EndReason.ERROR, 1, device.error, live_state=outcome.live_state)
        error = device.error
    trace = device.trace
    if outcome.ended is EndReason.ERROR and trace.failure is not None and trace.failure.kind in NOT_SIMULATED:
        outcome = dataclasses.replace(outcome, ended=EndReason.NOT_SIMULATED)
    ran_out_of_memory = is_caused_by_oom(error) or trace.ended_out_of_memory
    if isinstance(device, MeasuredDevice) and isinstance(error, (Exception, KeyboardInterrupt)):
        trace.failure = describe_measured_failure(error, device.find_error_phase(error))
        ran_out_of_memory = trace.failure.kind is FailureKind.OUT_OF_MEMORY
    stop_record.truncate(trace)
    if outcome.ended is EndReason.PEER:  # the cause is known once all ranks have ended
        trace.failure = make_refused_failure("", None, None, trace.phases[-1])._replace(kind=FailureKind.OTHER_RANK)
    elif outcome.ended is EndReason.INTERRUPTED and trace.failure is None:  # interrupted while waiting for another rank
        trace.failure = make_refused_failure("", None, None, trace.phases[-1])._replace(
            kind=FailureKind.INTERRUPTED, error=KeyboardInterrupt.__name__
        )
    if outcome.ended is EndReason.EXIT and has_last_allocation_failed(trace):
        # The program caught the out-of-memory error and exited.
        trace.refused.pop()
        trace.ended_out_of_memory = ran_out_of_memory = True
    if trace.ended_out_of_memory and error is not None:
        trace.may_train = may_train(error)
    if ran_out_of_memory:
        outcome = ScriptOutcome(EndReason.REFUSED, outcome.exit_code, error, live_state=outcome.live_state)
    if stop_record.engine is not None:
        outcome = dataclasses.replace(outcome, engine=stop_record.engine)
        if not stop_record.engine.starts and outcome.ended is EndReason.ERROR:
            # The engine's own refusal is the verdict of the run, and no failure.
            outcome, trace.failure = dataclasses.replace(outcome, ended=EndReason.REFUSED, error=None), None
    return trace, outcome


def _run(
    program: Program,
    device: VirtualGpu | MeasuredDevice,
    rule: StopRule,
    handlers: ExitHandlers,
    start: ProcessStart | None,
) -> ScriptOutcome:
    """Run `program` until it ends, `rule` stops it, or one of its threads ends with an error of memprof."""
    if isinstance(device, MeasuredDevice):
        return program.run(rule, handlers, start)
    with allow_stop_from_threads() as stop:
        watch = ThreadWatch(stop)
        with PatchSet() as patches:
            patches.apply_all(watch.patches())
            outcome = program.run(rule, handlers, start)
    if watch.error is None:
        return outcome
    return ScriptOutcome(EndReason.ERROR, 1, watch.error, live_state=(outcome.live_state, outcome.error))
