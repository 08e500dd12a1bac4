"""Channel of a rank to the process that matches the calls of all ranks (script/exchange.py).

One pipe carries contributions to collectives, messages to other ranks, operations on stores, and whether a rank has run
enough steps. No port is opened and no file is created.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from memprof.virtual.limits import program_line, unsupported_error

Payload = Any  # known values of tensors in a message, as plain Python


class CollectiveCall(NamedTuple):
    """Call of a collective by a rank; calls of one collective with different `key` are an error."""

    group: str
    ranks: tuple[int, ...]  # of the program, in the group's order
    number: int  # number of earlier calls of the group on this rank
    name: str  # all_reduce, and so on
    detail: str  # the reduction, or the source or destination rank
    dtype: str
    gives: tuple[int, ...]  # elements to each rank of the group
    takes: tuple[int, ...]  # elements from each
    text: str  # the call in words
    line: str  # of the program: `file:line function`

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the properties that have to be equal on all ranks."""
        return self.name, self.detail, self.dtype

    @property
    def place(self) -> tuple[str, tuple[int, ...], int]:
        """Return the identity of the collective, which the calls of all its ranks share."""
        return self.group, self.ranks, self.number


class Channel:
    """Channel of one rank to the parent process."""

    def __init__(self, connection: Connection, rank: int, ranks: Sequence[int], size: int) -> None:
        self._connection = connection
        self.rank, self.ranks, self.size = rank, tuple(ranks), size
        self._process, self._thread = os.getpid(), threading.get_ident()
        self.stop: Callable[[str], NoReturn] = _no_more  # called with the reason when the parent ends this rank
        self.told: str | None = None  # reason, once the parent has ended this rank

    def tell(self, *message: Any) -> None:
        """Send `message` to the parent process, without an answer."""
        if os.getpid() != self._process:
            raise unsupported_error(
                "talks to other ranks from a process of its own (os.fork)", "have the rank itself do that"
            )
        if threading.get_ident() != self._thread:
            raise unsupported_error("talks to other ranks from a thread of its own", "have the main thread do that")
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except OSError:  # the parent process has ended
            os._exit(1)

    def ask(self, *message: Any) -> Any:
        """Send `message` to the parent process and return the answer, which may wait for other ranks."""
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
        """Run an operation on the store that all ranks share."""
        return self.ask("store", name, arguments, program_line())

    def agrees(self, enough: bool) -> bool:
        """Return whether all ranks have run enough steps; `enough` says so of this rank, after a step."""
        return bool(self.ask("step", enough))


def _no_more(why: str) -> NoReturn:
    raise SystemExit(why)
