"""Losses that CUDA computes element by element into a tensor of its own and then reduces.

The element-wise loss is as large as the input, and no meta kernel makes it. Sources: native/Loss.cpp,
native/cuda/Loss.cu, native/cuda/MultiMarginLoss.cu, native/cuda/MultiLabelMarginCriterion.cu.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.card import Card
from memprof.virtual.kernels.copies import contiguous
from memprof.virtual.kernels.reductions import opmath, reduction_buffers
from memprof.virtual.kernels.registry import composite, kernel, scratch
from memprof.virtual.launch import Launch

_aten = torch.ops.aten
_META = torch.device("meta")
_NONE = 0
"""`at::Reduction`: none is 0, the mean 1, the sum 2."""


def _stays_whole(launch: Launch, reduction_at: int) -> bool:
    """Whether the loss is not reduced, or runs on the host: then the meta kernel does."""
    return bool(launch.call.real) or launch.argument(reduction_at, "reduction", 1) == _NONE


def _reduce(launch: Launch, loss: torch.Tensor) -> None:
    """What the reduction of all of `loss` takes while it runs."""
    launch.transients(*reduction_buffers(loss, None, opmath(loss), launch.card))


@kernel(_aten.mse_loss, _aten.smooth_l1_loss)
def structured(launch: Launch) -> Any:
    """mse_loss and smooth_l1_loss: two tensors like the loss before its reduction (Loss.cpp).

    The first is the result, which is allocated before it is known to be a scalar and keeps its memory. The other is
    what is reduced. Both are laid out as an element-wise operator on input and target gives.
    """
    if _stays_whole(launch, 2):
        return NotImplemented
    result = _aten.sub.Tensor(*launch.args[:2])
    loss = torch.empty_like(result)
    launch.record(result, loss)
    _reduce(launch, loss)
    return _as_scalar(result)


def _as_scalar(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` resized to a scalar: its memory stays as it is."""
    return tensor.set_(tensor.untyped_storage(), 0, (), ())  # type: ignore[call-overload, no-any-return]


@kernel(_aten.huber_loss)
def huber_loss(launch: Launch) -> Any:
    """The loss like the input, then its mean or sum (Loss.cpp)."""
    if _stays_whole(launch, 2):
        return NotImplemented
    loss = torch.empty_like(launch.args[0])
    launch.record(loss)
    result = launch.new((), loss.dtype)
    _reduce(launch, loss)
    return result


@kernel(_aten.binary_cross_entropy)
def binary_cross_entropy(launch: Launch) -> Any:
    """The loss, whose mean or sum is copied back into it: a scalar with memory as large as the input (Loss.cu)."""
    if _stays_whole(launch, 3):
        return NotImplemented
    loss = torch.empty_like(launch.args[0])
    launch.record(loss)
    reduced = launch.new((), loss.dtype)
    _reduce(launch, loss)
    del reduced  # it has been copied back
    return _as_scalar(loss)


@kernel(_aten.multi_margin_loss)
def multi_margin_loss(launch: Launch) -> Any:
    """A loss for each sample, summed (MultiMarginLoss.cu)."""
    data = launch.args[0]
    if data.dim() < 2 or _stays_whole(launch, 5):
        return NotImplemented
    result = launch.new((), data.dtype)
    _sum_of_samples(launch, data)
    return result


@kernel(_aten.multilabel_margin_loss_forward)
def multilabel_margin_loss_forward(launch: Launch) -> Any:
    """A loss for each sample, summed, and which classes are targets (MultiLabelMarginCriterion.cu)."""
    data, target, reduction = launch.args
    if launch.call.real:
        return NotImplemented
    shape = data.shape[:1] if reduction == _NONE and data.dim() == 2 else ()
    result = launch.new(shape, data.dtype)
    is_target = launch.new(target.shape, data.dtype)
    if reduction != _NONE and data.dim() == 2:
        _sum_of_samples(launch, data)
    return result, is_target


