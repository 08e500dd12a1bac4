"""The channel between a rank and the parent process, which matches the ranks' collectives (script/exchange.py).

One pipe carries tensors of collectives, messages to other ranks, operations on stores, and whether a rank has run
enough steps. No port is opened and no file is created.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from memprof.virtual.limits import find_program_line, unsupported_error

Payload = Any  # encoded known values of a tensor, or a list of such values


class CollectiveCall(NamedTuple):
    """The call of a collective by one rank; the `signature` must be equal on all ranks."""

    group: str
    ranks: tuple[int, ...]  # global ranks, in the group's order
    call_index: int  # number of earlier calls of the group on this rank
    name: str  # all_reduce, and so on
    detail: str  # the reduction, or the source or destination rank
    dtype: str
    send_counts: tuple[int, ...]  # number of elements that are sent to each rank of the group
    receive_counts: tuple[int, ...]  # number of elements that are received from each rank
    description: str  # the call in words
    line: str  # line of the program: `file:line function`

    @property
    def signature(self) -> tuple[str, str, str]:
        """Return the properties that have to be equal on all ranks."""
        return self.name, self.detail, self.dtype

    @property
    def collective_id(self) -> tuple[str, tuple[int, ...], int]:
        """Return an identifier of the collective, equal for the calls of all its ranks."""
        return self.group, self.ranks, self.call_index


class Channel:
    """The connection of one rank to the parent process."""

    def __init__(self, connection: Connection, rank: int, ranks: Sequence[int], size: int) -> None:
        self._connection = connection
        self.rank, self.ranks, self.size = rank, tuple(ranks), size  # this rank; running ranks; world size
        self._process_id, self._thread_id = os.getpid(), threading.get_ident()
        self.on_stop: Callable[[str], NoReturn] = (
            _exit_with_reason  # called with the reason when the parent ends this rank
        )
        self.stop_reason: str | None = None  # set once the parent has ended this rank

    def send(self, *message: Any) -> None:
        """Send `message` to the parent process, without waiting for a reply."""
        if os.getpid() != self._process_id:
            raise unsupported_error(
                "talks to other ranks from a process of its own (os.fork)", "have the rank itself do that"
            )
        if threading.get_ident() != self._thread_id:
            raise unsupported_error("talks to other ranks from a thread of its own", "have the main thread do that")
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except OSError:  # the parent process has ended
            os._exit(1)

    def request(self, *message: Any) -> Any:
        """Send `message` to the parent process and return the reply, which may wait for other ranks.

        If the parent ends this rank, call `on_stop`, which does not return."""
        self.send(*message)
        try:
            kind, reply = pickle.loads(self._connection.recv_bytes())
        except (OSError, EOFError):
            os._exit(1)
        if kind == "stop":
            self.stop_reason = reply
            self.on_stop(reply)
        return reply

    def call_store(self, operation: str, *arguments: Any) -> Any:
        """Run an operation on the key-value store that all ranks share, and return the result."""
        return self.request("store", operation, arguments, find_program_line())

    def are_all_ranks_done(self, is_done: bool) -> bool:
        """Report whether this rank has run enough steps (`is_done`); return whether all ranks have."""
        return bool(self.request("step", is_done))


def _exit_with_reason(reason: str) -> NoReturn:
    raise SystemExit(reason)
