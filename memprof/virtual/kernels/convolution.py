"""Convolutions as CUDA runs them with cuDNN: memory formats of outputs and gradients, copies, and workspaces.

Meta kernels return contiguous outputs for every device; on CUDA the memory format follows the input and the weight.
Sources: native/Convolution.cpp, native/ConvUtils.h, native/cudnn/ConvShared.cpp, native/cuda/DepthwiseConv2d.cu.

For the workspaces of cuDNN's convolutions, there is a rule where public measurements agree, and an upper bound.

torch runs the first plan of cuDNN's heuristics whose workspace fits, and frees the workspace before the call returns
(native/cudnn/Conv_v8.cpp, run_conv_plan). cuDNN does not publish which plan runs. Public measurements, with
torch.backends.cudnn.benchmark off and cuDNN 8 or 9 unless said otherwise:

* **half precision, channels first**: the kernels for tensor cores work channels-last. Data, output and weight are
  copied, with channels rounded up to 16 bytes. To the byte: the forward of a Conv3d from 64 to 32 channels on an A100
  (github.com/pytorch/pytorch/issues/95024). To the printed digits: ten sizes of a Conv2d (123533), a Conv3d (136479).
  The weight gradient also needs partial sums: six sizes of a Conv2d from 4 to 4 channels, to the same byte in two
  programs (Liger-Kernel's benchmark of multi-token attention, RTX 3090).
* **float32**: the weight is copied, with one value for each channel of the result. To the byte with the two constants
  below: six convolutions of 5x5 in one recording (torch 2.3, Ampere, TF32 on). 1x1 kernels need no workspace, except in
  one of two recordings, where they needed 4 or 128 MiB.
* **float32 in three dimensions** with TF32: as in half precision (one measurement, 17 GiB: 128947, A100).

No measurements were found for channels-last tensors, whose kernels need no copies, for groups, or for compute
capability 10 and later. For 9.0, `_sm90_workspace_bytes` follows recordings on an H100 (torch 2.11, cuDNN 9.19, TF32
on: the truth captures, operators.jsonl and convolutions.jsonl in tests/accuracy/truth).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from memprof.allocator.releases import Change
from memprof.torch_private import kernels
from memprof.units import round_up
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.copies import copy_bytes, suggest_layout
from memprof.virtual.kernels.reductions import accumulator_bytes_per_value, reduction_buffers
from memprof.virtual.kernels.registry import META, aten, kernel

_CONTIGUOUS = torch.contiguous_format


def choose_cudnn_layout(
    first: torch.Tensor, second: torch.Tensor, suggest: Callable[[Any], torch.memory_format] = suggest_layout
) -> torch.memory_format:
    """Return cuDNN's memory format: channels-last if either tensor is (cudnn_conv_suggest_memory_format).

    `suggest` returns the memory format of one tensor; compiled code passes a function for symbolic sizes.
    """
    if torch.float64 in (first.dtype, second.dtype):
        return _CONTIGUOUS
    first_layout = suggest(first)
    return first_layout if first_layout is not _CONTIGUOUS else suggest(second)


def _copy_to_layout(tensor: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    """Return `tensor` if its memory format is `layout`, else a meta tensor (not counted) with its copy's strides."""
    if tensor.is_contiguous(memory_format=layout):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=META, memory_format=layout)


def is_depthwise(data: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int) -> bool:
    """Return whether every input channel has its own filters, one or several (ConvParams::is_depthwise)."""
    channels = data.shape[1]
    return not transposed and groups > 1 and channels == groups and weight.shape[0] % channels == 0


def uses_cudnn(gpu: DeviceProperties, data: torch.Tensor, weight: torch.Tensor, has_big_padding: bool) -> bool:
    """Return whether cuDNN runs the convolution (ConvParams::use_cudnn); otherwise torch's own kernels do."""
    if not kernels.get_cudnn_enabled() or has_big_padding:
        return False
    if torch.bfloat16 in (data.dtype, weight.dtype) and gpu.compute_capability < (8, 0):
        return False
    has_cudnn_bug = Change.CUDNN_3D_WORKAROUND.is_in(gpu.release) and 90_800 <= gpu.cudnn_version < 91_500
    if has_cudnn_bug and data.element_size() == 2 and weight.dim() == 5 and math.prod(weight.shape[2:]) > 1:
        return choose_cudnn_layout(data, weight) is not _CONTIGUOUS
    return data.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@functools.lru_cache(maxsize=4096)
