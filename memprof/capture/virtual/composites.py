"""Composite operators that choose by device in C++, before a dispatch mode sees them: here they choose as CUDA does.

On meta tensors torch would take the generic path (attention with an S x S score matrix in float32, dropout with a mask
in the input's dtype, RMS norm in pieces). Each choice that is made here is recorded as an assumption of the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memprof.capture.virtual.attention import Attention
from memprof.capture.virtual.batch_norm import BatchNorm
from memprof.capture.virtual.encoder import Encoder
from memprof.capture.virtual.recording import RecordingMode
from memprof.capture.virtual.recurrent import Recurrent
from memprof.trace.events import GPU

_aten = torch.ops.aten
_dropout = torch.dropout
_cross_entropy: Callable[..., torch.Tensor] = torch._C._nn.cross_entropy_loss
_nll_loss: Callable[..., torch.Tensor] = torch._C._nn.nll_loss_nd
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
            _cross_entropy: self._cross_entropy,
            **BatchNorm(self._on_gpu).handlers(),
            **Recurrent(self._recording, self._on_gpu).handlers(),
            **{
                func: functools.partial(self._softmax, func, operator)
                for func, operator in (
                    (torch.softmax, _aten._softmax),
                    (torch.Tensor.softmax, _aten._softmax),
                    (torch.log_softmax, _aten._log_softmax),
                    (torch.Tensor.log_softmax, _aten._log_softmax),
                )
            },
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

    def _rms_norm(
        self, input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
    ) -> torch.Tensor:
        if not self._on_gpu(input) or (weight is not None and weight.dtype != input.dtype):
            return torch.rms_norm(input, normalized_shape, weight, eps)
        self._assume("torch.rms_norm runs as CUDA's fused kernel.")
        return _aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]  # type: ignore[no-any-return]
