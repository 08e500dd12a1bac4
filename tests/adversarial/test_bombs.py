"""Small files that would take all memory or all time, before each reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adversarial import bombs
from tests.adversarial.documents import capture
from tests.adversarial.harmless import assert_harmless, run, untouched
from tests.lanes import of_lane

COMMANDS = ("analyze", "show", "compare", "export")
_IN_EVERY_RUN = ("shared_events", "colliding_tuples", "empty_dicts", "long names", "the deepest list")


def _cases() -> list[object]:
    found = [(made.__name__, command) for made in bombs.SNAPSHOTS for command in ("analyze", "compare", "export")]
    found += [(name, command) for name in bombs.CAPTURES for command in COMMANDS]
    # What reads a file is shared by all commands: analyze is given all, each other command one in nine.
    found = [case for number, case in enumerate(found) if case[1] == "analyze" or number % 9 == 0]
    marks = {True: (), False: (pytest.mark.nightly,)}
    return [
        pytest.param(*case, marks=marks[case[0] in _IN_EVERY_RUN and case[1] == "analyze"], id="-".join(case))
        for case in found
    ]


INPUTS = {"bombs, for each reader": len(_cases())}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "command"), of_lane(_cases()))
def test_a_bomb(tmp_path: Path, name: str, command: str) -> None:
    file = tmp_path / "bomb"
    file.write_bytes(bombs.CAPTURES[name](capture()) if name in bombs.CAPTURES else getattr(bombs, name)())
    before = untouched(tmp_path)
    others = {"compare": (file,), "export": ("--to", tmp_path.parent / "bomb.json", "--force")}
    assert_harmless(run(command, file, *others.get(command, ())))
    assert untouched(tmp_path) == before
