"""Composite operators that choose by device in C++, before a dispatch mode sees them: here they choose as CUDA does.

On meta tensors torch would take the generic path (attention with an S x S score matrix in float32, dropout with a mask
in the input's dtype, RMS norm in pieces). Each choice that is made here is recorded as an assumption of the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memprof.capture.virtual.recording import RecordingMode
from memprof.trace.events import GPU

_aten = torch.ops.aten
_sdpa = torch._C._nn.scaled_dot_product_attention
_dropout = torch.dropout
_cross_entropy: Callable[..., torch.Tensor] = torch._C._nn.cross_entropy_loss
_nll_loss: Callable[..., torch.Tensor] = torch._C._nn.nll_loss_nd
_linear: Callable[..., torch.Tensor] = torch._C._nn.linear
_one_hot: Callable[..., torch.Tensor] = torch._C._nn.one_hot
_NoTorchFunction = torch._C.DisableTorchFunction


class Composites:
    """The CUDA choices for one card."""

    def __init__(
        self, recording: RecordingMode, compute_capability: tuple[int, int], assume: Callable[[str], None]
    ) -> None:
        self._recording = recording
        self._capability = compute_capability
        self._assume = assume

    def handlers(self) -> dict[Any, Callable[..., Any]]:
        """Function -> replacement, for the function mode."""
        handlers: dict[Any, Callable[..., Any]] = {
            _sdpa: self._attention,
            _dropout: self._dropout,
            _cross_entropy: self._cross_entropy,
            _linear: self._linear,
            _one_hot: self._one_hot,
            **{
                func: functools.partial(self._softmax, func, operator)
                for func, operator in (
                    (torch.softmax, _aten._softmax),
                    (torch.Tensor.softmax, _aten._softmax),
                    (torch.log_softmax, _aten._log_softmax),
                    (torch.Tensor.log_softmax, _aten._log_softmax),
                )
            },
            torch.nn.functional.scaled_dot_product_attention: self._attention,
        }
        if hasattr(_aten, "_fused_rms_norm"):
            handlers[torch.rms_norm] = self._rms_norm
        return handlers

    def _on_gpu(self, tensor: torch.Tensor) -> bool:
        with _NoTorchFunction():
            return self._recording.device_of(tensor) == GPU

    # -- attention --------------------------------------------------------------------------------------------------

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if not self._on_gpu(query):
            return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        backend = self.attention_backend(query, key, value, attn_mask, dropout_p, is_causal, needs_grad)
        self._assume(f"Attention runs on the {backend} backend of scaled_dot_product_attention.")
        if backend == "math":
            return self._math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        head_dim = query.shape[-1]
        if scale is None:
            scale = head_dim**-0.5
        if backend == "flash":
            query, key, value = (_padded(tensor) for tensor in (query, key, value))
            result = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
            return result[0][..., :head_dim] if result[0].shape[-1] != head_dim else result[0]
        if enable_gqa and key.shape[1] != query.shape[1]:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if attn_mask is not None:
            attn_mask = _additive_mask(attn_mask, query, key)
        result = _aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
        )
        return result[0]  # type: ignore[no-any-return]

    def attention_backend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        needs_grad: bool,
    ) -> str:
        """The backend that CUDA's order (flash, efficient, math) gives.

        Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
        """
        backends = torch.backends.cuda
        head_dim = query.shape[-1]
        half = query.dtype in (torch.float16, torch.bfloat16)
        same_head = query.shape[-1] == key.shape[-1] == value.shape[-1]
        four_dims = query.dim() == key.dim() == value.dim() == 4
        capability = self._capability
        small_shared_memory = capability in ((8, 6), (8, 9), (12, 0), (12, 1))
        if (
            backends.flash_sdp_enabled()
            and capability >= (8, 0)
            and attn_mask is None
            and half
            and same_head
            and four_dims
            and head_dim <= 256
            and not (is_causal and query.shape[-2] != key.shape[-2])
            and not (
                needs_grad and small_shared_memory and (192 < head_dim <= 224 or (head_dim > 224 and dropout_p > 0))
            )
        ):
            return "flash"
        alignment = 8 if half else 4 if capability >= (8, 0) else 1
        if (
            backends.mem_efficient_sdp_enabled()
            and capability >= (5, 0)
            and four_dims
            and query.dtype in (torch.float16, torch.float32, *((torch.bfloat16,) if capability >= (8, 0) else ()))
            and head_dim % alignment == 0
            and value.shape[-1] % alignment == 0
        ):
            return "efficient"
        if not backends.math_sdp_enabled():
            # As scaled_dot_product_attention says it when the allowed backends cannot do it.
            raise RuntimeError("No available kernel. Aborting execution.")
        return "math"

    def _math_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        """The generic path, operator by operator as `_scaled_dot_product_attention_math` runs without modes.

        Under a mode C++ would add the mask out of place and take the CPU's dropout
        (aten/src/ATen/native/transformers/attention.cpp).
        """
        dtype = query.dtype
        if dtype in (torch.float16, torch.bfloat16) and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
            query, key, value = query.float(), key.float(), value.float()
        root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        query = query * root
        if is_causal:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = _additive(attn_mask, query)
        if enable_gqa and key.shape[1] != query.shape[1]:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ (key.transpose(-2, -1) * root)
        if attn_mask is not None:
            scores.add_(attn_mask)
        scores = torch._safe_softmax(scores, -1)
        if dropout_p > 0:
            scores = self._dropout(scores, dropout_p)
        result = (scores @ value).to(dtype)
        # The operator returns the scores too, in the input's dtype; SDPA drops them.
        scores.to(dtype)
        return result

    # -- the others -------------------------------------------------------------------------------------------------

    def _dropout(self, input: torch.Tensor, p: float = 0.5, train: bool = True) -> torch.Tensor:
        if not (train and 0 < p < 1 and input.numel() and self._on_gpu(input)):
            return _dropout(input, p, train)
        self._assume("Dropout keeps a boolean mask (CUDA's native_dropout).")
        return _aten.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]

    def _softmax(
        self, func: Any, operator: Any, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """From float16 to float32 without a copy, which CUDA's kernel does and others do not (native/SoftMax.cpp)."""
        if dtype is torch.float32 and input.dtype is torch.float16 and not kwargs and self._on_gpu(input):
            return operator(input, dim, True)  # type: ignore[no-any-return]
        return func(input, dim, dtype=dtype, **kwargs)  # type: ignore[no-any-return]

    def _cross_entropy(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        """Under autocast the log-softmax inside keeps its dtype, and nll_loss casts it (native/LossNLL.cpp)."""
        half = input.dtype in (torch.float16, torch.bfloat16)
        classes = not target.is_floating_point() and label_smoothing == 0
        if half and classes and torch.is_autocast_enabled("cuda") and self._on_gpu(input):
            log_softmax = torch.log_softmax(input, 1 if input.dim() > 1 else 0, dtype=input.dtype)
            weight = None if weight is None else weight.float()
            return _nll_loss(log_softmax.float(), target, weight, reduction, ignore_index)
        return _cross_entropy(input, target, weight, reduction, ignore_index, label_smoothing)

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """Where product and bias cannot be one call, the bias is added in place (native/Linear.cpp).

        Under a mode C++ would add it out of place.
        """
        if (
            bias is None
            or input.dim() == 2
            or input.is_contiguous()
            or not (self._on_gpu(input) and self._on_gpu(weight))
        ):
            return NotImplemented
        return torch.matmul(input, weight.t()).add_(bias)

    def _one_hot(self, input: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        """Ones scattered into zeros; on meta tensors C++ would compare with a range (native/Onehot.cpp)."""
        if not self._on_gpu(input) or not input.numel() or input.dtype is not torch.int64:
            return _one_hot(input, num_classes)
        if num_classes == -1:
            num_classes = int(input.max().item()) + 1
        result = torch.zeros((*input.shape, num_classes), dtype=torch.int64, device=input.device)
        return result.scatter_(-1, input.unsqueeze(-1), 1)

    def _rms_norm(
        self, input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
    ) -> torch.Tensor:
        if not self._on_gpu(input) or (weight is not None and weight.dtype != input.dtype):
            return torch.rms_norm(input, normalized_shape, weight, eps)
        self._assume("torch.rms_norm runs as CUDA's fused kernel.")
        return _aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]  # type: ignore[no-any-return]


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Head dimension padded to a multiple of 8, as flash attention needs it."""
    missing = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A boolean mask as zeros and minus infinities of the query's dtype."""
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, torch.full_like(zero, float("-inf")))


def _additive_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask as the efficient kernel takes it: additive, its rows aligned to 16 elements, expanded over the heads."""
    if mask.dtype is torch.bool:
        mask = _additive(mask, query)
    length = mask.shape[-1]
    if length % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[-2], key.shape[-2])
