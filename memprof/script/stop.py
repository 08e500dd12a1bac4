"""When a script has shown enough: after so many optimizer steps, or a time; and how it ended."""

from __future__ import annotations

import contextlib
import enum
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType


class Ended(enum.StrEnum):
    """Why a script no longer runs."""

    STEPS = "steps"
    """It has made the steps that were asked for."""
    TIMEOUT = "timeout"
    EXIT = "exit"
    """It came to its end, or called sys.exit."""
    ERROR = "error"
    """It raised."""
    NOT_SIMULATED = "not simulated"
    """It did what memprof refuses, for it cannot be simulated."""
    REFUSED = "refused"
    """It raised because the card was full."""
    INTERRUPTED = "interrupted"
    PEER = "another rank"
    """It was stopped because another rank of the program failed, or a call of theirs did not agree."""


class StopRun(BaseException):
    """Ends the script. Not an Exception: a script that survives its own errors is not to survive this."""

    def __init__(self, why: Ended) -> None:
        super().__init__(f"memprof has seen enough ({why.value})")
        self.why = why


@dataclass(frozen=True, slots=True)
class StopRule:
    """When to stop.

    Args:
        steps: after so many optimizer steps; None: never.
        seconds: after so much time; None: never.
        patience: so many steps more, as long as each leaves more memory held than the one before: the state is not
            steady then, and one more look tells a leak from what is made once.
    """

    steps: int | None = 2
    seconds: float | None = None
    patience: int = 0

    def after_step(self, completed: int, *, grew: bool = False, agreed: Callable[[bool], bool] = bool) -> None:
        """`completed` optimizer steps were made; `grew`: more is held than after the one before.

        Args:
            agreed: told whether they are enough here, says whether they are everywhere.

        Raises:
            StopRun: they are enough.
        """
        if self.steps is None or completed < self.steps:
            return
        if agreed(not grew or completed >= self.steps + self.patience):
            raise StopRun(Ended.STEPS)

    @contextlib.contextmanager
    def clock(self) -> Iterator[None]:
        """Inside, the script is stopped when its time is up: by a signal, which needs the main thread."""
        if self.seconds is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            raise StopRun(Ended.TIMEOUT)

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
    """Gives what any thread may call to stop the script, as with an error: by a signal, since the main thread may be
    waiting for something that will not come."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    main = threading.get_ident()
    over = threading.Event()
    senders: list[threading.Thread] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not over.is_set():
            raise StopRun(Ended.ERROR)

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
    """How a script ended."""

    ended: Ended
    exit_code: int
    """The script's own: 0 where it was stopped, 1 where it raised."""
    error: BaseException | None = None
    """What it raised."""
    kept: object = field(default=None, repr=False, compare=False)
    """Its variables, or the exception whose frames hold them: what is alive at the end is not to die of the end."""
