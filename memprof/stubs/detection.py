"""Operators of torchvision: non-maximum suppression, pooling of regions, deformable convolutions.

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
    """Return the indices of all boxes, since coordinates are unknown; scratch: sorted scores, a bit for each pair."""
    boxes, scores = launch.args[:2]
    if not (launch.call.on_gpu or launch.call.on_host):
        return NotImplemented
    launch.values.assume("Non-maximum suppression keeps every box: where they lie is not known.")
    with launch.inside():
        order = aten.sort.stable(scores, stable=True, dim=0, descending=True)[1]
        sorted_boxes = aten.index_select.default(boxes, 0, order)
        num_boxes = boxes.shape[0]
        bitmask = aten.new_empty.default(order, [num_boxes * -(-num_boxes // _BOXES_PER_BLOCK)])
        keep_mask = aten.new_empty.default(order, [num_boxes], dtype=torch.bool)
        keep_mask.logical_or_(sorted_boxes.select(1, 0) >= 0)
        result = aten.masked_select.default(order, keep_mask)
    del bitmask
    return result


@registry.kernel("torchvision.box_iou_rotated")
def box_iou_rotated(launch: KernelContext) -> Any:
    """Return the overlaps [boxes, other boxes] in float32."""
    boxes, other_boxes = launch.args[:2]
    if not boxes.is_meta:
        return NotImplemented
    if boxes.dtype != other_boxes.dtype:
        raise RuntimeError("boxes1 and boxes2 must have the same dtype")
    with launch.inside():
        overlaps = aten.new_empty.default(boxes, [len(boxes) * len(other_boxes)], dtype=torch.float32)
        return overlaps.view(len(boxes), len(other_boxes))


# Operators with contiguous copies of features and boxes; in the backward of boxes and argmax, or gradient and boxes.
_POOLING_OPERATORS = ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool")
scratch(*(f"torchvision.{name}" for name in _POOLING_OPERATORS))(make_copies_formula(0, 1))
scratch("torchvision._roi_align_backward", "torchvision._roi_pool_backward")(make_copies_formula(1, 2))
scratch("torchvision._ps_roi_align_backward", "torchvision._ps_roi_pool_backward")(make_copies_formula(0, 1))


@registry.kernel("torchvision.deform_conv2d")
def deform_conv2d(launch: KernelContext) -> Any:
    """Return the convolution; scratch: columns (im2col) of up to 32 images, and two buffers of the output's size."""
    data, weight, offset, mask, bias = launch.args[:5]
    if not data.is_meta or not data.numel():
        return NotImplemented
    shape = (data.shape[0], weight.shape[0], *offset.shape[2:])
    with launch.scratch(*copy_bytes(data, offset, weight, mask, bias)), launch.inside():
        output, sums = data.new_zeros(shape), data.new_zeros(shape)
        columns, filters = _allocate_columns(data, weight, offset), weight.flatten(1)
        sums.view(-1, weight.shape[0], columns.shape[1])[0].addmm_(filters, columns[: filters.shape[1]])
        return output + bias.view(1, -1, 1, 1)


@registry.kernel("torchvision._deform_conv2d_backward")
def deform_conv2d_backward(launch: KernelContext) -> Any:
    """Return the gradients of all inputs; scratch: columns (im2col) of up to 32 images, and a permuted gradient."""
    grad, data, weight, offset, mask, bias = launch.args[:6]
    if not data.is_meta or not data.numel():
        return NotImplemented
    num_images, filters = _count_parallel_images(data), weight.flatten(1)
    with launch.scratch(*copy_bytes(grad, data, weight, offset, mask, bias)), launch.inside():
        input_grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (data, offset, mask)]
        grad_groups = grad.contiguous().view(-1, num_images, *grad.shape[1:]).transpose(1, 2)
        columns = _allocate_columns(data, weight, offset)
        columns[: filters.shape[1]].addmm_(filters.t(), grad_groups[0].reshape(grad.shape[1], -1))
        del columns
        weight_grad = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        weight_grad_input = grad_groups.contiguous()
        columns = _allocate_columns(data, weight, offset)
        weight_grad.flatten(1).addmm_(weight_grad_input[0].reshape(grad.shape[1], -1), columns[: filters.shape[1]].t())
        del weight_grad_input, columns
        return input_grads[0], weight_grad, *input_grads[1:], torch.ones_like(bias) * grad.sum((0, 2, 3))


def _count_parallel_images(data: torch.Tensor) -> int:
    """Return the number of images in `data` that are convolved at a time: at most 32."""
    return next(count for count in range(_MAX_IMAGES, 0, -1) if data.shape[0] % count == 0)


def _allocate_columns(data: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return the columns (im2col) of the images that are convolved at a time, which the weights multiply."""
    rows = data.shape[1] * weight.shape[2] * weight.shape[3]
    return data.new_empty((rows, _count_parallel_images(data) * offset.shape[2] * offset.shape[3]))


def list_float32_operators() -> list[Any]:
    """Return the registered operators of torchvision that autocast runs in float32 (torchvision/csrc/ops/autocast).

    Their floating-point results are cast to the dtype of the first tensor.
    """
    names = ("nms", "deform_conv2d", *_POOLING_OPERATORS)
    return [operator for name in names if (operator := getattr(torch.ops.torchvision, name, None)) is not None]
