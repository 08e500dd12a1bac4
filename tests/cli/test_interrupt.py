"""Ctrl-C during an import, which libraries do not survive, ends the process; elsewhere it is an exception."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

# A library that hides a KeyboardInterrupt, as transformers does.
LIBRARY = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt as error:
    raise ImportError("hidden") from error
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("end_interrupted_imports(); import library", -signal.SIGINT),
        ("end_interrupted_imports(); restore_interrupts(); import library", 1),
        ("signal.signal(2, signal.SIG_IGN); end_interrupted_imports(); import library", 0),
        ("signal.signal(2, signal.SIG_IGN); restore_interrupts(); import library", 0),
        ("end_interrupted_imports()\ntry: os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt: sys.exit(7)", 7),
    ],
    ids=["import", "restored", "ignored", "ignored-restored", "elsewhere"],
)
def test_interrupt(tmp_path: Path, code: str, expected: int) -> None:
    (tmp_path / "library.py").write_text(LIBRARY)
    # A shell script that runs the tests in its background has them ignore SIGINT.
    begin = "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program = f"{begin}from memprof.cli.interrupt import *\nsys.path.append({str(tmp_path)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == expected, done.stderr
