"""torchvision without its compiled operators, as when PyPI's CUDA build is installed beside torch for the CPU.

The package's Python code registers shapes and derivatives for its operators, but the operators themselves are missing,
so that the import fails. Here the operators are defined; detection.py has the allocations of their kernels.

Sources: torchvision/csrc/ops (nms.cpp, roi_align.cpp and its siblings, deform_conv2d.cpp, box_iou_rotated.cpp,
autograd/) and torchvision/extension.py of pytorch/vision@v0.28.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.patching import Patch
from memprof.stubs.packages import NO_STUBS_HINT

_BOXES = "Tensor dets, Tensor scores, float iou_threshold"
_POOLING = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_INPUT_SIZE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_CONVOLUTION = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
    "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
    "bool use_mask"
)
SCHEMAS = {
    "nms": f"({_BOXES}) -> Tensor",
    "box_iou_rotated": "(Tensor boxes1, Tensor boxes2) -> Tensor",
    "qnms": f"({_BOXES}) -> Tensor",
    "roi_align": f"(Tensor input, Tensor rois, {_POOLING}, int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward": (
        f"(Tensor grad, Tensor rois, {_POOLING}, {_INPUT_SIZE}, int sampling_ratio, bool aligned) -> Tensor"
    ),
    "qroi_align": (
        "(Tensor input, Tensor rois, float input_scale, int input_zero_point, float rois_scale, int rois_zero_point, "
        f"{_POOLING}, int sampling_ratio, bool aligned) -> Tensor"
    ),
    "roi_pool": f"(Tensor input, Tensor rois, {_POOLING}) -> (Tensor, Tensor)",
    "_roi_pool_backward": f"(Tensor grad, Tensor rois, Tensor argmax, {_POOLING}, {_INPUT_SIZE}) -> Tensor",
    "ps_roi_align": f"(Tensor input, Tensor rois, {_POOLING}, int sampling_ratio) -> (Tensor, Tensor)",
    "_ps_roi_align_backward": (
        f"(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOLING}, int sampling_ratio, {_INPUT_SIZE}) -> Tensor"
    ),
    "ps_roi_pool": f"(Tensor input, Tensor rois, {_POOLING}) -> (Tensor, Tensor)",
    "_ps_roi_pool_backward": f"(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOLING}, {_INPUT_SIZE}) -> Tensor",
    "deform_conv2d": f"({_CONVOLUTION}) -> Tensor",
    "_deform_conv2d_backward": f"(Tensor grad, {_CONVOLUTION}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
}
_NOT_LOADED = (
    "torchvision's compiled operators cannot be loaded here (a build for CUDA beside torch for the CPU): they are "
    f"replaced by stubs, allocating as those of 0.28.0 do {NO_STUBS_HINT}"
)


@functools.cache
def define_operators() -> torch.library.Library:
    """Define torchvision's operators, without kernels, for the lifetime of the process; return their library."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
    return library


def get_patches(module: Any, assume: Callable[[str], None]) -> Iterator[Patch]:
    """Define the operators if torchvision's library is not loaded, and yield patches of `module` that hide this."""
    if not module._has_ops():
        assume(_NOT_LOADED)
        define_operators()
        yield module, "_has_ops", lambda: True
        yield module, "_check_cuda_version", lambda: -1  # as in a build without CUDA
