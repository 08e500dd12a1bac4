"""What is recorded of a run's surroundings: without torch being imported, and without a variable being set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memprof.device.environment import VARIABLES, read_environment
from memprof.device.gpus import NvmlGpu, NvmlSample


def test_records_what_is_here():
    before = dict(os.environ)
    environment = read_environment()
    import torch

    assert environment.torch_version == torch.__version__
    assert environment.torch_cuda == torch.version.cuda
    assert dict(os.environ) == before


def test_imports_no_torch():
    code = "import sys; from memprof.device.environment import read_environment; read_environment(); "
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)


def test_variables_that_are_set():
    variables = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_VISIBLE_DEVICES": "1", "HOME": "/nowhere"}
    environment = read_environment(variables=variables)
    assert environment.variables == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    assert set(environment.variables) <= set(VARIABLES)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "hides every GPU"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "hides every GPU"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:2"}, "torch reads the first"),
    ],
)
def test_what_does_not_fit_together(variables, said):
    assert any(said in note for note in read_environment(variables=variables).notes)
    for fitting in (
        {}, {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, {"CUDA_VISIBLE_DEVICES": "0", "PYTORCH_ALLOC_CONF": "a:1"},
        {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:1"},
    ):  # fmt: skip
        assert not any(said in note for note in read_environment(variables=fitting).notes)


@pytest.mark.parametrize(
    ("cuda", "reading", "said"),
    [
        ("13.0", NvmlSample(), "torch is built for CUDA 13.0, and there is no NVIDIA driver here"),
        (
            "13.0",
            NvmlSample((NvmlGpu(0, "x"),), "570.1", "12.8"),
            "torch is built for CUDA 13.0, and the driver runs CUDA 12.8 at most",
        ),
        (
            None,
            NvmlSample((NvmlGpu(0, "x"),), "570.1", "12.8"),
            "there is a GPU, and the installed torch is built without CUDA",
        ),
        ("12.9", NvmlSample((NvmlGpu(0, "x"),), "570.1", "12.8"), None),
    ],
)
def test_build_and_driver(monkeypatch, cuda, reading, said):
    monkeypatch.setattr(
        "memprof.device.environment._read_torch_version", lambda: {"__version__": "2.13.0", "cuda": cuda}
    )
    monkeypatch.setattr("memprof.device.environment._read_loaded_driver", lambda: None)
    assert read_environment(reading, {}).notes == (() if said is None else (said,))
