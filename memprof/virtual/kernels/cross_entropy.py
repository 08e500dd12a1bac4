"""Cross entropy and the pairwise distance under autocast, which casts what their C++ calls inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.torch_private import kernels
from memprof.virtual.kernels.registry import composite
from memprof.virtual.machine import Machine

_nll_loss: Callable[..., torch.Tensor] = kernels.nll_loss_nd


@composite(kernels.cross_entropy_loss)
def cross_entropy(
    machine: Machine,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Under autocast the log-softmax inside keeps its dtype, and what follows it is cast (native/LossNLL.cpp)."""
    if not _autocasts(machine, input):
        return NotImplemented
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


@composite(torch.pairwise_distance)
def pairwise_distance(
    machine: Machine, x1: torch.Tensor, x2: torch.Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    """Under autocast the norm inside gives float32 (native/Distance.cpp)."""
    if not _autocasts(machine, x1):
        return NotImplemented
    return kernels.norm(x1 - x2 + eps, p, -1, keepdim, dtype=torch.float32)


def _autocasts(machine: Machine, input: torch.Tensor) -> bool:
    """Whether a reduction of `input` inside a C++ function would be made in float32 by autocast."""
    half = input.dtype in (torch.float16, torch.bfloat16)
    return half and torch.is_autocast_enabled("cuda") and machine.is_on_card(input)


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