def _output_shape(data: torch.Size, weight: torch.Size, dtype: torch.dtype, bias: Any, *options: Any) -> torch.Size:
    """Return the output shape of a convolution of shapes `data` and `weight`; the meta kernel checks `options`."""
    tensors = (None if size is None else torch.empty(size, dtype=dtype, device=META) for size in (data, weight, bias))
    return aten.convolution.default(*tensors, *options).shape  # type: ignore[no-any-return]


def _to_4d(tensor: torch.Tensor) -> torch.Tensor:
    """Return a batch of sequences (3D) as images of height 1 (view4d); other tensors unchanged."""
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def is_output_padding_big(stride: Any, output_padding: Any) -> bool:
    """Return whether `output_padding` is at least `stride` in any dimension (ConvParams::is_output_padding_big)."""
    strides = list(stride) * (len(output_padding) if len(stride) == 1 else 1)
    return any(padding >= s for padding, s in zip(output_padding, strides, strict=True))


def _im2col_bytes(data: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, transposed: bool) -> int:
    """Return the bytes of the matrix into which torch's own kernels unfold one image: kernel elements x positions
    (native/cuda/ConvolutionMM2d.cu, NaiveConvolutionTranspose2d.cu; in 3D NaiveDilatedConvolution.cu)."""
    positions = math.prod((data if transposed else output).shape[2:])
    return math.prod(weight.shape[1:]) * positions * data.element_size()


def _allocate_workspace(
    launch: KernelContext, tensors: tuple[torch.Tensor, ...], result: torch.Tensor, layout: torch.memory_format
) -> None:
    """Allocate and free cuDNN's workspace for a call that computes `result`, one of `tensors`: (data, weight, output),
    in reverse order if the convolution is transposed."""
    if torch.backends.cudnn.benchmark:
        launch.values.assume(BENCHMARK_ASSUMPTION)
    launch.values.assume(WORKSPACE_ASSUMPTION)
    is_channels_last = layout is not _CONTIGUOUS
    is_backward = launch.operator.packet is aten.convolution_backward
    stride, transposed = launch.args[3 + is_backward], launch.args[6 + is_backward]
    data, weight, output = reversed(tensors) if transposed else tensors
    launch.workspace(
        *compute_workspace(launch.gpu, data, weight, output, result, is_channels_last=is_channels_last, stride=stride)
    )


@kernel(aten.convolution)
def convolution(launch: KernelContext) -> Any:
    """Allocate the output in cuDNN's memory format; the bias is added in place (Convolution.cpp, _convolution)."""
    data, weight, bias, stride, _, _, transposed, output_padding, groups = launch.args
    if not data.is_meta or not weight.is_meta or data.dim() != weight.dim() or not data.numel():
        return NotImplemented
    options = (tuple(option) if isinstance(option, list) else option for option in launch.args[3:])
    shape = _output_shape(data.shape, weight.shape, data.dtype, None if bias is None else bias.shape, *options)
    is_1d = data.dim() == 3
    contiguous_data = _copy_to_layout(data, _CONTIGUOUS) if is_1d else data
    data4d, weight4d = _to_4d(contiguous_data), _to_4d(weight)
    is_depthwise_conv = is_depthwise(data, weight, transposed, groups)
    has_big_padding = transposed and is_output_padding_big(stride, output_padding)
    is_on_cudnn = uses_cudnn(launch.gpu, data, weight, has_big_padding)
    layout = choose_cudnn_layout(data4d, weight4d) if is_on_cudnn else _CONTIGUOUS
    is_on_cudnn = is_on_cudnn and (not is_depthwise_conv or layout is not _CONTIGUOUS)
    flat_copies = copy_bytes(data) if is_1d else []
    with launch.scratch(*flat_copies, *copy_bytes(data4d, layout=layout)):
        result = launch.new((*shape[:2], 1, shape[2]) if is_1d else shape, data.dtype, layout)
        with launch.scratch(*copy_bytes(weight4d, layout=layout)):
            if is_on_cudnn:
                _allocate_workspace(launch, (data4d, weight4d, result), result, layout)
            elif not (is_depthwise_conv or (result.shape[2:] == data4d.shape[2:] and math.prod(weight.shape[2:]) == 1)):
                launch.transients(_im2col_bytes(data4d, weight4d, result, transposed))
    launch.values.propagate(launch.func, launch.args, launch.kwargs, [result])
    return result.squeeze(2) if is_1d else result


