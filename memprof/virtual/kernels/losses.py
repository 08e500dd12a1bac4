"""Losses whose CUDA kernels compute one value per element into a separate tensor and then reduce it.

The unreduced loss is as large as the input, and torch's meta kernels do not allocate it. Sources: native/Loss.cpp,
native/cuda/Loss.cu, native/cuda/MultiMarginLoss.cu, native/cuda/MultiLabelMarginCriterion.cu.

Cross entropy and the pairwise distance are here because autocast casts the inputs of their inner operators.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.torch_private import kernels
from memprof.virtual.column_broadcasts import record_column_broadcast
from memprof.virtual.device_state import DeviceState
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.copies import make_copies_formula
from memprof.virtual.kernels.reductions import accumulator_bytes_per_value, reduction_buffers
from memprof.virtual.kernels.registry import aten, composite, kernel, scratch

_REDUCTION_NONE, _REDUCTION_SUM = 0, 2  # `at::Reduction`; the mean is 1
_Weight = torch.Tensor | None


def _is_unreduced(launch: KernelContext, reduction_position: int) -> bool:
    """Return whether the loss has reduction="none" or runs on the host; torch's meta kernel is correct for both."""
    return bool(launch.call.real) or launch.argument(reduction_position, "reduction", 1) == _REDUCTION_NONE


def _allocate_reduction_buffers(launch: KernelContext, loss: torch.Tensor) -> None:
    """Allocate and free the buffers that reduce `loss` to a scalar."""
    launch.transients(*reduction_buffers(loss, None, accumulator_bytes_per_value(loss), launch.gpu))


@kernel(aten.mse_loss, aten.smooth_l1_loss)
def elementwise_loss(launch: KernelContext) -> Any:
    """Allocate two tensors of the shape of the unreduced loss, for mse_loss and smooth_l1_loss (Loss.cpp).

    The first is the result, which is resized to a scalar but keeps its memory. The second is reduced. Both have the
    strides of an element-wise operator on input and target.
    """
    if _is_unreduced(launch, 2):
        return NotImplemented
    result = aten.sub.Tensor(*launch.args[:2])
    loss = torch.empty_like(result)
    launch.record(result)
    record_column_broadcast(launch.device_state.recorder, launch.operator.name, launch.call, [result])
    launch.record(loss)
    _allocate_reduction_buffers(launch, loss)
    return _resize_to_scalar(result)


