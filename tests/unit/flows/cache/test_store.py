"""The folder of cached results: found again, bounded, and never in the way."""

import multiprocessing
import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from memprof.errors import UsageError
from memprof.flows.cache.store import Store, get_cache_folder

KEYS = [f"{number:064x}" for number in range(40)]


@pytest.mark.parametrize(
    ("environ", "platform", "folder"),
    [
        ({}, "linux", "HOME/.cache/memprof"),
        ({"XDG_CACHE_HOME": "/var/kept"}, "linux", "/var/kept/memprof"),
        ({"XDG_CACHE_HOME": "relative"}, "linux", "HOME/.cache/memprof"),
        ({}, "darwin", "HOME/Library/Caches/memprof"),
        ({}, "win32", "HOME/AppData/Local/memprof/Cache"),
        ({"MEMPROF_CACHE": "/elsewhere"}, "linux", "/elsewhere"),
        ({"MEMPROF_CACHE": "~/mine"}, "linux", "HOME/mine"),
        ({"MEMPROF_CACHE": "off"}, "linux", None),
        ({"MEMPROF_CACHE": ""}, "linux", None),
    ],
)
def test_the_folder_is_the_platforms(environ, platform, folder):
    found = get_cache_folder(environ, platform)
    assert found == (None if folder is None else Path(folder.replace("HOME", str(Path.home()))))


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert get_cache_folder({}) is None


def test_what_is_kept_is_found_again_and_nobody_else_may_read_it(tmp_path):
    store = Store(tmp_path / "a" / "b")
    assert store.find(KEYS[0]) is None and store.list_entries() == []
    assert store.save(KEYS[0], {"text": "ä", "number": 2**70, "list": [None, 1.5]})
    assert Store(tmp_path / "a" / "b").find(KEYS[0]) == {"text": "ä", "number": 2**70, "list": [None, 1.5]}
    assert store.find(KEYS[1]) is None
    assert [path.name for path in store.folder.iterdir()] == [f"{KEYS[0]}.answer"]
    if os.name == "posix":
        assert not store.folder.stat().st_mode & 0o077
        assert not store.list_entries()[0].path.stat().st_mode & 0o077


def test_what_was_asked_for_least_recently_goes_first(tmp_path):
    text = os.urandom(150).hex()
    Store(tmp_path).save(KEYS[9], {"text": text})
    store = Store(tmp_path, max_bytes=5 * Store(tmp_path).list_entries()[0].num_bytes + 50)
    store.clear()
    for number, key in enumerate(KEYS[:4]):
        assert store.save(key, {"text": text})
        os.utime(store.list_entries()[0].path, (number, number))
    store.find(KEYS[0])
    before = {entry.path.stem for entry in store.list_entries()}
    for key in KEYS[4:8]:
        store.save(key, {"text": text})
    after = {entry.path.stem for entry in store.list_entries()}
    assert len(before) == 4 and KEYS[0] in after and not {KEYS[1], KEYS[2]} & after
    assert sum(entry.num_bytes for entry in store.list_entries()) <= store.max_bytes
    assert not store.save(KEYS[10], {"text": os.urandom(4000).hex()}) and store.find(KEYS[10]) is None


@pytest.mark.parametrize("harm", ["truncated", "emptied", "flipped", "text", "folder", "fifo", "binary"])
def test_a_damaged_file_is_none(tmp_path, harm):
    store = Store(tmp_path)
    store.save(KEYS[0], {"answer": list(range(100))})
    path = store.list_entries()[0].path
    whole = path.read_bytes()
    if harm in ("folder", "fifo"):
        path.unlink()
        path.mkdir() if harm == "folder" else os.mkfifo(path)
    else:
        changed = bytearray(whole)
        changed[-9] ^= 1
        harmed = {"truncated": whole[:-3], "emptied": b"", "flipped": bytes(changed), "text": b"{}\n"}
        path.write_bytes(harmed.get(harm, b"\xff" * 50))
    assert store.find(KEYS[0]) is None
    if harm not in ("folder", "fifo"):
        assert store.save(KEYS[0], {"again": 1}) and store.find(KEYS[0]) == {"again": 1}


def test_every_cut_and_every_flipped_byte_is_seen(tmp_path):
    store = Store(tmp_path)
    store.save(KEYS[0], {"a": 1})
    path = store.list_entries()[0].path
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place])
        assert store.find(KEYS[0]) is None
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])
        assert store.find(KEYS[0]) is None


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert not Store(tmp_path / "file" / "cache").save(KEYS[0], {})
    assert Store(tmp_path / "file" / "cache").clear() == 0

    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    store = Store(tmp_path / "cache")
    monkeypatch.setattr(os, "replace", full)
    assert not store.save(KEYS[0], {"a": 1})
    assert list((tmp_path / "cache").iterdir()) == []


def test_clearing_leaves_the_files_of_others(tmp_path):
    store = Store(tmp_path / "cache")
    for key in KEYS[:3]:
        store.save(key, {"a": 1})
    (store.folder / f".{KEYS[0]}.x7.answer").write_text("half")
    (store.folder / "thesis.txt").write_text("mine")
    assert store.clear() == 3
    assert [path.name for path in store.folder.iterdir()] == ["thesis.txt"]
    (store.folder / "thesis.txt").unlink()
    assert store.clear() == 0 and not store.folder.exists()


def test_what_was_left_half_written_long_ago_is_removed(tmp_path):
    store = Store(tmp_path)
    old, new = (tmp_path / f".{KEYS[0]}.{name}.answer" for name in ("old", "new"))
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (time.time() - 7200,) * 2)
    store.save(KEYS[1], {"a": 1})
    assert not old.exists() and new.exists()


def _work(folder: Path, seed: int) -> None:
    store = Store(folder, max_bytes=3000)
    for turn in range(60):
        key = KEYS[(seed + turn) % 10]
        found = store.find(key)
        assert found in (None, {"key": key, "padding": key * 5})
        store.save(key, {"key": key, "padding": key * 5})
        if turn % 20 == 19:
            store.clear()


def test_processes_at_once_see_whole_answers_or_none(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_work, args=(tmp_path, seed)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert not [path for path in tmp_path.glob("*") if path.name.startswith(".")]


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "answers"):
        with pytest.raises(UsageError):
            Store(folder).make_folder()

    def refuse(*arguments, **more):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(UsageError, match="cannot be written to: Read-only file system"):
        Store(tmp_path / "answers").make_folder()


def test_a_claim_ends_with_its_process(tmp_path):
    """Killed sweeps withdraw no claims; those of other machines end after a minute."""
    store, claim = Store(tmp_path), tmp_path / f".{KEYS[0]}.claim.answer"
    assert store.claim(KEYS[0]) and not store.claim(KEYS[0])
    here = claim.read_bytes()
    ended = subprocess.Popen(["true"])
    ended.wait()
    pid = b"%d" % ended.pid
    for content, is_free in ((b"", False), (pid + b" elsewhere", False), (pid + here[here.index(b" ") :], True)):
        claim.write_bytes(content)
        assert store.claim(KEYS[0]) is is_free
    assert claim.read_bytes() == here
    os.utime(claim, (time.time() - 61,) * 2)
    assert store.claim(KEYS[0])