def _sum_of_samples(launch: Launch, data: torch.Tensor) -> None:
    losses = launch.new(data.shape[0], data.dtype)
    _reduce(launch, losses)


@kernel(
    _aten.multi_margin_loss_backward,
    _aten.multilabel_margin_loss_backward,
    _aten.fractional_max_pool3d_backward,
    on_host=True,
)
def gradient_of_input(launch: Launch) -> Any:
    """Backward operators without a meta kernel: a contiguous gradient of the shape of the input, argument number 1."""
    data = launch.args[1]
    if not data.is_meta:
        return NotImplemented
    return launch.new(data.shape, data.dtype)


@composite(torch.ctc_loss)
def ctc_loss_of_lengths(
    machine: Any,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *options: Any,
    **named: Any,
) -> Any:
    """Lengths given as tensors are read by the host, wherever they are (native/LossCTC.cpp, ctc_loss); where they are
    not known they stay tensors, and on the card."""
    lengths = (input_lengths, target_lengths)
    if not machine.is_on_card(log_probs) or not all(isinstance(each, torch.Tensor) for each in lengths):
        return NotImplemented
    known = [machine.values.store.get(each) for each in lengths]
    if all(each is not None for each in known):
        lengths = tuple(each.tolist() for each in known)
    return torch.ctc_loss(log_probs, targets, *lengths, *options, **named)


@kernel(_aten._ctc_loss, on_host=True)
def ctc_loss(launch: Launch) -> Any:
    """Loss per sample and the alignments' log probabilities alpha (native/cuda/LossCTC.cu, ctc_loss_gpu_template)."""
    log_probs, targets, _, target_lengths = launch.args[:4]
    if not log_probs.is_meta:
        return NotImplemented
    frames, batch = log_probs.shape[0], log_probs.shape[1]
    known = (
        launch.values.store.get(target_lengths)
        if isinstance(target_lengths, torch.Tensor)
        else torch.tensor(target_lengths)
    )
    if known is not None:
        longest = int(known.max()) if known.numel() else 0
    else:
        launch.values.assume("CTC targets whose lengths are not known are all as long as they can be.")
        longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // batch)
    # The lengths go to the card as int64 (both), and so do the offsets of the targets.
    launch.transients(*3 * [8 * batch])
    alpha = launch.new((batch, frames, 2 * longest + 1), log_probs.dtype)
    return launch.new(batch, log_probs.dtype), alpha


@kernel(_aten._ctc_loss_backward, on_host=True)
def ctc_loss_backward(launch: Launch) -> Any:
    """A gradient like the log probabilities; beta, as large as alpha, lives while it runs (native/cuda/LossCTC.cu)."""
    log_probs, alpha = launch.args[1], launch.args[6]
    if not log_probs.is_meta:
        return NotImplemented
    with launch.scratch(alpha.numel() * alpha.element_size()):
        result = launch.new(log_probs.shape, log_probs.dtype)
        launch.transients(*3 * [8 * log_probs.shape[1]])
    return result


@scratch(_aten.nll_loss_forward)
def nll_loss(args: Any, card: Card) -> list[int]:
    """Contiguous copies of input, target and weight (native/cuda/Loss.cu)."""
    return contiguous(*args[:3])


@scratch(_aten.nll_loss_backward)
def nll_loss_backward(args: Any, card: Card) -> list[int]:
    """Likewise, and of the gradient."""
    grad, data, target, weight = args[:4]
    return contiguous(target, data, grad, weight)


@scratch(_aten.nll_loss2d_forward)
def nll_loss2d(args: Any, card: Card) -> list[int]:
    """Of images, if they are reduced; else of the weight alone (native/cuda/NLLLoss2d.cu)."""
    data, target, weight, reduction = args[:4]
    return contiguous(data, weight, target) if reduction else contiguous(weight)


@scratch(_aten.nll_loss2d_backward)
def nll_loss2d_backward(args: Any, card: Card) -> list[int]:
    """Of target and weight."""
    target, weight, reduction = args[2:5]
    return contiguous(target, weight) if reduction else contiguous(weight)
