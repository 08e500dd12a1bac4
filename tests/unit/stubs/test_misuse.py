"""Tensors of a type, a shape or a place that the real function refuses are refused too, and not guessed about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu

GPU = find_gpu("h100-80gb")


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16)


def index() -> torch.Tensor:
    return torch.zeros(10, dtype=torch.int64, device="cuda")


def flash(*shapes: tuple[int, ...], **options: Any) -> Any:
    import flash_attn

    return flash_attn.flash_attn_func(*(half(*shape) for shape in shapes), **options)


def flash_3(*shapes: tuple[int, ...]) -> Any:
    import flash_attn_interface

    return flash_attn_interface.flash_attn_func(*(half(*shape) for shape in shapes))


def flash_of(dtype: torch.dtype, device: str = "cuda") -> Any:
    import flash_attn

    q = torch.empty(2, 10, 4, 64, dtype=dtype, device=device)
    return flash_attn.flash_attn_func(q, q, q)


def varlen() -> Any:
    import flash_attn

    return flash_attn.flash_attn_varlen_func(*[half(10, 4, 64)] * 3, index()[:3], index()[:3], 5, 5)


def rotary(positions: int, turned: int) -> Any:
    from flash_attn.layers.rotary import apply_rotary_emb

    return apply_rotary_emb(half(2, 10, 4, 64), half(positions, turned), half(positions, turned))


def flash_norm() -> Any:
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    return rms_norm_fn(half(4, 9), half(8), None)


def cross_entropy() -> Any:
    from flash_attn.losses.cross_entropy import CrossEntropyLoss

    return CrossEntropyLoss()(half(4, 9), index()[:5])


def efficient(*tensors: torch.Tensor) -> Any:
    from xformers.ops import memory_efficient_attention

    return memory_efficient_attention(*tensors)


def scatter(name: str, *rows: torch.Tensor, **options: Any) -> Any:
    import torch_scatter

    return getattr(torch_scatter, name)(*rows, **options)


def convolution(channels: int, width: int, activation: str | None = None) -> Any:
    from causal_conv1d import causal_conv1d_fn

    return causal_conv1d_fn(half(2, 8, 10), half(channels, width), activation=activation)


def scan() -> Any:
    from mamba_ssm import selective_scan_fn

    return selective_scan_fn(half(2, 8, 10), half(2, 8, 9), half(8, 4).float(), half(2, 4, 10), half(2, 4, 10))


def engine(name: str, *sizes: int) -> Any:
    import transformer_engine.pytorch as te

    return getattr(te, name)(*sizes, params_dtype=torch.bfloat16)(half(4, 9))


def apex_norm() -> Any:
    from apex.normalization import FusedLayerNorm

    return FusedLayerNorm(8).cuda()(half(4, 9))


def neighbours(x: torch.Tensor, y: torch.Tensor) -> Any:
    from torch_cluster import knn

    return knn(x, y, 3)


Q = (2, 10, 4, 64)
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "attention in float32": (lambda: flash_of(torch.float32), RuntimeError, "only support fp16 and bf16"),
    "attention on the host": (lambda: flash_of(torch.bfloat16, "cpu"), RuntimeError, "flash_attn_func: expected a ten"),
    "attention of three dimensions": (lambda: flash(*[Q[1:]] * 3), RuntimeError, "expects queries of 4 dim"),
    "heads of two sizes": (lambda: flash(Q, (2, 10, 4, 32), (2, 10, 4, 32)), RuntimeError, "heads of one size"),
    "heads that do not divide": (lambda: flash(Q, (2, 10, 3, 64), (2, 10, 3, 64)), RuntimeError, "must divide"),
    "two batch sizes": (lambda: flash(Q, (3, 10, 4, 64), (3, 10, 4, 64)), RuntimeError, "of one batch size"),
    "large heads": (lambda: flash(*[(2, 10, 4, 300)] * 3), RuntimeError, "at most 256"),
    "lengths in int64": (varlen, RuntimeError, "cu_seqlens of dtype int32"),
    "heads of two sizes, 3": (lambda: flash_3(Q, (2, 10, 4, 32), (2, 10, 4, 32)), RuntimeError, "one size of heads"),
    "heads that do not divide, 3": (lambda: flash_3(Q, (2, 10, 3, 64), (2, 10, 3, 64)), RuntimeError, "divide those"),
    "attention of three dimensions, 3": (lambda: flash_3(*[Q[1:]] * 3), RuntimeError, "queries of 4 dimensions"),
    "few positions": (lambda: rotary(5, 16), RuntimeError, "seqlen_ro >= seqlen"),
    "more positions than a head": (lambda: rotary(10, 64), RuntimeError, "rotary_dim <= headdim"),
    "a short weight of a norm": (flash_norm, RuntimeError, "layer_norm_fn expects weights of 9"),
    "labels without logits": (cross_entropy, RuntimeError, "cross_entropy_loss expects a label for each row"),
    "efficient, float64": (lambda: efficient(*[half(*Q).double()] * 3), NotImplementedError, "torch.float64"),
    "efficient, mixed": (lambda: efficient(half(*Q), half(*Q).half(), half(*Q)), ValueError, "the same dtype"),
    "efficient, two sizes": (
        lambda: efficient(half(*Q), half(2, 10, 4, 32), half(*Q)), ValueError, "Incompatible shapes",
    ),
    "rows by int32": (
        lambda: scatter("scatter_max", half(10, 4), index().int(), dim=0, dim_size=5), RuntimeError,
        "scatter_max expects an index of int64",
    ),
    "rows by too few": (
        lambda: scatter("scatter_sum", half(10, 4), index()[:5], dim=0, dim_size=5), RuntimeError, "must match",
    ),
    "segments by fractions": (
        lambda: scatter("segment_sum_csr", half(10, 4), half(3)), RuntimeError, "segment_sum_csr expects an index",
    ),
    "a convolution of other channels": (lambda: convolution(9, 4), RuntimeError, "a weight of 8 channels"),
    "a wide convolution": (lambda: convolution(8, 7), RuntimeError, "a width between 2 and 4"),
    "another activation": (lambda: convolution(8, 4, "gelu"), NotImplementedError, "silu"),
    "steps of another length": (scan, RuntimeError, "selective_scan_fn expects u and delta"),
    "a product of another size": (lambda: engine("Linear", 8, 16), AssertionError, "GEMM not possible"),
    "a norm of another size": (lambda: engine("LayerNorm", 8), RuntimeError, "8"),
    "Apex's norm of another size": (apex_norm, RuntimeError, "normalized_shape"),
    "points of two spaces": (lambda: neighbours(half(10, 3), half(10, 2)), RuntimeError, "as many coordinates"),
    "points of integers": (lambda: neighbours(index(), index()), RuntimeError, "floating-point numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_the_real_one_refuses_is_refused(gpu: VirtualGpu, name: str) -> None:
    call, error, words = CASES[name]
    with pytest.raises(error, match=words):
        call()
