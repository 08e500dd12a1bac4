"""Rules that stop a script after a number of training steps or seconds, and the outcome of a script."""

from __future__ import annotations

import contextlib
import enum
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from memprof.serving.budget import EngineBudget


class EndReason(enum.StrEnum):
    """Reason why a script ended."""

    STEPS = "steps"  # the requested steps are done
    READY = "ready"  # an inference engine has started, and waits for requests
    TIMEOUT = "timeout"
    EXIT = "exit"  # the script came to its end, or called sys.exit
    ERROR = "error"  # the script raised
    NOT_SIMULATED = "not simulated"  # the script did something that cannot be simulated
    REFUSED = "refused"  # the script raised because the GPU was full
    INTERRUPTED = "interrupted"
    # Another rank of the program failed, or calls of ranks did not agree.
    PEER = "another rank"


class StopRun(BaseException):
    """Exception that ends the script; not a subclass of Exception, which the script may catch."""

    def __init__(self, reason: EndReason) -> None:
        super().__init__(f"memprof has seen enough ({reason.value})")
        self.reason = reason


MIN_GROWTH_BYTES = 64 << 10  # Bytes per step. Smaller growth, such as a metric kept as a tensor, fills no GPU.

# Additional steps if memory grows by less: enough to fill a window of the last few tensors, or to create late state.
NUM_EXTRA_STEPS = 6

# A run goes on past its steps up to these limits, for events that come late: longer batches, an evaluation. Usually the
# number of events is reached first (1.5 s of CPU time); for programs that wait for data, the seconds are, of which a
# quarter counts while they wait.
MAX_CHEAP_EVENTS, MAX_CHEAP_SECONDS = 10_000, 15.0

# While memory grows, it goes on up to these limits (half a minute of CPU time), to see it level off, or run out.
MAX_GROWING_EVENTS, MAX_GROWING_SECONDS = 200_000, 300.0

