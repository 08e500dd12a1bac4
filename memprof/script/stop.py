"""Rules to stop a script after a number of optimizer steps or a time, and the outcome of a script."""

from __future__ import annotations

import contextlib
import enum
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType


class EndReason(enum.StrEnum):
    """Reason why a script ended."""

    STEPS = "steps"  # the requested steps are done
    TIMEOUT = "timeout"
    EXIT = "exit"  # the script came to its end, or called sys.exit
    ERROR = "error"  # the script raised
    NOT_SIMULATED = "not simulated"  # the script did something that cannot be simulated
    REFUSED = "refused"  # the script raised because the GPU was full
    INTERRUPTED = "interrupted"
    # Another rank of the program failed, or calls of ranks did not agree.
    PEER = "another rank"


class StopRun(BaseException):
    """Exception that ends the script; no subclass of Exception, which the script itself may catch."""

    def __init__(self, why: EndReason) -> None:
        super().__init__(f"memprof has seen enough ({why.value})")
        self.why = why


MIN_GROWTH_BYTES = 64 << 10  # Memory that a step adds. Less growth is a metric kept as a tensor, and fills no GPU.

# Additional steps where memory grows by less: enough to fill a window of the last few tensors, and to make late state.
NUM_EXTRA_STEPS = 6

# A run goes on past its steps up to here, to see what comes late: longer batches, an evaluation. As a rule the number
# of events decides (they take 1.5 s of a processor); the time does for programs that wait for their data.
CHEAP_EVENTS, CHEAP_SECONDS = 10_000, 15.0

# ... and up to here (half a minute of a processor) while its memory grows, to see it level off, end or run out.
GROWING_EVENTS, GROWING_SECONDS = 200_000, 300.0


@dataclass(frozen=True, slots=True)
class RunProgress:
    """State of a run at the end of a training step."""

    completed: int  # training steps that have ended
    held_bytes: Sequence[int]  # allocated on the GPU at the end of each of them
    num_events: int | None = None  # events recorded so far; None: not counted during the run (measured)
    seconds: float = 0.0  # since the end of the step at which the run could stop

    @property
    def growth_bytes(self) -> int:
        """Return the bytes that a step added, on average over the later half of the steps; 0 without growth."""
        half = self.held_bytes[(len(self.held_bytes) - 1) // 2 :]
        return max(half[-1] - half[0], 0) // (len(half) - 1) if len(half) > 1 else 0


@dataclass(frozen=True, slots=True)
class StopRule:
    """Rule by which a script is stopped."""

    steps: int | None = 2  # number of training steps; None: no limit
    seconds: float | None = None  # time limit; None: no limit
    continues_past_steps: bool = False  # go on past `steps`, while that costs little or memory grows

    def check_step(self, progress: RunProgress, all_ranks_agree: Callable[[bool], bool] = bool) -> None:
        """Raise StopRun if all ranks can stop, which `all_ranks_agree` returns, given whether this rank can."""
        if self.steps is None or progress.completed < self.steps:
            return
        if all_ranks_agree(not (self.continues_past_steps and self._should_go_on(self.steps, progress))):
            raise StopRun(EndReason.STEPS)

    def _should_go_on(self, steps: int, progress: RunProgress) -> bool:
        """Return whether one more step may change the result, or costs next to nothing."""
        growth = progress.growth_bytes
        if progress.num_events is not None:
            if progress.num_events < CHEAP_EVENTS and progress.seconds < CHEAP_SECONDS:
                return True
            if growth >= MIN_GROWTH_BYTES:
                return progress.num_events < GROWING_EVENTS and progress.seconds < GROWING_SECONDS
        return growth > 0 and progress.completed < steps + NUM_EXTRA_STEPS

    @contextlib.contextmanager
    def limit_time(self) -> Iterator[None]:
        """Context manager: stop the script in the body after `seconds`, by a signal, which needs the main thread."""
        if self.seconds is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            raise StopRun(EndReason.TIMEOUT)

        before = signal.signal(signal.SIGALRM, stop)
        # Repeatedly: an exception in a finalizer is lost.
        signal.setitimer(signal.ITIMER_REAL, self.seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def allow_stop_from_threads() -> Iterator[Callable[[], None]]:
    """Context manager: yield a function by which any thread can stop the script, by a signal to the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    main = threading.get_ident()
    over = threading.Event()
    senders: list[threading.Thread] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not over.is_set():
            raise StopRun(EndReason.ERROR)

    def send() -> None:
        # Repeatedly, as in `clock`.
        while not over.is_set():
            signal.pthread_kill(main, signal.SIGVTALRM)
            over.wait(1.0)

    def start() -> None:
        senders.append(threading.Thread(target=send, daemon=True))
        senders[-1].start()

    # Not the signal of `clock`, and a signal that programs do not use.
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        yield start
    finally:
        over.set()
        for sender in senders:  # no signal is sent after the handler is gone
            sender.join()
        signal.signal(signal.SIGVTALRM, before)


@dataclass(frozen=True, slots=True)
class ScriptOutcome:
    """End of a script."""

    ended: EndReason
    exit_code: int  # the script's exit code: 0 where it was stopped, 1 where it raised
    error: BaseException | None = None  # the script's exception
    # The script's variables, or the exception whose frames have them: keeps tensors live at the end.
    kept: object = field(default=None, repr=False, compare=False)
    # Total training steps that a stopped script would have made; None: unknown.
    planned_steps: int | None = None
