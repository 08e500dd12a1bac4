"""torch_scatter: rows of a tensor reduced by an index, and functions composed of these reductions.

Sources: torch_scatter/scatter.py, segment_csr.py, segment_coo.py, composite/ and utils.py, csrc/scatter.cpp,
segment_csr.cpp, segment_coo.cpp and csrc/cuda of rusty1s/pytorch_scatter@2.1.2. Sums are torch's own `scatter_add_`.
Without a number of rows from the program, the largest index determines it: the index must be known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.stubs.registry import stub
from memprof.stubs.tools import check_on_gpu, kernel, mark_written, require

_AT = "rusty1s/pytorch_scatter@2.1.2:"
_LEAST = ("min", "max")


def _public(name: str, file: str) -> Callable[[Any], Any]:
    source = f"{_AT}torch_scatter/{file}.py, csrc/{file}.cpp, csrc/cuda/{file}_cuda.cu"
    return stub(f"torch_scatter.{file}.{name}", f"torch_scatter.{name}", source=source)


def _composite(name: str, file: str) -> Callable[[Any], Any]:
    names = (f"torch_scatter.composite.{file}.{name}", f"torch_scatter.composite.{name}", f"torch_scatter.{name}")
    return stub(*names, source=f"{_AT}torch_scatter/composite/{file}.py")


@stub("torch_scatter.utils.broadcast", source=f"{_AT}torch_scatter/utils.py")
def broadcast(src, other, dim):
    """Return a view of `src` as large as `other`."""
    dim = other.dim() + dim if dim < 0 else dim
    if src.dim() == 1:
        src = src[(None,) * dim]
    return src[(..., *(None,) * (other.dim() - src.dim()))].expand(other.size())


def _rows(index: torch.Tensor, dim_size: int | None) -> int:
    if dim_size is not None:
        return dim_size
    return int(index.max()) + 1 if index.numel() else 0


def _check(name: str, src: torch.Tensor, index: torch.Tensor) -> None:
    check_on_gpu(name, src, index)
    require(index.dtype == torch.int64, name, "an index of int64")


def _output(values: torch.Tensor, size: list[int], into: torch.Tensor | None) -> torch.Tensor:
    made = values.new_empty(size) if into is None else into.contiguous()
    mark_written(made)
    return made


@_public("scatter_sum", "scatter")
def scatter_sum(src, index, dim=-1, out=None, dim_size=None):
    """Return sums in `out` or in new zeros, by torch's own operator."""
    check_on_gpu("torch_scatter.scatter_sum", src, index)
    index = broadcast(index, src, dim)
    if out is None:
        size = list(src.size())
        size[dim] = _rows(index, dim_size)
        out = torch.zeros(size, dtype=src.dtype, device=src.device)
    return out.scatter_add_(dim, index, src)


@_public("scatter_add", "scatter")
def scatter_add(src, index, dim=-1, out=None, dim_size=None):
    """Return sums as scatter_sum does."""
    return scatter_sum(src, index, dim, out, dim_size)


def _scatter(name: str, src: torch.Tensor, index: torch.Tensor, dim: int, given, dim_size) -> tuple[torch.Tensor, ...]:
    """Return the output, and for min and max the position of each result (scatter_cuda)."""
    _check(f"torch_scatter.scatter_{name}", src, index)
    dim, shape = src.dim() + dim if dim < 0 else dim, src.shape

    def forward(values: torch.Tensor, where: torch.Tensor, into):
        where = broadcast(where, values, dim)
        values = values.contiguous()
        size = list(values.size())
        if into is None:
            size[dim] = _rows(where, dim_size)
        made = _output(values, size, into)
        if name == "mul":
            return made, (values, where, made)
        place = torch.empty_like(made, dtype=torch.int64)
        if into is None:
            made.masked_fill_(made == 0, 0)
        return (made, place), (where, place)

    def backward(saved, gradient: torch.Tensor, *others):
        if name == "mul":
            values, where, made = saved
            found = torch.gather(gradient * made, dim, where).div_(values)
            return found.masked_fill_(found.isnan(), 0), None, None
        return _scatter_to_positions(gradient, saved[1], shape, dim), None, None

    result = kernel(forward, backward, src, index, given)
    return result if isinstance(result, tuple) else (result,)


