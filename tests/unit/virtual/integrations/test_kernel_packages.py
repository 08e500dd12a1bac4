"""Packages of Python and Triton, which install anywhere (flash-linear-attention, Liger-Kernel), and what they ask."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu

GPU = find_gpu("h100-80gb")
SMS = 132
MIB = 1 << 20


PROPERTIES = {"max_shared_mem": 227 * 1024, "max_num_regs": 65_536, "multiprocessor_count": SMS, "warpSize": 32}


def test_tritons_driver_describes_the_gpu() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: its driver was not asked")
    from triton.runtime import driver

    with VirtualGpu(GPU):
        target = driver.active.get_current_target()
        assert (target.backend, target.arch) == ("cuda", 90)
        assert driver.active.utils.get_device_properties(0) == PROPERTIES


FLA = """
import torch
from fla.modules import FusedRMSNormGated
from fla.utils import device, get_multiprocessor_count

print(device, get_multiprocessor_count(0))
norm = FusedRMSNormGated(1024).cuda()
x, gate = (torch.randn(4096, 1024, device="cuda", requires_grad=True) for _ in range(2))
for _ in range(2):  # kernels are timed at their first call
    y, gradient = norm(x, gate), torch.empty(4096, 1024, device="cuda")
    x.grad = gate.grad = norm.weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y.backward(gradient)
    print(torch.cuda.max_memory_allocated() - before)
"""


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_flash_linear_attention_finds_the_gpu(tmp_path) -> None:
    """Gradients of both inputs, and a row of partial sums for each multiprocessor (fla/modules/norm/
    fused_norm_gate.py, layer_norm_gated_bwd); at the first call the buffer of Triton's benchmark."""
    script = tmp_path / "norm.py"
    script.write_text(FLA)
    command = [sys.executable, "-m", "memprof", "run", "--gpu", "h100-80gb", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    taken = 2 * 16 * MIB + 4 * SMS * 1024
    assert done.stdout.splitlines()[:3] == [f"cuda {SMS}", str(taken + 256 * MIB), str(taken + 4096)], done.stderr
    assert "roll back to CPU" not in done.stderr


def test_liger_kernels_norm_keeps_partial_sums_for_each_multiprocessor() -> None:
    """A gradient of the input in place of the output's, and partial sums (liger_kernel/ops/rms_norm.py,
    rms_norm_backward)."""
    norms = pytest.importorskip("liger_kernel.transformers.rms_norm", reason="Liger-Kernel is not installed")
    with VirtualGpu(GPU, workspaces=False, skips_kernels=True):
        norm = norms.LigerRMSNorm(1024).cuda()
        x = torch.randn(4096, 1024, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        y = norm(x)
        assert torch.cuda.memory_allocated() - before == 16 * MIB + 4 * 4096, "the output, and a factor for each row"
        gradient = torch.empty_like(y)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y.backward(gradient)
        assert torch.cuda.max_memory_allocated() - before == 4 * SMS * 1024 + 4 * 1024
        assert x.grad is not None and x.grad.shape == x.shape
