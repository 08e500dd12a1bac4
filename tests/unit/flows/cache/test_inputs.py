"""What an answer rests on: whatever changes makes another question of it."""

import os
import sys
import types

import pytest

from memprof.flows.cache import inputs


def test_it_is_the_same_twice():
    assert inputs.describe_environment() == inputs.describe_environment()


@pytest.mark.parametrize(("name", "counts"), [("PYTORCH_CUDA_ALLOC_CONF", True), ("HF_HOME", True), ("LINES", False)])
def test_variables_that_libraries_read_count(name, counts):
    before = inputs.describe_environment({})
    assert (inputs.describe_environment({name: "x"}) != before) is counts
    assert inputs.describe_environment({"MEMPROF_CACHE": "/elsewhere"}) == before


def test_what_is_installed_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = [inputs.describe_environment()]
    (tmp_path / "peft-1.0.dist-info").mkdir()
    found.append(inputs.describe_environment())
    (tmp_path / "peft-1.0.dist-info").rename(tmp_path / "peft-1.1.dist-info")
    found.append(inputs.describe_environment())
    (tmp_path / "transformers.py").write_text("")
    found.append(inputs.describe_environment())
    assert all(one != other for at, one in enumerate(found) for other in found[:at])
    (tmp_path / "notes.txt").write_text("")
    assert inputs.describe_environment() == found[-1]


def test_every_file_of_memprof_counts(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    table = tmp_path / "data" / "gpus.toml"
    table.write_text("a = 1")
    monkeypatch.setattr(inputs, "_PACKAGE_FOLDER", tmp_path)
    before = inputs.describe_environment()
    table.write_text("a = 12")
    after = inputs.describe_environment()
    assert before != after
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.pyc").write_text("")
    assert inputs.describe_environment() == after
    (tmp_path / "new.py").write_text("")
    assert inputs.describe_environment() != after


def test_an_answer_holds_until_a_file_of_it_changes(tmp_path, monkeypatch):
    file = tmp_path / "modeling.py"
    file.write_text("x = 1")
    os.utime(file, (1, 1))
    module = types.ModuleType("modeling_of_this_test")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    # A test may be younger than the modules that it runs beside.
    monkeypatch.setattr(inputs, "_START_TIME_NS", 1 << 62)
    stamps = inputs.stamp_loaded_files()
    assert stamps is not None and str(file) in {path for path, *_ in stamps}
    assert inputs.are_files_unchanged(stamps)
    file.write_text("x = 2")
    assert not inputs.are_files_unchanged(stamps)
    os.utime(file, (1, 1))
    assert inputs.are_files_unchanged(stamps)  # the same size and time: as Python itself sees it
    file.unlink()
    assert not inputs.are_files_unchanged(stamps)
    assert not inputs.are_files_unchanged([["half"]])


def test_what_changed_while_it_ran_gives_no_answer_to_keep(tmp_path, monkeypatch):
    file = tmp_path / "modeling.py"
    file.write_text("x = 1")
    module = types.ModuleType("modeling_of_this_test")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(inputs, "_START_TIME_NS", os.stat(file).st_mtime_ns - 1)
    assert inputs.stamp_loaded_files() is None
