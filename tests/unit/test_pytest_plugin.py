"""The pytest plugin, in test suites of its users."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import python

pytest_plugins = "pytester"
ROOT = Path(__file__).resolve().parents[2]

SUITE = """
import unittest

import pytest
import torch
from torch import nn

GIB = 1 << 30


@pytest.fixture
def layer():
    return nn.Linear(16384, 16384, bias=False).to("cuda")  # 1 GiB


def train(layer):
    layer(torch.ones(1024, 16384, device="cuda")).sum().backward()  # activations, gradients: 1.2 GiB more


@pytest.mark.memprof(gpu="rtx-4090", limit="4GiB")
def test_fits(layer, virtual_gpu):
    train(layer)
    assert GIB < virtual_gpu.allocated_bytes < 3 * GIB
    assert torch.cuda.get_device_name() == "NVIDIA GeForce RTX 4090"


@pytest.mark.memprof("rtx-4090", limit="2GiB")
def test_is_over_its_limit(layer):
    train(layer)


@pytest.mark.memprof(vram=2)
def test_is_over_its_gpu(layer):
    train(layer)


@pytest.mark.memprof(vram=2.1, limit="2048MiB")
def test_cache_does_not_count():
    for size in (900, 1000, 1100, 1200):  # each is freed, and kept by the allocator until the GPU is full
        torch.empty(size << 20, dtype=torch.uint8, device="cuda")


@pytest.mark.memprof(gpu="rtx-4090")
def test_fails_by_itself(layer):
    assert layer is None


@pytest.mark.memprof
def test_uses_nothing():
    pass


@pytest.mark.xfail(strict=True)
@pytest.mark.memprof(vram=2)
def test_is_known_not_to_fit(layer):
    train(layer)


@pytest.mark.memprof(limit="1GiB")
class TestClass(unittest.TestCase):
    def test_method(self):
        torch.empty(1 << 20, device="cuda")


def test_fixture_alone_judges_nothing(virtual_gpu):
    torch.empty(200 * GIB, dtype=torch.uint8, device="cuda")
    report = virtual_gpu.report()
    assert not report.verdict.fits


def test_without_any():
    assert not torch.cuda.is_available()


@pytest.mark.memprof(gpu="rtx-4909")
def test_unknown_gpu():
    pass


@pytest.mark.memprof(gpu="rtx-4090", limit="lots")
def test_no_amount():
    pass


@pytest.mark.memprof(gpu="rtx-4090", limit="80GiB")
def test_more_than_there_is():
    pass


@pytest.mark.memprof(gpu="rtx-4090", limit="100MiB")
def test_less_than_the_context():
    pass


@pytest.mark.memprof(GPU="rtx-4090")
def test_unknown_argument():
    pass


@pytest.mark.memprof(gpus=2, vram=2)
def test_the_second_gpu_is_full(layer):
    layer.to("cuda:1")(torch.ones(1024, 16384, device="cuda:1")).sum().backward()


@pytest.mark.memprof(gpus=2, rank=3, world_size=4)
def test_one_rank(layer):
    torch.distributed.init_process_group("nccl")
    assert torch.distributed.get_rank() == 3 and torch.cuda.device_count() == 2


@pytest.mark.memprof(gpus="2")
def test_no_number_of_gpus():
    pass


@pytest.mark.memprof(gpus=2, rank=2)
def test_no_such_rank():
    pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder of a user's tests; `run` gives it the plugin, and no other that happens to be installed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\naddopts = --strict-markers -p no:cacheprovider")
    return pytester


def run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return suite.runpytest_subprocess("-p", "memprof.pytest_plugin", *arguments)


