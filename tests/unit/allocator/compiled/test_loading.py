"""When numba is asked, what it may do, and what becomes of a replay where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from memprof.allocator.compiled import loading, rules
from memprof.allocator.compiled.loading import compiled, is_kept, load
from memprof.cache.store import COMPILED
from tests.unit.allocator.compiled.forced import UNCOMPILED, played_by
from tests.unit.allocator.compiled.programs import SETTINGS, history, program

ROOT = Path(__file__).resolve().parents[4]
_PROGRAM = """
import numba
from memprof.allocator.compiled.loading import load
from tests.unit.allocator.compiled.forced import played_by
from tests.unit.allocator.compiled.programs import history, program
found = load()
assert numba.config.CACHE_DIR == "", "a program's own setting"
trace, answers = program(5), []
for functions in (found, None):
    with played_by(functions) as lengths:
        answers.append(history(trace, "", None, [], writes=True))
    assert bool(lengths) == (functions is not None)
assert answers[0] == answers[1]
print("hits", 0 if found is None else sum(found.play.stats.cache_hits.values()), "compiled" if found else "plain")
"""


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    """A folder of kept answers."""
    monkeypatch.setenv("MEMPROF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def started(folder: Path) -> subprocess.Popen[str]:
    """A process that loads the rules and replays by them and without."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MEMPROF_CACHE": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def said(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate()
    assert process.returncode == 0 and not errors, errors
    return output.strip()


def test_asked_only_where_it_pays(monkeypatch):
    asked: list[bool] = []
    monkeypatch.setattr(loading, "_loaded", [])
    monkeypatch.setattr(loading, "load", lambda: asked.append(True) or UNCOMPILED)
    monkeypatch.setattr(loading, "is_kept", lambda: False)
    assert compiled(loading.FEWEST_KEPT) is None and compiled(loading.FEWEST - 1) is None and not asked
    monkeypatch.setattr(loading, "is_kept", lambda: True)
    assert compiled(loading.FEWEST_KEPT - 1) is None and not asked
    assert compiled(loading.FEWEST_KEPT) is UNCOMPILED and asked
    assert compiled(loading.FEWEST_EVENTS) is UNCOMPILED and compiled(loading.FEWEST_EVENTS - 1) is None
    assert len(asked) == 1


def test_without_numba(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert load() is None
    assert not folder.exists()


@pytest.mark.parametrize("wrong", ["no njit", "njit fails", "its functions fail"])
def test_with_a_numba_that_does_not_work(monkeypatch, folder, wrong):
    def fails(*arguments, **options):
        raise SystemError("initialization failed")

    broken = types.SimpleNamespace(config=types.SimpleNamespace(CACHE_DIR="own"))
    if wrong != "no njit":
        broken.njit = fails if wrong == "njit fails" else lambda **options: lambda function: fails
    monkeypatch.setitem(sys.modules, "numba", broken)
    monkeypatch.setattr(loading, "_loaded", [])
    assert load() is None and broken.config.CACHE_DIR == "own"
    assert compiled(loading.FEWEST) is None


def test_not_where_little_memory_is_left(monkeypatch):
    monkeypatch.setattr(loading, "left_bytes", lambda: loading.ROOM_BYTES - 1)
    monkeypatch.setattr(loading, "_compile", lambda functions: UNCOMPILED)
    assert load() is None
    monkeypatch.setattr(loading, "left_bytes", lambda: loading.ROOM_BYTES)
    assert load() is UNCOMPILED
    monkeypatch.setattr(loading, "left_bytes", lambda: None)
    assert load() is UNCOMPILED


def test_the_folder_is_the_users_own(monkeypatch, folder):
    own = loading._kept_folder()
    assert own is not None and own.parent == folder / COMPILED and own.is_dir()
    assert not is_kept()
    for name in ("play.nbc", "number.nbc"):
        (own / name).touch()
    assert is_kept()
    if hasattr(os, "getuid"):
        folder.chmod(0o777)
        assert loading._kept_folder() is None
        folder.chmod(0o700)
        monkeypatch.setattr(os, "getuid", lambda: -1)
        assert loading._kept_folder() is None
    monkeypatch.setenv("MEMPROF_CACHE", "off")
    assert loading._kept_folder() is None and not is_kept()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders have no modes here")
def test_folders_that_are_made_are_for_their_owner_alone(folder):
    before = os.umask(0o002)
    try:
        assert loading._kept_folder() is not None
    finally:
        os.umask(before)


def test_a_file_where_the_folder_would_be(folder):
    folder.write_text("")
    assert loading._kept_folder() is None and not is_kept()


def test_another_source_has_another_folder(monkeypatch, folder):
    before = loading._folder()
    monkeypatch.setattr(loading, "_SOURCES", ("compiled/rules.py",))
    assert loading._folder() != before


@pytest.mark.nightly
def test_compiled_kept_and_loaded_again(folder):
    """By several processes at once; what is damaged is thrown away, and nothing lies beside the source."""
    together = [started(folder) for _ in range(2)]
    for process in together:
        assert said(process).endswith("compiled")
    assert said(started(folder)) == "hits 1 compiled"
    (kept,) = (folder / COMPILED).iterdir()
    assert len(list(kept.rglob("*.nbc"))) == 2
    assert not list(Path(rules.__file__).parent.rglob("*.nb*"))
    for file in kept.rglob("*.nbc"):
        file.write_bytes(file.read_bytes()[:1000])
    assert said(started(folder)) == "hits 0 plain"
    assert not kept.exists()


@pytest.mark.slow
def test_as_plain_python_where_it_is_compiled(compiled_rules):
    assert compiled_rules is not None
    for seed in range(8):
        trace = program(seed, steps=300)
        for text in SETTINGS.values():
            with played_by(compiled_rules) as lengths:
                one = history(trace, text, None, [100], writes=True)
            with played_by(None):
                two = history(trace, text, None, [100], writes=True)
            assert one == two and lengths
