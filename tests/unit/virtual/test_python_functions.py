"""torch's own Python functions under the mode: TorchScript compiles what calls them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu

SOURCE = """
import pytest
import torch
import torch.nn.functional as F

def act(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x) * F.silu(x)
"""


@torch.jit.script
def scripted_before(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x)


def test_torchscript_compiles_what_calls_torchs_functions(tmp_path: Path) -> None:
    """The program's own, and what was compiled before."""
    (tmp_path / "scripted.py").write_text(SOURCE)
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False):
        spec = importlib.util.spec_from_file_location("scripted", tmp_path / "scripted.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        x = torch.zeros(1024, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        made = torch.jit.script(module.act)(scripted_before(x))
        assert torch.cuda.memory_allocated() - before >= 4 * 4096
        made.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


def test_a_program_may_replace_torchs_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nanotron does while it builds a model: what is computed beside its tensors is not made by these."""
    own = torch.empty, torch.zeros, torch.ones, torch.full

    def elsewhere(factory: Any) -> Any:
        return lambda *args, **kwargs: factory(*args, **{**kwargs, "device": "cuda", "dtype": torch.bfloat16})

    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False):
        for name, factory in zip(("empty", "zeros", "ones", "full"), own, strict=True):
            monkeypatch.setattr(torch, name, elsewhere(factory))
        linear = torch.nn.Linear(8, 8)
        linear.weight.data.fill_(0.0)
        assert torch.ones(4).tolist() == [1.0] * 4
        assert linear.weight.dtype is torch.bfloat16 and linear.weight.is_cuda
        assert torch.ones(4, 4).sum().item() == 16
        monkeypatch.undo()
        assert (torch.empty, torch.zeros, torch.ones, torch.full) == own