def test_a_suite(suite: pytest.Pytester) -> None:
    suite.makepyfile(SUITE)
    done = python("-m", "pytest", "-p", "memprof.pytest_plugin", "-v", "-rA", folder=suite.path)
    lines = done.stdout.splitlines()
    outcomes = {
        line.split("::")[-1].split()[0]: line.split()[1]
        for line in lines
        if line.startswith("test_a_suite.py::") and line.endswith("%]")
    }
    assert outcomes == {
        "test_fits": "PASSED",
        "test_is_over_its_limit": "FAILED",
        "test_is_over_its_gpu": "FAILED",
        "test_cache_does_not_count": "PASSED",
        "test_fails_by_itself": "FAILED",
        "test_uses_nothing": "FAILED",
        "test_is_known_not_to_fit": "XFAIL",
        "test_method": "PASSED",
        "test_fixture_alone_judges_nothing": "PASSED",
        "test_without_any": "PASSED",
        "test_unknown_gpu": "ERROR",
        "test_no_amount": "ERROR",
        "test_more_than_there_is": "ERROR",
        "test_less_than_the_context": "ERROR",
        "test_unknown_argument": "ERROR",
        "test_the_second_gpu_is_full": "FAILED",
        "test_one_rank": "PASSED",
        "test_no_number_of_gpus": "ERROR",
        "test_no_such_rank": "ERROR",
    }
    shown = pytest.LineMatcher(lines)
    shown.fnmatch_lines([
        "*_ test_is_over_its_limit _*",
        "memprof: does not fit: it takes 2.*GiB with cached memory and the CUDA context (* held to 2.00 GiB)",
        "  peak: 2.* GiB allocated in backward of step 1; 2.* GiB reserved in backward of step 1",
        "  full: in backward of step 1 at test_a_suite0/test_a_suite.py:16, requested 1.00 GiB with 1.* GiB in use",
        "  largest at the peak:",
        "    1.00 GiB ?16384x16384? float32: parameters weight",
        "    1.00 GiB ?16384x16384? float32: gradients weight",
        "    64.00 MiB ?1024x16384? float32: inputs at test_a_suite0/test_a_suite.py:16",
    ])  # fmt: skip
    shown.fnmatch_lines(["memprof: the test has the marker, and used no memory of the GPU: move the model*"])
    # What is wrong with a marker, with the value and what to do.
    shown.fnmatch_lines(["usage error of the marker memprof: unknown GPU", "*'rtx-4909'", "*did you mean 'rtx-4090'?*"])
    shown.fnmatch_lines(["usage error of the marker memprof: not an amount of memory", "*'lots'"])
    shown.fnmatch_lines(["usage error of the marker memprof: the limit is more than the GPU has"])
    shown.fnmatch_lines(["usage error of the marker memprof: the limit leaves nothing beside the CUDA context"])
    shown.fnmatch_lines(["usage error of the marker memprof: gpus is not a whole number", "*'2'"])
    shown.fnmatch_lines(["usage error of the marker memprof: there is no such rank", "*rank=2 of 2"])
    shown.fnmatch_lines(["usage error of the marker memprof: got an unexpected keyword argument 'GPU'"])


@pytest.mark.nightly
def test_with_workers(suite: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    suite.makepyfile("""
        import pytest, torch

        @pytest.mark.memprof(vram=1)
        @pytest.mark.parametrize("mib", [100, 900])
        def test_size(mib):
            torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
    """)
    result = run(suite, "-p", "xdist", "-n", "1")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["memprof: does not fit: it takes 1.29 GiB with cached memory and the CUDA context (custom GPU with 1.00 GiB)"]
    )


def test_a_suite_that_does_not_use_it_pays_nothing(suite: pytest.Pytester) -> None:
    suite.makepyfile("""
        import sys

        def test_nothing_was_imported():
            heavy = {"torch", "transformers", "rich", "pandas", "numpy", "memprof.flows.profile", "memprof.virtual"}
            assert not heavy & set(sys.modules)
    """)
    result = run(suite, "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.memprof(gpu='h100-80gb', *limit=None*"])
    run(suite).assert_outcomes(passed=1)
