"""kernels.get_kernel: kernels of the hub that have a stub, and the others by their names."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.stubs import hub
from memprof.virtual import VirtualGpu

GPU = find_gpu("h100-80gb")


def heads() -> torch.Tensor:
    return torch.empty(1, 64, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)


@pytest.mark.parametrize(("repository", "package"), [
    ("kernels-community/flash-attn2", "flash_attn"), ("kernels-community/flash-attn3", "flash_attn_interface"),
])  # fmt: skip
def test_a_known_kernel_is_its_stub(gpu: VirtualGpu, repository: str, package: str) -> None:
    from kernels import get_kernel, has_kernel

    assert has_kernel(repository, version=1)
    module = get_kernel(repository, version=1)
    module.flash_attn_func(heads(), heads(), heads(), causal=True).sum().backward()
    assert any(line.startswith(f"{package} is not installed") for line in gpu.trace.assumptions)
    assert any(line.startswith("kernels is not installed") for line in gpu.trace.assumptions)
    with pytest.raises(AttributeError, match="no_such_function"):
        _ = module.no_such_function


def test_another_is_refused_by_its_name(gpu: VirtualGpu) -> None:
    from kernels import LayerRepository, get_kernel

    with pytest.raises(MemprofError, match=r"kernels\.get_kernel with 'somebody/scan', a compiled kernel"):
        get_kernel("somebody/scan", version=1)
    with pytest.raises(MemprofError, match=r"uses kernels\.LayerRepository"):
        LayerRepository("somebody/scan", layer_name="Scan")


def test_libraries_do_not_find_it(gpu: VirtualGpu) -> None:
    import kernels
    from transformers.utils.import_utils import is_kernels_available

    assert kernels.get_kernel is hub.get_kernel
    assert not is_kernels_available()


def test_the_installed_package_is_asked_for_the_others() -> None:
    asked: list[str] = []
    real: Any = ModuleType("kernels.load")
    real.get_kernel = real.has_kernel = lambda repo_id, **how: asked.append(repo_id)
    for owner, name, replacement in hub.get_patches(real):
        setattr(owner, name, replacement)
    assert real.get_kernel("kernels-community/flash-attn3", version=1).flash_attn_interface.flash_attn_func
    assert not asked
    real.get_kernel("somebody/scan", version=1)
    assert asked == ["somebody/scan"]
    assert "kernels" not in sys.modules
