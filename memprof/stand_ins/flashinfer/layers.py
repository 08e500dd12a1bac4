"""flashinfer's norms, gates and rotary embeddings: one output each, or none where they write what they are given.

Sources: flashinfer/activation.py, norm/__init__.py and rope.py of flashinfer-ai/flashinfer@v0.6.17.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.stand_ins.registry import stand_in
from memprof.stand_ins.tools import on_card, written

_AT = "flashinfer-ai/flashinfer@v0.6.17:flashinfer/"


def public(module: str, name: str, file: str = "") -> Callable[[Any], Any]:
    """Register a function of `flashinfer.module` that the package itself has too."""
    return stand_in(f"flashinfer.{module}.{name}", f"flashinfer.{name}", source=f"{_AT}{file or module + '.py'}")


# -- gates ----------------------------------------------------------------------------------------------------------


def _gated(name: str, input: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    on_card(f"flashinfer.{name}", input, out)
    if input.shape[-1] * input.dtype.itemsize % 16:
        raise ValueError("The pointers must be multiple of 16 bytes.")
    shape = (*input.shape[:-1], input.shape[-1] // 2)
    if out is None:
        return torch.empty(shape, device=input.device, dtype=input.dtype)
    if out.shape != shape:
        raise AssertionError(f"{tuple(out.shape)} != {shape}")
    written(out)
    return out


@public("activation", "silu_and_mul")
def silu_and_mul(input: torch.Tensor, out: Any = None, enable_pdl: Any = None) -> torch.Tensor:
    """A tensor of half the last dimension."""
    return _gated("silu_and_mul", input, out)


@public("activation", "gelu_tanh_and_mul")
def gelu_tanh_and_mul(input: torch.Tensor, out: Any = None, enable_pdl: Any = None) -> torch.Tensor:
    """A tensor of half the last dimension."""
    return _gated("gelu_tanh_and_mul", input, out)


@public("activation", "gelu_and_mul")
def gelu_and_mul(input: torch.Tensor, out: Any = None, enable_pdl: Any = None) -> torch.Tensor:
    """A tensor of half the last dimension."""
    return _gated("gelu_and_mul", input, out)


# -- norms ----------------------------------------------------------------------------------------------------------

_norm = "norm/__init__.py"


def _normed(name: str, input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    on_card(f"flashinfer.{name}", input, weight, out)
    if weight.shape != input.shape[-1:]:
        raise RuntimeError(f"flashinfer.{name}: a weight of {tuple(weight.shape)} for rows of {input.shape[-1]}")
    if out is None:
        return torch.empty_like(input)
    written(out)
    return out


@public("norm", "rmsnorm", _norm)
def rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: Any = None, enable_pdl: Any = None
) -> torch.Tensor:
    """A tensor like the input."""
    return _normed("rmsnorm", input, weight, out)


@public("norm", "gemma_rmsnorm", _norm)
def gemma_rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: Any = None, enable_pdl: Any = None
) -> torch.Tensor:
    """A tensor like the input."""
    return _normed("gemma_rmsnorm", input, weight, out)


@public("norm", "fused_add_rmsnorm", _norm)
def fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, enable_pdl: Any = None
) -> None:
    """The sum is written into the residual, its norm into the input: nothing is taken."""
    _normed("fused_add_rmsnorm", input, weight, input)
    _normed("fused_add_rmsnorm", residual, weight, residual)


@public("norm", "gemma_fused_add_rmsnorm", _norm)
def gemma_fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, enable_pdl: Any = None
) -> None:
    """The sum is written into the residual, its norm into the input: nothing is taken."""
    _normed("gemma_fused_add_rmsnorm", input, weight, input)
    _normed("gemma_fused_add_rmsnorm", residual, weight, residual)


@public("norm", "layernorm", _norm)
def layernorm(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """A tensor like the input."""
    return _normed("layernorm", input, gemma, None)


# -- rotations ------------------------------------------------------------------------------------------------------


def _turned(name: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    on_card(f"flashinfer.{name}", *tensors)
    return tuple(map(torch.empty_like, tensors))


def _turned_in_place(name: str, *tensors: torch.Tensor) -> None:
    on_card(f"flashinfer.{name}", *tensors)
    written(*tensors)


@public("rope", "apply_rope")
def apply_rope(
    q: Any, k: Any, indptr: Any, offsets: Any, rotary_dim: Any = None, interleave: bool = False,
    rope_scale: float = 1, rope_theta: float = 1e4,
) -> Any:  # fmt: skip
    """Tensors like queries and keys."""
    return _turned("apply_rope", q, k)


@public("rope", "apply_rope_inplace")
def apply_rope_inplace(
    q: Any, k: Any, indptr: Any, offsets: Any, rotary_dim: Any = None, interleave: bool = False,
    rope_scale: float = 1, rope_theta: float = 1e4,
) -> None:  # fmt: skip
    """Queries and keys are written where they lie."""
    _turned_in_place("apply_rope_inplace", q, k)


@public("rope", "apply_rope_pos_ids")
def apply_rope_pos_ids(
    q: Any, k: Any, pos_ids: Any, rotary_dim: Any = None, interleave: bool = False, rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> Any:  # fmt: skip
    """Tensors like queries and keys."""
    return _turned("apply_rope_pos_ids", q, k)


@public("rope", "apply_rope_pos_ids_inplace")
def apply_rope_pos_ids_inplace(
    q: Any, k: Any, pos_ids: Any, rotary_dim: Any = None, interleave: bool = False, rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:  # fmt: skip
    """Queries and keys are written where they lie."""
    _turned_in_place("apply_rope_pos_ids_inplace", q, k)


@public("rope", "apply_llama31_rope")
def apply_llama31_rope(
    q: Any, k: Any, indptr: Any, offsets: Any, rotary_dim: Any = None, interleave: bool = False,
    rope_scale: float = 8, rope_theta: float = 5e5, low_freq_factor: float = 1, high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> Any:  # fmt: skip
    """Tensors like queries and keys."""
    return _turned("apply_llama31_rope", q, k)


@public("rope", "apply_llama31_rope_inplace")
def apply_llama31_rope_inplace(
    q: Any, k: Any, indptr: Any, offsets: Any, rotary_dim: Any = None, interleave: bool = False,
    rope_scale: float = 8, rope_theta: float = 5e5, low_freq_factor: float = 1, high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:  # fmt: skip
    """Queries and keys are written where they lie."""
    _turned_in_place("apply_llama31_rope_inplace", q, k)


@public("rope", "apply_rope_with_cos_sin_cache")
def apply_rope_with_cos_sin_cache(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool = True
) -> Any:
    """Tensors like queries and keys."""
    _check_cache(cos_sin_cache)
    return _turned("apply_rope_with_cos_sin_cache", query, key)


@public("rope", "apply_rope_with_cos_sin_cache_inplace")
def apply_rope_with_cos_sin_cache_inplace(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool = True
) -> None:
    """Queries and keys are written where they lie."""
    _check_cache(cos_sin_cache)
    _turned_in_place("apply_rope_with_cos_sin_cache_inplace", query, key)


def _check_cache(table: torch.Tensor) -> None:
    if table.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
