"""Bytes of DeepSpeed's two Adams: one on the GPU, one in the host's memory; and of its package where it is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.stubs.extension import StubExtension
from memprof.virtual import VirtualGpu
from tests.unit.stubs.test_apex import layer
from tests.unit.stubs.test_flash_attention import measured

GPU = find_gpu("a100-80gb")
NUMBER = 600 * 512


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_adam_has_moments_in_the_type_of_the_parameter(gpu: VirtualGpu, dtype: torch.dtype) -> None:
    from deepspeed.ops.adam import FusedAdam

    model = layer(dtype)
    stays, _, optimizer = measured(lambda: FusedAdam(model.parameters()))
    assert stays == 4  # the flag of overflows
    moments = 2 * dtype.itemsize * NUMBER
    assert measured(optimizer.step)[:2] == (moments, moments)
    assert measured(optimizer.step)[:2] == (0, 0)
    assert optimizer.state[model.weight]["step"] == 2
    optimizer.zero_grad()
    assert model.weight.grad is None
    of_doubles = FusedAdam(layer(torch.float64).parameters())
    with pytest.raises(RuntimeError, match="only support fp16, bf16 and fp32"):
        of_doubles.step()


@pytest.mark.parametrize(("decoupled", "like"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_the_adam_of_the_host_takes_nothing_on_the_gpu_and_computes(
    gpu: VirtualGpu, decoupled: bool, like: type[torch.optim.Optimizer]
) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    ours, theirs = (torch.nn.Parameter(torch.arange(8.0) / 7) for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.3}
    optimizer = DeepSpeedCPUAdam([ours], adamw_mode=decoupled, **options)
    reference = like([theirs], **options)  # type: ignore[arg-type]
    for factor in (1.0, -0.5, 2.0):
        ours.grad, theirs.grad = torch.arange(8.0) * factor, torch.arange(8.0) * factor
        assert measured(optimizer.step)[:2] == (0, 0)
        reference.step()
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert optimizer.state[ours]["exp_avg"].dtype is torch.float32
    halves = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    halves.grad = torch.ones_like(halves)
    smaller = DeepSpeedCPUAdam([halves], fp32_optimizer_states=False)
    smaller.step()
    assert smaller.state[halves]["exp_avg_sq"].dtype is torch.bfloat16
    on_gpu = torch.nn.Parameter(torch.ones(4, device="cuda"))
    on_gpu.grad = torch.ones_like(on_gpu)
    with pytest.raises(AssertionError, match="must be 'cpu'"):
        DeepSpeedCPUAdam([on_gpu]).step()


def test_the_rest_of_the_package_is_refused_by_name(gpu: VirtualGpu) -> None:
    import deepspeed

    with pytest.raises(MemprofError, match=r"deepspeed\.initialize, which is not installed"):
        deepspeed.initialize()


def test_of_an_installed_package_the_kernel_is_stood_in_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deepspeed" / "ops" / "op_builder"
    folder.mkdir(parents=True)
    (tmp_path / "deepspeed" / "__init__.py").write_text("kind = 'real'\n")
    for made in (folder.parent, folder):
        (made / "__init__.py").write_text("")
    (folder / "fused_adam.py").write_text(
        "class FusedAdamBuilder:\n    def load(self, verbose=True):\n        raise OSError('no nvcc')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with VirtualGpu(GPU, workspaces=False, extensions=[StubExtension()]) as gpu:
            import deepspeed
            from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder

            assert deepspeed.kind == "real"
            weight = torch.ones(4, device="cuda")
            flag = torch.zeros(1, dtype=torch.int, device="cuda")
            assert measured(lambda: FusedAdamBuilder().load().multi_tensor_adam(65536, flag, [[weight]] * 4))[0] == 0
        assert any("kernel of FusedAdam is not compiled" in line for line in gpu.trace.assumptions)
        with pytest.raises(OSError, match="nvcc"):
            FusedAdamBuilder().load()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]
