"""Composite operators that choose by device in C++, before a dispatch mode sees them: here they choose as CUDA does.

On meta tensors torch would take the generic path (attention with an S x S score matrix in float32, dropout with a mask
in the input's dtype, RMS norm in pieces). Each choice that is made here is recorded as an assumption of the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memprof.trace.events import GPU
from memprof.virtual.kernels.attention import Attention
from memprof.virtual.kernels.batch_norm import BatchNorm
from memprof.virtual.kernels.encoder import Encoder
from memprof.virtual.kernels.recurrent import Recurrent
from memprof.virtual.recording import RecordingMode
from memprof.watch.wrappers import is_wrapped

_aten = torch.ops.aten
_dropout = torch.dropout
_linear = torch._C._nn.linear
_cross_entropy: Callable[..., torch.Tensor] = torch._C._nn.cross_entropy_loss
_nll_loss: Callable[..., torch.Tensor] = torch._C._nn.nll_loss_nd
_one_hot: Callable[..., torch.Tensor] = torch._C._nn.one_hot
_NoTorchFunction = torch._C.DisableTorchFunction


class Composites:
    """The CUDA choices for one card."""

    def __init__(self, recording: RecordingMode, assume: Callable[[str], None]) -> None:
        self._recording = recording
        self._assume = assume

    def handlers(self) -> dict[Any, Callable[..., Any]]:
        """Function -> replacement, for the function mode."""
        attention = Attention(self._recording, self._on_gpu, self._dropout)
        handlers: dict[Any, Callable[..., Any]] = {
            **attention.handlers(),
            **Encoder(attention, self._on_gpu).handlers(),
            _dropout: self._dropout,
            _linear: self._linear,
            _cross_entropy: self._cross_entropy,
            _one_hot: self._one_hot,
            **BatchNorm(self._on_gpu).handlers(),
            **Recurrent(self._recording, self._on_gpu).handlers(),
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
            torch.pairwise_distance: self._pairwise_distance,
        }
        if hasattr(_aten, "_fused_rms_norm"):
            handlers[torch.rms_norm] = self._rms_norm
        return handlers

    def _on_gpu(self, tensor: torch.Tensor) -> bool:
        with _NoTorchFunction():
            return self._recording.device_of(tensor) == GPU

    def _dropout(self, input: torch.Tensor, p: float = 0.5, train: bool = True) -> torch.Tensor:
        if not (train and 0 < p < 1 and input.numel() and self._on_gpu(input)):
            return _dropout(input, p, train)
        self._assume("Dropout keeps a boolean mask (CUDA's native_dropout).")
        return _aten.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Where it is no single addmm, the bias is added in place; under a mode out of place (native/Linear.cpp)."""
        if bias is None or is_wrapped(bias):  # in a real run it is added out of place as well
            return _linear(input, weight, bias)
        self._recording.adds_bias = True
        try:
            return _linear(input, weight, bias)
        finally:
            self._recording.adds_bias = False

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
