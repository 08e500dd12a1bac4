"""A terminal: a pseudo-terminal with a program on it, and what would stand on the screen.

Enough of an xterm for what programs and memprof write: printing, line feeds, scroll regions, cursor movements, erasing.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time

_SEQUENCE = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|\x1b([78])")


class Screen:
    """Rows of text, and what has scrolled off above them."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.lines = [""] * rows
        self.scrolled: list[str] = []
        self.row = self.column = 0
        self.region = (0, rows - 1)
        self._saved = (0, 0)
        self.unknown: list[str] = []

    @property
    def text(self) -> str:
        """Everything, from the first line that scrolled off to the last row."""
        return "\n".join([*self.scrolled, *self.lines])

    def feed(self, text: str) -> None:
        place = 0
        for found in _SEQUENCE.finditer(text):
            self._print(text[place : found.start()])
            place = found.end()
            if found[4] == "7":
                self._saved = (self.row, self.column)
            elif found[4] == "8":
                self.row, self.column = self._saved
            elif not found[1]:
                self._control(found[3], [int(n) if n else 0 for n in found[2].split(";")] if found[2] else [])
        self._print(text[place:])

    def _control(self, kind: str, numbers: list[int]) -> None:
        first = numbers[0] if numbers else 0
        if kind == "H":
            self.row, self.column = max(first, 1) - 1, max(numbers[1] if len(numbers) > 1 else 1, 1) - 1
        elif kind == "A":
            self.row = max(self.row - max(first, 1), 0)
        elif kind == "K":
            self.lines[self.row] = "" if first == 2 else self.lines[self.row][: self.column]
        elif kind == "J":
            self.lines[self.row] = self.lines[self.row][: self.column]
            self.lines[self.row + 1 :] = [""] * (self.rows - self.row - 1)
        elif kind == "r":
            self.region = (max(first, 1) - 1, (numbers[1] if len(numbers) > 1 else self.rows) - 1)
            self.row = self.column = 0
        elif kind != "m":
            self.unknown.append(kind)

    def _print(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self._line_feed()
            elif character == "\r":
                self.column = 0
            elif character >= " ":
                if self.column == self.columns:
                    self.column = 0
                    self._line_feed()
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
                self.column += 1

    def _line_feed(self) -> None:
        top, bottom = self.region
        if self.row == bottom:
            gone = self.lines.pop(top)
            self.lines.insert(bottom, "")
            if top == 0:
                self.scrolled.append(gone)
        else:
            self.row = min(self.row + 1, self.rows - 1)


class Terminal:
    """A program on a pseudo-terminal of its own, as its foreground job."""

    def __init__(self, arguments: list[str], env: dict[str, str], rows: int = 30, columns: int = 110) -> None:
        self.screen = Screen(rows, columns)
        self.received = ""
        self.exit_code: int | None = None
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            try:
                # As a shell starts a foreground job: whoever runs the tests may ignore these (a job of a script does).
                for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                os.execvpe(arguments[0], arguments, env)
            finally:
                os._exit(99)
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        """As a window does; the screen that is kept here stays as it was."""
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def read(self, seconds: float = 0.0) -> bool:
        """Take in what is written within `seconds`; false once nobody writes any more."""
        while select.select([self._descriptor], [], [], seconds)[0]:
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:
                return False
            if not data:
                return False
            text = data.decode(errors="replace")
            self.received += text
            self.screen.feed(text)
            seconds = 0.0
        return True

    def wait_for(self, text: str, seconds: float = 20.0) -> None:
        until = time.monotonic() + seconds
        while text not in self.received:
            if time.monotonic() > until or not self.read(0.1):
                raise AssertionError(f"{text!r} was not written, but:\n{self.received}")

    def wait(self, seconds: float = 30.0) -> int:
        """The exit code (minus the signal that killed it), after everything was taken in."""
        until = time.monotonic() + seconds
        while self.read(0.1) and time.monotonic() < until:
            if self.exit_code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.exit_code = os.waitstatus_to_exitcode(status)
                    self.read(0.2)
                    break
        if self.exit_code is None and time.monotonic() > until:
            self.end()
            raise AssertionError(f"it did not end within {seconds} s, but:\n{self.received}")
        if self.exit_code is None:
            self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.exit_code

    def end(self) -> None:
        """Whatever still runs on it is killed."""
        if self._descriptor < 0:
            return
        if self.exit_code is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
        os.close(self._descriptor)
        self._descriptor = -1
