"""Rules to stop a script that has shown enough: after so many optimizer steps, or a time; and how it ended."""

from __future__ import annotations

import contextlib
import enum
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType


class EndReason(enum.StrEnum):
    """Why a script no longer runs."""

    STEPS = "steps"  # it has made the steps that were requested
    TIMEOUT = "timeout"
    EXIT = "exit"  # it came to its end, or called sys.exit
    ERROR = "error"  # it raised
    NOT_SIMULATED = "not simulated"  # it did what memprof refuses, for it cannot be simulated
    REFUSED = "refused"  # it raised because the GPU was full
    INTERRUPTED = "interrupted"
    # It was stopped because another rank of the program failed, or a call of theirs did not agree.
    PEER = "another rank"


class StopRun(BaseException):
    """Ends the script. Not an Exception: a script that survives its own errors is not to survive this."""

    def __init__(self, why: EndReason) -> None:
        super().__init__(f"memprof has seen enough ({why.value})")
        self.why = why


MIN_GROWTH_BYTES = 64 << 10  # Memory that a step adds. Less is a metric that is kept as a tensor, and fills no GPU.

# Steps more where memory grows by less: a window over the last few tensors fills by then, and late state is made.
PATIENCE = 6

# A run goes on past its steps up to here, to see what comes late: longer batches, an evaluation. As a rule the number
# of events decides (they take 1.5 s of a processor); the time does for programs that wait for their data.
CHEAP_EVENTS, CHEAP_SECONDS = 10_000, 15.0

# ... and up to here (half a minute of a processor) while its memory grows, to see it level off, end or run out.
GROWING_EVENTS, GROWING_SECONDS = 200_000, 300.0


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The state of a run at the end of a training step."""

    completed: int  # training steps that have ended
    held_bytes: Sequence[int]  # allocated on the GPU at the end of each of them
    num_events: int | None = None  # recorded so far; None: they are not counted while the run goes on (measured)
    seconds: float = 0.0  # since the step ended at which the run was asked to stop

    @property
    def growth_bytes(self) -> int:
        """Return bytes that a step added, on average over the later half of the steps; 0 where memory did not grow."""
        half = self.held_bytes[(len(self.held_bytes) - 1) // 2 :]
        return max(half[-1] - half[0], 0) // (len(half) - 1) if len(half) > 1 else 0


@dataclass(frozen=True, slots=True)
class StopRule:
    """The rule by which a script is stopped."""

    steps: int | None = 2  # after so many training steps; None: never
    seconds: float | None = None  # after so much time; None: never
    goes_on: bool = False  # past `steps`, while that costs little or memory grows

    def after_step(self, progress: RunProgress, agreed: Callable[[bool], bool] = bool) -> None:
        """Raise StopRun if enough was seen; `agreed`, told whether of this run, says whether of all ranks."""
        if self.steps is None or progress.completed < self.steps:
            return
        if agreed(not (self.goes_on and self._is_worth_more(self.steps, progress))):
            raise StopRun(EndReason.STEPS)

    def _is_worth_more(self, steps: int, progress: RunProgress) -> bool:
        """Return whether one more step may change the answer, or costs next to nothing."""
        growth = progress.growth_bytes
        if progress.num_events is not None:
            if progress.num_events < CHEAP_EVENTS and progress.seconds < CHEAP_SECONDS:
                return True
            if growth >= MIN_GROWTH_BYTES:
                return progress.num_events < GROWING_EVENTS and progress.seconds < GROWING_SECONDS
        return growth > 0 and progress.completed < steps + PATIENCE

    @contextlib.contextmanager
    def clock(self) -> Iterator[None]:
        """Stop the script inside when its time is up: by a signal, which needs the main thread."""
        if self.seconds is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            raise StopRun(EndReason.TIMEOUT)

        before = signal.signal(signal.SIGALRM, stop)
        # Again and again: an exception that is raised where nothing may be raised (a finalizer) is lost.
        signal.setitimer(signal.ITIMER_REAL, self.seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def stopping_from_threads() -> Iterator[Callable[[], None]]:
    """Yield what any thread may call to stop the script: by a signal, for the main thread may be waiting in vain."""
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
        # Again and again, as the clock does.
        while not over.is_set():
            signal.pthread_kill(main, signal.SIGVTALRM)
            over.wait(1.0)

    def start() -> None:
        senders.append(threading.Thread(target=send, daemon=True))
        senders[-1].start()

    # Not the clock's signal, and one that programs leave alone.
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        yield start
    finally:
        over.set()
        for sender in senders:  # none is sent when nobody is there to take it
            sender.join()
        signal.signal(signal.SIGVTALRM, before)


@dataclass(frozen=True, slots=True)
class ScriptOutcome:
    """The end of a script."""

    ended: EndReason
    exit_code: int  # the script's own: 0 where it was stopped, 1 where it raised
    error: BaseException | None = None  # what it raised
    # Its variables, or the exception whose frames hold them: what is live at the end is not to die of the end.
    kept: object = field(default=None, repr=False, compare=False)
    # Training steps that it would have made in all, where it was stopped; None: that is not known.
    planned_steps: int | None = None
