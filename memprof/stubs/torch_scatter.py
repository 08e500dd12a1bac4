"""torch_scatter: rows of a tensor reduced by an index, and functions composed of these reductions.

Sources: torch_scatter/scatter.py, segment_csr.py, segment_coo.py, composite/ and utils.py, csrc/scatter.cpp,
segment_csr.cpp, segment_coo.cpp and csrc/cuda of rusty1s/pytorch_scatter@2.1.2. Sums are torch's own `scatter_add_`.
Without a number of rows from the program, the largest index determines it: the index must be known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.stubs.registry import register_in, stub
from memprof.stubs.tools import check_on_gpu, kernel, mark_written, require

_REPOSITORY = "rusty1s/pytorch_scatter@2.1.2:"
_EXTREMA = ("min", "max")


def _register(file: str) -> Callable[[Any], Any]:
    source = f"{_REPOSITORY}torch_scatter/{file}.py, csrc/{file}.cpp, csrc/cuda/{file}_cuda.cu"
    return register_in(f"torch_scatter.{file}", "torch_scatter", source=source)


def _register_composite(file: str) -> Callable[[Any], Any]:
    modules = (f"torch_scatter.composite.{file}", "torch_scatter.composite", "torch_scatter")
    return register_in(*modules, source=f"{_REPOSITORY}torch_scatter/composite/{file}.py")


@stub("torch_scatter.utils.broadcast", source=f"{_REPOSITORY}torch_scatter/utils.py")
def broadcast(src, other, dim):
    """Return a view of `src` that is expanded to the shape of `other`."""
    if src.dim() == 1:
        src = src[(None,) * (dim % other.dim())]
    return _add_dims(src, other.dim()).expand(other.size())


def _count_rows(index: torch.Tensor, dim_size: int | None) -> int:
    if dim_size is not None:
        return dim_size
    return int(index.max()) + 1 if index.numel() else 0


def _check_index(name: str, src: torch.Tensor, index: torch.Tensor) -> None:
    check_on_gpu(name, src, index)
    require(index.dtype == torch.int64, name, "an index of int64")


def _make_output(values: torch.Tensor, dim: int, num_rows: int, out: torch.Tensor | None) -> torch.Tensor:
    """Return `out`, or without it a new tensor with the shape of `values`, but `num_rows` in dimension `dim`."""
    size = (*values.shape[:dim], num_rows, *values.shape[dim + 1 :])
    result = values.new_empty(size) if out is None else out.contiguous()
    mark_written(result)
    return result


def _add_dims(tensor: torch.Tensor, num_dims: int) -> torch.Tensor:
    """Return a view of `tensor` with `num_dims` dimensions, of which the added trailing ones have size 1."""
    return tensor[(..., *(None,) * (num_dims - tensor.dim()))]


@_register("scatter")
def scatter_sum(src, index, dim=-1, out=None, dim_size=None):
    """Return the sum of the rows with each index, in `out` or new zeros, by torch's scatter_add_."""
    check_on_gpu("torch_scatter.scatter_sum", src, index)
    index = broadcast(index, src, dim)
    if out is None:
        size = list(src.size())
        size[dim] = _count_rows(index, dim_size)
        out = torch.zeros(size, dtype=src.dtype, device=src.device)
    return out.scatter_add_(dim, index, src)


@_register("scatter")
def scatter_add(src, index, dim=-1, out=None, dim_size=None):
    """Return the sum of the rows with each index, as scatter_sum does."""
    return scatter_sum(src, index, dim, out, dim_size)


