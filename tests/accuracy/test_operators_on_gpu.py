"""Operators request on the virtual GPU what an H100 was recorded to be asked for, but for those listed here."""

from __future__ import annotations

import fnmatch
import importlib.metadata
from pathlib import Path

import pytest

from tests.accuracy.truth import compare
from tests.gpu.compare_operators import read
from tests.processes import ROOT, python

# Operator -> why its requests differ.
DIFFERENT = {
    "conv*": "cuDNN does not publish its plans (kernels/convolution.py)",
    "linalg.*": "cuSOLVER's workspaces, and flags of a few bytes",
    "fft": "cuFFT's workspace",
    "bincount": "the result is as large as values that are not known",
    "masked_select": "the result is as large as values that are not known",
    "nonzero": "the result is as large as values that are not known",
    "where": "the result is as large as values that are not known",
    "TransformerEncoderLayer": "one tensor of 4 MiB in its backward, not looked into",
}
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
    assert [name for name in sorted(differ) if not any(fnmatch.fnmatch(name, known) for known in DIFFERENT)] == []
