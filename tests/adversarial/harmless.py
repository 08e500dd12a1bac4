"""What every adversarial input must leave whole: time, memory, the terminal, and the shape of an answer."""

from __future__ import annotations

import re
from pathlib import Path

from tests.processes import Done, python

SECONDS = 60  # Of a processor. On a machine that does other things as well an answer may take WAIT times as long.
SECONDS_OF = {"recommend": 180}  # A search runs a model a dozen times, and says which run it is at.
WAIT = 5
MOST_BYTES = 2 << 30
LEAN = ("memprof.cli.main", "memprof.flows.recordings", "memprof.flows.compare", "memprof.report.terminal.report")
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def run(*arguments: object, libraries: tuple[str, ...] = LEAN, **where: object) -> Done:
    """`memprof ARGUMENTS` in a process of its own, in time."""
    most = SECONDS_OF.get(str(arguments[0]), SECONDS)
    words = map(str, arguments)
    done = python("-m", "memprof", *words, seconds=WAIT * most, libraries=libraries, **where)  # type: ignore[arg-type]
    assert done.processor_seconds < most, arguments
    return done


def assert_harmless(done: Done) -> None:
    """It ended by itself with an answer or one error, within bounds, and a terminal would obey nothing of it."""
    said = done.stdout + done.stderr
    assert done.exit_code in (0, 1, 2, 3), (done.exit_code, done.stderr[-2000:])
    assert "Traceback (most recent call last)" not in said, said[-2000:]
    assert done.peak_bytes < MOST_BYTES
    assert not _OBEYED.search(said), ascii(_OBEYED.findall(said)[:5])
    assert done.exit_code != 2 or not done.stdout


def untouched(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, to be compared with later."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
