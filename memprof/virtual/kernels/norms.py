"""Scratch memory of layer, group and RMS norm (native/cuda/layer_norm_kernel.cu, group_norm_kernel.cu)."""

from __future__ import annotations

import math
from typing import Any

import torch

from memprof.trace.events import HOST
from memprof.virtual.card import Card
from memprof.virtual.kernels.copies import contiguous
from memprof.virtual.kernels.reductions import opmath, reduction_buffers
from memprof.virtual.kernels.registry import composite, input_copies, kernel, scratch
from memprof.virtual.launch import Launch
from memprof.virtual.machine import Machine

_aten = torch.ops.aten

_WARP = 32
_ROWS_PER_BLOCK = 32
_MAX_BLOCKS = 32 * 1024
_MANY_ROWS = 64 * 1024


@input_copies(_aten.native_layer_norm)
def layer_norm_copy(args: Any) -> list[int]:
    """What is normalised, weight and bias are made contiguous (layer_norm_cuda)."""
    return contiguous(args[0], *args[2:4])


@input_copies(_aten.native_layer_norm_backward)
def layer_norm_backward_copy(args: Any) -> list[int]:
    """The same in the backward, before the gradients are made (layer_norm_backward_cuda)."""
    return contiguous(args[1], *args[5:7])


@kernel("aten._fused_rms_norm", on_host=True)
def fused_rms_norm(launch: Launch) -> Any:
    """The result and, for each row, what it was multiplied by (_fused_rms_norm_cuda)."""
    data, shape, weight = launch.args[:3]
    if launch.device == HOST:
        with launch.inside():
            return launch.func._op_dk(torch.DispatchKey.CompositeImplicitAutograd, *launch.args)
    with launch.scratch(*contiguous(data, weight)):
        return launch.new(data.shape, data.dtype), launch.new(*_row_statistics(data, shape))


def _row_statistics(data: torch.Tensor, shape: Any) -> tuple[Any, torch.dtype]:
    rows = data.shape[: data.dim() - len(shape)]
    return (*rows, *[1] * len(shape)), torch.float64 if data.dtype is torch.float64 else torch.float32


@input_copies("aten._fused_rms_norm_backward")
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


@scratch(_aten.native_layer_norm_backward)
def layer_norm_backward(args: Any, card: Card) -> list[int]:
    """A contiguous gradient, then partial sums of the gradients of weight and bias.

    The copy is made last, by LayerNormBackwardKernelImpl; the sums by LaunchGammaBetaBackwardCUDAKernel.
    """
    wanted = int(bool(args[7][1])) + int(bool(args[7][2]))
    return contiguous(args[0]) + (_partial_sums(args[1], math.prod(args[2]), wanted, card) if wanted else [])


@scratch("aten._fused_rms_norm_backward")
def rms_norm_backward(args: Any, card: Card) -> list[int]:
    """A contiguous gradient, then partial sums of the gradient of the weight."""
    return contiguous(args[0]) + (_partial_sums(args[1], math.prod(args[2]), 1, card) if args[5][1] else [])


@kernel(_aten.native_layer_norm_backward, "aten._fused_rms_norm_backward", on_host=True)
def norm_backward(launch: Launch) -> Any:
    """CUDA makes a contiguous gradient of the input; the meta kernel gives it the strides of its factors."""
    result = launch.run()
    gradient = result[0]
    if gradient is None or gradient.is_contiguous():
        return result
    # It is new and fills its storage, so that only its strides are others.
    return (gradient.as_strided(gradient.size(), _strides(gradient.size())), *result[1:])


def _strides(size: torch.Size) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()


@scratch(_aten.native_group_norm)
def group_norm(args: Any, card: Card) -> list[int]:
    """A scale and a shift for each sample's channels in float32, where there is a weight or a bias."""
    data, weight, bias, batch, channels, positions = args[:6]
    if (weight is None and bias is None) or positions == 1:
        return []
    return 2 * [opmath(data) * batch * channels]


@scratch(_aten.native_group_norm_backward)
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


def rms_norm(
    machine: Machine,
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """`torch.rms_norm` as one kernel; on other devices it runs in pieces."""
    if not machine.is_on_card(input) or (weight is not None and weight.dtype != input.dtype):
        return NotImplemented
    machine.values.assume("torch.rms_norm runs as CUDA's fused kernel.")
    return _aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]


def meta_rms_norm(data: torch.Tensor, shape: Any, weight: torch.Tensor | None, eps: float | None) -> Any:
    """What `_fused_rms_norm` is for meta tensors, which torch has not (whole.py)."""
    size, dtype = _row_statistics(data, shape)
    return torch.empty_like(data, memory_format=torch.contiguous_format), data.new_empty(size, dtype=dtype)


HAS_FUSED_RMS_NORM = (
    hasattr(_aten, "_fused_rms_norm")
    and _aten._fused_rms_norm.default._schema.arguments[1].name == "normalized_shape"
)  # fmt: skip
"""In release 2.8 an operator of that name is Apple's alone."""

if HAS_FUSED_RMS_NORM:
    composite(torch.rms_norm)(rms_norm)
