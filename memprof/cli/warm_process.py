"""Commands of memprof in processes that have torch imported already, forked from one that has done nothing else."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple


class Finished(NamedTuple):
    """The end of a command, and what it wrote; a `code` below 0 is the signal that ended it."""

    code: int
    output: str
    errors: str


class RunningCommand:
    """A command in a process of its own, which `WarmProcesses` has started."""

    def __init__(self, context: Any, arguments: list[str], text: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="memprof-")
        self._files = [Path(self._folder.name, stream) for stream in ("in", "out", "err")]
        self._files[0].write_text(text, encoding="utf-8")
        self._process = context.Process(target=_run_command, args=(arguments, self._files))
        self._process.start()

    def wait(self) -> Finished:
        """Wait for the end of the command."""
        with self._folder:
            self._process.join()
            output, errors = (file.read_text(encoding="utf-8", errors="replace") for file in self._files[1:])
        return Finished(self._process.exitcode, output, errors)

    def terminate(self) -> None:
        """End the command."""
        self._process.terminate()


class WarmProcesses:
    """Runs commands, each in a process of its own; `module` is imported before the first one."""

    def __init__(self, module: str) -> None:
        has_fork = "forkserver" in multiprocessing.get_all_start_methods()  # Windows has none: each process imports
        self._context: Any = multiprocessing.get_context("forkserver" if has_fork else "spawn")
        if has_fork:
            self._context.set_forkserver_preload([module])
            multiprocessing.forkserver.ensure_running()  # it imports while the first question is on its way

    def start(self, arguments: list[str], text: str = "") -> RunningCommand:
        """Start `memprof ARGUMENTS` with `text` as standard input; the first call waits for the imports."""
        return RunningCommand(self._context, arguments, text)


def _run_command(arguments: list[str], files: list[Path]) -> None:
    for number, file in enumerate(files):
        opened = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the length of the process
    sys.argv = ["memprof", *arguments]
    from memprof.cli.main import run

    run()