@kernel(aten.convolution_backward)
def convolution_backward(launch: KernelContext) -> Any:
    """Allocate the gradients of data and weight, then the bias's gradient, a sum over batch and positions."""
    grad, data, weight, bias_sizes, stride, _, _, transposed, output_padding, groups, output_mask = launch.args
    if not (grad.is_meta and data.is_meta and weight.is_meta) or not data.numel():
        return NotImplemented
    is_1d = weight.dim() == 3
    contiguous_data = _copy_to_layout(data, _CONTIGUOUS) if is_1d else data
    grad4d, data4d, weight4d = map(_to_4d, (grad, contiguous_data, weight))
    is_depthwise_conv = is_depthwise(data, weight, transposed, groups)
    has_big_padding = transposed and is_output_padding_big(stride, output_padding)
    is_on_cudnn = uses_cudnn(launch.gpu, data, weight, has_big_padding)
    layout = choose_cudnn_layout(data4d, weight4d) if is_on_cudnn else _CONTIGUOUS
    with launch.scratch(*copy_bytes(data) if is_1d else ()):
        if is_on_cudnn and (not is_depthwise_conv or layout is not _CONTIGUOUS):
            grads = _cudnn_backward(launch, grad4d, data4d, weight4d, layout, output_mask)
        else:
            grads = _native_backward(launch, grad4d, data4d, weight4d, output_mask, is_weight_first=is_depthwise_conv)
            if not is_depthwise_conv:
                launch.transients(_im2col_bytes(data4d, weight4d, grad4d, transposed))
    grad_bias = None
    if output_mask[2]:
        grad_bias = launch.new((weight.shape[0],) if bias_sizes is None else tuple(bias_sizes), grad.dtype)
        dims = [dim for dim in range(grad4d.dim()) if dim != 1]
        launch.transients(*reduction_buffers(grad4d, dims, accumulator_bytes_per_value(grad), launch.gpu))
    if is_1d:
        grads = tuple(None if t is None else t.squeeze(2) for t in grads)
    return (*grads, grad_bias)


def _cudnn_backward(
    launch: KernelContext,
    grad: torch.Tensor,
    data: torch.Tensor,
    weight: torch.Tensor,
    layout: torch.memory_format,
    output_mask: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Return new gradients of data and weight in cuDNN's memory formats (ConvShared.cpp,
    cudnn_convolution_backward)."""
    grad_data = grad_weight = None
    with contextlib.ExitStack() as stack:
        if output_mask[1]:
            stack.enter_context(launch.scratch(*copy_bytes(data, layout=layout)))
            data = _copy_to_layout(data, layout)
        chosen_layout = suggest_layout(data)
        stack.enter_context(launch.scratch(*copy_bytes(grad, layout=chosen_layout)))
        grad = _copy_to_layout(grad, chosen_layout)
        if output_mask[0]:
            chosen_layout = choose_cudnn_layout(grad, weight)
            grad_data = launch.new(data.shape, grad.dtype, chosen_layout)
            with launch.scratch(*copy_bytes(weight, grad, layout=chosen_layout)):
                _allocate_workspace(launch, (grad_data, weight, grad), grad_data, chosen_layout)
        if output_mask[1]:
            chosen_layout = choose_cudnn_layout(data, grad)
            with launch.scratch(*copy_bytes(grad, data, layout=chosen_layout)):
                grad_weight = launch.new(weight.shape, grad.dtype, chosen_layout)
                _allocate_workspace(launch, (data, grad_weight, grad), grad_weight, chosen_layout)
    return grad_data, grad_weight


def _native_backward(
    launch: KernelContext,
    grad: torch.Tensor,
    data: torch.Tensor,
    weight: torch.Tensor,
    output_mask: Any,
    *,
    is_weight_first: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return new gradients of data and weight as torch's own kernels compute them, from contiguous tensors."""
    grads: list[torch.Tensor | None] = [None, None]
    with launch.scratch(*copy_bytes(grad)):
        for i in (1, 0) if is_weight_first else (0, 1):
            if output_mask[i]:
                with launch.scratch(*copy_bytes((weight, data)[i])):
                    grads[i] = launch.new((data, weight)[i].shape, grad.dtype)
    return tuple(grads)