# Memory that grows so slowly that the GPU has room for more steps than these may level off as well, but whether it does
# is worth fewer events (7 s of CPU time); so is what the program's loops do later for the first time.
MIN_SLOW_STEPS, MAX_SLOW_EVENTS = 10_000, 50_000


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Progress of a run at the end of a training step, or at a call of a model behind one."""

    completed: int  # training steps that have ended, or calls that have begun
    held_bytes: Sequence[int]  # allocated on the GPU at the end of each step, or at the begin of each call
    num_events: int | None = None  # events recorded so far; None: not counted during the run (measured)
    # Of a processor, or a quarter of those of the clock, since the end of the step at which the run could stop.
    seconds: float = 0.0
    room_bytes: int | None = None  # of the GPU beside the peak so far; None: unknown
    awaits_optimizer: bool = False  # whether an optimizer has made no step yet, such as that of a GAN's generator
    # Whether the first evaluation, or the program's end, may come after at most as many steps as it has made.
    nears_end: Callable[[], bool] = bool
    # In how many events the steps before the next model may end that a loop around them builds; None: there is none, or
    # it is not known.
    count_events_to_next_model: Callable[[], int | None] = lambda: None
    # In how many events the program's loops may do the next thing for the first time, see first_rounds.py; None: they
    # do nothing new.
    count_events_to_new_code: Callable[[], int | None] = lambda: None

    @property
    def growth_bytes(self) -> int:
        """Return the average growth of memory per step in bytes, over the later half of the steps; at least 0."""
        later_half = self.held_bytes[(len(self.held_bytes) - 1) // 2 :]
        return max(later_half[-1] - later_half[0], 0) // (len(later_half) - 1) if len(later_half) > 1 else 0


@dataclass(frozen=True, slots=True)
class StopRule:
    """Rule that says when a script is stopped: after training steps, after seconds, or once an engine is ready."""

    steps: int | None = 2  # number of training steps; None: no limit
    seconds: float | None = None  # time limit; None: no limit
    continues_past_steps: bool = False  # go on past `steps`, while that costs little or memory grows
    stops_at_ready: bool = False  # stop once an inference engine is ready for requests

    def check_step(self, progress: RunProgress, all_ranks_agree: Callable[[bool], bool] = bool) -> None:
        """Raise StopRun if the run can stop at this step; `all_ranks_agree` combines the answers of all ranks."""
        if self.steps is None or progress.completed < self.steps:
            return
        if all_ranks_agree(not (self.continues_past_steps and self._should_go_on(self.steps, progress))):
            raise StopRun(EndReason.STEPS)

    def _should_go_on(self, steps: int, progress: RunProgress) -> bool:
        """Return whether one more step is cheap, or may change the result because memory grows."""
        growth = progress.growth_bytes
        if progress.num_events is not None:
            if progress.num_events < MAX_CHEAP_EVENTS and progress.seconds < MAX_CHEAP_SECONDS:
                return True
            if progress.awaits_optimizer and progress.num_events < MAX_SLOW_EVENTS:
                return progress.seconds < MAX_CHEAP_SECONDS
            to_new_code = progress.count_events_to_new_code()
            if to_new_code is not None and progress.num_events + to_new_code < MAX_SLOW_EVENTS:
                return progress.seconds < MAX_CHEAP_SECONDS
            to_next_model = progress.count_events_to_next_model()
            if to_next_model is not None and progress.num_events + to_next_model < MAX_GROWING_EVENTS:
                return progress.seconds < MAX_GROWING_SECONDS
            if growth >= MIN_GROWTH_BYTES:
                is_slow = progress.room_bytes is not None and progress.room_bytes > growth * MIN_SLOW_STEPS
                max_events = MAX_SLOW_EVENTS if is_slow else MAX_GROWING_EVENTS
                return progress.num_events < max_events and progress.seconds < MAX_GROWING_SECONDS
        return (growth > 0 and progress.completed < steps + NUM_EXTRA_STEPS) or progress.nears_end()

    def check_call(self, progress: RunProgress) -> None:
        """Raise StopRun if the run can stop at a call of a model behind a training step at which it could.

        Such calls, of an evaluation or to make samples, are as many as no loop of training steps tells. `progress` is
        that of the calls since this step.
        """
        events = progress.num_events
        if not self.continues_past_steps or events is None:
            return
        limit, seconds = MAX_SLOW_EVENTS, MAX_CHEAP_SECONDS
        if progress.growth_bytes >= MIN_GROWTH_BYTES:  # what the calls return may be kept
            limit, seconds = MAX_GROWING_EVENTS, MAX_GROWING_SECONDS
        if events >= limit or progress.seconds >= seconds:
            raise StopRun(EndReason.STEPS)

    @contextlib.contextmanager
    def limit_time(self) -> Iterator[None]:
        """Context manager: raise StopRun in the body after `seconds`, by a signal; only in the main thread."""
        if self.seconds is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle_alarm(number: int, frame: FrameType | None) -> None:
            raise StopRun(EndReason.TIMEOUT)

        previous_handler = signal.signal(signal.SIGALRM, handle_alarm)
        # Repeatedly: an exception in a finalizer is lost.
        signal.setitimer(signal.ITIMER_REAL, self.seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous_handler)


@contextlib.contextmanager
def allow_stop_from_threads() -> Iterator[Callable[[], None]]:
    """Context manager: yield a function that stops the script from any thread, by a signal to the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    main_thread_id = threading.get_ident()
    has_ended = threading.Event()
    senders: list[threading.Thread] = []

    def handle_signal(number: int, frame: FrameType | None) -> None:
        if not has_ended.is_set():
            raise StopRun(EndReason.ERROR)

    def send_signals() -> None:
        # Repeatedly, as in `limit_time`.
        while not has_ended.is_set():
            signal.pthread_kill(main_thread_id, signal.SIGVTALRM)
            has_ended.wait(1.0)

    def start_sending() -> None:
        senders.append(threading.Thread(target=send_signals, daemon=True))
        senders[-1].start()

    # Not the signal of `limit_time`, and one that programs do not use.
    previous_handler = signal.signal(signal.SIGVTALRM, handle_signal)
    try:
        yield start_sending
    finally:
        has_ended.set()
        for sender in senders:  # no signal is sent after the handler is gone
            sender.join()
        signal.signal(signal.SIGVTALRM, previous_handler)


@dataclass(frozen=True, slots=True)
class ScriptOutcome:
    """The end of a script: reason, exit code and exception."""

    ended: EndReason
    exit_code: int  # the script's exit code: 0 where it was stopped, 1 where it raised
    error: BaseException | None = None  # the script's exception
    # The script's variables, or the exception whose frames have them: keeps tensors live at the end.
    live_state: object = field(default=None, repr=False, compare=False)
    # Total training steps that a stopped script would have made; None: unknown.
    planned_steps: int | None = None
    misses_evaluation: bool = False  # whether a stopped script has code that evaluates, and has not come to it
    evaluation_step: int | None = None  # the training step after which that evaluation comes; None: unknown
    misses_unfreezing: bool = False  # whether the training loop of a stopped script unfreezes parameters later
    misses_model: bool = False  # whether a loop around the steps of a stopped script builds another model later
    misses_calls: bool = False  # whether a script was stopped among the calls of models behind its last step
    idle_optimizers: int = 0  # of a stopped script: those that have made no step
    engine: EngineBudget | None = None  # of the inference engine that the script has started
