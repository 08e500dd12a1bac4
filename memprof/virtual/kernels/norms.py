"""Scratch memory of layer, group and RMS norm (native/cuda/layer_norm_kernel.cu, group_norm_kernel.cu)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from memprof.virtual.card import Card
from memprof.virtual.kernels.copies import contiguous
from memprof.virtual.kernels.reductions import opmath, reduction_buffers

if TYPE_CHECKING:
    from memprof.virtual.calls import Call, Operator
    from memprof.virtual.recording import RecordingMode
    from memprof.watch.recorder import Place

_aten = torch.ops.aten

_WARP = 32
_ROWS_PER_BLOCK = 32
_MAX_BLOCKS = 32 * 1024
_MANY_ROWS = 64 * 1024


def layer_norm_copy(args: Any) -> list[int]:
    """What is normalised, weight and bias are made contiguous (layer_norm_cuda)."""
    return contiguous(args[0], *args[2:4])


def layer_norm_backward_copy(args: Any) -> list[int]:
    """The same in the backward, before the gradients are made (layer_norm_backward_cuda)."""
    return contiguous(args[1], *args[5:7])


def rms_norm_copy(args: Any) -> list[int]:
    """What is normalised and the weight are made contiguous (_fused_rms_norm_cuda)."""
    return contiguous(args[0], args[2])


def rms_norm_backward_copy(args: Any) -> list[int]:
    """The same in the backward."""
    return contiguous(args[1], args[4])


def _partial_sums(data: torch.Tensor, width: int, parameters: int, card: Card) -> list[int]:
    """Very many short rows are summed in blocks first, into a row for each block, and these then by a reduction."""
    rows = data.numel() // width if width else 0
    if rows <= _MANY_ROWS or width // _WARP >= card.num_sms // 2:
        return []
    across = -(-width // _WARP)
    blocks = min(_MAX_BLOCKS // across, -(-rows // _ROWS_PER_BLOCK))
    item = data.element_size()
    partial = torch.empty(blocks, width, dtype=data.dtype, device="meta")
    finished = [width * item, *reduction_buffers(partial, [0], opmath(partial), card)]
    return parameters * [blocks * width * item] + parameters * finished


def layer_norm_backward(args: Any, card: Card) -> list[int]:
    """A contiguous gradient, then partial sums of the gradients of weight and bias.

    The copy is made last, by LayerNormBackwardKernelImpl; the sums by LaunchGammaBetaBackwardCUDAKernel.
    """
    wanted = int(bool(args[7][1])) + int(bool(args[7][2]))
    return contiguous(args[0]) + (_partial_sums(args[1], math.prod(args[2]), wanted, card) if wanted else [])


def rms_norm_backward(args: Any, card: Card) -> list[int]:
    """A contiguous gradient, then partial sums of the gradient of the weight."""
    return contiguous(args[0]) + (_partial_sums(args[1], math.prod(args[2]), 1, card) if args[5][1] else [])


def norm_backward(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """CUDA makes a contiguous gradient of the input; the meta kernel gives it the strides of its factors."""
    result = mode.allocating(operator, call, place)
    gradient = result[0]
    if gradient is None or gradient.is_contiguous():
        return result
    # It is new and fills its storage, so that only its strides are others.
    return (gradient.as_strided(gradient.size(), _strides(gradient.size())), *result[1:])


def _strides(size: torch.Size) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()


def group_norm(args: Any, card: Card) -> list[int]:
    """A scale and a shift for each sample's channels in float32, where there is a weight or a bias."""
    data, weight, bias, batch, channels, positions = args[:6]
    if (weight is None and bias is None) or positions == 1:
        return []
    return 2 * [opmath(data) * batch * channels]


def group_norm_backward(args: Any, card: Card) -> list[int]:
    """Sums for each channel, and for the input's gradient factors for each channel and group, in float32."""
    data, weight = args[1], args[4]
    batch, channels, positions, groups, mask = args[5:10]
    item = opmath(data)
    buffers = 2 * [item * batch * channels]
    if mask[0]:
        if weight is not None and positions != 1:
            buffers.append(item * batch * channels)
        buffers += 2 * [item * batch * groups]
    return buffers


INPUT_COPIES: dict[Any, Any] = {
    _aten.native_layer_norm: layer_norm_copy,
    _aten.native_layer_norm_backward: layer_norm_backward_copy,
    **({_aten._fused_rms_norm: rms_norm_copy} if hasattr(_aten, "_fused_rms_norm") else {}),
    **({_aten._fused_rms_norm_backward: rms_norm_backward_copy} if hasattr(_aten, "_fused_rms_norm_backward") else {}),
}
TEMPORARIES: dict[Any, Any] = {
    _aten.native_layer_norm_backward: layer_norm_backward,
    _aten.native_group_norm: group_norm,
    _aten.native_group_norm_backward: group_norm_backward,
    **({_aten._fused_rms_norm_backward: rms_norm_backward} if hasattr(_aten, "_fused_rms_norm_backward") else {}),
}
HANDLERS: dict[Any, Any] = {
    _aten.native_layer_norm_backward: norm_backward,
    **({_aten._fused_rms_norm_backward: norm_backward} if hasattr(_aten, "_fused_rms_norm_backward") else {}),
}
