"""Batch norm as CUDA runs it: which of cuDNN's and torch's own kernels, and what each keeps and takes.

Sources: native/Normalization.cpp (_select_batch_norm_backend), native/cudnn/BatchNorm.cpp, native/cuda/Normalization.cu
and Normalization.cuh. A recording of a network with contiguous inputs (a graphics card of the Ampere generation,
torch 2.3) shows that cuDNN takes neither a workspace nor a reserve space for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memprof.trace.events import GPU
from memprof.virtual.calls import Call, Operator
from memprof.virtual.kernels.copies import suggested_format

if TYPE_CHECKING:
    from memprof.virtual.recording import RecordingMode
    from memprof.watch.recorder import Place

_aten = torch.ops.aten
_META = torch.device("meta")
_batch_norm = torch.batch_norm
_instance_norm = torch.instance_norm
_NoTorchFunction = torch._C.DisableTorchFunction

_INT_MAX = 2**31 - 1
_MAX_BATCH_TRAINING = 880_801
_MAX_BATCH_EVALUATION = 65_535
CHANNELS_LAST = (
    "Batch norm of channels-last inputs is cuDNN's, whose reserve space and workspace for them are not published: "
    "they are not counted."
)


def uses_cudnn(
    data: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
) -> bool:
    """Whether CUDA hands this batch norm to cuDNN (_select_batch_norm_backend): never in bfloat16."""
    if not torch._C._get_cudnn_enabled() or data.dtype is torch.bfloat16 or weight is None or bias is None:
        return False
    statistics = running_mean is not None and running_var is not None
    none = running_mean is None and running_var is None and training
    return (
        (data.dtype is not torch.float16 or weight.dtype is torch.float32)
        and (statistics or none)
        and data.dim() >= 3
        and data.shape[0] <= (_MAX_BATCH_TRAINING if training else _MAX_BATCH_EVALUATION)
        and data.numel() < _INT_MAX
    )


class BatchNorm:
    """The composite functions, replaced where their input is on the card."""

    def __init__(self, on_gpu: Callable[[torch.Tensor], bool]) -> None:
        self._on_gpu = on_gpu

    def handlers(self) -> dict[Any, Callable[..., Any]]:
        """Function -> replacement, for the function mode."""
        return {_batch_norm: self.batch_norm, _instance_norm: self.instance_norm}

    def batch_norm(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> torch.Tensor:
        """`torch.batch_norm`: cuDNN's operator, which gets contiguous tensors, or torch's own."""
        parameters = (weight, bias, running_mean, running_var)
        if input.numel() and self._on_gpu(input) and uses_cudnn(input, *parameters, training):
            data = input.contiguous(memory_format=suggested_format(input))
            packed = [None if each is None else each.contiguous() for each in parameters]
            return _aten.cudnn_batch_norm(data, *packed, training, momentum, eps)[0]  # type: ignore[no-any-return]
        return _batch_norm(input, *parameters, training, momentum, eps, cudnn_enabled)

    def instance_norm(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        use_input_stats: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> torch.Tensor:
        """`torch.instance_norm`: batch norm of one sample with a channel for each sample's."""
        statistics = (running_mean, running_var)
        if not self._on_gpu(input) or not (use_input_stats or all(each is not None for each in statistics)):
            return _instance_norm(
                input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
            )
        batch, channels = input.shape[:2]
        weight, bias, mean, var = (
            None if each is None else each.repeat(batch) for each in (weight, bias, running_mean, running_var)
        )
        flat = input.contiguous().view(1, batch * channels, *input.shape[2:])
        result = self.batch_norm(flat, weight, bias, mean, var, use_input_stats, momentum, eps, cudnn_enabled)
        with torch.no_grad():
            for kept, seen in ((running_mean, mean), (running_var, var)):
                if kept is not None and seen is not None:
                    kept.copy_(seen.view(batch, channels).mean(0))
        return result.view(input.shape)


# -- the operators ----------------------------------------------------------------------------------------------------


def _accumulated(tensor: torch.Tensor) -> torch.dtype:
    """The type in which CUDA keeps statistics: float32 for half precision."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _vector(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=_META)


def cudnn_batch_norm(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """The output in the input's layout, and in training the mean and the inverse deviation."""
    data, weight, training = call.args[0], call.args[1], call.args[5]
    if not call.on_gpu:
        return NotImplemented
    if training:
        _forget_statistics(mode, call)
    layout = suggested_format(data)
    if layout is not torch.contiguous_format:
        mode.values.assume(CHANNELS_LAST)
    output = torch.empty_like(data, memory_format=layout)
    channels = data.shape[1] if training else 0
    saved = _vector(channels, weight.dtype), _vector(channels, weight.dtype)
    mode.record([output, *saved], operator.name, place, GPU)
    return (output, *saved, _vector(0, torch.uint8))


