"""Convolutions as CUDA runs them with cuDNN: layouts of outputs and gradients, and the copies made on the way.

The meta kernels know no device and give contiguous outputs; on CUDA the layout follows the input and the weight.
Sources: native/Convolution.cpp, native/ConvUtils.h, native/cudnn/ConvShared.cpp, native/cuda/DepthwiseConv2d.cu.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from memprof.torch_private import kernels
from memprof.virtual.card import Card, cudnn_version
from memprof.virtual.kernels import convolution_workspace
from memprof.virtual.kernels.copies import contiguous, suggested_format
from memprof.virtual.kernels.reductions import opmath, reduction_buffers
from memprof.virtual.kernels.registry import kernel
from memprof.virtual.launch import Launch

_aten = torch.ops.aten
_META = torch.device("meta")
_CONTIGUOUS = torch.contiguous_format


def cudnn_format(
    first: torch.Tensor,
    second: torch.Tensor,
    suggested: Callable[[torch.Tensor], torch.memory_format] = suggested_format,
) -> torch.memory_format:
    """The layout that cuDNN works in (cudnn_conv_suggest_memory_format): channels-last if either tensor is.

    Args:
        suggested: says it of one tensor; another than this is for sizes that are symbols.
    """
    if torch.float64 in (first.dtype, second.dtype):
        return _CONTIGUOUS
    found = suggested(first)
    return found if found is not _CONTIGUOUS else suggested(second)


def _in_layout(tensor: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    """The tensor, or what its copy in this layout looks like."""
    if tensor.is_contiguous(memory_format=layout):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=_META, memory_format=layout)


def is_depthwise(data: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int) -> bool:
    """One or several filters for each channel (ConvParams::is_depthwise)."""
    channels = data.shape[1]
    return not transposed and groups > 1 and channels == groups and weight.shape[0] % channels == 0


def uses_cudnn(card: Card, data: torch.Tensor, weight: torch.Tensor, padding_too_big: bool) -> bool:
    """Whether the convolution is cuDNN's (ConvParams::use_cudnn); else torch's own kernels run."""
    if not kernels.get_cudnn_enabled() or padding_too_big:
        return False
    if torch.bfloat16 in (data.dtype, weight.dtype) and card.compute_capability < (8, 0):
        return False
    # torch 2.9 and later go round a fault of cuDNN 9.8 to 9.14.
    faulty = card.release >= (2, 9) and 90_800 <= cudnn_version(card.release) < 91_500
    if faulty and data.element_size() == 2 and weight.dim() == 5 and math.prod(weight.shape[2:]) > 1:
        return cudnn_format(data, weight) is not _CONTIGUOUS
    return data.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@functools.lru_cache(maxsize=4096)
def _output_shape(data: torch.Size, weight: torch.Size, dtype: torch.dtype, *parameters: Any) -> torch.Size:
    """The shape by the meta kernel, which also checks the arguments."""
    bias, *rest = parameters
    result = _aten.convolution.default(
        torch.empty(data, dtype=dtype, device=_META),
        torch.empty(weight, dtype=dtype, device=_META),
        None if bias is None else torch.empty(bias, dtype=dtype, device=_META),
        *rest,
    )
    return result.shape  # type: ignore[no-any-return]


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _two_dimensional(tensor: torch.Tensor) -> torch.Tensor:
    """Convolutions over one dimension run as those over two (view4d)."""
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def padding_too_big(stride: Any, output_padding: Any) -> bool:
    """Whether a transposed convolution is padded by a step or more (ConvParams::is_output_padding_big)."""
    return any(padding >= step for padding, step in zip(output_padding, _as_many(stride, output_padding), strict=True))


def _as_many(values: Any, like: Any) -> list[int]:
    return list(values) * len(like) if len(values) == 1 else list(values)


def _columns_bytes(data: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, transposed: bool) -> int:
    """What torch's own kernels lay out one image in, to multiply matrices: each point of the kernel at each position.

    Sources: native/cuda/ConvolutionMM2d.cu, NaiveDilatedConvolution.cu (all over three dimensions),
    NaiveConvolutionTranspose2d.cu.
    """
    positions = math.prod((data if transposed else output).shape[2:])
    return math.prod(weight.shape[1:]) * positions * data.element_size()


def _take_workspace(
    launch: Launch,
    data: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    made: torch.Tensor,
    layout: torch.memory_format,
) -> None:
    """cuDNN's own memory for one call, which makes one of the three."""
    if torch.backends.cudnn.benchmark:
        launch.values.assume(convolution_workspace.BENCHMARK)
    launch.values.assume(convolution_workspace.RULE)
    last = layout is not _CONTIGUOUS
    launch.workspace(*convolution_workspace.workspace(launch.card, data, weight, output, made, last=last))


