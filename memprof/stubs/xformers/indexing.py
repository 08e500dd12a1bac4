"""xformers.ops: rows by an index, added or concatenated, for stochastic depth (DINOv2).

Source: xformers/ops/indexing.py of facebookresearch/xformers@v0.0.32.post2. Its Triton kernels allocate nothing.
"""

from __future__ import annotations

import torch

from memprof.stubs.registry import stub
from memprof.stubs.tools import check_on_gpu, kernel, mark_written, require

_SOURCE = "facebookresearch/xformers@v0.0.32.post2:xformers/ops/indexing.py"


class _IndexAdd(torch.autograd.Function):
    """The autograd function of scaled_index_add, which writes `x` in place; saves index, scaling and source."""

    @staticmethod
    def forward(ctx, x, index, source, scaling):
        mark_written(x)
        ctx.mark_dirty(x)
        ctx.save_for_backward(index, scaling, source)
        return x

    @staticmethod
    def backward(ctx, gradient):
        _, scaling, source = ctx.saved_tensors
        source_gradient = torch.empty_like(source)
        scaling_gradient = None if scaling is None else source.new_empty(source.shape, dtype=scaling.dtype)
        return gradient, None, source_gradient, scaling_gradient


@stub("xformers.ops.indexing.scaled_index_add", "xformers.ops.scaled_index_add", source=_SOURCE)
def scaled_index_add(input, index, source, scaling=None, alpha=1.0):
    """Add scaled rows of `source` to `input` in place; the gradient of `scaling` has the shape of `source`."""
    name = "xformers.ops.scaled_index_add"
    check_on_gpu(name, input, index, source, scaling)
    require(input.shape[1:] == source.shape[1:], name, "rows of one shape")
    return _IndexAdd.apply(input, index, source, scaling)  # type: ignore[no-any-return]


@stub("xformers.ops.indexing.index_select_cat", "xformers.ops.index_select_cat", source=_SOURCE)
def index_select_cat(sources, indices):
    """Return the rows of all `sources` at `indices` in one vector; gradients are allocated as zeros."""
    shapes = [source.shape for source in sources]

    def forward(*tensors: torch.Tensor):
        check_on_gpu("xformers.ops.index_select_cat", *tensors)
        indices = tensors[len(shapes) :]
        elements = sum(len(index) * shape[1] for shape, index in zip(shapes, indices, strict=True))
        return tensors[0].new_empty(elements), indices

    def backward(saved, gradient: torch.Tensor):
        return *(gradient.new_zeros(shape) for shape in shapes), *(None for _ in shapes)

    return kernel(forward, backward, *sources, *indices)  # type: ignore[no-any-return]
