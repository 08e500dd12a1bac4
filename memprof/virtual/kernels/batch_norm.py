"""Batch norm as CUDA runs it: which of cuDNN's and torch's own kernels, and what each keeps and takes.

Sources: native/Normalization.cpp (_select_batch_norm_backend), native/cudnn/BatchNorm.cpp, native/cuda/Normalization.cu
and Normalization.cuh. A recording of a network with contiguous inputs (a graphics card of the Ampere generation,
torch 2.3) shows that cuDNN takes neither a workspace nor a reserve space for them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from memprof.torch_private import kernels
from memprof.virtual.kernels.copies import suggested_format
from memprof.virtual.kernels.registry import composite, kernel
from memprof.virtual.launch import Launch
from memprof.virtual.machine import Machine

_aten = torch.ops.aten
_META = torch.device("meta")

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
    if not kernels.get_cudnn_enabled() or data.dtype is torch.bfloat16 or weight is None or bias is None:
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


@composite(torch.batch_norm)
def batch_norm(
    machine: Machine,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """`torch.batch_norm`: cuDNN's operator, which gets contiguous tensors, or torch's own."""
    parameters = (weight, bias, running_mean, running_var)
    if not (input.numel() and machine.is_on_card(input) and uses_cudnn(input, *parameters, training)):
        return NotImplemented
    data = input.contiguous(memory_format=suggested_format(input))
    packed = [None if each is None else each.contiguous() for each in parameters]
    return _aten.cudnn_batch_norm(data, *packed, training, momentum, eps)[0]


@composite(torch.instance_norm)
def instance_norm(
    machine: Machine,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """`torch.instance_norm`: batch norm of one sample with a channel for each sample's."""
    if not machine.is_on_card(input) or not (use_input_stats or (running_mean is not None and running_var is not None)):
        return NotImplemented
    batch, channels = input.shape[:2]
    weight, bias, mean, var = (
        None if each is None else each.repeat(batch) for each in (weight, bias, running_mean, running_var)
    )
    flat = input.contiguous().view(1, batch * channels, *input.shape[2:])
    parameters = (weight, bias, mean, var, use_input_stats, momentum, eps, cudnn_enabled)
    result = batch_norm(machine, flat, *parameters)
    if result is NotImplemented:
        result = torch.batch_norm(flat, *parameters)
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


@kernel(_aten.cudnn_batch_norm)
def cudnn_batch_norm(launch: Launch) -> Any:
    """The output in the input's layout, and in training the mean and the inverse deviation."""
    data, weight, training = launch.args[0], launch.args[1], launch.args[5]
    if training:
        _forget_statistics(launch)
    layout = suggested_format(data)
    if layout is not torch.contiguous_format:
        launch.values.assume(CHANNELS_LAST)
    output = torch.empty_like(data, memory_format=layout)
    channels = data.shape[1] if training else 0
    saved = _vector(channels, weight.dtype), _vector(channels, weight.dtype)
    launch.record(output, *saved)
    return (output, *saved, _vector(0, torch.uint8))


@kernel(_aten.cudnn_batch_norm_backward)
def cudnn_batch_norm_backward(launch: Launch) -> Any:
    """The gradients of the input, in its layout, and of the parameters, whether or not they are wanted."""
    data, grad, weight = launch.args[:3]
    layout = suggested_format(data)
    copied = () if grad.is_contiguous(memory_format=layout) else (grad.numel() * grad.element_size(),)
    with launch.scratch(*copied):
        return (
            launch.new(data.shape, data.dtype, layout),
            launch.new(weight.numel(), weight.dtype),
            launch.new(weight.numel(), weight.dtype),
        )


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


@kernel(_aten.native_batch_norm, _aten._native_batch_norm_legit, _aten._native_batch_norm_legit_no_training)
def native_batch_norm(launch: Launch) -> Any:
    """Torch's own: statistics in float32 for half precision, copied from the running ones in evaluation."""
    data = launch.args[0]
    if not data.is_meta or not data.numel():
        return NotImplemented
    if launch.operator.packet is _aten._native_batch_norm_legit_no_training:
        training = False
    else:
        training = bool(launch.args[3 if launch.func._overloadname == "no_stats" else 5])
        _forget_statistics(launch)
    output = torch.empty_like(data)
    saved = [_vector(data.shape[1], _accumulated(data)) for _ in range(2)]
    launch.record(output, *saved)
    if training and _channels_last_kernels(data):
        launch.transients(*_staging(data, 4))
    return (output, *saved)


def _forget_statistics(launch: Launch) -> None:
    """Running statistics are updated in place, which the schema does not say: their values are no longer known."""
    for tensor in launch.args[3:5]:
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            launch.values.store.drop(tensor.untyped_storage()._cdata)


@kernel(_aten.native_batch_norm_backward)
def native_batch_norm_backward(launch: Launch) -> Any:
    """batch_norm_backward_cuda: one fused kernel for contiguous inputs, sums in two steps for channels-last ones."""
    grad, data, weight, _, _, _, save_invstd, training, _, mask = launch.args
    if not data.is_meta or not data.numel():
        return NotImplemented
    channels = data.shape[1]
    kind = data.dtype if weight is None else weight.dtype
    reduces = training or mask[1] or mask[2]
    dense = data.dim() in (4, 5) and data.is_contiguous(memory_format=_CHANNELS_LAST[data.dim()])
    if reduces and mask[0] and not (dense or (data.is_contiguous() and data.stride(1) == 1)):
        grads = [torch.empty(data.shape, dtype=data.dtype, device=_META)]
        grads += [_vector(channels, kind) for wanted in mask[1:] if wanted]
        launch.record(*grads)
        rest = iter(grads[1:])
        return (grads[0], *(next(rest) if wanted else None for wanted in mask[1:]))
    with contextlib.ExitStack() as taken:
        vector_bytes = channels * _accumulated(data).itemsize
        if save_invstd is None or not save_invstd.numel():
            taken.enter_context(launch.scratch(vector_bytes))
        parameters: list[torch.Tensor | None] = [None, None]
        if reduces:
            taken.enter_context(launch.scratch(vector_bytes, vector_bytes))
            if weight is not None:
                parameters = [launch.new(channels, kind), launch.new(channels, kind)]
            launch.transients(*_staging(grad, 2))
        grad_data = torch.empty_like(data) if mask[0] else None
        launch.record(grad_data)
    return (grad_data, *parameters)
