"""Bytes of flash-attn's products, norms and activations, and of the modules that are built beside it."""

from __future__ import annotations

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.stubs.extension import StubExtension
from memprof.virtual import VirtualGpu
from tests.unit.stubs.test_flash_attention import backward, half, measured, single, tensor

ROWS, WIDTH, INNER, SMS = 1024, 256, 1024, 108
WORKSPACE = 4 * 2**20


@pytest.mark.usefixtures("gpu")
def test_a_product_has_both_gradients_by_one_call() -> None:
    from flash_attn.ops.fused_dense import FusedDense

    layer = FusedDense(WIDTH, INNER).cuda().bfloat16()
    x = tensor(2, ROWS // 2, WIDTH)
    stays, peak, out = measured(lambda: layer(x))
    assert (out.shape, stays, peak) == ((2, ROWS // 2, INNER), half(ROWS, INNER), half(ROWS, INNER))
    gradients = half(ROWS, WIDTH) + half(INNER, WIDTH) + half(INNER)
    assert backward(out) == gradients + WORKSPACE
    assert layer.bias is not None and layer.bias.grad is not None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("level", "kept"), [(0, 2), (1, 1), (2, 0)])
def test_what_a_network_keeps_by_its_level(level: int, kept: int) -> None:
    from flash_attn.ops.fused_dense import FusedMLP

    network = FusedMLP(WIDTH, INNER, checkpoint_lvl=level).cuda().bfloat16()
    x = tensor(ROWS, WIDTH)
    stays, peak, out = measured(lambda: network(x))
    inner = half(ROWS, INNER)
    assert (out.shape, stays) == (x.shape, half(ROWS, WIDTH) + kept * inner)
    assert peak == 2 * inner + max(WORKSPACE, half(ROWS, WIDTH))
    # Both sides of the activation are there again, and the gradient of one, of weight and bias after it.
    made = (2 - kept) * inner + inner + half(INNER, WIDTH) + half(WIDTH) + half(INNER)
    assert backward(out) == made + WORKSPACE
    assert all(one.grad is not None for one in network.parameters())


def test_on_hopper_gelu_is_a_kernel_of_its_own() -> None:
    with VirtualGpu(find_gpu("h100-80gb"), workspaces=False, extensions=[StubExtension()]):
        from flash_attn.ops.fused_dense import FusedMLP

        network = FusedMLP(WIDTH, INNER).cuda().bfloat16()
        stays, peak, _ = measured(lambda: network(tensor(ROWS, WIDTH)))
        assert stays == peak == 2 * half(ROWS, INNER) + 2 * half(ROWS, WIDTH)


@pytest.mark.usefixtures("gpu")
def test_relu_keeps_a_bit_for_each_and_groups_are_refused() -> None:
    from flash_attn.ops.fused_dense import FusedMLP

    network = FusedMLP(WIDTH, INNER, activation="relu").cuda().bfloat16()
    stays, _, _ = measured(lambda: network(tensor(ROWS, WIDTH)))
    assert stays == 2 * half(ROWS, WIDTH) + half(ROWS, INNER) + ROWS * INNER // 8
    with pytest.raises(MemprofError, match="fused_mlp_func with a process group"):
        network(tensor(ROWS, WIDTH), process_group=object())


@pytest.mark.usefixtures("gpu")
def test_swiglu_saves_both() -> None:
    from flash_attn.ops.activations import swiglu

    x, y = tensor(ROWS, WIDTH), tensor(ROWS, WIDTH)
    stays, peak, out = measured(lambda: swiglu(x, y))
    assert stays == peak == half(ROWS, WIDTH)
    assert backward(out) == 2 * half(ROWS, WIDTH)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_norm_of_a_sum_keeps_it(kind: str) -> None:
    from flash_attn.ops.layer_norm import DropoutAddLayerNorm
    from flash_attn.ops.rms_norm import DropoutAddRMSNorm

    norm = {"layer": DropoutAddLayerNorm, "rms": DropoutAddRMSNorm}[kind](WIDTH, prenorm=True, p=0.1).cuda()
    x, residual = tensor(ROWS, WIDTH), tensor(ROWS, WIDTH, dtype=torch.float32)
    stays, peak, (out, summed) = measured(lambda: norm(x, residual))
    assert (out.dtype, summed.dtype) == (torch.bfloat16, torch.float32)
    # The norm, the sum, a byte for each, two numbers a row.
    assert stays == peak == half(ROWS, WIDTH) + single(ROWS, WIDTH) + ROWS * WIDTH + 2 * single(ROWS)
    gradients = half(ROWS, WIDTH) + single(ROWS, WIDTH) + 2 * single(WIDTH)
    zeros = single(ROWS, WIDTH)  # that of the sum, which was not used
    assert backward(out) == gradients + zeros + 2 * single(SMS, WIDTH)


@pytest.mark.usefixtures("gpu")
def test_a_norm_alone_saves_its_input() -> None:
    from flash_attn.ops.rms_norm import RMSNorm

    norm = RMSNorm(WIDTH).cuda().bfloat16()
    stays, _, out = measured(lambda: norm(tensor(ROWS, WIDTH)))
    assert stays == 2 * half(ROWS, WIDTH) + 2 * single(ROWS)
    with pytest.raises(RuntimeError, match="weights of 128"):
        norm(tensor(ROWS, 128))
    del out


@pytest.mark.usefixtures("gpu")
def test_modules_of_their_own_write_into_what_they_are_given() -> None:
    """As TinyLlama calls them, by Python that it has copied."""
    import rotary_emb
    import xentropy_cuda_lib

    x, cos = tensor(2, 64, 4, 32).detach(), tensor(64, 1, 16).detach()
    halves = x.chunk(2, dim=-1)
    stays, peak, _ = measured(lambda: rotary_emb.apply_rotary(*halves, cos, cos, *halves, False))
    assert stays == peak == 0
    logits, labels = tensor(ROWS, 512).detach(), torch.zeros(ROWS, dtype=torch.int64, device="cuda")
    stays, _, (losses, sums) = measured(lambda: xentropy_cuda_lib.forward(logits, labels, 0.0))
    assert (losses.dtype, stays) == (torch.float32, 2 * single(ROWS))
    for inplace, wanted in ((True, 0), (False, half(ROWS, 512))):
        call = (losses, logits, sums, labels, 0.0, inplace, 512)
        assert measured(lambda call=call: xentropy_cuda_lib.backward(*call))[0] == wanted
    with pytest.raises(RuntimeError, match="a label for each row"):
        xentropy_cuda_lib.forward(logits, labels[:5], 0.0)
