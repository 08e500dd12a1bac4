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
            **{
                func: functools.partial(self._softmax, func, operator)
                for func, operator in (
                    (torch.softmax, _aten._softmax),
                    (torch.Tensor.softmax, _aten._softmax),
                    (torch.special.softmax, _aten._softmax),
                    (torch.log_softmax, _aten._log_softmax),
                    (torch.Tensor.log_softmax, _aten._log_softmax),
                    (torch.special.log_softmax, _aten._log_softmax),
                )
            },
            torch.nn.functional.scaled_dot_product_attention: self._attention,
            torch.pairwise_distance: self._pairwise_distance,
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
        """Under autocast the log-softmax inside keeps its dtype, and what follows it is cast (native/LossNLL.cpp)."""
        if not self._autocasts(input):
            return _cross_entropy(input, target, weight, reduction, ignore_index, label_smoothing)
        classes = 1 if input.dim() > 1 else 0
        log_softmax = torch.log_softmax(input, classes, dtype=input.dtype)
        if target.shape == input.shape:
            return _probability_loss(log_softmax, target, weight, reduction, classes, label_smoothing)
        # The arguments are cast from right to left: see autocast.py.
        nll_weight = None if weight is None else weight.float()
        nll_loss = _nll_loss(log_softmax.float(), target, nll_weight, reduction, ignore_index)
        if not label_smoothing:
            return nll_loss
        smooth_loss = _smooth_loss(log_softmax, target, weight, reduction, ignore_index, classes)
        return (1 - label_smoothing) * nll_loss + smooth_loss * (label_smoothing / input.shape[classes])

    def _pairwise_distance(
        self, x1: torch.Tensor, x2: torch.Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False
    ) -> torch.Tensor:
        """Under autocast the norm inside gives float32 (native/Distance.cpp)."""
        if not self._autocasts(x1):
            return torch.pairwise_distance(x1, x2, p, eps, keepdim)
        return torch._VF.norm(x1 - x2 + eps, p, -1, keepdim, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def _autocasts(self, input: torch.Tensor) -> bool:
        """Whether a reduction of `input` inside a C++ function would be made in float32 by autocast."""
        half = input.dtype in (torch.float16, torch.bfloat16)
        return half and torch.is_autocast_enabled("cuda") and self._on_gpu(input)

    def _rms_norm(
        self, input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
    ) -> torch.Tensor:
        if not self._on_gpu(input) or (weight is not None and weight.dtype != input.dtype):
            return torch.rms_norm(input, normalized_shape, weight, eps)
        self._assume("torch.rms_norm runs as CUDA's fused kernel.")
        return _aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]  # type: ignore[no-any-return]


def _probability_loss(
    log_softmax: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    classes: int,
    label_smoothing: float,
) -> torch.Tensor:
    """Cross entropy with probabilities for a target: `cross_entropy_loss_prob_target`, its sums in float32."""
    if label_smoothing > 0:
        target = target * (1 - label_smoothing) + label_smoothing / log_softmax.shape[classes]
    weight = None if weight is None else _by_class(weight, log_softmax, classes)
    product = log_softmax * target
    if weight is not None:
        product = product * weight
    if reduction == _NO_REDUCTION:
        return -_sum(product, classes)
    total = -_sum(product)
    return total if reduction == _SUM else total / (log_softmax.numel() / log_softmax.shape[classes])


def _smooth_loss(
    log_softmax: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    classes: int,
) -> torch.Tensor:
    """What label smoothing adds: the second half of `cross_entropy_loss_label_smoothing`, its sums in float32."""
    weighted = log_softmax if weight is None else log_softmax * _by_class(weight, log_softmax, classes)
    loss = -_sum(weighted, classes)
    ignored = target == ignore_index
    loss.masked_fill_(ignored, 0.0)
    if reduction == _NO_REDUCTION:
        return loss
    if reduction == _SUM:
        return _sum(loss)
    # The divisor is computed first.
    chosen = ~ignored
    count = chosen.sum() if weight is None else _sum(weight.gather(0, target.masked_select(chosen).flatten()))
    return _sum(loss) / count


_NO_REDUCTION, _SUM = 0, 2
"""`at::Reduction`; 1 is the mean."""


def _by_class(weight: torch.Tensor, input: torch.Tensor, classes: int) -> torch.Tensor:
    return weight.view([-1 if dim == classes else 1 for dim in range(input.dim())])


def _sum(input: torch.Tensor, *dims: int) -> torch.Tensor:
    return input.sum(dims, dtype=torch.float32) if dims else input.sum(dtype=torch.float32)


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