WORKSPACE_ASSUMPTION = (
    "The workspaces of cuDNN's convolutions, gone when each call returns, follow what was measured on GPUs of compute "
    "capability 8, and on an H100 for 9.0: for half precision that is not channels-last copies in the layout of the "
    "tensor cores, for float32 one of the weight, on an H100 of all. Which kernel cuDNN takes is not published."
)
BENCHMARK_ASSUMPTION = (
    "torch.backends.cudnn.benchmark is on: while algorithms are tried, a convolution takes the largest workspace that "
    "any of them asks for, up to what the GPU has left. That is not counted."
)

_ALIGNMENT_BYTES = 16
# Of the gradient of a weight in half precision: 7 to 11 such parts in the six sizes, 10 in the two largest.
_PARTIAL_SUMS_BYTES = 10 * 98_352
_MAX_FEW_CHANNELS = 16
_FEW_CHANNELS_BYTES = 32 << 10  # where what is made has no more channels than that
_UNALIGNED_BYTES = 2 << 10  # in float32 where channels are no multiple of 16 bytes
_ACCUMULATORS_BYTES = 64 << 10  # of one multiprocessor: a tile of 128 x 128 sums in float32, the bound of what is split


class WorkspaceBytes(NamedTuple):
    """Size of the workspace of one convolution, in bytes."""

    num_bytes: int  # by the rule
    max_bytes: int  # the bound: the most that was measured of a convolution of its kind


def _padded_bytes(tensor: torch.Tensor, dims: tuple[int, ...] = (1,)) -> int:
    """Return the bytes of a copy of `tensor` with the sizes of `dims` padded to multiples of 16 bytes."""
    alignment = _ALIGNMENT_BYTES // tensor.element_size()
    sizes = (round_up(size, alignment) if dim in dims else size for dim, size in enumerate(tensor.shape))
    return math.prod(sizes) * tensor.element_size()


def compute_workspace(
    gpu: DeviceProperties,
    data: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    result: torch.Tensor,
    *,
    is_channels_last: bool,
    stride: Sequence[int] = (1,),
) -> WorkspaceBytes:
    """Return the workspace size of a call that computes `result`: `data`, `weight` or `output`, or the gradient of
    one."""
    is_half = data.element_size() == 2
    is_weight_grad = result is weight
    uses_tf32 = data.dtype is torch.float32 and gpu.compute_capability >= (8, 0) and kernels.get_cudnn_allow_tf32()
    uses_tensor_cores = gpu.compute_capability >= (7, 0) if is_half else uses_tf32
    copied_bytes = [_padded_bytes(data), _padded_bytes(output), _padded_bytes(weight, (0, 1))]
    # cuDNN 7.6 on a V100 kept what it made in half precision in float32: pytorch/pytorch issues 31500 and 50990.
    float32_result_bytes = 0 if is_weight_grad else _padded_bytes(result)
    # On 9.0 results are split as well as the gradients of weights, into up to two tiles for each multiprocessor.
    num_tiles = 2 if uses_tensor_cores and gpu.compute_capability == (9, 0) else int(is_weight_grad)
    sums_bytes = gpu.num_sms * _ACCUMULATORS_BYTES * num_tiles
    max_bytes = sum(copied_bytes) + float32_result_bytes + max(sums_bytes, _FEW_CHANNELS_BYTES + _UNALIGNED_BYTES)
    channels = result.shape[1]
    few_channels_bytes = _FEW_CHANNELS_BYTES if channels <= _MAX_FEW_CHANNELS else 0
    if uses_tensor_cores and gpu.compute_capability == (9, 0):
        num_bytes = _sm90_workspace_bytes(
            gpu, data, weight, output, result, is_channels_last=is_channels_last, stride=stride
        )
    elif is_half and is_weight_grad and uses_tensor_cores:
        num_bytes = _PARTIAL_SUMS_BYTES + few_channels_bytes + (0 if is_channels_last else sum(copied_bytes))
    elif is_channels_last or not (uses_tensor_cores or data.dtype is torch.float32):
        num_bytes = 0
    elif is_half or (uses_tensor_cores and weight.dim() == 5):
        num_bytes = sum(copied_bytes)
    elif math.prod(weight.shape[2:]) == 1:
        num_bytes = 0
    else:
        is_unaligned = any(tensor.shape[1] % 4 for tensor in (data, output))
        num_bytes = weight.numel() * 4 + channels * 4 + few_channels_bytes + (_UNALIGNED_BYTES if is_unaligned else 0)
    return WorkspaceBytes(num_bytes, max(num_bytes, max_bytes))


