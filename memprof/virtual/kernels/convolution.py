"""Convolutions as CUDA runs them with cuDNN: layouts of outputs and gradients, and the copies made on the way.

The meta kernels know no device and give contiguous outputs; on CUDA the layout follows the input and the weight.
Sources: native/Convolution.cpp, native/ConvUtils.h, native/cudnn/ConvShared.cpp, native/cuda/DepthwiseConv2d.cu.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from memprof.trace.events import GPU
from memprof.virtual.calls import Call, Operator
from memprof.virtual.kernels.copies import suggested_format
from memprof.virtual.kernels.reductions import opmath, reduction_buffers

if TYPE_CHECKING:
    from memprof.virtual.recording import RecordingMode
    from memprof.watch.recorder import Place

_aten = torch.ops.aten
_META = torch.device("meta")
_CONTIGUOUS = torch.contiguous_format

WORKSPACE = (
    "Each convolution's cuDNN workspace is not counted: its size is the library's choice of algorithm, on a real GPU "
    "mostly small and gone when the call returns, but with torch.backends.cudnn.benchmark as large as the card allows "
    "while algorithms are tried."
)


def cudnn_format(first: torch.Tensor, second: torch.Tensor) -> torch.memory_format:
    """The layout that cuDNN works in (cudnn_conv_suggest_memory_format): channels-last if either tensor is."""
    if torch.float64 in (first.dtype, second.dtype):
        return _CONTIGUOUS
    found = suggested_format(first)
    return found if found is not _CONTIGUOUS else suggested_format(second)


class _Copies:
    """Contiguous copies of inputs that live while a part of an operator runs."""

    def __init__(self, mode: RecordingMode, operator: Operator, place: Place) -> None:
        self._mode = mode
        self._name = operator.name
        self._place = place

    def of(self, tensor: torch.Tensor, layout: torch.memory_format) -> tuple[torch.Tensor, int | None]:
        """The tensor in this layout, and the copy to give back, if one had to be made."""
        if tensor.is_contiguous(memory_format=layout):
            return tensor, None
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=_META, memory_format=layout)
        return copy, self._mode.recorder.allocate_hidden(_bytes(tensor), self._name, self._place, GPU)

    def give_back(self, *taken: int | None) -> None:
        """These copies are dropped."""
        for index in taken:
            if index is not None:
                self._mode.recorder.free_hidden(index)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _new(shape: Any, like: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=_META, memory_format=layout)


def is_depthwise(data: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int) -> bool:
    """One or several filters for each channel (ConvParams::is_depthwise)."""
    channels = data.shape[1]
    return not transposed and groups > 1 and channels == groups and weight.shape[0] % channels == 0


def uses_cudnn(mode: RecordingMode, data: torch.Tensor, weight: torch.Tensor, padding_too_big: bool) -> bool:
    """Whether the convolution is cuDNN's (ConvParams::use_cudnn); else torch's own kernels run."""
    if not torch._C._get_cudnn_enabled() or padding_too_big:
        return False
    if torch.bfloat16 in (data.dtype, weight.dtype) and mode.card.compute_capability < (8, 0):
        return False
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


def _padding_too_big(stride: Any, output_padding: Any) -> bool:
    return any(padding >= step for padding, step in zip(output_padding, _as_many(stride, output_padding), strict=True))


def _as_many(values: Any, like: Any) -> list[int]:
    return list(values) * len(like) if len(values) == 1 else list(values)


def convolution(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """The output in cuDNN's layout; the bias is added to it in place (native/Convolution.cpp, _convolution)."""
    data, weight, bias, stride, padding, dilation, transposed, output_padding, groups = call.args
    if not call.on_gpu or not data.is_meta or not weight.is_meta or data.dim() != weight.dim() or not data.numel():
        return NotImplemented
    shape = _output_shape(
        data.shape,
        weight.shape,
        data.dtype,
        None if bias is None else bias.shape,
        *map(_hashable, (stride, padding, dilation, transposed, output_padding, groups)),
    )
    copies = _Copies(mode, operator, place)
    flat, first = copies.of(data, _CONTIGUOUS) if data.dim() == 3 else (data, None)
    data4d, weight4d = _two_dimensional(flat), _two_dimensional(weight)
    depthwise = is_depthwise(data, weight, transposed, groups)
    too_big = transposed and _padding_too_big(stride, output_padding)
    cudnn = uses_cudnn(mode, data, weight, too_big)
    layout = cudnn_format(data4d, weight4d) if cudnn else _CONTIGUOUS
    if cudnn and (not depthwise or layout is not _CONTIGUOUS):
        mode.values.assume(WORKSPACE)
    else:
        layout = _CONTIGUOUS
    _, second = copies.of(data4d, layout)
    full_shape = shape if len(shape) != 3 else (shape[0], shape[1], 1, shape[2])
    result = _new(full_shape, data, layout)
    mode.record([result], operator.name, place, GPU)
    _, third = copies.of(weight4d, layout)
    copies.give_back(third, second, first)
    mode.values.learn(call.func, call.args, call.kwargs, [result])
    return result.squeeze(2) if len(shape) == 3 else result


