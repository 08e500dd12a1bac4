"""Losses that CUDA computes element by element into a tensor of its own and then reduces.

The element-wise loss is as large as the input, and no meta kernel makes it. Sources: native/Loss.cpp,
native/cuda/Loss.cu, native/cuda/MultiMarginLoss.cu, native/cuda/MultiLabelMarginCriterion.cu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memprof.trace.events import GPU
from memprof.virtual.calls import Call, Operator
from memprof.virtual.kernels.reductions import opmath, reduction_buffers

if TYPE_CHECKING:
    from memprof.virtual.recording import RecordingMode
    from memprof.watch.recorder import Place

_aten = torch.ops.aten
_META = torch.device("meta")
_NONE = 0
"""`at::Reduction`: none is 0, the mean 1, the sum 2."""


def _argument(call: Call, position: int, name: str, default: Any) -> Any:
    return call.args[position] if len(call.args) > position else call.kwargs.get(name, default)


def _reduce(mode: RecordingMode, operator: Operator, place: Place, loss: torch.Tensor) -> None:
    """What the reduction of all of `loss` takes while it runs."""
    mode.transients(reduction_buffers(loss, None, opmath(loss), mode.card), operator, place)


def structured(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """mse_loss and smooth_l1_loss: two tensors like the loss before its reduction (Loss.cpp).

    The first is the result, which is allocated before it is known to be a scalar and keeps its memory. The other is
    what is reduced. Both are laid out as an element-wise operator on input and target gives.
    """
    if not call.on_gpu or call.real or _argument(call, 2, "reduction", 1) == _NONE:
        return NotImplemented
    result = _aten.sub.Tensor(*call.args[:2])
    loss = torch.empty_like(result)
    mode.record([result], operator.name, place, GPU)
    mode.record([loss], operator.name, place, GPU)
    _reduce(mode, operator, place, loss)
    return _as_scalar(result)


def _as_scalar(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` resized to a scalar: its memory stays as it is."""
    return tensor.set_(tensor.untyped_storage(), 0, (), ())  # type: ignore[call-overload, no-any-return]


def huber_loss(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """The loss like the input, then its mean or sum (Loss.cpp)."""
    if not call.on_gpu or call.real or _argument(call, 2, "reduction", 1) == _NONE:
        return NotImplemented
    loss = torch.empty_like(call.args[0])
    mode.record([loss], operator.name, place, GPU)
    result = torch.empty((), dtype=loss.dtype, device=_META)
    mode.record([result], operator.name, place, GPU)
    _reduce(mode, operator, place, loss)
    return result


def binary_cross_entropy(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """The loss, whose mean or sum is copied back into it: a scalar with memory as large as the input (Loss.cu)."""
    if not call.on_gpu or call.real or _argument(call, 3, "reduction", 1) == _NONE:
        return NotImplemented
    loss = torch.empty_like(call.args[0])
    mode.record([loss], operator.name, place, GPU)
    reduced = torch.empty((), dtype=loss.dtype, device=_META)
    mode.record([reduced], operator.name, place, GPU)
    _reduce(mode, operator, place, loss)
    return _as_scalar(loss)


def multi_margin_loss(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """A loss for each sample, summed (MultiMarginLoss.cu)."""
    data = call.args[0]
    if not call.on_gpu or call.real or data.dim() < 2 or _argument(call, 5, "reduction", 1) == _NONE:
        return NotImplemented
    result = torch.empty((), dtype=data.dtype, device=_META)
    mode.record([result], operator.name, place, GPU)
    _sum_of_samples(mode, operator, place, data)
    return result


def multilabel_margin_loss_forward(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """A loss for each sample, summed, and which classes are targets (MultiLabelMarginCriterion.cu)."""
    data, target, reduction = call.args
    if not call.on_gpu or call.real:
        return NotImplemented
    shape = data.shape[:1] if reduction == _NONE and data.dim() == 2 else ()
    result = torch.empty(shape, dtype=data.dtype, device=_META)
    is_target = torch.empty(target.shape, dtype=data.dtype, device=_META)
    mode.record([result, is_target], operator.name, place, GPU)
    if reduction != _NONE and data.dim() == 2:
        _sum_of_samples(mode, operator, place, data)
    return result, is_target


def _sum_of_samples(mode: RecordingMode, operator: Operator, place: Place, data: torch.Tensor) -> None:
    losses = torch.empty(data.shape[0], dtype=data.dtype, device=_META)
    mode.record([losses], operator.name, place, GPU)
    _reduce(mode, operator, place, losses)


def gradient_of_input(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """Backward operators without a meta kernel: a contiguous gradient of the shape of the input, argument number 1."""
    data = call.args[1]
    if not data.is_meta:
        return NotImplemented
    result = torch.empty(data.shape, dtype=data.dtype, device=_META)
    mode.record([result], operator.name, place, call.device or GPU)
    return result


HANDLERS: dict[Any, Any] = {
    _aten.mse_loss: structured,
    _aten.smooth_l1_loss: structured,
    _aten.huber_loss: huber_loss,
    _aten.binary_cross_entropy: binary_cross_entropy,
    _aten.multi_margin_loss: multi_margin_loss,
    _aten.multilabel_margin_loss_forward: multilabel_margin_loss_forward,
    _aten.multi_margin_loss_backward: gradient_of_input,
    _aten.multilabel_margin_loss_backward: gradient_of_input,
    _aten.fractional_max_pool3d_backward: gradient_of_input,
}
