"""Handlers of `atexit`: the program's own are run at its end, the last first, and nobody else's are."""

from __future__ import annotations

import atexit
import os
import sys
import textwrap
from pathlib import Path

import pytest

from memprof.patching import PatchSet
from memprof.script import EndReason, Program, StopRule
from memprof.script.exits import ExitHandlers


def ran(folder: Path, text: str, **files: str) -> tuple[EndReason, int]:
    for name, content in {**files, "train": text}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(content), encoding="utf-8")
    for name in files:
        sys.modules.pop(name, None)
    handlers, patches = ExitHandlers(lambda code: True), PatchSet()
    before = atexit.register, atexit.unregister, os._exit
    patches.apply_all(handlers.patches())
    try:
        outcome = Program(str(folder / "train.py"), ("7",)).run(StopRule(), handlers)
    finally:
        patches.undo()
    assert (atexit.register, atexit.unregister, os._exit) == before
    return outcome.ended, outcome.exit_code


@pytest.mark.parametrize(
    ("end", "ended", "code"),
    [
        ("", EndReason.EXIT, 0),
        ("sys.exit(5)", EndReason.EXIT, 5),
        ("raise ValueError", EndReason.ERROR, 1),
    ],
)
def test_they_run_at_the_end_the_last_first(tmp_path, capsys, end, ended, code):
    text = f"""
    import atexit, sys
    import library
    atexit.register(print, "first", sys.argv[1], sep="=")
    @atexit.register
    def second():
        print("second", sys.argv[1:])
        atexit.register(print, "registered by a handler")
    atexit.register(print, "forgotten")
    atexit.unregister(print)
    atexit.register(print, "third")
    {end}
    """
    library = "import atexit\natexit.register(lambda: print('library'))"
    assert ran(tmp_path, text, library=library) == (ended, code)
    assert capsys.readouterr().out == "third\nsecond ['7']\nregistered by a handler\nlibrary\n"


def test_an_error_in_one_is_said_and_the_others_run(tmp_path, capsys):
    text = """
    import atexit, sys
    atexit.register(print, "last")
    atexit.register(sys.exit, 9)
    def fails(): raise ValueError("mine")
    atexit.register(fails)
    """
    assert ran(tmp_path, text) == (EndReason.EXIT, 0)
    said = capsys.readouterr()
    assert said.out == "last\n"
    assert "Exception ignored in atexit callback: <function fails" in said.err and "ValueError: mine" in said.err


def test_none_runs_where_the_program_leaves_at_once(tmp_path, capsys):
    assert ran(tmp_path, "import atexit, os\natexit.register(print, 'no')\nos._exit(3)") == (EndReason.EXIT, 3)
    assert capsys.readouterr().out == ""


def test_those_of_python_itself_are_left_to_this_process(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(atexit, "register", lambda function, *args: seen.append(function))
    ran(tmp_path, "import importlib, logging\nimportlib.reload(logging)")
    assert [function.__name__ for function in seen] == ["shutdown"]


@pytest.mark.parametrize(("daemon", "is_awaited"), [(False, True), (True, False)])
def test_a_process_that_the_program_leaves_is_waited_for(tmp_path: Path, daemon: bool, is_awaited: bool) -> None:
    """As Python does, which kills daemons; the virtual GPU then knows what the process was refused."""
    script = f"""
        import multiprocessing, pathlib, time

        def work():
            time.sleep(0.2)
            pathlib.Path({str(tmp_path / "written")!r}).touch()

        process = multiprocessing.get_context("fork").Process(target=work, daemon={daemon})
        process.start()
        """
    assert ran(tmp_path, script) == (EndReason.EXIT, 0)
    assert (tmp_path / "written").exists() == is_awaited