def _scatter(reduce: str, src: torch.Tensor, index: torch.Tensor, dim: int, out, dim_size) -> Any:
    """Return the rows of `src` reduced by `index`, and for min and max the position of each result (scatter_cuda)."""
    _check_index(f"torch_scatter.scatter_{reduce}", src, index)
    dim, shape = src.dim() + dim if dim < 0 else dim, src.shape

    def forward(values: torch.Tensor, index: torch.Tensor, out):
        index = broadcast(index, values, dim)
        values = values.contiguous()
        result = _make_output(values, dim, 0 if out is not None else _count_rows(index, dim_size), out)
        if reduce == "mul":
            return result, (values, index, result)
        positions = torch.empty_like(result, dtype=torch.int64)
        if out is None:
            result.masked_fill_(result == 0, 0)
        return (result, positions), (index, positions)

    def backward(saved, gradient: torch.Tensor, *other_gradients):
        if reduce == "mul":
            values, index, result = saved
            src_grad = torch.gather(gradient * result, dim, index).div_(values)
            return src_grad.masked_fill_(src_grad.isnan(), 0), None, None
        return _scatter_to_positions(gradient, saved[1], shape, dim), None, None

    return kernel(forward, backward, src, index, out)


def _scatter_to_positions(gradient: torch.Tensor, positions: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor:
    """Return `gradient` scattered to `positions` in zeros of `shape`; one more row is for positions without a value."""
    size = list(shape)
    size[dim] += 1
    src_grad = torch.zeros(size, dtype=gradient.dtype, device=gradient.device)
    return src_grad.scatter_(dim, positions, gradient).narrow(dim, 0, size[dim] - 1)


def _register_scatter(reduce: str, docstring: str) -> Callable[..., Any]:
    def scatter(src, index, dim=-1, out=None, dim_size=None):
        return _scatter(reduce, src, index, dim, out, dim_size)

    scatter.__name__, scatter.__doc__ = f"scatter_{reduce}", docstring
    return _register("scatter")(scatter)  # type: ignore[no-any-return]


scatter_mul = _register_scatter("mul", "Return products; saves the input and the products.")
scatter_min = _register_scatter("min", "Return the minimum of each row, and its position.")
scatter_max = _register_scatter("max", "Return the maximum of each row, and its position.")


@_register("scatter")
def scatter_mean(src, index, dim=-1, out=None, dim_size=None):
    """Return the mean of the rows with each index: their sums, divided in place by their numbers."""
    out = scatter_sum(src, index, dim, out, dim_size)
    ones = torch.ones(index.size(), dtype=src.dtype, device=src.device)
    count = scatter_sum(ones, index, min(dim % src.dim(), index.dim() - 1), None, out.size(dim))
    count[count < 1] = 1
    count = broadcast(count, out, dim)
    return out.true_divide_(count) if out.is_floating_point() else out.div_(count, rounding_mode="floor")


@_register("scatter")
def scatter(src, index, dim=-1, out=None, dim_size=None, reduce="sum"):
    """Return the result of scatter_sum, scatter_mul, scatter_mean, scatter_min or scatter_max, as `reduce` says."""
    if reduce not in _SCATTER_FUNCTIONS:
        raise ValueError
    result = _SCATTER_FUNCTIONS[reduce](src, index, dim, out, dim_size)
    return result[0] if reduce in _EXTREMA else result


_SCATTER_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": scatter_sum, "add": scatter_sum, "mul": scatter_mul, "mean": scatter_mean, "min": scatter_min,
    "max": scatter_max,
}  # fmt: skip


