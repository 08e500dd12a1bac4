"""Answers at an address of fsspec: one object each, found by listing, and errors that say what to do."""

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from memprof.errors import MemprofError, UsageError
from memprof.flows.cache.objects import ObjectStore, open_address
from memprof.flows.cache.store import Store

KEYS = [f"{number:064x}" for number in range(4)]


@pytest.fixture
def address():
    yield "memory://bucket/answers"
    for path in fsspec.filesystem("memory").find("/bucket"):
        MemoryFileSystem.store.pop(path)


def test_two_writers_put_an_object_for_each_answer(address):
    first, second = open_address(address), open_address(address)
    first.save(KEYS[0], {"text": "ä", "number": 2**70})
    second.save(KEYS[0], {"text": "ä", "number": 2**70})
    second.save(KEYS[1], {"list": [None, 1.5]})
    assert open_address(address).find_all(KEYS) == {}
    first.flush()
    second.flush()
    assert open_address(address).find_all(KEYS) == {
        KEYS[0]: {"text": "ä", "number": 2**70},
        KEYS[1]: {"list": [None, 1.5]},
    }
    names = fsspec.filesystem("memory").ls("/bucket/answers", detail=False)
    assert sorted(names) == [f"/bucket/answers/{key}.answer" for key in KEYS[:2]]


def test_only_listed_objects_are_read_and_damaged_ones_are_none(address, monkeypatch):
    store = open_address(address)
    store.save(KEYS[0], {"number": 1})
    store.flush()
    fsspec.filesystem("memory").pipe(f"/bucket/answers/{KEYS[1]}.answer", b"cut off")
    read = []
    cat = MemoryFileSystem.cat
    monkeypatch.setattr(MemoryFileSystem, "cat", lambda self, paths, **more: read.extend(paths) or cat(self, paths))
    assert open_address(address).find_all(KEYS) == {KEYS[0]: {"number": 1}}
    assert read == [f"/bucket/answers/{key}.answer" for key in KEYS[:2]]


def test_a_local_address_is_the_folder(tmp_path):
    store = open_address(f"file://{tmp_path}/answers")
    assert isinstance(store, Store) and store.folder == tmp_path / "answers"


@pytest.mark.parametrize(
    ("address", "problem", "hint"),
    [
        ("nosuch://bucket/x", "no such address", "s3://BUCKET/FOLDER"),
        ("oss://bucket/x", "a package is missing for this address", "ossfs"),
    ],
)
def test_an_address_that_cannot_be_used(address, problem, hint):
    with pytest.raises(UsageError, match=problem) as error:
        open_address(address)
    assert hint in error.value.hint and address in error.value.value


def test_a_store_without_permission_is_an_error_by_name(address, monkeypatch):
    store = open_address(address)
    store.save(KEYS[0], {})

    def refuse(self, *arguments, **more):
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(MemoryFileSystem, "pipe", refuse)
    with pytest.raises(MemprofError, match="answers cannot be stored"):
        store.flush()
    monkeypatch.setattr(MemoryFileSystem, "ls", refuse)
    with pytest.raises(UsageError, match="the store cannot be read") as error:
        open_address(address)
    assert error.value.value == "memory:///bucket/answers (403 Forbidden)"
    assert isinstance(store, ObjectStore)