def _scatter_to_positions(gradient: torch.Tensor, place: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor:
    """Return the gradient scattered to the positions of min or max; an extra row for missing ones is cut off."""
    size = list(shape)
    size[dim] += 1
    made = torch.zeros(size, dtype=gradient.dtype, device=gradient.device)
    return made.scatter_(dim, place, gradient).narrow(dim, 0, size[dim] - 1)


def _register_scatter(name: str, text: str) -> Callable[..., Any]:
    def scatter(src, index, dim=-1, out=None, dim_size=None):
        made = _scatter(name, src, index, dim, out, dim_size)
        return made if name in _LEAST else made[0]

    scatter.__doc__ = text
    return _public(f"scatter_{name}", "scatter")(scatter)  # type: ignore[no-any-return]


scatter_mul = _register_scatter("mul", "Return products; saves the input and the products.")
scatter_min = _register_scatter("min", "Return the minimum of each row, and its position.")
scatter_max = _register_scatter("max", "Return the maximum of each row, and its position.")


@_public("scatter_mean", "scatter")
def scatter_mean(src, index, dim=-1, out=None, dim_size=None):
    """Return sums, divided in place by counts."""
    out = scatter_sum(src, index, dim, out, dim_size)
    number = out.size(dim)
    places = dim + src.dim() if dim < 0 else dim
    if index.dim() <= places:
        places = index.dim() - 1
    ones = torch.ones(index.size(), dtype=src.dtype, device=src.device)
    count = scatter_sum(ones, index, places, None, number)
    count[count < 1] = 1
    count = broadcast(count, out, dim)
    return out.true_divide_(count) if out.is_floating_point() else out.div_(count, rounding_mode="floor")


@_public("scatter", "scatter")
def scatter(src, index, dim=-1, out=None, dim_size=None, reduce="sum"):
    """Return the result of scatter_sum, mul, mean, min or max, by the name in `reduce`."""
    one = _SCATTERS.get(reduce)
    if one is None:
        raise ValueError
    made = one(src, index, dim, out, dim_size)
    return made[0] if isinstance(made, tuple) else made


_SCATTERS: dict[str, Callable[..., Any]] = {
    "sum": scatter_sum, "add": scatter_sum, "mul": scatter_mul, "mean": scatter_mean, "min": scatter_min,
    "max": scatter_max,
}  # fmt: skip


def _segments(
    name: str, src: torch.Tensor, index: torch.Tensor, given, reduce: str, *, csr: bool, dim_size=None
) -> tuple[torch.Tensor, ...]:
    """Return the output, and positions of min or max, or counts by index (segment_csr_cuda, segment_coo_cuda)."""
    _check(f"torch_scatter.{name}", src, index)
    dim, shape = index.dim() - 1, src.shape

    def forward(values: torch.Tensor, where: torch.Tensor, into):
        above = values.shape[: dim + (not csr)]
        where = where.expand((*above, where.shape[-1]) if csr else above)
        values = values.contiguous()
        size = list(values.size())
        if into is None:
            size[dim] = max(where.size(dim) - 1, 0) if csr else _rows(where.select(dim, -1), dim_size)
        made = _output(values, size, into)
        if reduce in _LEAST:
            place = torch.empty(made.shape, dtype=torch.int64, device=made.device)
            if not csr and into is None:
                made.masked_fill_(made == 0, 0)
            return (made, place), (index, place)
        if csr or reduce != "mean":
            return made, (index,)
        counts = torch.zeros((*where.shape[:-1], made.shape[dim]), dtype=made.dtype, device=made.device)
        made.div_(counts.masked_fill_(counts < 1, 1)[(..., *(None,) * (made.dim() - counts.dim()))])
        return made, (index, counts)

    def backward(saved, gradient: torch.Tensor, *others):
        if reduce in _LEAST:
            return _scatter_to_positions(gradient, saved[1], shape, dim), None, None
        gradient = gradient.contiguous()
        made = torch.empty(shape, dtype=gradient.dtype, device=gradient.device)
        if reduce == "mean" and made.numel():
            if csr:
                ends = saved[0]
                count = ends.narrow(-1, 1, ends.size(-1) - 1) - ends.narrow(-1, 0, ends.size(-1) - 1)
                count = count.to(made.dtype)
            else:
                count = saved[1]
            each = count.new_empty((*count.shape[:-1], shape[dim]))
            made.true_divide_(each[(..., *(None,) * (made.dim() - each.dim()))])
        return made, None, None

    result = kernel(forward, backward, src, index, given)
    return result if isinstance(result, tuple) else (result,)


def _register_segments(reduce: str, of_csr: str, of_coo: str) -> None:
    """Register a reduction by segment bounds and one by a sorted index, each with its docstring."""
    kind = "sum" if reduce == "add" else reduce

    def by_csr(src, indptr, out=None):
        made = _segments(f"segment_{kind}_csr", src, indptr, out, kind, csr=True)
        return made if kind in _LEAST else made[0]

    def by_coo(src, index, out=None, dim_size=None):
        made = _segments(f"segment_{kind}_coo", src, index, out, kind, csr=False, dim_size=dim_size)
        return made if kind in _LEAST else made[0]

    for by, function, text in (("csr", by_csr, of_csr), ("coo", by_coo, of_coo)):
        function.__doc__ = text
        _public(f"segment_{reduce}_{by}", f"segment_{by}")(function)


for _reduce, *_texts in (
    ("sum", "Return sums of segments.", "Return sums of segments."),
    ("add", "Return sums of segments.", "Return sums of segments."),
    ("mean", "Return segment means; the backward makes counts.", "Return segment means; saves the counts."),
    ("min", *["Return the minimum of each segment, and its position."] * 2),
    ("max", *["Return the maximum of each segment, and its position."] * 2),
):
    _register_segments(_reduce, *_texts)


def _check_reduce(reduce: str) -> str:
    if reduce not in ("sum", "add", "mean", *_LEAST):
        raise ValueError
    return "sum" if reduce == "add" else reduce


@_public("segment_csr", "segment_csr")
def segment_csr(src, indptr, out=None, reduce="sum"):
    """Return the result of segment_sum_csr, mean, min or max, by the name in `reduce`."""
    reduce = _check_reduce(reduce)
    return _segments(f"segment_{reduce}_csr", src, indptr, out, reduce, csr=True)[0]


@_public("gather_csr", "segment_csr")
def gather_csr(src, indptr, out=None):
    """Return a row for each element of its segment: the last bound is the number of rows."""
    return _gather("gather_csr", src, indptr, out, int(indptr.flatten()[-1]) if out is None and src.numel() else 0)


@_public("segment_coo", "segment_coo")
def segment_coo(src, index, out=None, dim_size=None, reduce="sum"):
    """Return the result of segment_sum_coo, mean, min or max, by the name in `reduce`."""
    reduce = _check_reduce(reduce)
    return _segments(f"segment_{reduce}_coo", src, index, out, reduce, csr=False, dim_size=dim_size)[0]


@_public("gather_coo", "segment_coo")
def gather_coo(src, index, out=None):
    """Return a row for each index."""
    return _gather("gather_coo", src, index, out, index.shape[-1])


def _gather(name: str, src: torch.Tensor, index: torch.Tensor, given, number: int) -> torch.Tensor:
    _check(f"torch_scatter.{name}", src, index)
    dim, shape = index.dim() - 1, src.shape

    def forward(values: torch.Tensor, where: torch.Tensor, into):
        values = values.contiguous()
        size = list(values.size())
        size[dim] = number
        made = _output(values, size, into)
        return made, (where,)

    def backward(saved, gradient: torch.Tensor):
        gradient = gradient.contiguous()
        return torch.empty(shape, dtype=gradient.dtype, device=gradient.device), None, None

    return kernel(forward, backward, src, index, given)


def _check_floats(name: str, src: torch.Tensor) -> None:
    if not torch.is_floating_point(src):
        raise ValueError(f"`{name}` can only be computed over tensors with floating point data types.")


# The functions below name temporaries as the source does, since a named tensor lives until the function ends.


@_composite("scatter_softmax", "softmax")
def scatter_softmax(src, index, dim=-1, dim_size=None):
    """Return the softmax over the elements of each row; the source's named temporaries live until the function ends."""
    _check_floats("scatter_softmax", src)
    index = broadcast(index, src, dim)
    largest = scatter_max(src, index, dim=dim, dim_size=dim_size)[0]
    largest_of_each = largest.gather(dim, index)
    centered = src - largest_of_each
    powers = centered.exp_()
    total = scatter_sum(powers, index, dim, dim_size=dim_size)
    total_of_each = total.gather(dim, index)
    return powers.div(total_of_each)


@_composite("scatter_log_softmax", "softmax")
def scatter_log_softmax(src, index, dim=-1, eps=1e-12, dim_size=None):
    """Return the logarithm of scatter_softmax."""
    _check_floats("scatter_log_softmax", src)
    index = broadcast(index, src, dim)
    largest = scatter_max(src, index, dim=dim, dim_size=dim_size)[0]
    largest_of_each = largest.gather(dim, index)
    centered = src - largest_of_each
    total = scatter_sum(centered.exp(), index, dim, dim_size=dim_size)
    total_of_each = total.add_(eps).log_().gather(dim, index)
    return centered.sub_(total_of_each)


@_composite("scatter_logsumexp", "logsumexp")
def scatter_logsumexp(src, index, dim=-1, out=None, dim_size=None, eps=1e-12):
    """Return the logarithm of the sum of each row's exponentials."""
    _check_floats("scatter_logsumexp", src)
    index = broadcast(index, src, dim)
    size = list(src.size())
    size[dim] = _rows(index, dim_size) if out is None else out.size(dim)
    largest = torch.full(size, float("-inf"), dtype=src.dtype, device=src.device)
    largest = scatter_max(src, index, dim, largest, dim_size=size[dim])[0]
    largest_of_each = largest.gather(dim, index)
    centered = src - largest_of_each
    centered.masked_fill_(torch.isnan(centered), float("-inf"))
    if out is not None:
        out = out.sub_(largest).exp_()
    total = scatter_sum(centered.exp_(), index, dim, out, size[dim])
    return total.add_(eps).log_().add_(largest).nan_to_num_(neginf=0.0)


@_composite("scatter_std", "std")
def scatter_std(src, index, dim=-1, out=None, dim_size=None, unbiased=True):
    """Return standard deviations; allocates counts, means, and squares of each element."""
    dim_size = dim_size if out is None else out.size(dim)
    dim = src.dim() + dim if dim < 0 else dim
    places = index.dim() - 1 if index.dim() <= dim else dim
    ones = torch.ones(index.size(), dtype=src.dtype, device=src.device)
    count = scatter_sum(ones, index, places, dim_size=dim_size)
    index = broadcast(index, src, dim)
    total = scatter_sum(src, index, dim, dim_size=dim_size)
    count = broadcast(count, total, dim).clamp(1)
    mean = total.div(count)
    var = src - mean.gather(dim, index)
    var = var * var
    out = scatter_sum(var, index, dim, out, dim_size)
    count = count.sub(1).clamp_(1) if unbiased else count
    return out.div(count + 1e-6).sqrt()
