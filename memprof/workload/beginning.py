"""One beginning for many pieces of work: a process waits where their ways part, and is forked there for each.

Runs of one model at several lengths and batches build the same model in the same way. The process that has built it is
as each of them would be at that point, so that what a fork of it goes on to do is what the whole run would have done.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, Pipe
from typing import Any, Generic, NoReturn, TypeVar

from memprof.cache.inputs import files_of_modules, note_files
from memprof.errors import MemprofError
from memprof.workload import side_by_side

_Question = TypeVar("_Question")
_Answer = TypeVar("_Answer")


class Beginning(Generic[_Question, _Answer]):
    """A process that does `work` up to where that asks for a question, and is forked for each.

    It begins when it is asked for the first time. Any process that is forked from the one that made this may ask, and
    several may at once.

    Args:
        work: calls what it is given where the ways part; that returns the question, and what `work` returns is the
            answer. Both can be pickled. It raises MemprofError where there is none, also on the way to that point.
        forking: what is open while it is forked there.
    """

    def __init__(
        self,
        work: Callable[[Callable[[], _Question]], _Answer],
        forking: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._door, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid, self._made_by = side_by_side.fork(), os.getpid()
        if self._pid == 0:
            self._door.close()
            _be(work, forking, inside)
        inside.close()

    def ask(self, question: _Question) -> _Answer | MemprofError | None:
        """The answer, or why there is none; None: the process died without one."""
        ours, theirs = Pipe()
        with ours:
            try:
                with theirs:
                    socket.send_fds(self._door, [_ASKS], [theirs.fileno()])
                ours.send(question)
                answer, files = ours.recv()
            except (EOFError, OSError, pickle.UnpicklingError):
                return None
        note_files(files)
        found: _Answer | MemprofError = answer
        return found

    def close(self) -> None:
        """End it, when those are done that go on from it. In a process that did not make it: forget it."""
        with self._door, contextlib.suppress(OSError):
            if os.getpid() == self._made_by:
                self._door.send(_END)
                os.waitpid(self._pid, 0)


_ASKS, _END = b"?", b"."


class _Over(BaseException):  # no Exception: nobody on the way out may take it for the work's own
    """Nobody asks any more."""


def _be(
    work: Callable[[Callable[[], Any]], Any],
    forking: Callable[[], AbstractContextManager[object]],
    door: socket.socket,
) -> NoReturn:
    """The process that waits, and those that are forked from it."""
    line: Connection | None = None

    def part() -> Any:
        nonlocal line
        while True:
            asked = _next_line(door)
            _bury(os.WNOHANG)
            with forking():
                is_child = side_by_side.fork() == 0
            if is_child:
                break
            asked.close()
        line = asked
        side_by_side.settle()
        door.close()
        return line.recv()

    try:
        side_by_side.settle()
        before = files_of_modules()
        select.select([door], [], [])
        answer = side_by_side.tried(lambda: work(part))
        told = answer, files_of_modules() - before
        while line is None:  # it did not come to where ways part: that is the answer to everybody
            with _next_line(door) as anybody:
                anybody.recv()
                anybody.send(told)
        line.send(told)
        line.close()
    finally:
        if line is None:
            _bury(0)
        os._exit(0)


def _bury(options: int) -> None:
    """Wait for those that are done, so that their time counts as this one's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _next_line(door: socket.socket) -> Connection:
    """To whoever asks next."""
    message, files, _, _ = socket.recv_fds(door, 1, 1)
    if message != _ASKS:
        raise _Over
    return Connection(files[0])
