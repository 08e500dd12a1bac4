"""Log of a watched command: CSV, one write for each full line, so that other programs can follow the file."""

from __future__ import annotations

import csv
import io
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from memprof.trace.files import FileKind

LOG_KIND = FileKind("log", "--log", lambda begin, end: begin.startswith(b"time,elapsed_seconds,processes,"))


class Log:
    """CSV log that replaces an existing file; does nothing if `file` is None. Methods never raise: see `note`."""

    def __init__(self, file: Path | None, header: Sequence[str]) -> None:
        self._file = file
        self._descriptor = -1
        self._num_missing_lines = 0
        self._error = ""
        self._unwritten_header = [header]
        if file is not None:
            try:
                self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
                self._is_regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
            except OSError as error:
                self._error = error.strerror or str(error)

    def write(self, row: Sequence[object]) -> None:
        """Append a line; after an error, such as a full disk, later lines are still tried."""
        if self._descriptor < 0:
            return
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows([*self._unwritten_header, row])
        try:
            self._write_all(buffer.getvalue().encode())
        except OSError as error:
            self._num_missing_lines += 1
            self._error = error.strerror or str(error)
        else:
            self._unwritten_header = []

    def _write_all(self, data: bytes) -> None:
        begin = os.lseek(self._descriptor, 0, os.SEEK_CUR) if self._is_regular else 0
        num_bytes = 0
        try:
            while num_bytes < len(data):
                num_bytes += os.write(self._descriptor, data[num_bytes:])
        except OSError:
            if self._is_regular and num_bytes:  # remove a partly written line
                os.ftruncate(self._descriptor, begin)
                os.lseek(self._descriptor, begin, os.SEEK_SET)
            raise

    def close(self) -> None:
        """Close the file; some file systems report write errors only on close."""
        if self._descriptor >= 0:
            try:
                os.close(self._descriptor)
            except OSError as error:
                self._error = error.strerror or str(error)
            self._descriptor = -1

    @property
    def note(self) -> str:
        """Return one line on the last error; empty if there was none."""
        if not self._error:
            return ""
        num_lines = self._num_missing_lines
        lines = f"; {num_lines} {'line is' if num_lines == 1 else 'lines are'} missing" if num_lines else ""
        return f"log {self._file}: {self._error.lower()}{lines}"
