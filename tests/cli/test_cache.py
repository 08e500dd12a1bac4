"""The cache of answers, as a user meets it."""

import json
import os
import sys

import pytest

from memprof.flows.cache import results
from tests.golden.test_report import document
from tests.processes import ROOT
from tests.unit.test_architecture import _modules

SMALL = ("profile", "--model-size", "1M", "--context-length", "64")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPROF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(results, "stamp_loaded_files", list)  # this process is older than what it tests
    return tmp_path / "cache"


@pytest.mark.nightly
def test_the_same_question_has_the_same_answer_from_the_cache(memprof, folder, tmp_path):
    memprof(*SMALL, "--no-cache")  # libraries set variables of their own when they are imported
    first, second = memprof(*SMALL), memprof(*SMALL)
    assert "from the cache" not in first.stderr
    assert second.stdout == first.stdout and second.exit_code == first.exit_code == 0
    (line,) = second.stderr.splitlines()
    assert line.startswith("memprof: from the cache, simulated ") and "--no-cache" in line
    assert "from the cache" not in memprof(*SMALL, "--no-cache").stderr
    assert memprof(*SMALL, "-q").stderr == ""
    assert memprof(*SMALL, "--json").json["command"] == "profile"
    # Another question, and what needs every event.
    assert "from the cache" not in memprof(*SMALL, "--batch-size", "2").stderr
    assert "from the cache" not in memprof(*SMALL, "--save", tmp_path / "a.memprof").stderr
    assert memprof("show", tmp_path / "a.memprof").stdout == first.stdout

    listed = memprof("cache").stdout.splitlines()
    assert listed[0].startswith(f"{folder}: 2 answers, ") and "memprof profile --model-size 1M" in listed[1]
    asked = {row["asked"] for row in memprof("cache", "--json").json["answers"]}
    assert asked == {
        f"memprof {' '.join(SMALL)} --save {tmp_path}/a.memprof",
        f"memprof {' '.join(SMALL)} --batch-size 2",
    }
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-20])
    assert "damaged: not used" in memprof("cache").stdout
    again = memprof(*SMALL)
    assert again.stdout == first.stdout and "from the cache" not in again.stderr
    assert memprof("cache", "--clear").stdout == f"2 answers removed from {folder}\n"
    assert not folder.exists()


def test_without_a_cache_nothing_is_kept(memprof, folder, monkeypatch):
    monkeypatch.setenv("MEMPROF_CACHE", "off")
    assert "nothing is kept" in memprof("cache").stdout
    assert memprof("cache", "--json").json["folder"] is None
    folder.write_text("a file is in the way")
    monkeypatch.setenv("MEMPROF_CACHE", str(folder))
    assert memprof(*SMALL).exit_code == 0 and memprof(*SMALL).stderr == ""


def test_a_failed_run_is_not_kept(memprof, folder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 3}))
    assert memprof("profile", "--model", tmp_path).exit_code != 0
    assert not folder.exists()


def test_recommend_is_kept_too(memprof, monkeypatch):
    from memprof.flows.recommend import largest_models
    from memprof.report.documents.recommendation import LargestModel, Recommendation
    from memprof.trace.facts import DeviceFacts

    calls = []

    def answer(spec, progress):
        calls.append(spec)
        row = LargestModel("inference", "gpt2", 1, 2, 3, 4, 8, "gpt2-medium", 9, "memprof profile --model gpt2")
        return Recommendation(DeviceFacts("GPU", 8 << 30, 7 << 30), context_length=9, largest=(row,), runs=1)

    monkeypatch.setattr(largest_models, "recommend_largest_models", answer)
    first, second = memprof("recommend", "--gpu-vram", "8"), memprof("recommend", "--gpu-vram", "8")
    assert len(calls) == 1 and second.stdout == first.stdout and "from the cache" in second.stderr
    memprof("recommend", "--gpu-vram", "8", "--no-cache")
    memprof("recommend", "--gpu-vram", "9")
    assert len(calls) == 3


FOUND = """
from memprof.flows.cache import results
from memprof.cli.main import run
import json, pathlib
report = json.loads(pathlib.Path({report!r}).read_text()) | {{"memprof_version": "0"}}
results.ResultCacheEntry.find = lambda self, kind: (kind.from_json(report), 5.0)
try:
    run(["profile", "--model", "gpt2", "--context-length", "64", "-q"])
except SystemExit as done:
    assert not done.code, done.code
"""


def test_a_kept_answer_needs_no_torch(folder, tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    document(8 << 30).save(report)
    modules = _modules(FOUND.format(report=str(report)))
    assert "memprof.report.terminal.brief" in modules
    assert not {"torch", "transformers", "numpy", "pandas", "memprof.findings.rules", "memprof.flows.profile"} & modules


@pytest.mark.nightly
def test_two_processes_in_turn(tmp_path):
    """As people use it: all of it in processes of their own."""
    import subprocess

    command = [sys.executable, "-m", "memprof", *SMALL]
    environment = {**os.environ, "MEMPROF_CACHE": str(tmp_path / "own"), "PYTHONPATH": str(ROOT)}
    done = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    assert done[0].stdout == done[1].stdout
    assert "from the cache" in done[1].stderr and "from the cache" not in done[0].stderr