def _resize_to_scalar(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` resized to a scalar; its storage keeps its size."""
    return tensor.set_(tensor.untyped_storage(), 0, (), ())  # type: ignore[call-overload, no-any-return]


@kernel(aten.huber_loss, aten.binary_cross_entropy)
def reduced_loss(launch: KernelContext) -> Any:
    """Allocate a loss of the input's shape, then its mean or sum (Loss.cpp). binary_cross_entropy copies the scalar
    back into the loss, so the result keeps memory of the input's size (Loss.cu)."""
    is_copied = launch.operator.packet is aten.binary_cross_entropy
    if _is_unreduced(launch, 3 if is_copied else 2):
        return NotImplemented
    loss = torch.empty_like(launch.args[0])
    launch.record(loss)
    reduced = launch.new((), loss.dtype)
    _allocate_reduction_buffers(launch, loss)
    return _resize_to_scalar(loss) if is_copied else reduced


@kernel(aten.multi_margin_loss)
def multi_margin_loss(launch: KernelContext) -> Any:
    """Allocate the mean or sum, and temporarily one loss per sample (MultiMarginLoss.cu)."""
    data = launch.args[0]
    if data.dim() < 2 or _is_unreduced(launch, 5):
        return NotImplemented
    result = launch.new((), data.dtype)
    _allocate_reduction_buffers(launch, launch.new(data.shape[0], data.dtype))
    return result


@kernel(aten.multilabel_margin_loss_forward)
def multilabel_margin_loss_forward(launch: KernelContext) -> Any:
    """Allocate the loss, a mask of the target classes, and a temporary loss per sample
    (MultiLabelMarginCriterion.cu)."""
    data, target, reduction = launch.args
    if launch.call.real:
        return NotImplemented
    shape = data.shape[:1] if reduction == _REDUCTION_NONE and data.dim() == 2 else ()
    result = launch.new(shape, data.dtype)
    is_target = launch.new(target.shape, data.dtype)
    if reduction != _REDUCTION_NONE and data.dim() == 2:
        _allocate_reduction_buffers(launch, launch.new(data.shape[0], data.dtype))
    return result, is_target


@kernel(aten.multi_margin_loss_backward, aten.multilabel_margin_loss_backward, on_host=True)
@kernel(aten.fractional_max_pool3d_backward, on_host=True)
def make_input_gradient(launch: KernelContext) -> Any:
    """Allocate a contiguous gradient of the input's shape (argument 1), for backward operators without meta kernel."""
    data = launch.args[1]
    if not data.is_meta:
        return NotImplemented
    return launch.new(data.shape, data.dtype)


@composite(torch.ctc_loss)
def ctc_loss_with_lengths(
    device_state: Any, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *rest: Any, **kwargs: Any
) -> Any:
    """Run `ctc_loss` with lengths as Python lists, since the host reads length tensors (native/LossCTC.cpp, ctc_loss).
    Length tensors whose values are unknown stay on the GPU."""
    lengths = (input_lengths, target_lengths)
    if not device_state.is_on_gpu(log_probs) or not all(isinstance(t, torch.Tensor) for t in lengths):
        return NotImplemented
    known_lengths = [device_state.values.store.get(t) for t in lengths]
    if all(t is not None for t in known_lengths):
        lengths = tuple(t.tolist() for t in known_lengths)
    return torch.ctc_loss(log_probs, targets, *lengths, *rest, **kwargs)


@kernel(aten._ctc_loss, on_host=True)
def ctc_loss(launch: KernelContext) -> Any:
    """Allocate one loss per sample, and the alignments' log probabilities (LossCTC.cu, ctc_loss_gpu_template)."""
    log_probs, targets, _, target_lengths = launch.args[:4]
    if not log_probs.is_meta:
        return NotImplemented
    frames, batch = log_probs.shape[0], log_probs.shape[1]
    is_tensor = isinstance(target_lengths, torch.Tensor)
    known_lengths = launch.values.store.get(target_lengths) if is_tensor else torch.tensor(target_lengths)
    if known_lengths is not None:
        max_target_length = int(known_lengths.max()) if known_lengths.numel() else 0
    else:
        launch.values.assume("CTC targets whose lengths are not known are all as long as they can be.")
        max_target_length = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // batch)
    # Input lengths, target lengths and target offsets are copied to the GPU as int64.
    launch.transients(*3 * [8 * batch])
    alpha = launch.new((batch, frames, 2 * max_target_length + 1), log_probs.dtype)
    return launch.new(batch, log_probs.dtype), alpha


@kernel(aten._ctc_loss_backward, on_host=True)
def ctc_loss_backward(launch: KernelContext) -> Any:
    """Allocate the gradient of the log probabilities; the temporary beta is as large as alpha (cuda/LossCTC.cu)."""
    log_probs, alpha = launch.args[1], launch.args[6]
    if not log_probs.is_meta:
        return NotImplemented
    with launch.scratch(alpha.numel() * alpha.element_size()):
        result = launch.new(log_probs.shape, log_probs.dtype)
        launch.transients(*3 * [8 * log_probs.shape[1]])
    return result


# native/cuda/Loss.cu: input, target and weight; then target, input, gradient and weight.
scratch(aten.nll_loss_forward)(make_copies_formula(0, 1, 2))
scratch(aten.nll_loss_backward)(make_copies_formula(2, 1, 0, 3))


# Copies of all inputs if the loss of images is reduced, else of the weight only (native/cuda/NLLLoss2d.cu).
scratch(aten.nll_loss2d_forward)(
    lambda args, gpu: (make_copies_formula(0, 2, 1) if args[3] else make_copies_formula(2))(args)
)
scratch(aten.nll_loss2d_backward)(
    lambda args, gpu: (make_copies_formula(2, 3) if args[4] else make_copies_formula(3))(args)
)


@composite(kernels.cross_entropy_loss)
def cross_entropy(
    device_state: DeviceState,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Run cross entropy under autocast, where only operators after the log-softmax use float32 (native/LossNLL.cpp)."""
    if not _is_autocast_to_float32(device_state, input):
        return NotImplemented
    class_dim = 1 if input.dim() > 1 else 0
    log_softmax = torch.log_softmax(input, class_dim, dtype=input.dtype)
    if target.shape == input.shape:
        return _compute_probability_loss(log_softmax, target, weight, reduction, class_dim, label_smoothing)
    # The arguments are cast from right to left: see autocast.py.
    nll_weight = None if weight is None else weight.float()
    nll_loss = kernels.nll_loss_nd(log_softmax.float(), target, nll_weight, reduction, ignore_index)
    if not label_smoothing:
        return nll_loss
    smooth_loss = _compute_smooth_loss(log_softmax, target, weight, reduction, ignore_index, class_dim)
    return (1 - label_smoothing) * nll_loss + smooth_loss * (label_smoothing / input.shape[class_dim])


@composite(torch.pairwise_distance)
def pairwise_distance(
    device_state: DeviceState,
    x1: torch.Tensor,
    x2: torch.Tensor,
    p: float = 2,
    eps: float = 1e-6,
    keepdim: bool = False,
) -> Any:
    """Run the pairwise distance under autocast, where the norm returns float32 (native/Distance.cpp)."""
    if not _is_autocast_to_float32(device_state, x1):
        return NotImplemented
    return kernels.norm(x1 - x2 + eps, p, -1, keepdim, dtype=torch.float32)


def _is_autocast_to_float32(device_state: DeviceState, input: torch.Tensor) -> bool:
    """Return whether autocast runs reductions of `input` inside C++ functions in float32."""
    is_half = input.dtype in (torch.float16, torch.bfloat16)
    return is_half and torch.is_autocast_enabled(device_state.gpus.type) and device_state.is_on_gpu(input)


def _compute_probability_loss(
    log_softmax: torch.Tensor, target: torch.Tensor, weight: _Weight, reduction: int, class_dim: int, smoothing: float
) -> torch.Tensor:
    """Return cross entropy for class probabilities `target`, summed in float32 (`cross_entropy_loss_prob_target`)."""
    if smoothing > 0:
        target = target * (1 - smoothing) + smoothing / log_softmax.shape[class_dim]
    weight = None if weight is None else _view_by_class(weight, log_softmax, class_dim)
    product = log_softmax * target
    if weight is not None:
        product = product * weight
    if reduction == _REDUCTION_NONE:
        return -_sum_in_float32(product, class_dim)
    total = -_sum_in_float32(product)
    return total if reduction == _REDUCTION_SUM else total / (log_softmax.numel() / log_softmax.shape[class_dim])


def _compute_smooth_loss(
    log_softmax: torch.Tensor, target: torch.Tensor, weight: _Weight, reduction: int, ignore_index: int, class_dim: int
) -> torch.Tensor:
    """Return the label smoothing term (second half of `cross_entropy_loss_label_smoothing`), summed in float32."""
    losses = log_softmax if weight is None else log_softmax * _view_by_class(weight, log_softmax, class_dim)
    loss = -_sum_in_float32(losses, class_dim)
    is_ignored = target == ignore_index
    loss.masked_fill_(is_ignored, 0.0)
    if reduction == _REDUCTION_NONE:
        return loss
    if reduction == _REDUCTION_SUM:
        return _sum_in_float32(loss)
    # The divisor is computed first.
    is_counted = ~is_ignored
    divisor = (
        is_counted.sum()
        if weight is None
        else _sum_in_float32(weight.gather(0, target.masked_select(is_counted).flatten()))
    )
    return _sum_in_float32(loss) / divisor


def _view_by_class(weight: torch.Tensor, input: torch.Tensor, class_dim: int) -> torch.Tensor:
    return weight.view([-1 if dim == class_dim else 1 for dim in range(input.dim())])


def _sum_in_float32(input: torch.Tensor, *dims: int) -> torch.Tensor:
    return input.sum(dims, dtype=torch.float32) if dims else input.sum(dtype=torch.float32)