# -- compute capability 9.0 --------------------------------------------------------------------------------------------

_COPY_EXTRA_BYTES = 16  # beside what is copied
_LARGE_KERNEL_BYTES = 131
_MIN_LARGE_ELEMENTS = 1 << 21  # gradients of data from which on kernels take these; twice as many results
_TILE = 128
_MAX_WINOGRAD_BYTES = 24 << 20  # 18 MiB were taken; where it would be 28 MiB another kernel ran
_WINOGRAD_TILE_VALUES = 36  # a tile of 4 x 4 results and 3 x 3 weights has 6 x 6 transformed values
_MAX_SMALL_KERNEL = 27  # a kernel of 5 x 5, or of 3 x 3 x 3
_MIN_IMAGE_PIXELS = 64  # points: 7 x 7 took copies, 14 x 14 none
_GROUPED_SLICES = 16
_MIN_POSITIONS_PER_SLICE = 768  # positions in float32
_MANY_POSITIONS = 16_384  # from there on half precision is split too, and few channels
_FEW_CHANNELS_SLICES = {2: 58, 4: 54}  # by bytes of an element; 54 to 67 in seven convolutions of two dimensions


def _sm90_workspace_bytes(
    gpu: DeviceProperties,
    data: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    result: torch.Tensor,
    *,
    is_channels_last: bool,
    stride: Sequence[int],
) -> int:
    """Return the workspace bytes recorded on an H100: copies in channels-last order, and partial sums of the result.

    The formula was fitted to 307 convolutions of real networks, forward and backward: for 81, all requests are exact;
    for half, the error is at most 1.1%. The least certain part is which results are split, and into how many slices.
    """
    is_half, is_weight_grad = data.element_size() == 2, result is weight
    filters, channels = weight.shape[:2]
    kernel_elements = math.prod(weight.shape[2:])
    is_strided = any(alignment > 1 for alignment in stride)
    is_patch_embedding = list(stride) == list(weight.shape[2:])
    if data.shape[1] != channels and kernel_elements != 1:
        return _grouped_bytes(data, weight, output, result, is_channels_last=is_channels_last)
    if channels < 4 and not (weight.dim() == 5 and (is_weight_grad or filters == 1)):
        # Images: small kernels need nothing, larger ones lay out what they read unpadded.
        if not is_channels_last and not is_half:
            if kernel_elements <= _MAX_SMALL_KERNEL or (
                is_patch_embedding and not is_weight_grad and not weight.shape[-1] % 4
            ):
                return 0
            if result is data:
                return 0 if is_strided else data.nbytes
        elif kernel_elements <= _MAX_SMALL_KERNEL and (
            (is_half and not is_channels_last and result is output) or (is_weight_grad and not (is_half or is_strided))
        ):
            return 0
    # Small kernels read and write channels-first data without copies.
    reads_in_place = channels == 64 and not (is_half or is_channels_last or is_weight_grad)
    # A product of matrices for each image.
    if kernel_elements == 1 and not is_channels_last and (reads_in_place or not is_strided):
        product_bytes = result.numel() * 4 * data.shape[0] if is_weight_grad else 0
        # ... unless images are so small that their weights outweigh them.
        if math.prod(data.shape[2:]) >= _MIN_IMAGE_PIXELS and product_bytes <= 2 * (data.nbytes + output.nbytes):
            return product_bytes
        if math.prod(data.shape[2:]) >= _MIN_IMAGE_PIXELS or is_weight_grad:
            return data.nbytes + output.nbytes + _COPY_EXTRA_BYTES
    # The first and the last convolution of a diffusion model.
    is_latent_conv = 4 in (filters, channels) and not (is_half or is_channels_last)
    if is_latent_conv and result is data:
        return 0
    is_padded = is_half or is_weight_grad or weight.dim() == 5 or channels >= 4 or (result is data and not is_strided)
    data_bytes, output_bytes, weight_bytes = (
        (_padded_bytes(tensor, dims) if is_padded else tensor.nbytes)
        for tensor, dims in ((data, (1,)), (output, (1,)), (weight, (0, 1)))
    )
    alignment = _ALIGNMENT_BYTES // data.element_size()
    channels_fit, filters_fit = not channels % alignment or channels == 1, not filters % alignment
    is_large_result = result.numel() >= (_MIN_LARGE_ELEMENTS if result is data else 2 * _MIN_LARGE_ELEMENTS) or (
        is_strided and result is data and not is_half
    )
    uses_large_kernel = is_large_result and min(filters, channels) > _MAX_FEW_CHANNELS
    if reads_in_place and result is output and (is_strided or not uses_large_kernel):
        output_bytes, uses_large_kernel = 0, False
    copied_bytes = 0
    if not is_channels_last:
        copied_bytes = (
            data_bytes
            + (0 if is_latent_conv and result is output else output_bytes)
            + (weight_bytes if kernel_elements > 1 else 0)
        )
    elif kernel_elements > 1 and not (channels_fit and filters_fit):
        copies_output = not (is_half or channels_fit) and (is_weight_grad or (result is data and is_strided))
        copied_bytes = data_bytes * (not channels_fit) + weight_bytes
        copied_bytes += output_bytes * (copies_output or not filters_fit)
    num_bytes = copied_bytes + _COPY_EXTRA_BYTES if copied_bytes else 0
    if is_weight_grad:
        winograd_bytes = (
            _winograd_bytes(data, weight, output)
            if kernel_elements == 9 and not (is_half or is_channels_last or is_strided)
            else 0
        )
        return winograd_bytes or num_bytes + _partial_sums_bytes(gpu, data, weight, output)
    return num_bytes + uses_large_kernel * _LARGE_KERNEL_BYTES