def _reduce(src: torch.Tensor, index: torch.Tensor, out, reduce: str, *, csr: bool, dim_size=None) -> Any:
    """Return the segments' reductions, and for min and max the positions (segment_csr_cuda, segment_coo_cuda)."""
    _check_index(f"torch_scatter.segment_{reduce}_{'csr' if csr else 'coo'}", src, index)
    dim, shape = index.dim() - 1, src.shape

    def forward(values: torch.Tensor, index: torch.Tensor, out):
        outer_shape = values.shape[: dim + (not csr)]
        rows = index.expand((*outer_shape, index.shape[-1]) if csr else outer_shape)
        values = values.contiguous()
        num_rows = 0
        if out is None:
            num_rows = max(rows.size(dim) - 1, 0) if csr else _count_rows(rows.select(dim, -1), dim_size)
        result = _make_output(values, dim, num_rows, out)
        if reduce in _EXTREMA:
            positions = torch.empty(result.shape, dtype=torch.int64, device=result.device)
            if not csr and out is None:
                result.masked_fill_(result == 0, 0)
            return (result, positions), (index, positions)
        if csr or reduce != "mean":
            return result, (index,)
        counts = torch.zeros((*rows.shape[:-1], result.shape[dim]), dtype=result.dtype, device=result.device)
        result.div_(_add_dims(counts.masked_fill_(counts < 1, 1), result.dim()))
        return result, (index, counts)

    def backward(saved, gradient: torch.Tensor, *other_gradients):
        if reduce in _EXTREMA:
            return _scatter_to_positions(gradient, saved[1], shape, dim), None, None
        gradient = gradient.contiguous()
        src_grad = torch.empty(shape, dtype=gradient.dtype, device=gradient.device)
        if reduce == "mean" and src_grad.numel():
            counts = saved[0].diff().to(src_grad.dtype) if csr else saved[1]
            row_counts = counts.new_empty((*counts.shape[:-1], shape[dim]))
            src_grad.true_divide_(_add_dims(row_counts, src_grad.dim()))
        return src_grad, None, None

    return kernel(forward, backward, src, index, out)


def _register_segment_functions(reduce: str, csr_docstring: str, coo_docstring: str) -> None:
    """Register segment_REDUCE_csr and segment_REDUCE_coo with these docstrings."""
    name = "sum" if reduce == "add" else reduce

    def reduce_csr(src, indptr, out=None):
        return _reduce(src, indptr, out, name, csr=True)

    def reduce_coo(src, index, out=None, dim_size=None):
        return _reduce(src, index, out, name, csr=False, dim_size=dim_size)

    reduce_csr.__name__, reduce_csr.__doc__ = f"segment_{reduce}_csr", csr_docstring
    reduce_coo.__name__, reduce_coo.__doc__ = f"segment_{reduce}_coo", coo_docstring
    _register("segment_csr")(reduce_csr)
    _register("segment_coo")(reduce_coo)


for _name, *_docstrings in (
    ("sum", *["Return sums of segments."] * 2),
    ("add", *["Return sums of segments."] * 2),
    ("mean", "Return segment means; the backward counts rows.", "Return segment means; saves the counts of rows."),
    ("min", *["Return the minimum of each segment, and its position."] * 2),
    ("max", *["Return the maximum of each segment, and its position."] * 2),
):
    _register_segment_functions(_name, *_docstrings)


def _reduce_by_name(src: torch.Tensor, index: torch.Tensor, out, reduce: str, **options) -> torch.Tensor:
    if reduce not in ("sum", "add", "mean", *_EXTREMA):
        raise ValueError
    result = _reduce(src, index, out, "sum" if reduce == "add" else reduce, **options)
    return result[0] if reduce in _EXTREMA else result


@_register("segment_csr")
def segment_csr(src, indptr, out=None, reduce="sum"):
    """Return the sum, mean, minimum or maximum of each segment, as `reduce` says; `indptr` has the bounds."""
    return _reduce_by_name(src, indptr, out, reduce, csr=True)


@_register("segment_csr")
def gather_csr(src, indptr, out=None):
    """Return each row of `src` repeated for its segment; the last bound in `indptr` is the number of rows."""
    return _gather("gather_csr", src, indptr, out, int(indptr.flatten()[-1]) if out is None and src.numel() else 0)


@_register("segment_coo")
def segment_coo(src, index, out=None, dim_size=None, reduce="sum"):
    """Return the sum, mean, minimum or maximum of each segment, as `reduce` says; `index` is sorted."""
    return _reduce_by_name(src, index, out, reduce, csr=False, dim_size=dim_size)


@_register("segment_coo")
def gather_coo(src, index, out=None):
    """Return the row of `src` at each index."""
    return _gather("gather_coo", src, index, out, index.shape[-1])


