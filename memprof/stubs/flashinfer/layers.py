"""flashinfer's norms, gates and rotary embeddings: one output tensor each, or none for in-place functions.

Sources: flashinfer/activation.py, norm/__init__.py and rope.py of flashinfer-ai/flashinfer@v0.6.17.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.stubs.registry import stub
from memprof.stubs.tools import check_on_gpu, mark_written

_SOURCE = "flashinfer-ai/flashinfer@v0.6.17:flashinfer/"


def register(module: str, name: str, file: str = "") -> Callable[[Any], Any]:
    """Return a decorator that registers a stub as `flashinfer.name` and `flashinfer.module.name`."""
    return stub(f"flashinfer.{module}.{name}", f"flashinfer.{name}", source=f"{_SOURCE}{file or module + '.py'}")


def _make_gate(name: str) -> Callable[..., Any]:
    def gate(input, out=None, enable_pdl=None):
        """Return the activation of one half of the last dimension times the other half; writes `out` if given."""
        check_on_gpu(f"flashinfer.{name}", input, out)
        if input.shape[-1] * input.dtype.itemsize % 16:
            raise ValueError("The pointers must be multiple of 16 bytes.")
        shape = (*input.shape[:-1], input.shape[-1] // 2)
        if out is None:
            return torch.empty(shape, device=input.device, dtype=input.dtype)
        if out.shape != shape:
            raise AssertionError(f"{tuple(out.shape)} != {shape}")
        mark_written(out)
        return out

    return gate


for _name in ("silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul"):
    register("activation", _name)(_make_gate(_name))


_NORM = "norm/__init__.py"


def _normalize(name: str, input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    check_on_gpu(f"flashinfer.{name}", input, weight, out)
    if weight.shape != input.shape[-1:]:
        raise RuntimeError(f"flashinfer.{name}: a weight of {tuple(weight.shape)} for rows of {input.shape[-1]}")
    if out is None:
        return torch.empty_like(input)
    mark_written(out)
    return out


def _register_rms_norms(prefix: str) -> None:
    """Register flashinfer's rmsnorm and fused_add_rmsnorm under names with `prefix`."""

    @register("norm", f"{prefix}rmsnorm", _NORM)
    def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
        """Return the RMS norm of `input`; writes `out` if given."""
        return _normalize(f"{prefix}rmsnorm", input, weight, out)

    @register("norm", f"{prefix}fused_add_rmsnorm", _NORM)
    def fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
        """Write the sum of both into `residual`, and its norm into `input`; nothing is allocated."""
        for tensor in (input, residual):
            _normalize(f"{prefix}fused_add_rmsnorm", tensor, weight, tensor)


_register_rms_norms("")
_register_rms_norms("gemma_")


@register("norm", "layernorm", _NORM)
def layernorm(input, gemma, beta, eps=1e-6):
    """Return the layer norm of `input`."""
    return _normalize("layernorm", input, gemma, None)


def _rotate(name: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return rotated copies of queries and keys."""
    check_on_gpu(f"flashinfer.{name}", *tensors)
    return tuple(map(torch.empty_like, tensors))


def _rotate_in_place(name: str, *tensors: torch.Tensor) -> None:
    """Rotate queries and keys in place; nothing is allocated."""
    check_on_gpu(f"flashinfer.{name}", *tensors)
    mark_written(*tensors)


def _register_rotations(suffix: str, rotate: Callable[..., Any]) -> None:
    """Register flashinfer's four rotary functions under names with `suffix`; `rotate` makes their results."""

    def rotation(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__doc__ = rotate.__doc__
        return register("rope", function.__name__ + suffix)(function)  # type: ignore[no-any-return]

    @rotation
    def apply_rope(q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
        return rotate(f"apply_rope{suffix}", q, k)

    @rotation
    def apply_rope_pos_ids(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
        return rotate(f"apply_rope_pos_ids{suffix}", q, k)

    @rotation
    def apply_llama31_rope(
        q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5, low_freq_factor=1,
        high_freq_factor=4, old_context_len=8192,
    ):  # fmt: skip
        return rotate(f"apply_llama31_rope{suffix}", q, k)

    @rotation
    def apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox=True):
        if cos_sin_cache.dtype != torch.float32:
            raise ValueError("cos_sin_cache should be float32")
        return rotate(f"apply_rope_with_cos_sin_cache{suffix}", query, key)


_register_rotations("", _rotate)
_register_rotations("_inplace", _rotate_in_place)
