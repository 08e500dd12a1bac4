"""The workspaces of cuDNN's convolutions: a rule where public measurements agree on one, and a bound.

torch runs the first plan of cuDNN's heuristics whose workspace it can allocate, takes it beside the result and gives it
back before the call returns (native/cudnn/Conv_v8.cpp, run_conv_plan). Which plan that is, cuDNN does not publish. What
others measured, with torch.backends.cudnn.benchmark off and cuDNN 8 or 9 unless said otherwise, is this:

* **half precision, channels first**: the kernels for tensor cores work channels-last. Data, output and weight are
  copied, with channels rounded up to 16 bytes. To the byte: the forward of a Conv3d from 64 to 32 channels on an A100
  (github.com/pytorch/pytorch/issues/95024). Within what was printed: ten sizes of a Conv2d (123533), a Conv3d (136479).
  The gradient of the weight takes partial sums too: six sizes of a Conv2d from 4 to 4 channels, to the same byte in
  two programs (Liger-Kernel's benchmark of multi-token attention, RTX 3090).
* **float32**: the weight is laid out anew and one value is taken for each channel of what is made. To the byte with the
  two constants below: six convolutions of 5x5 in one recording (torch 2.3, Ampere, TF32 on). Kernels of one point take
  nothing, except in one of two recordings, where they took 4 or 128 MiB.
* **float32 in three dimensions** with TF32: as in half precision (one figure, 17 GiB: 128947, A100).

Nothing was found for channels-last tensors, whose kernels need no copies, for groups, or for compute capability 9 on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from memprof.torch_private import kernels
from memprof.virtual.card import Card

RULE = (
    "The workspaces of cuDNN's convolutions, gone when each call returns, follow what was measured on cards of compute "
    "capability 8: for half precision that is not channels-last copies in the layout of the tensor cores, for float32 "
    "one of the weight. Which kernel cuDNN takes is not published."
)
BENCHMARK = (
    "torch.backends.cudnn.benchmark is on: while algorithms are tried, a convolution takes the largest workspace that "
    "any of them asks for, up to what the card has left. That is not counted."
)

_ALIGNMENT_BYTES = 16
_PARTIAL_SUMS_BYTES = 10 * 98_352
"""Of the gradient of a weight in half precision: 7 to 11 such parts in the six sizes, 10 in the two largest."""
_FEW_CHANNELS = 16
_FEW_CHANNELS_BYTES = 32 << 10
"""Where what is made has no more channels than that."""
_UNALIGNED_BYTES = 2 << 10
"""In float32 where channels are no multiple of 16 bytes."""
_ACCUMULATORS_BYTES = 64 << 10
"""Of one multiprocessor: a tile of 128 x 128 sums in float32, the bound of what is split."""


class Workspace(NamedTuple):
    """What a convolution takes beside its result, in bytes."""

    num_bytes: int
    """By the rule."""
    most_bytes: int
    """The bound: the most that was measured of a convolution of its kind."""


def _padded_bytes(tensor: torch.Tensor, dims: tuple[int, ...] = (1,)) -> int:
    """Bytes of a copy whose channels are rounded up."""
    step = _ALIGNMENT_BYTES // tensor.element_size()
    sizes = (-(-size // step) * step if dim in dims else size for dim, size in enumerate(tensor.shape))
    return math.prod(sizes) * tensor.element_size()


def workspace(
    card: Card, data: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, made: torch.Tensor, *, last: bool
) -> Workspace:
    """The workspace of one call.

    Args:
        card: whose kernels run.
        data: the convolution's input, or the gradient of it.
        weight: or its gradient.
        output: or its gradient.
        made: which of the three the call makes.
        last: whether it runs in a channels-last layout.
    """
    half = data.element_size() == 2
    by_weight = made is weight
    on_tensor_cores = card.compute_capability >= (7, 0) if half else _tf32(card, data)
    copied = [_padded_bytes(data), _padded_bytes(output), _padded_bytes(weight, (0, 1))]
    # cuDNN 7.6 on a V100 kept what it made in half precision in float32: pytorch/pytorch issues 31500 and 50990.
    twice = 0 if by_weight else _padded_bytes(made)
    sums = card.num_sms * _ACCUMULATORS_BYTES if by_weight else 0
    most_bytes = sum(copied) + twice + max(sums, _FEW_CHANNELS_BYTES + _UNALIGNED_BYTES)
    channels = made.shape[1]
    few = _FEW_CHANNELS_BYTES if channels <= _FEW_CHANNELS else 0
    if half and by_weight and on_tensor_cores:
        num_bytes = _PARTIAL_SUMS_BYTES + few + (0 if last else sum(copied))
    elif last or not (on_tensor_cores or data.dtype is torch.float32):
        num_bytes = 0
    elif half or (on_tensor_cores and weight.dim() == 5):
        num_bytes = sum(copied)
    elif math.prod(weight.shape[2:]) == 1:
        num_bytes = 0
    else:
        unaligned = any(tensor.shape[1] % 4 for tensor in (data, output))
        num_bytes = weight.numel() * 4 + channels * 4 + few + (_UNALIGNED_BYTES if unaligned else 0)
    return Workspace(num_bytes, max(num_bytes, most_bytes))


def _tf32(card: Card, data: torch.Tensor) -> bool:
    return data.dtype is torch.float32 and card.compute_capability >= (8, 0) and kernels.get_cudnn_allow_tf32()
