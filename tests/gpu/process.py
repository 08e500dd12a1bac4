"""A program with a time limit, whose output goes to a file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# Between the request to end and the kill.
_GRACE_S = 5.0


class Process:
    """A command that runs in a process group of its own, so that what it starts ends with it.

    Args:
        command: program and arguments.
        output: the file that gets what it prints.
        folder: where it runs.
        environment: all of its environment variables.
        seconds: how long it may run from now on; counted also while nobody waits for it.
    """

    def __init__(
        self, command: Sequence[str], output: Path, folder: Path, environment: Mapping[str, str], seconds: float
    ) -> None:
        self._began = time.monotonic()
        self._seconds = seconds
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def wait(self) -> tuple[int | None, float]:
        """Wait until it has ended, or end it at its limit; returns its exit code (None: it was ended) and seconds."""
        try:
            code = self._process.wait(max(0.0, self._began + self._seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
            code = None
        return code, time.monotonic() - self._began

    def end(self) -> None:
        """End the whole group: by SIGTERM, and by SIGKILL where that is not enough."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
