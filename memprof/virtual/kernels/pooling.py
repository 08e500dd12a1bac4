"""Pooling, upsampling, unfolding and padding: copies of inputs whose strides the CUDA kernels do not support.

Sources: native/cuda/AveragePool2d.cu and 3d, DilatedMaxPool2d.cu and 3d, AdaptiveAveragePooling.cu and 3d,
AdaptiveMaxPooling2d.cu and 3d, MaxUnpooling.cu, Im2Col.cu, Col2Im.cu, ReflectionPad.cu. Fractional pooling, grid
samples and padding by replication (ReplicationPadding.cu: packed accessors) support any strides.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.copies import copy_bytes, make_copies_formula, suggest_layout
from memprof.virtual.kernels.registry import aten, input_copies, kernel, scratch

# Copies keep the suggested memory format of the input.
scratch(aten.avg_pool2d, aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)(
    lambda args, gpu: copy_bytes(args[0], layout=suggest_layout(args[0]))
)


@scratch(aten.avg_pool2d_backward, aten.max_pool2d_with_indices_backward, aten.max_pool3d_with_indices_backward)
def compute_pool_backward_copies(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the copies of input, gradient and indices in the input's memory format."""
    indices = (arg for arg in args[2:] if isinstance(arg, torch.Tensor))
    return copy_bytes(args[1], args[0], *indices, layout=suggest_layout(args[1]))


scratch(aten.avg_pool3d, aten.avg_pool3d_backward, aten._adaptive_avg_pool3d_backward)(make_copies_formula(0))
scratch(aten.adaptive_max_pool2d_backward, aten.adaptive_max_pool3d_backward)(make_copies_formula(0, 2))
scratch(aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d)(make_copies_formula(0))
scratch(*(getattr(aten, f"reflection_pad{dims}d_backward") for dims in (1, 2, 3)))(make_copies_formula(0))
input_copies(aten.max_unpool2d, aten.max_unpool3d)(make_copies_formula(0, 1))


@kernel(aten.im2col, aten.col2im)
def fold(launch: KernelContext) -> Any:
    """Allocate a result of the input's size and resize it, so that a smaller result keeps the input's memory."""
    data = launch.args[0]
    result = launch.func(*launch.args)
    with launch.scratch(*copy_bytes(data)):
        if result.numel() > data.numel():
            with launch.scratch(data.nbytes):
                launch.record(result)
            launch.values.propagate(launch.func, launch.args, launch.kwargs, [result])
            return result
        return launch.new(data.shape, data.dtype).as_strided(result.shape, result.stride())


@scratch(aten._adaptive_avg_pool2d_backward)
def compute_adaptive_avg_backward_copies(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a contiguous copy of the gradient, unless the input is channels-last."""
    return copy_bytes(args[0]) if suggest_layout(args[1]) is torch.contiguous_format else []


@scratch(aten.adaptive_max_pool2d, aten.adaptive_max_pool3d)
def compute_adaptive_max_copies(args: Any, gpu: DeviceProperties | None = None) -> list[int]:
    """Return the bytes of a contiguous copy of a batched input; an unbatched input is not copied."""
    return copy_bytes(args[0]) if args[0].dim() == len(args[1]) + 2 else []


@input_copies(aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d)
def compute_adaptive_avg_copies(args: Any) -> list[int]:
    """Return the bytes of a contiguous copy of the input; 2D images in channels-last format are not copied."""
    is_channels_last = args[0].dim() == 4 and suggest_layout(args[0]) is not torch.contiguous_format
    return [] if is_channels_last else compute_adaptive_max_copies(args)


# Nearest upsampling of fewer channels has no channels-last kernel (native/cuda/UpSampleNearest2d.cu).
_MIN_CHANNELS_LAST = 4


def _image_copies(size_position: int, args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of copies and temporaries of 2D upsampling; `args[size_position]` is the output size."""
    source, result_shape = args[0], (*args[0].shape[:2], *args[size_position][-2:])
    if tuple(source.shape) == result_shape or not source.numel():
        return []
    if suggest_layout(source) is torch.contiguous_format:
        return copy_bytes(source)
    if source.shape[1] < _MIN_CHANNELS_LAST:
        return [math.prod(result_shape) * source.element_size(), *copy_bytes(source)]
    is_dense = source.is_contiguous(memory_format=torch.channels_last)
    return [] if is_dense else [source.numel() * source.element_size()]


# Nearest upsampling, its backward (whose result is as large as the input was) and the bilinear backward work on
# contiguous or channels-last images (native/cuda/UpSampleNearest2d.cu, UpSampleBilinear2d.cu). All other forward
# kernels support any strides.
compute_upsample_2d_copies = scratch(aten.upsample_nearest2d, aten._upsample_nearest_exact2d)(partial(_image_copies, 1))
compute_upsample_2d_backward_copies = partial(_image_copies, 2)
scratch(aten.upsample_nearest2d_backward, aten._upsample_nearest_exact2d_backward)(compute_upsample_2d_backward_copies)
scratch(aten.upsample_bilinear2d_backward)(compute_upsample_2d_backward_copies)
# Rows and their gradients are made contiguous (native/cuda/UpSampleNearest1d.cu).
scratch(aten.upsample_nearest1d, aten.upsample_nearest1d_backward)(make_copies_formula(0))
scratch(aten._upsample_nearest_exact1d, aten._upsample_nearest_exact1d_backward)(make_copies_formula(0))


def _volume_copies(size_position: int, args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of copies and temporaries of 3D upsampling; `args[size_position]` is the output size."""
    source, result_shape = args[0], (*args[0].shape[:2], *args[size_position][-3:])
    is_dense = suggest_layout(source) is torch.contiguous_format
    return copy_bytes(source) if is_dense else [math.prod(result_shape) * source.element_size(), *copy_bytes(source)]


# Volumes and their gradients are made contiguous (native/cuda/UpSampleNearest3d.cu,
# upsample_nearest3d_out_cuda_template).
scratch(aten.upsample_nearest3d, aten._upsample_nearest_exact3d)(partial(_volume_copies, 1))
scratch(aten.upsample_nearest3d_backward, aten._upsample_nearest_exact3d_backward)(partial(_volume_copies, 2))
