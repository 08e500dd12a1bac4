"""Attributes of others are replaced for a time, and every one of them is put back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from memprof.patching import PatchSet


def _owner(**values: object) -> ModuleType:
    owner = ModuleType("owner")
    vars(owner).update(values)
    return owner


def test_what_is_replaced_is_put_back_in_reverse_order() -> None:
    owner = _owner(a=1)
    with PatchSet() as patches:
        patches.set(owner, "a", 2)
        patches.set(owner, "a", 3)
        patches.set(owner, "new", 4)
        assert (owner.a, owner.new) == (3, 4)
    assert owner.a == 1
    assert not hasattr(owner, "new")


def test_one_that_cannot_be_put_back_keeps_no_other_from_it() -> None:
    class Once:
        sets = 0

        def __setattr__(self, name: str, value: object) -> None:
            Once.sets += 1
            if Once.sets > 1:
                raise AttributeError("set before")
            vars(self)[name] = value

    first, stubborn, last = _owner(a=1), Once(), _owner(a=1)
    vars(stubborn)["a"] = 1
    patches = PatchSet()
    for owner in (first, stubborn, last):
        patches.set(owner, "a", 2)
    with pytest.raises(AttributeError, match="set before"):
        patches.undo()
    assert (first.a, last.a) == (1, 1)


def test_suspended_shows_what_was_there_before() -> None:
    owner = _owner(a=1)
    with PatchSet() as patches:
        patches.set(owner, "a", 2)
        with patches.suspended():
            assert owner.a == 1
        assert owner.a == 2
    assert owner.a == 1


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "imported_by_test_patch_set"
    (tmp_path / f"{name}.py").write_text("a = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_a_module_is_patched_once_it_is_imported(module: str) -> None:
    before = list(sys.meta_path)
    with PatchSet() as patches:
        patches.apply_on_import(module, lambda imported: [(imported, "a", imported.a + 1)])
        patches.apply_on_import(module, lambda imported: [(imported, "b", imported.a + 1)])
        found = __import__(module)
        assert (found.a, found.b) == (2, 3)
    assert found.a == 1
    assert not hasattr(found, "b")
    assert sys.meta_path == before


def test_one_that_was_imported_before_is_patched_at_once(module: str) -> None:
    found = __import__(module)
    with PatchSet() as patches:
        patches.apply_on_import(module, lambda imported: [(imported, "a", 2)])
        assert found.a == 2
    assert found.a == 1


def test_after_it_is_left_an_import_is_nobodys(module: str) -> None:
    with PatchSet() as patches:
        patches.apply_on_import(module, lambda imported: [(imported, "a", 2)])
    assert __import__(module).a == 1


def test_a_program_may_take_the_hook_out(module: str) -> None:
    before = list(sys.meta_path)
    owner = _owner(a=1)
    with PatchSet() as patches:
        patches.set(owner, "a", 2)
        patches.apply_on_import(module, lambda imported: [])
        sys.meta_path[:] = before
    assert owner.a == 1
