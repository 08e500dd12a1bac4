"""The comparison of stand-ins with sources, on a source that differs; the lists that it has written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import memprof
from memprof.catalog.stand_ins import PACKAGES, public_names
from memprof.virtual.stand_ins import registry
from tests.accuracy import stand_in_signatures

SOURCE = """
import torch
from made_up.inner import helper

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps=1e-5): ...

norm = Function.apply
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
    trees = stand_in_signatures.modules("made_up", tmp_path)
    written = stand_in_signatures.written("made_up", trees)
    assert written == "made_up: Function _private helper inner norm scale\nmade_up.inner: helper\n"

    @memprof.stand_in("made_up.norm", source="here")
    def norm(x, eps=0.00001): ...

    @memprof.stand_in("made_up.scale", source="here")
    def scale(x, *, by=3.0): ...

    @memprof.stand_in("made_up.helper", source="here")
    def helper(b, a): ...

    assert list(stand_in_signatures.differences("made_up", trees)) == [
        "made_up.helper: (a, b) there, (b, a) here",
        "made_up.scale: (x, *, by=2.0) there, (x, *, by=3.0) here",
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_stand_in_is_a_name_of_the_real_package(package: str) -> None:
    names = public_names(package)
    assert names
    for module, held in registry.modules(package).items():
        assert set(held) <= names[module], module
        assert all("@" in one.source for one in held.values())
