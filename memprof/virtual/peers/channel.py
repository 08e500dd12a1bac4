"""A rank's end of the line to the process in which the ranks meet (script/exchange.py).

One line carries all: what a rank contributes to a collective, what it sends another, what it puts into a store, and
whether it has shown enough. No port is opened and no file is made.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from memprof.virtual.limits import program_line, unsupported_error

Payload = Any  # what is known of the tensors that a rank gives, in plain Python


class CollectiveCall(NamedTuple):
    """A call of a collective by a rank: two that do not agree in `key` meet in an error."""

    group: str
    ranks: tuple[int, ...]  # of the program, in the group's order
    number: int  # how many calls of this group there were before on this rank
    name: str  # all_reduce, and so on
    detail: str  # the reduction, or the rank that it is from or to
    dtype: str
    gives: tuple[int, ...]  # elements to each rank of the group
    takes: tuple[int, ...]  # elements from each
    text: str  # all of this as one says it
    line: str  # of the program: `file:line function`

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what is the same on all ranks."""
        return self.name, self.detail, self.dtype

    @property
    def place(self) -> tuple[str, tuple[int, ...], int]:
        """Return what calls that meet have in common."""
        return self.group, self.ranks, self.number


class Channel:
    """The line of one rank."""

    def __init__(self, connection: Connection, rank: int, ranks: Sequence[int], size: int) -> None:
        self._connection = connection
        self.rank, self.ranks, self.size = rank, tuple(ranks), size
        self._process, self._thread = os.getpid(), threading.get_ident()
        self.stop: Callable[[str], NoReturn] = _no_more  # called where this rank is told to end: with why
        self.told: str | None = None  # why, once it was told

    def tell(self, *message: Any) -> None:
        """Tell it to the parent, which does not answer."""
        if os.getpid() != self._process:
            raise unsupported_error(
                "talks to other ranks from a process of its own (os.fork)", "have the rank itself do that"
            )
        if threading.get_ident() != self._thread:
            raise unsupported_error("talks to other ranks from a thread of its own", "have the main thread do that")
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except OSError:  # there is nobody left who would want to know
            os._exit(1)

    def ask(self, *message: Any) -> Any:
        """Return the answer, which may take as long as other ranks do."""
        self.tell(*message)
        try:
            told, answer = pickle.loads(self._connection.recv_bytes())
        except (OSError, EOFError):
            os._exit(1)
        if told == "stop":
            self.told = answer
            self.stop(answer)
        return answer

    def store(self, name: str, *arguments: Any) -> Any:
        """Run an operation on the store that all share."""
        return self.ask("store", name, arguments, program_line())

    def agrees(self, enough: bool) -> bool:
        """Return whether all ranks have shown enough, as this one has or has not, after a step of its own."""
        return bool(self.ask("step", enough))


def _no_more(why: str) -> NoReturn:
    raise SystemExit(why)