def _gather(name: str, src: torch.Tensor, index: torch.Tensor, out, num_rows: int) -> torch.Tensor:
    _check_index(f"torch_scatter.{name}", src, index)
    dim, shape = index.dim() - 1, src.shape

    def forward(values: torch.Tensor, index: torch.Tensor, out):
        return _make_output(values.contiguous(), dim, num_rows, out), (index,)

    def backward(saved, gradient: torch.Tensor):
        gradient = gradient.contiguous()
        return torch.empty(shape, dtype=gradient.dtype, device=gradient.device), None, None

    return kernel(forward, backward, src, index, out)


def _check_floating_point(name: str, src: torch.Tensor) -> None:
    if not torch.is_floating_point(src):
        raise ValueError(f"`{name}` can only be computed over tensors with floating point data types.")


# The functions below name temporaries as the source does, since a named tensor lives until the function ends.


@_register_composite("softmax")
def scatter_softmax(src, index, dim=-1, dim_size=None):
    """Return the softmax over the rows with each index; temporaries of the input's size live until the end."""
    _check_floating_point("scatter_softmax", src)
    index = broadcast(index, src, dim)
    row_max = scatter_max(src, index, dim=dim, dim_size=dim_size)[0]
    element_max = row_max.gather(dim, index)
    centered = src - element_max
    exponentials = centered.exp_()
    row_sum = scatter_sum(exponentials, index, dim, dim_size=dim_size)
    element_sum = row_sum.gather(dim, index)
    return exponentials.div(element_sum)


@_register_composite("softmax")
def scatter_log_softmax(src, index, dim=-1, eps=1e-12, dim_size=None):
    """Return the log-softmax over the rows with each index; temporaries live until the end."""
    _check_floating_point("scatter_log_softmax", src)
    index = broadcast(index, src, dim)
    row_max = scatter_max(src, index, dim=dim, dim_size=dim_size)[0]
    element_max = row_max.gather(dim, index)
    centered = src - element_max
    row_sum = scatter_sum(centered.exp(), index, dim, dim_size=dim_size)
    element_sum = row_sum.add_(eps).log_().gather(dim, index)
    return centered.sub_(element_sum)


@_register_composite("logsumexp")
def scatter_logsumexp(src, index, dim=-1, out=None, dim_size=None, eps=1e-12):
    """Return the logsumexp of the rows with each index; temporaries of the input's size live until the end."""
    _check_floating_point("scatter_logsumexp", src)
    index = broadcast(index, src, dim)
    size = list(src.size())
    size[dim] = _count_rows(index, dim_size) if out is None else out.size(dim)
    row_max = torch.full(size, float("-inf"), dtype=src.dtype, device=src.device)
    row_max = scatter_max(src, index, dim, row_max, dim_size=size[dim])[0]
    element_max = row_max.gather(dim, index)
    centered = src - element_max
    centered.masked_fill_(torch.isnan(centered), float("-inf"))
    if out is not None:
        out = out.sub_(row_max).exp_()
    row_sum = scatter_sum(centered.exp_(), index, dim, out, size[dim])
    return row_sum.add_(eps).log_().add_(row_max).nan_to_num_(neginf=0.0)


@_register_composite("std")
def scatter_std(src, index, dim=-1, out=None, dim_size=None, unbiased=True):
    """Return the standard deviation of the rows with each index; allocates counts, means and squares."""
    dim_size = dim_size if out is None else out.size(dim)
    dim = src.dim() + dim if dim < 0 else dim
    ones = torch.ones(index.size(), dtype=src.dtype, device=src.device)
    count = scatter_sum(ones, index, min(dim, index.dim() - 1), dim_size=dim_size)
    index = broadcast(index, src, dim)
    total = scatter_sum(src, index, dim, dim_size=dim_size)
    count = broadcast(count, total, dim).clamp(1)
    mean = total.div(count)
    var = src - mean.gather(dim, index)
    var = var * var
    out = scatter_sum(var, index, dim, out, dim_size)
    count = count.sub(1).clamp_(1) if unbiased else count
    return out.div(count + 1e-6).sqrt()
