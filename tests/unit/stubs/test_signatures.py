"""The comparison of stubs with sources, on a source that differs; the lists that it has written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import memprof
from memprof.stubs import registry
from memprof.stubs.packages import PACKAGES, read_public_names
from tests.accuracy import stub_signatures

SOURCE = """
import torch
from made_up.inner import helper

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps=1e-5): ...

norm = Function.apply
class Layer(torch.nn.Module):
    def forward(self, x): ...
def scale(x, *, by: float = 2.0): ...
if torch:
    _private = 3
"""


@pytest.fixture
def made_up() -> Iterator[None]:
    yield
    registry.unregister("made_up")


@pytest.mark.usefixtures("made_up")
def test_a_parameter_with_another_name_or_default_is_told(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text(SOURCE)
    (tmp_path / "inner.py").write_text("def helper(a, b): ...\n")
    trees = stub_signatures.modules("made_up", tmp_path)
    written = stub_signatures.written("made_up", trees)
    assert written == "made_up: Function Layer _private helper inner norm scale\nmade_up.inner: helper\n"

    @memprof.stub("made_up.norm", source="here")
    def norm(x, eps=0.00001): ...

    @memprof.stub("made_up.scale", source="here")
    def scale(x, *, by=3.0): ...

    @memprof.stub("made_up.helper", source="here")
    def helper(b, a): ...

    @memprof.stub("made_up.Layer", source="here")
    class Layer:
        def forward(self, rows): ...

    @memprof.stub("made_up.unheard_of", source="here")
    def unheard_of(x): ...

    own = stub_signatures.own_rows("made_up")
    assert list(stub_signatures.differences(own, stub_signatures.real_rows("made_up", trees, own))) == [
        "made_up.Layer.forward: (x) there, (rows) here",
        "made_up.helper: (a, b) there, (b, a) here",
        "made_up.scale: (x, *, by=2.0) there, (x, *, by=3.0) here",
        "made_up.unheard_of: not in the source",
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_stub_is_a_name_of_the_real_package(package: str) -> None:
    names = read_public_names(package)
    assert names
    for module, held in registry.find_modules(package).items():
        assert set(held) <= names[module], module
        assert all("@" in one.source for one in held.values())


def test_operators_are_read_in_cpp_and_in_python_that_gives_shapes(tmp_path: Path) -> None:
    own = {"made::a": "x, y", "made::b": "data", "made::c": "x"}
    (tmp_path / "ops.cpp").write_text('m.def(SCHEMA("made::a(Tensor x, "\n  "Tensor(a!) z) -> Tensor(a!)"));')
    (tmp_path / "shapes.py").write_text('@register_meta("b")\ndef shape_of_b(data): ...\n')
    real = stub_signatures.operators("made", tmp_path, own)
    assert list(stub_signatures.differences(own, real)) == [
        "made::a: (x, z) there, (x, y) here",
        "made::c: not in the source",
    ]


def test_each_stub_takes_what_was_read_in_the_source() -> None:
    """By the list that the script made of the real packages: a stub that it lacks was compared with nothing."""
    for package in [*PACKAGES, *stub_signatures.OPERATORS]:
        own, kept = stub_signatures.own_rows(package), stub_signatures.kept()[package]
        assert own
        assert not list(stub_signatures.differences(own, kept))
        assert not {name.removesuffix(".__init__") for name in kept.keys() - own.keys()} - own.keys()