@kernel(_aten.convolution)
def convolution(launch: Launch) -> Any:
    """The output in cuDNN's layout; the bias is added to it in place (native/Convolution.cpp, _convolution)."""
    data, weight, bias, stride, padding, dilation, transposed, output_padding, groups = launch.args
    if not data.is_meta or not weight.is_meta or data.dim() != weight.dim() or not data.numel():
        return NotImplemented
    shape = _output_shape(
        data.shape,
        weight.shape,
        data.dtype,
        None if bias is None else bias.shape,
        *map(_hashable, (stride, padding, dilation, transposed, output_padding, groups)),
    )
    one_dimensional = data.dim() == 3
    flat = _in_layout(data, _CONTIGUOUS) if one_dimensional else data
    data4d, weight4d = _two_dimensional(flat), _two_dimensional(weight)
    depthwise = is_depthwise(data, weight, transposed, groups)
    too_big = transposed and padding_too_big(stride, output_padding)
    cudnn = uses_cudnn(launch.card, data, weight, too_big)
    layout = cudnn_format(data4d, weight4d) if cudnn else _CONTIGUOUS
    cudnn = cudnn and (not depthwise or layout is not _CONTIGUOUS)
    if not cudnn:
        layout = _CONTIGUOUS
    with (
        launch.scratch(*contiguous(data) if one_dimensional else ()),
        launch.scratch(*contiguous(data4d, layout=layout)),
    ):
        result = launch.new((*shape[:2], 1, shape[2]) if one_dimensional else shape, data.dtype, layout)
        with launch.scratch(*contiguous(weight4d, layout=layout)):
            if cudnn:
                _take_workspace(launch, data4d, weight4d, result, result, layout)
            elif not (depthwise or (result.shape[2:] == data4d.shape[2:] and math.prod(weight.shape[2:]) == 1)):
                launch.transients(_columns_bytes(data4d, weight4d, result, transposed))
    launch.values.propagate(launch.func, launch.args, launch.kwargs, [result])
    return result.squeeze(2) if one_dimensional else result


@kernel(_aten.convolution_backward)
def convolution_backward(launch: Launch) -> Any:
    """Gradients in the layouts that cuDNN gives them (native/Convolution.cpp, convolution_backward).

    The gradient of the bias is a sum over the batch and all positions, made last.
    """
    grad, data, weight, bias_sizes, stride, _, _, transposed, output_padding, groups, mask = launch.args
    if not (grad.is_meta and data.is_meta and weight.is_meta) or not data.numel():
        return NotImplemented
    one_dimensional = weight.dim() == 3
    flat = _in_layout(data, _CONTIGUOUS) if one_dimensional else data
    grad4d, data4d, weight4d = map(_two_dimensional, (grad, flat, weight))
    depthwise = is_depthwise(data, weight, transposed, groups)
    too_big = transposed and padding_too_big(stride, output_padding)
    cudnn = uses_cudnn(launch.card, data, weight, too_big)
    layout = cudnn_format(data4d, weight4d) if cudnn else _CONTIGUOUS
    with launch.scratch(*contiguous(data) if one_dimensional else ()):
        if cudnn and (not depthwise or layout is not _CONTIGUOUS):
            grads = _cudnn_backward(launch, grad4d, data4d, weight4d, layout, mask)
        else:
            grads = _native_backward(launch, grad4d, data4d, weight4d, mask, weight_first=depthwise)
            if not depthwise:
                launch.transients(_columns_bytes(data4d, weight4d, grad4d, transposed))
    grad_bias = None
    if mask[2]:
        grad_bias = launch.new((weight.shape[0],) if bias_sizes is None else tuple(bias_sizes), grad.dtype)
        dims = [dim for dim in range(grad4d.dim()) if dim != 1]
        launch.transients(*reduction_buffers(grad4d, dims, opmath(grad), launch.card))
    if one_dimensional:
        grads = tuple(None if each is None else each.squeeze(2) for each in grads)
    return (*grads, grad_bias)


def _cudnn_backward(
    launch: Launch,
    grad: torch.Tensor,
    data: torch.Tensor,
    weight: torch.Tensor,
    layout: torch.memory_format,
    mask: Any,
) -> tuple[torch.Tensor | None, ...]:
    """native/cudnn/ConvShared.cpp, cudnn_convolution_backward; a transposed convolution does likewise."""
    grad_data = grad_weight = None
    with contextlib.ExitStack() as held:
        if mask[1]:
            held.enter_context(launch.scratch(*contiguous(data, layout=layout)))
            data = _in_layout(data, layout)
        chosen = suggested_format(data)
        held.enter_context(launch.scratch(*contiguous(grad, layout=chosen)))
        grad = _in_layout(grad, chosen)
        if mask[0]:
            chosen = cudnn_format(grad, weight)
            grad_data = launch.new(data.shape, grad.dtype, chosen)
            with launch.scratch(*contiguous(weight, grad, layout=chosen)):
                _take_workspace(launch, grad_data, weight, grad, grad_data, chosen)
        if mask[1]:
            chosen = cudnn_format(data, grad)
            with launch.scratch(*contiguous(grad, data, layout=chosen)):
                grad_weight = launch.new(weight.shape, grad.dtype, chosen)
                _take_workspace(launch, data, grad_weight, grad, grad_weight, chosen)
    return grad_data, grad_weight


def _native_backward(
    launch: Launch,
    grad: torch.Tensor,
    data: torch.Tensor,
    weight: torch.Tensor,
    mask: Any,
    *,
    weight_first: bool,
) -> tuple[torch.Tensor | None, ...]:
    """torch's own kernels work on contiguous tensors (native/cuda/DepthwiseConv2d.cu)."""
    grads: list[torch.Tensor | None] = [None, None]
    with launch.scratch(*contiguous(grad)):
        for which in (1, 0) if weight_first else (0, 1):
            if mask[which]:
                with launch.scratch(*contiguous((weight, data)[which])):
                    grads[which] = launch.new((data, weight)[which].shape, grad.dtype)
    return tuple(grads)
