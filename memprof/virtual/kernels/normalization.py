"""Layer, group, RMS, batch and instance norm: the kernels that CUDA runs, and their memory.

Sources of layer, group and RMS norm: native/cuda/layer_norm_kernel.cu, group_norm_kernel.cu. Sources of batch norm, for
the choice between cuDNN and torch's kernels and the memory of each: native/Normalization.cpp
(_select_batch_norm_backend), native/cudnn/BatchNorm.cpp, native/cuda/Normalization.cu and Normalization.cuh. In a
recording (Ampere, torch 2.3), cuDNN has neither a workspace nor a reserve space for contiguous inputs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from memprof.torch_private import kernels
from memprof.trace.events import HOST
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.device_state import DeviceState
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.copies import copy_bytes, make_copies_formula, suggest_layout
from memprof.virtual.kernels.reductions import accumulator_bytes_per_value, floor_power_of_two, reduction_buffers
from memprof.virtual.kernels.registry import META, aten, composite, input_copies, kernel, scratch

_WARP_SIZE = 32
_ROWS_PER_BLOCK = 32
_MAX_BLOCKS = 32 * 1024
_MANY_ROWS = 64 * 1024


# Copies of input, weight and bias, before the result (layer_norm_cuda, layer_norm_backward_cuda).
compute_layer_norm_copies = input_copies(aten.native_layer_norm)(make_copies_formula(0, 2, 3))
compute_layer_norm_backward_copies = input_copies(aten.native_layer_norm_backward)(make_copies_formula(1, 5, 6))
compute_rms_norm_backward_copies = input_copies("aten._fused_rms_norm_backward")(make_copies_formula(1, 4))


@kernel("aten._fused_rms_norm", on_host=True)
def fused_rms_norm(launch: KernelContext) -> Any:
    """Allocate the result and the inverse root mean square of each row (_fused_rms_norm_cuda)."""
    data, shape, weight = launch.args[:3]
    if launch.device == HOST:
        with launch.inside():
            return launch.func._op_dk(torch.DispatchKey.CompositeImplicitAutograd, *launch.args)
    with launch.scratch(*copy_bytes(data, weight)):
        return launch.new(data.shape, data.dtype), launch.new(*_get_row_statistics_layout(data, shape))


def _get_row_statistics_layout(data: torch.Tensor, shape: Any) -> tuple[Any, torch.dtype]:
    rows = data.shape[: data.dim() - len(shape)]
    return (*rows, *[1] * len(shape)), torch.float64 if data.dtype is torch.float64 else torch.float32


def _compute_partial_sums(data: torch.Tensor, width: int, num_parameters: int, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of partial sums over many short rows: one row of sums per thread block, and their reduction."""
    num_rows = data.numel() // width if width else 0
    if num_rows <= _MANY_ROWS or width // _WARP_SIZE >= gpu.num_sms // 2:
        return []
    num_column_blocks = -(-width // _WARP_SIZE)
    num_blocks = min(_MAX_BLOCKS // num_column_blocks, -(-num_rows // _ROWS_PER_BLOCK))
    item_bytes = data.element_size()
    sums = torch.empty(num_blocks, width, dtype=data.dtype, device="meta")
    sizes = [width * item_bytes, *reduction_buffers(sums, [0], accumulator_bytes_per_value(sums), gpu)]
    return num_parameters * [num_blocks * width * item_bytes] + num_parameters * sizes


def _norm_backward_scratch(mask_position: int, args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a contiguous gradient, and of partial sums of the gradients of weight and bias.

    In torch, LayerNormBackwardKernelImpl and LaunchGammaBetaBackwardCUDAKernel allocate them.
    """
    num_parameters = sum(map(bool, args[mask_position][1:]))
    return copy_bytes(args[0]) + (
        _compute_partial_sums(args[1], math.prod(args[2]), num_parameters, gpu) if num_parameters else []
    )


compute_layer_norm_backward_scratch = scratch(aten.native_layer_norm_backward)(partial(_norm_backward_scratch, 7))
compute_rms_norm_backward_scratch = scratch("aten._fused_rms_norm_backward")(partial(_norm_backward_scratch, 5))


@kernel(aten.native_layer_norm_backward, "aten._fused_rms_norm_backward", on_host=True)
def norm_backward(launch: KernelContext) -> Any:
    """Run the operator, but return a contiguous gradient of the input, as on CUDA; the meta kernel's strides differ."""
    result = launch.run()
    grad_input = result[0]
    if grad_input is None or grad_input.is_contiguous():
        return result
    # The gradient is new and fills its storage, so that another view of the storage suffices.
    strides = torch.empty(grad_input.size(), device="meta").stride()
    return (grad_input.as_strided(grad_input.size(), strides), *result[1:])


@scratch(aten.native_group_norm)
def compute_group_norm_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a float32 scale and shift for each sample and channel, if there is a weight or a bias."""
    data, weight, bias, batch, channels, num_positions = args[:6]
    if (weight is None and bias is None) or num_positions == 1:
        return []
    return 2 * [accumulator_bytes_per_value(data) * batch * channels]


@scratch(aten.native_group_norm_backward)
def compute_group_norm_backward_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of float32 sums for each channel, and of factors for each channel and group."""
    data, weight = args[1], args[4]
    batch, channels, num_positions, num_groups, output_mask = args[5:10]
    item_bytes = accumulator_bytes_per_value(data)
    buffers = 2 * [item_bytes * batch * channels]
    if output_mask[0]:
        buffers += 2 * [item_bytes * batch * num_groups]
        if weight is not None and num_positions != 1:
            buffers.append(item_bytes * batch * channels)
    return buffers


def rms_norm(
    device_state: DeviceState,
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Run `torch.rms_norm` as one fused kernel; on devices other than CUDA, torch runs several operators."""
    if not device_state.is_on_gpu(input) or (weight is not None and weight.dtype != input.dtype):
        return NotImplemented
    device_state.values.assume("torch.rms_norm runs as CUDA's fused kernel.")
    return aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]


def meta_rms_norm(data: torch.Tensor, shape: Any, weight: torch.Tensor | None, eps: float | None) -> Any:
    """Return the results of `_fused_rms_norm`, for which torch has no meta kernel (integrations/results_in_cpp.py)."""
    size, dtype = _get_row_statistics_layout(data, shape)
    return torch.empty_like(data, memory_format=torch.contiguous_format), data.new_empty(size, dtype=dtype)


# In torch 2.8, an operator of this name exists for MPS only.
HAS_FUSED_RMS_NORM = (
    hasattr(aten, "_fused_rms_norm")
    and aten._fused_rms_norm.default._schema.arguments[1].name == "normalized_shape"
)  # fmt: skip

if HAS_FUSED_RMS_NORM:
    composite(torch.rms_norm)(rms_norm)


_INT_MAX = 2**31 - 1
_MAX_BATCH_TRAINING = 880_801
_MAX_BATCH_EVALUATION = 65_535
CHANNELS_LAST_ASSUMPTION = (
    "Batch norm of channels-last inputs is cuDNN's, whose reserve space and workspace for them are not published: "
    "they are counted for compute capability 9.0, where the workspaces of one size were measured, and not for others."
)


def uses_cudnn(data: torch.Tensor, parameters: Sequence[torch.Tensor | None], training: bool) -> bool:
    """Return whether CUDA runs batch norm by cuDNN (_select_batch_norm_backend); it does not in bfloat16."""
    weight, bias, running_mean, running_var = parameters
    if not kernels.get_cudnn_enabled() or data.dtype is torch.bfloat16 or weight is None or bias is None:
        return False
    has_statistics = running_mean is not None and running_var is not None
    has_no_statistics = running_mean is None and running_var is None and training
    return (
        (data.dtype is not torch.float16 or weight.dtype is torch.float32)
        and (has_statistics or has_no_statistics)
        and data.dim() >= 3
        and data.shape[0] <= (_MAX_BATCH_TRAINING if training else _MAX_BATCH_EVALUATION)
        and data.numel() < _INT_MAX
    )


@composite(torch.batch_norm)
def batch_norm(
    device_state: DeviceState,
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
    """Run `torch.batch_norm` by cuDNN's operator, with contiguous tensors; NotImplemented where torch's kernels run."""
    parameters = (weight, bias, running_mean, running_var)
    if not (input.numel() and device_state.is_on_gpu(input) and uses_cudnn(input, parameters, training)):
        return NotImplemented
    data = input.contiguous(memory_format=suggest_layout(input))
    contiguous_parameters = [None if t is None else t.contiguous() for t in parameters]
    return aten.cudnn_batch_norm(data, *contiguous_parameters, training, momentum, eps)[0]


@composite(torch.instance_norm)
def instance_norm(
    device_state: DeviceState,
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
    """Run `torch.instance_norm` as a batch norm of one sample with batch x channels channels."""
    if not device_state.is_on_gpu(input) or not (
        use_input_stats or (running_mean is not None and running_var is not None)
    ):
        return NotImplemented
    batch, channels = input.shape[:2]
    parameters = (weight, bias, running_mean, running_var)
    repeated_parameters = [None if t is None else t.repeat(batch) for t in parameters]
    flat_input = input.contiguous().view(1, batch * channels, *input.shape[2:])
    options: list[Any] = [*repeated_parameters, use_input_stats, momentum, eps, cudnn_enabled]
    result = batch_norm(device_state, flat_input, *options)
    if result is NotImplemented:
        result = torch.batch_norm(flat_input, *options)
    with torch.no_grad():
        for buffer, updated_buffer in zip(parameters[2:], repeated_parameters[2:], strict=True):
            if buffer is not None and updated_buffer is not None:
                buffer.copy_(updated_buffer.view(batch, channels).mean(0))
    return result.view(input.shape)


def _accumulation_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which CUDA computes statistics: float32 for half precision, else the dtype of `tensor`."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


@kernel(aten.cudnn_batch_norm)
def cudnn_batch_norm(launch: KernelContext) -> Any:
    """Allocate the output in the input's memory format and, in training, mean and inverse standard deviation."""
    data, weight, training = launch.args[0], launch.args[1], launch.args[5]
    if training:
        _forget_running_statistics(launch)
    layout = suggest_layout(data)
    if layout is not torch.contiguous_format:
        launch.values.assume(CHANNELS_LAST_ASSUMPTION)
    output = launch.new(data.shape, data.dtype, layout)
    saved_statistics = [launch.new(data.shape[1] if training else 0, weight.dtype) for _ in range(2)]
    if training:
        launch.transients(
            *_compute_cudnn_workspace(launch, layout, 3, 2 * _accumulation_dtype(data).itemsize * data.shape[1] + 84)
        )
    return (output, *saved_statistics, torch.empty(0, dtype=torch.uint8, device=META))


@kernel(aten.cudnn_batch_norm_backward)
def cudnn_batch_norm_backward(launch: KernelContext) -> Any:
    """Allocate the gradients of the input, in its memory format, and of weight and bias, even if not requested."""
    data, grad, weight = launch.args[:3]
    layout = suggest_layout(data)
    with launch.scratch(*copy_bytes(grad, layout=layout)):
        gradients = (
            launch.new(data.shape, data.dtype, layout),
            *(launch.new(weight.numel(), weight.dtype) for _ in "wb"),
        )
        launch.transients(*_compute_cudnn_workspace(launch, layout, 2, 36))
        return gradients


def _compute_cudnn_workspace(
    launch: KernelContext, layout: torch.memory_format, num_blocks: int, extra_bytes: int
) -> list[int]:
    """Return the bytes of cuDNN's workspace: two sums for each channel, block and multiprocessor, and `extra_bytes`.
    Measured for 64 channels in float32 (H100, cuDNN 9.19): 203,348 bytes forward, 135,204 backward."""
    if layout is torch.contiguous_format or launch.gpu.compute_capability != (9, 0):
        return []
    data = launch.args[0]
    return [num_blocks * launch.gpu.num_sms * 2 * _accumulation_dtype(data).itemsize * data.shape[1] + extra_bytes]


_TILE_WIDTH = 32
_BLOCK_THREADS = 512
_VALUES_PER_THREAD = 16
_MAX_ROWS_OF_BLOCKS = 128
_CHANNELS_LAST_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _compute_staging_buffers(data: torch.Tensor, per_channel: int) -> list[int]:
    """Return the bytes of the buffers of channels-last kernels that reduce over blocks (flexible_launch_configs)."""
    channels = data.shape[1]
    reduction_size = data.numel() // channels
    width = min(floor_power_of_two(channels), _TILE_WIDTH)
    height = min(floor_power_of_two(-(-reduction_size // _VALUES_PER_THREAD)), _BLOCK_THREADS // width)
    num_rows = min(-(-reduction_size // (height * _VALUES_PER_THREAD)), _MAX_ROWS_OF_BLOCKS)
    if num_rows < 8:
        return []
    return [_accumulation_dtype(data).itemsize * per_channel * channels * num_rows, 4 * -(-channels // width)]


def _uses_channels_last_kernels(data: torch.Tensor) -> bool:
    """Return whether `data` is channels-last or has no dimension after the channels (batch_norm_choose_impl)."""
    if data.is_contiguous():
        return data.stride(1) == 1
    return data.dim() == 4 and data.is_contiguous(memory_format=torch.channels_last)


@kernel(aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_no_training)
def native_batch_norm(launch: KernelContext) -> Any:
    """Run torch's batch norm: statistics in float32 for half precision; evaluation copies the running statistics."""
    data = launch.args[0]
    if not data.is_meta or not data.numel():
        return NotImplemented
    if launch.operator.packet is aten._native_batch_norm_legit_no_training:
        training = False
    else:
        training = bool(launch.args[3 if launch.func._overloadname == "no_stats" else 5])
        if training:
            _forget_running_statistics(launch)
    output = torch.empty_like(data)
    launch.record(output)
    saved_statistics = [launch.new(data.shape[1], _accumulation_dtype(data)) for _ in range(2)]
    if training and _uses_channels_last_kernels(data):
        launch.transients(*_compute_staging_buffers(data, 4))
    return (output, *saved_statistics)


def _forget_running_statistics(launch: KernelContext) -> None:
    """Forget the known values of running statistics, which are updated in place although the schema does not say so."""
    for tensor in launch.args[3:5]:
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            launch.values.store.drop(tensor.untyped_storage()._cdata)


@kernel(aten.native_batch_norm_backward)
def native_batch_norm_backward(launch: KernelContext) -> Any:
    """Run batch_norm_backward_cuda: one fused kernel for contiguous inputs, two reductions for channels-last."""
    grad, data, weight, _, _, _, save_invstd, training, _, mask = launch.args
    if not data.is_meta or not data.numel():
        return NotImplemented
    channels = data.shape[1]
    dtype = data.dtype if weight is None else weight.dtype
    needs_sums = training or mask[1] or mask[2]
    is_channels_last = data.dim() in (4, 5) and data.is_contiguous(memory_format=_CHANNELS_LAST_FORMATS[data.dim()])
    if needs_sums and mask[0] and not (is_channels_last or (data.is_contiguous() and data.stride(1) == 1)):
        grad_input = launch.new(data.shape, data.dtype)
        return (grad_input, *(launch.new(channels, dtype) if is_needed else None for is_needed in mask[1:]))
    with contextlib.ExitStack() as stack:
        vector_bytes = channels * _accumulation_dtype(data).itemsize
        if save_invstd is None or not save_invstd.numel():
            stack.enter_context(launch.scratch(vector_bytes))
        parameters: list[torch.Tensor | None] = [None, None]
        if needs_sums:
            stack.enter_context(launch.scratch(vector_bytes, vector_bytes))
            if weight is not None:
                parameters = [launch.new(channels, dtype), launch.new(channels, dtype)]
            launch.transients(*_compute_staging_buffers(grad, 2))
        grad_data = torch.empty_like(data) if mask[0] else None
        launch.record(grad_data)
    return (grad_data, *parameters)
