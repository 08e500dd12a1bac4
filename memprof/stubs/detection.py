"""Operators of torchvision: boxes kept by their values, pooled regions, deformable convolutions.

Sources: torchvision/csrc/ops/cuda (nms_kernel.cu, roi_align_kernel.cu and its siblings, deform_conv2d_kernel.cu,
box_iou_rotated_kernel.cu) of pytorch/vision@v0.28.0.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels import registry
from memprof.virtual.kernels.copies import copy_bytes, make_copies_formula
from memprof.virtual.kernels.registry import aten, scratch

_BOXES_PER_BLOCK = 64
_MAX_IMAGES = 32  # images that a deformable convolution processes at a time (kMaxParallelImgs)


@registry.kernel("torchvision.nms", on_host=True)
def nms(launch: KernelContext) -> Any:
    """Keep every box, as unknown boxes do not overlap; CUDA sorts the scores, and has a bit for each pair."""
    boxes, scores = launch.args[:2]
    if not (launch.call.on_gpu or launch.call.on_host):
        return NotImplemented
    launch.values.assume("Non-maximum suppression keeps every box: where they lie is not known.")
    with launch.inside():
        order = aten.sort.stable(scores, stable=True, dim=0, descending=True)[1]
        ranked = aten.index_select.default(boxes, 0, order)
        count = boxes.shape[0]
        bits = aten.new_empty.default(order, [count * -(-count // _BOXES_PER_BLOCK)])
        kept = aten.new_empty.default(order, [count], dtype=torch.bool)
        kept.logical_or_(ranked.select(1, 0) >= 0)
        result = aten.masked_select.default(order, kept)
    del bits
    return result


@registry.kernel("torchvision.box_iou_rotated")
def box_iou_rotated(launch: KernelContext) -> Any:
    """Return the overlap of each pair of boxes in float32."""
    boxes, others = launch.args[:2]
    if not boxes.is_meta:
        return NotImplemented
    if boxes.dtype != others.dtype:
        raise RuntimeError("boxes1 and boxes2 must have the same dtype")
    with launch.inside():
        made = aten.new_empty.default(boxes, [len(boxes) * len(others)], dtype=torch.float32)
        return made.view(len(boxes), len(others))


# Operators with contiguous copies of features and boxes; in the backward of boxes and argmax, or gradient and boxes.
_POOLED = ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool")
scratch(*(f"torchvision.{name}" for name in _POOLED))(make_copies_formula(0, 1))
scratch("torchvision._roi_align_backward", "torchvision._roi_pool_backward")(make_copies_formula(1, 2))
scratch("torchvision._ps_roi_align_backward", "torchvision._ps_roi_pool_backward")(make_copies_formula(0, 1))


@registry.kernel("torchvision.deform_conv2d")
def deform_conv2d(launch: KernelContext) -> Any:
    """Return the convolution: products with several images' windows are summed, permuted (a copy) and biased."""
    data, weight, offset, mask, bias = launch.args[:5]
    if not data.is_meta or not data.numel():
        return NotImplemented
    shape = (data.shape[0], weight.shape[0], *offset.shape[2:])
    with launch.scratch(*copy_bytes(data, offset, weight, mask, bias)), launch.inside():
        ordered, summed = data.new_zeros(shape), data.new_zeros(shape)
        columns, filters = _columns(data, weight, offset), weight.flatten(1)
        summed.view(-1, weight.shape[0], columns.shape[1])[0].addmm_(filters, columns[: filters.shape[1]])
        return ordered + bias.view(1, -1, 1, 1)


@registry.kernel("torchvision._deform_conv2d_backward")
def deform_conv2d_backward(launch: KernelContext) -> Any:
    """Return the gradients of input, offset and mask; of the weight, by a permuted gradient; of the bias."""
    grad, data, weight, offset, mask, bias = launch.args[:6]
    if not data.is_meta or not data.numel():
        return NotImplemented
    images, filters = _images(data), weight.flatten(1)
    with launch.scratch(*copy_bytes(grad, data, weight, offset, mask, bias)), launch.inside():
        of_inputs = [torch.zeros_like(each, memory_format=torch.contiguous_format) for each in (data, offset, mask)]
        grouped = grad.contiguous().view(-1, images, *grad.shape[1:]).transpose(1, 2)
        columns = _columns(data, weight, offset)
        columns[: filters.shape[1]].addmm_(filters.t(), grouped[0].reshape(grad.shape[1], -1))
        del columns
        of_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        ordered = grouped.contiguous()
        columns = _columns(data, weight, offset)
        of_weight.flatten(1).addmm_(ordered[0].reshape(grad.shape[1], -1), columns[: filters.shape[1]].t())
        del ordered, columns
        return of_inputs[0], of_weight, *of_inputs[1:], torch.ones_like(bias) * grad.sum((0, 2, 3))


def _images(data: torch.Tensor) -> int:
    """Return the number of images that are convolved at a time."""
    return next(count for count in range(_MAX_IMAGES, 0, -1) if data.shape[0] % count == 0)


def _columns(data: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Allocate the windows (columns) of the images, which are multiplied with the weights."""
    rows = data.shape[1] * weight.shape[2] * weight.shape[3]
    return data.new_empty((rows, _images(data) * offset.shape[2] * offset.shape[3]))


def autocast_in_float32() -> list[Any]:
    """Return the operators, as far as they exist here, that autocast runs in float32 (torchvision/csrc/ops/autocast).

    All results but the indices of boxes are cast to the dtype of the first tensor.
    """
    names = ("nms", "deform_conv2d", *_POOLED)
    return [found for name in names if (found := getattr(torch.ops.torchvision, name, None)) is not None]
