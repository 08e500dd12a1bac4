"""Operators request on the virtual GPU what an H100 was recorded to be asked for, but for those listed here.

Of each table of tests/gpu/library_table.py, whose libraries do not publish what they take: at least as many calls as
said are equal to the byte, and the sums of the others differ by no more than said.
"""

from __future__ import annotations

import importlib.metadata
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.accuracy.truth import compare
from tests.gpu.compare_operators import read
from tests.processes import ROOT, python

_PLANS = "cuDNN does not publish its plans (kernels/convolution.py)"
_VALUES = "the result is as large as values that are not known"
# Operator -> why its requests differ.
DIFFERENT = {
    "conv1d bfloat16": _PLANS, "conv2d 256x28 kernel 1 channels last bfloat16": _PLANS,
    "conv2d 256x28 kernel 1 channels last float32": _PLANS, "conv2d 3x224 kernel 7 channels last bfloat16": _PLANS,
    "conv2d 3x224 kernel 7 channels last float32": _PLANS, "conv2d 3x224 kernel 7 float32": _PLANS,
    "conv3d bfloat16": _PLANS, "conv3d float32": _PLANS, "conv_transpose2d float32": _PLANS,
    "linalg.eig": "cuSOLVER's buffer is 3 KB smaller", "linalg.matrix_exp": "its many steps depend on the values",
    "bincount": _VALUES, "masked_select": _VALUES, "nonzero": _VALUES, "where": _VALUES,
    "TransformerEncoderLayer": "one tensor of 4 MiB in its backward, not looked into",
}  # fmt: skip


class Agreement(NamedTuple):
    """How a family of operators agrees with its recording."""

    equal: int  # calls, at least
    mean: float  # of the differences of sums, as a share of the recorded one, at most


FAMILIES = {
    "convolutions": Agreement(81, 0.08),
    # 24 norms ask for the same in another order; what else differs is in kernels/solver_buffers.py, and matrix_exp.
    "factorisations": Agreement(514, 0.062),
    "recurrences": Agreement(196, 0),
    "transforms": Agreement(132, 0.03),
}
RECORDED = [folder / "operators.jsonl" for folder in compare.folders() if (folder / "operators.jsonl").is_file()]


def simulated(out: Path, *options: str) -> dict[str, dict[str, Any]]:
    release = tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))
    if release < (2, 11):
        pytest.skip(f"recorded with torch 2.11, whose libraries are others than those of {release[0]}.{release[1]}")
    done = python("-m", "tests.gpu.operators", "virtual", "--gpu", "h100-80gb", "--out", out, *options, folder=ROOT)
    assert done.exit_code == 0, done.stderr
    return read(out)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.parent.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_agree_as_well_as_they_did(file: Path, family: str, tmp_path: Path) -> None:
    recorded, virtual = read(file.with_name(f"{family}.jsonl")), simulated(tmp_path / "out.jsonl", "--family", family)
    real = {name: line["again"] for name, line in recorded.items() if "again" in line}
    assert real.keys() <= virtual.keys()
    requested = {name: virtual[name].get("again", []) for name in real}
    differences = [abs(sum(requested[name]) - sum(real[name])) / max(sum(real[name]), 1) for name in real]
    found = Agreement(sum(real[name] == requested[name] for name in real), statistics.mean(differences))
    assert found.equal >= FAMILIES[family].equal and found.mean <= FAMILIES[family].mean, found


@pytest.mark.slow
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.parent.name)
@pytest.mark.nightly
def test_requests_are_those_of_the_gpu(file: Path, tmp_path: Path) -> None:
    real, virtual = read(file), simulated(tmp_path / "virtual.jsonl")
    assert real.keys() == virtual.keys() and len(real) > 150
    # The second call: what a library takes once hangs on what ran before.
    differ = {name for name in real if sorted(real[name]["again"]) != sorted(virtual[name].get("again", ()))}
    assert differ == DIFFERENT.keys()