def cudnn_batch_norm_backward(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """The gradients of the input, in its layout, and of the parameters, whether or not they are wanted."""
    data, grad, weight = call.args[:3]
    if not call.on_gpu:
        return NotImplemented
    layout = suggested_format(data)
    copy = None
    if not grad.is_contiguous(memory_format=layout):
        copy = mode.recorder.allocate_hidden(grad.numel() * grad.element_size(), operator.name, place, GPU)
    grads = (
        torch.empty(data.shape, dtype=data.dtype, device=_META, memory_format=layout),
        _vector(weight.numel(), weight.dtype),
        _vector(weight.numel(), weight.dtype),
    )
    mode.record(list(grads), operator.name, place, GPU)
    if copy is not None:
        mode.recorder.free_hidden(copy)
    return grads


_TILE_WIDTH = 32
_BLOCK_THREADS = 512
_VALUES_PER_THREAD = 16
_MAX_ROWS_OF_BLOCKS = 128
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _staging(data: torch.Tensor, per_channel: int) -> list[int]:
    """Buffers of the channels-last kernels whose reduction is split over blocks (flexible_launch_configs)."""
    channels = data.shape[1]
    reduction = data.numel() // channels
    width = min(_power_of_two(channels), _TILE_WIDTH)
    height = min(_power_of_two(-(-reduction // _VALUES_PER_THREAD)), _BLOCK_THREADS // width)
    if width * height != _BLOCK_THREADS:
        width = min(_power_of_two(channels), _BLOCK_THREADS // height)
    rows = min(-(-reduction // (height * _VALUES_PER_THREAD)), _MAX_ROWS_OF_BLOCKS)
    if rows < 8:
        return []
    return [_accumulated(data).itemsize * per_channel * channels * rows, 4 * -(-channels // width)]


def _power_of_two(value: int) -> int:
    return 1 << (value.bit_length() - 1)


def _channels_last_kernels(data: torch.Tensor) -> bool:
    """batch_norm_choose_impl: dense channels-last inputs, and those with nothing after their channels."""
    if data.is_contiguous():
        return data.stride(1) == 1
    return data.dim() == 4 and data.is_contiguous(memory_format=torch.channels_last)


def native_batch_norm(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """Torch's own: statistics in float32 for half precision, copied from the running ones in evaluation."""
    data = call.args[0]
    if not call.on_gpu or not data.is_meta or not data.numel():
        return NotImplemented
    if operator.packet is _aten._native_batch_norm_legit_no_training:
        training = False
    else:
        training = bool(call.args[3 if call.func._overloadname == "no_stats" else 5])
        _forget_statistics(mode, call)
    output = torch.empty_like(data)
    saved = [_vector(data.shape[1], _accumulated(data)) for _ in range(2)]
    mode.record([output, *saved], operator.name, place, GPU)
    if training and _channels_last_kernels(data):
        mode.transients(_staging(data, 4), operator, place)
    return (output, *saved)


def _forget_statistics(mode: RecordingMode, call: Call) -> None:
    """Running statistics are updated in place, which the schema does not say: their values are no longer known."""
    for tensor in call.args[3:5]:
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            mode.values.drop(tensor.untyped_storage()._cdata)


def native_batch_norm_backward(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """batch_norm_backward_cuda: one fused kernel for contiguous inputs, sums in two steps for channels-last ones."""
    grad, data, weight, _, _, _, save_invstd, training, _, mask = call.args
    if not call.on_gpu or not data.is_meta or not data.numel():
        return NotImplemented
    channels = data.shape[1]
    kind = data.dtype if weight is None else weight.dtype
    reduces = training or mask[1] or mask[2]
    dense = data.dim() in (4, 5) and data.is_contiguous(memory_format=_CHANNELS_LAST[data.dim()])
    if reduces and mask[0] and not (dense or (data.is_contiguous() and data.stride(1) == 1)):
        grads = [torch.empty(data.shape, dtype=data.dtype, device=_META)]
        grads += [_vector(channels, kind) for wanted in mask[1:] if wanted]
        mode.record(grads, operator.name, place, GPU)
        rest = iter(grads[1:])
        return (grads[0], *(next(rest) if wanted else None for wanted in mask[1:]))
    taken: list[int] = []

    def take(size: int) -> None:
        taken.append(mode.recorder.allocate_hidden(size, operator.name, place, GPU))

    vector_bytes = channels * _accumulated(data).itemsize
    if save_invstd is None or not save_invstd.numel():
        take(vector_bytes)
    parameters: list[torch.Tensor | None] = [None, None]
    if reduces:
        take(vector_bytes)
        take(vector_bytes)
        if weight is not None:
            parameters = [_vector(channels, kind), _vector(channels, kind)]
            mode.record([each for each in parameters if each is not None], operator.name, place, GPU)
        mode.transients(_staging(grad, 2), operator, place)
    grad_data = torch.empty_like(data) if mask[0] else None
    if grad_data is not None:
        mode.record([grad_data], operator.name, place, GPU)
    for index in taken:
        mode.recorder.free_hidden(index)
    return (grad_data, *parameters)


HANDLERS: dict[Any, Any] = {
    _aten.cudnn_batch_norm: cudnn_batch_norm,
    _aten.cudnn_batch_norm_backward: cudnn_batch_norm_backward,
    _aten.native_batch_norm: native_batch_norm,
    _aten._native_batch_norm_legit: native_batch_norm,
    _aten._native_batch_norm_legit_no_training: native_batch_norm,
    _aten.native_batch_norm_backward: native_batch_norm_backward,
}
