"""Operators request on the virtual GPU what an H100 was recorded to be asked for, but for those listed here."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from tests.accuracy.truth import compare
from tests.gpu.compare_operators import read
from tests.processes import ROOT, python

_PLANS = "cuDNN does not publish its plans (kernels/convolution.py)"
_SOLVER = "cuSOLVER's workspaces, and flags of a few bytes"
_VALUES = "the result is as large as values that are not known"
# Operator -> why its requests differ.
DIFFERENT = {
    "conv1d bfloat16": _PLANS, "conv2d 256x28 kernel 1 channels last bfloat16": _PLANS,
    "conv2d 256x28 kernel 1 channels last float32": _PLANS, "conv2d 3x224 kernel 7 channels last bfloat16": _PLANS,
    "conv2d 3x224 kernel 7 channels last float32": _PLANS, "conv2d 3x224 kernel 7 float32": _PLANS,
    "conv3d bfloat16": _PLANS, "conv3d float32": _PLANS, "conv_transpose2d float32": _PLANS,
    "linalg.cholesky": _SOLVER, "linalg.det": _SOLVER, "linalg.eig": _SOLVER, "linalg.eigh": _SOLVER,
    "linalg.inv of a batch": _SOLVER, "linalg.inv": _SOLVER, "linalg.lstsq": _SOLVER, "linalg.lu": _SOLVER,
    "linalg.matrix_exp": _SOLVER, "linalg.pinv": _SOLVER, "linalg.qr of a batch": _SOLVER, "linalg.qr": _SOLVER,
    "linalg.solve": _SOLVER, "linalg.svd": _SOLVER, "linalg.svdvals": _SOLVER,
    "bincount": _VALUES, "masked_select": _VALUES, "nonzero": _VALUES, "where": _VALUES,
    "fft": "cuFFT's workspace",
    "TransformerEncoderLayer": "one tensor of 4 MiB in its backward, not looked into",
}  # fmt: skip
RECORDED = [folder / "operators.jsonl" for folder in compare.folders() if (folder / "operators.jsonl").is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.parent.name)
def test_requests_are_those_of_the_gpu(file: Path, tmp_path: Path) -> None:
    release = tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))
    if release < (2, 11):
        pytest.skip(f"recorded with torch 2.11, whose libraries are others than those of {release[0]}.{release[1]}")
    out = tmp_path / "virtual.jsonl"
    done = python("-m", "tests.gpu.operators", "virtual", "--gpu", "h100-80gb", "--out", out, folder=ROOT)
    assert done.exit_code == 0, done.stderr
    real, virtual = read(file), read(out)
    assert real.keys() == virtual.keys() and len(real) > 150
    # The second call: what a library takes once hangs on what ran before.
    differ = {name for name in real if sorted(real[name]["again"]) != sorted(virtual[name].get("again", ()))}
    assert differ == DIFFERENT.keys()
