"""A program runs with another text than its files have: as a script, as a module, and in what shows its lines."""

from __future__ import annotations

import importlib
import linecache
import os
import py_compile
import runpy
import sys

from memprof.patching import PatchSet
from memprof.script.changed_files import change_files, show_changed_lines


def test_a_script_and_a_module_with_compiled_code(tmp_path, monkeypatch):
    (tmp_path / "script_of_program.py").write_text("import meters_of_program\nvalue = meters_of_program.value\n")
    module = tmp_path / "meters_of_program.py"
    module.write_text("value = 1\n")
    py_compile.compile(str(module))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = {
        os.path.realpath(
            "script_of_program.py"
        ): "import meters_of_program\nvalue = meters_of_program.value + 'ä'\nline = 3\n",
        os.path.realpath(module): "value = 'b'\n",
    }
    with PatchSet() as patches:
        patches.apply_all(change_files(texts))
        variables = runpy.run_path("script_of_program.py")
    assert (variables["value"], variables["line"]) == ("bä", 3)
    del sys.modules["meters_of_program"]
    assert importlib.import_module("meters_of_program").value == 1
    del sys.modules["meters_of_program"]
    assert runpy.run_path("script_of_program.py")["value"] == 1
    del sys.modules["meters_of_program"]


def test_lines_are_those_of_the_text(tmp_path):
    file = tmp_path / "script.py"
    file.write_text("a\n")
    show_changed_lines({str(file): "b\nc\n"})
    linecache.checkcache(str(file))
    assert linecache.getlines(str(file)) == ["b\n", "c\n"]
    linecache.cache.pop(str(file))