def convolution_backward(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """Gradients in the layouts that cuDNN gives them (native/Convolution.cpp, convolution_backward).

    The gradient of the bias is a sum over the batch and all positions, made last.
    """
    grad, data, weight, bias_sizes, stride, _, _, transposed, output_padding, groups, mask = call.args
    if not call.on_gpu or not (grad.is_meta and data.is_meta and weight.is_meta) or not data.numel():
        return NotImplemented
    copies = _Copies(mode, operator, place)
    one_dimensional = weight.dim() == 3
    flat, first = copies.of(data, _CONTIGUOUS) if one_dimensional else (data, None)
    grad4d, data4d, weight4d = map(_two_dimensional, (grad, flat, weight))
    depthwise = is_depthwise(data, weight, transposed, groups)
    too_big = transposed and _padding_too_big(stride, output_padding)
    cudnn = uses_cudnn(mode, data, weight, too_big)
    layout = cudnn_format(data4d, weight4d) if cudnn else _CONTIGUOUS
    if cudnn and (not depthwise or layout is not _CONTIGUOUS):
        mode.values.assume(WORKSPACE)
        grads = _cudnn_backward(mode, operator, place, (grad4d, data4d, weight4d), layout, mask)
    else:
        grads = _native_backward(mode, operator, place, (grad4d, data4d, weight4d), mask, weight_first=depthwise)
    copies.give_back(first)
    grad_bias = None
    if mask[2]:
        grad_bias = _new((weight.shape[0],) if bias_sizes is None else tuple(bias_sizes), grad, _CONTIGUOUS)
        mode.record([grad_bias], operator.name, place, GPU)
        dims = [dim for dim in range(grad4d.dim()) if dim != 1]
        mode.transients(reduction_buffers(grad4d, dims, opmath(grad), mode.card), operator, place)
    if one_dimensional:
        grads = tuple(None if each is None else each.squeeze(2) for each in grads)
    return (*grads, grad_bias)


def _cudnn_backward(
    mode: RecordingMode,
    operator: Operator,
    place: Place,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layout: torch.memory_format,
    mask: Any,
) -> tuple[torch.Tensor | None, ...]:
    """native/cudnn/ConvShared.cpp, cudnn_convolution_backward; a transposed convolution does likewise."""
    grad, data, weight = tensors
    copies = _Copies(mode, operator, place)
    data, data_copy = copies.of(data, layout) if mask[1] else (data, None)
    grad, grad_copy = copies.of(grad, suggested_format(data))
    grad_data = grad_weight = None
    if mask[0]:
        chosen = cudnn_format(grad, weight)
        grad_data = _new(data.shape, grad, chosen)
        mode.record([grad_data], operator.name, place, GPU)
        _, weight_copy = copies.of(weight, chosen)
        _, again = copies.of(grad, chosen)
        copies.give_back(again, weight_copy)
    if mask[1]:
        chosen = cudnn_format(data, grad)
        _, again = copies.of(grad, chosen)
        _, data_again = copies.of(data, chosen)
        grad_weight = _new(weight.shape, grad, chosen)
        mode.record([grad_weight], operator.name, place, GPU)
        copies.give_back(data_again, again)
    copies.give_back(grad_copy, data_copy)
    return grad_data, grad_weight


def _native_backward(
    mode: RecordingMode,
    operator: Operator,
    place: Place,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: Any,
    *,
    weight_first: bool,
) -> tuple[torch.Tensor | None, ...]:
    """torch's own kernels work on contiguous tensors (native/cuda/DepthwiseConv2d.cu)."""
    grad, data, weight = tensors
    copies = _Copies(mode, operator, place)
    _, grad_copy = copies.of(grad, _CONTIGUOUS)
    grads: list[torch.Tensor | None] = [None, None]
    for which in (1, 0) if weight_first else (0, 1):
        if mask[which]:
            like = (data, weight)[which]
            _, copy = copies.of((weight, data)[which], _CONTIGUOUS)
            made = grads[which] = _new(like.shape, grad, _CONTIGUOUS)
            mode.record([made], operator.name, place, GPU)
            copies.give_back(copy)
    copies.give_back(grad_copy)
    return tuple(grads)


HANDLERS: dict[Any, Any] = {
    _aten.convolution: convolution,
    _aten.convolution_backward: convolution_backward,
}
