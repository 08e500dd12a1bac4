"""An extension is a class in a file of its own: found there, put in place for a run, and taken away after it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memprof.device.catalog import find_gpu
from memprof.patching import Extension, Patch, find_extensions

torch = pytest.importorskip("torch")


class Library(ModuleType):
    where = "none"


class OfLibrary(Extension):
    imports = ("library_of_test_extension",)
    environment = {"LIBRARY": "on"}  # noqa: RUF012

    def __init__(self, library: ModuleType) -> None:
        self.library = library
        self.inside = False

    def patches(self, context: Any) -> Iterator[Patch]:
        yield self.library, "where", context.gpu.name

    def make_module_patches(self, module: ModuleType, context: Any) -> Iterator[Patch]:
        yield module, "a", context.gpus.num_gpus

    @contextlib.contextmanager
    def around(self, context: Any) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False


def test_it_is_in_place_for_the_length_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memprof.virtual import VirtualGpu

    (tmp_path / "library_of_test_extension.py").write_text("a = 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    library = Library("library")
    extension = OfLibrary(library)
    with VirtualGpu(find_gpu("h100-80gb"), gpus=2, extensions=[extension]):
        import os

        found = __import__("library_of_test_extension")
        assert (library.where, found.a, extension.inside) == ("NVIDIA H100 80GB HBM3", 2, True)
        assert os.environ["LIBRARY"] == "on"
    assert (library.where, found.a, extension.inside) == ("none", 0, False)
    assert "LIBRARY" not in os.environ
    sys.modules.pop("library_of_test_extension", None)


def test_those_of_a_folder_are_found_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_test_extension"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("from memprof.patching import Extension\n\nclass One(Extension):\n    pass\n")
    (package / "two.py").write_text("from package_of_test_extension.one import One\n\nclass Two(One):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert [kind.__name__ for kind in find_extensions(package.name)] == ["One", "Two"]
    for name in [name for name in sys.modules if name.startswith(package.name)]:
        del sys.modules[name]
