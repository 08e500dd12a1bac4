"""Bytes of what flash-attn has beside attention: rotary positions, norms in Triton, cross-entropy."""

from __future__ import annotations

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.stubs.tools import FLUSHED_BYTES
from memprof.virtual import VirtualGpu
from tests.unit.stubs.test_flash_attention import measured

GPU = find_gpu("a100-80gb")
ROWS, COLUMNS = 600, 512


def test_rotary_positions_in_a_tensor_of_their_own_or_in_place(gpu: VirtualGpu) -> None:
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb

    x = torch.empty(2, 64, 4, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cos, sin = (torch.empty(64, 8, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    stays, peak, out = measured(lambda: apply_rotary_emb(x, cos, sin))
    assert stays == peak == 2 * x.numel()
    gradient = torch.empty_like(out)
    assert measured(lambda: out.backward(gradient))[1] == 2 * x.numel()

    rotary = RotaryEmbedding(32).cuda()
    qkv = torch.empty(2, 64, 3, 4, 32, device="cuda", dtype=torch.bfloat16)
    stays, _, turned = measured(lambda: rotary(qkv))
    assert stays == 2 * 2 * 64 * 16  # cosines and sines, kept
    assert turned.data_ptr() == qkv.data_ptr()
    assert measured(lambda: rotary(qkv))[:2] == (0, 0)


def test_a_norm_in_triton_is_timed_at_its_first_call(gpu: VirtualGpu) -> None:
    from flash_attn.ops.triton.layer_norm import RMSNorm

    norm = RMSNorm(COLUMNS, device="cuda", dtype=torch.bfloat16)
    x = torch.empty(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    stays = 2 * ROWS * COLUMNS + 4 * ROWS
    assert measured(lambda: norm(x))[:2] == (stays, stays + FLUSHED_BYTES)
    assert measured(lambda: norm(x))[:2] == (stays, stays)
    out = norm(x)
    gradient = torch.empty_like(out)
    out.backward(gradient)
    out = norm(x)
    parts = 4 * 8 * GPU.num_sms * COLUMNS
    # Gradients are there: new ones are made, and added to them. The parts are summed in float32.
    assert measured(lambda: out.backward(gradient))[1] == 2 * ROWS * COLUMNS + parts + 4 * COLUMNS + 2 * COLUMNS


def test_a_residual_stream_is_returned_and_saved(gpu: VirtualGpu) -> None:
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    weight, bias = (torch.ones(COLUMNS, device="cuda", requires_grad=True) for _ in range(2))
    x = torch.empty(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    stream = torch.empty(ROWS, COLUMNS, device="cuda", requires_grad=True)
    stays, _, (out, summed) = measured(lambda: layer_norm_fn(x, weight, bias, stream, prenorm=True))
    assert (out.dtype, summed.dtype) == (torch.bfloat16, torch.float32)
    assert stays == 2 * ROWS * COLUMNS + 4 * ROWS * COLUMNS + 8 * ROWS
    (out.sum() + summed.sum()).backward()
    assert x.grad is not None and stream.grad is not None
    assert (x.grad.dtype, stream.grad.dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(MemprofError, match="layer_norm_fn with `rowscale`"):
        layer_norm_fn(x, weight, bias, rowscale=torch.ones(ROWS, device="cuda"))


@pytest.mark.parametrize("in_place", [False, True])
def test_the_gradient_of_cross_entropy_may_take_the_place_of_the_logits(gpu: VirtualGpu, in_place: bool) -> None:
    from flash_attn.losses.cross_entropy import CrossEntropyLoss

    weight = torch.empty(COLUMNS, COLUMNS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
    logits = torch.empty(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16) @ weight
    loss_of = CrossEntropyLoss(reduction="none", inplace_backward=in_place)
    stays, _, loss = measured(lambda: loss_of(logits, labels))
    assert (loss.dtype, stays) == (torch.float32, 2 * 4 * ROWS)
    gradient = torch.empty_like(loss)
    peak = measured(lambda: torch.autograd.grad(loss, logits, gradient))[1]
    zeros = 4 * ROWS  # the gradient of the z-losses
    assert peak == zeros + (0 if in_place else 2 * ROWS * COLUMNS)