def _grouped_bytes(
    data: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, result: torch.Tensor, *, is_channels_last: bool
) -> int:
    """Return the workspace bytes recorded for a grouped convolution: copies where the kernel needs another format."""
    is_half = data.element_size() == 2
    copied_bytes = data.nbytes + output.nbytes
    if is_half:
        return 0 if is_channels_last or result is weight else copied_bytes + weight.nbytes + _COPY_EXTRA_BYTES
    if result is weight:
        return copied_bytes + _GROUPED_SLICES * weight.nbytes + _COPY_EXTRA_BYTES
    if is_channels_last or result is data:
        return 0
    return copied_bytes + weight.nbytes + _COPY_EXTRA_BYTES + _LARGE_KERNEL_BYTES


def _winograd_bytes(data: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> int:
    """Return the bytes of data, gradient and weight transformed for Winograd's algorithm F(4x4, 3x3); 0 if it is not
    used. Exact for two recorded weight gradients in float32 (128 and 256 channels)."""
    filters, channels = weight.shape[:2]
    tiles = data.shape[0] * math.prod(-(-size // 4) for size in output.shape[2:])
    num_bytes = _WINOGRAD_TILE_VALUES * 4 * (filters * channels + (filters + channels) * tiles)
    return num_bytes if min(filters, channels) >= 64 and num_bytes <= _MAX_WINOGRAD_BYTES else 0


def _partial_sums_bytes(gpu: DeviceProperties, data: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> int:
    """Return the bytes of float32 partial sums of a weight gradient. The positions are divided into slices, so that
    each multiprocessor computes a tile; every slice has its own sums, and a counter for each tile."""
    filters, channels = weight.shape[:2]
    kernel_elements = math.prod(weight.shape[2:])
    positions = output.numel() // output.shape[1]
    if channels <= _MAX_FEW_CHANNELS:
        if positions < _MANY_POSITIONS:
            return 128 if weight.dim() == 4 else 0
        num_slices = _FEW_CHANNELS_SLICES[weight.element_size()]
        return 4 * num_slices * _padded_bytes(weight, (1,)) // weight.element_size() + 128
    tiles = -(-filters // _TILE) * -(-channels // _TILE) * kernel_elements
    least = _MIN_POSITIONS_PER_SLICE if weight.element_size() == 4 else _MANY_POSITIONS
    num_slices = gpu.num_sms // tiles if positions >= _MANY_POSITIONS else min(gpu.num_sms // tiles, positions // least)
    if num_slices < 2:
        return 0
    num_sums = (
        math.prod(size if size <= _TILE // 2 else round_up(size, _TILE) for size in (filters, channels))
        * kernel_elements
    )
    num_stored_slices = num_slices - (weight.element_size() == 2)  # in half precision one less than there are
    return 4 * (num_stored_slices * num_sums + num_slices * tiles + 7) + _LARGE_KERNEL_BYTES
