"""Placeholders for values that are not known: choices spread evenly, and masks of which only the density is known."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from typing import Any

import torch

_aten = torch.ops.aten

CHOICES = (
    "Choices by values that are not known (topk, argmax, sort, multinomial) are spread evenly. "
    "A chosen token is not one that ends a text: generation goes on to its longest length."
)
# Choices among more than this many, and fewer than there are to choose from, are tokens of a vocabulary: which one it
# is, is not known, so that it is equal to none that the program names. Published mixtures have up to so many experts.
MOST_EXPERTS = 512
# Where choices begin that are fewer than what they are made among. Tokens that end or pad a text are the first or the
# last of a vocabulary, in published tokenizers, so that this part of it has none of them.
_GOLDEN = 0.6180339887


def choices(
    overload: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor], avoided: Collection[int]
) -> tuple[torch.Tensor, range] | None:
    """Return indices for the last of `outputs`, and which of them are tokens; None if `overload` does not choose.

    Each is chosen equally often over all rows, and within one row none twice; none of `avoided` where the rows are few.
    """
    at = _DIM_AT.get(overload.overloadpacket)
    if at is None or (overload.overloadpacket in _TWO_FORMS and len(outputs) != 2):
        return None
    position, default = at
    dim = args[position] if len(args) > position else kwargs.get("dim", default)
    data, made = args[0], outputs[-1]
    is_whole = dim is None or not data.dim()
    dim = 0 if is_whole else dim % data.dim()
    available, rows = max(1, data.numel() if is_whole else data.shape[dim]), made.reshape(-1) if is_whole else made
    count = made.numel()
    last = max(0, available - count)
    first = min(int(_GOLDEN * available), last)
    free = (at for at in chain(range(first, last + 1), range(first)) if not any(at <= i < at + count for i in avoided))
    first = next(free, first)
    tokens = range(first, first + count) if available > max(MOST_EXPERTS, count) else range(0)
    numbers = (torch.arange(count) + first).remainder(available).to(made.dtype)
    if made.dim() != data.dim() or made.shape[dim] == 1:
        return numbers.reshape(made.shape), tokens
    return numbers.reshape(rows.movedim(dim, -1).shape).movedim(-1, dim).reshape(made.shape), tokens


# Operator that chooses -> where its dimension stands (9: nowhere), and which it is otherwise; None is the whole.
_DIM_AT: dict[Any, tuple[int, int | None]] = {
    **dict.fromkeys((_aten.argmax, _aten.argmin), (1, None)),
    **dict.fromkeys((_aten.max, _aten.min, _aten.median, _aten.nanmedian, _aten.cummax, _aten.cummin), (1, -1)),
    **dict.fromkeys((_aten.sort, _aten.argsort, _aten.mode), (1, -1)),
    **dict.fromkeys((_aten.topk, _aten.kthvalue), (2, -1)),
    _aten.multinomial: (9, -1),
}
# These choose only in the overloads that give values and indices.
_TWO_FORMS = frozenset({_aten.max, _aten.min, _aten.median, _aten.nanmedian})


def counted(overload: Any, args: Any, output: torch.Tensor, density: float) -> torch.Tensor | None:
    """Return what an operator makes of the mask `args[0]`, a `density` of it true, evenly; None if it doesn't count."""
    packet, data = overload.overloadpacket, args[0]
    if packet in _COUNTS and not output.is_floating_point():
        total = round(density * data.numel())
        each, rest = divmod(total, max(1, output.numel()))
        return (each + (torch.arange(output.numel()) < rest)).to(output.dtype).reshape(output.shape)
    if packet is _aten._to_copy and density == 1.0 and not output.is_floating_point():
        return torch.ones((), dtype=output.dtype).expand(output.shape)
    if packet is _aten.cumsum and density == 1.0:  # one row stands for all
        shape = data.movedim(args[1], -1).shape if data.dim() else torch.Size([1])
        sums = torch.arange(1, shape[-1] + 1, dtype=output.dtype).expand(shape)
        return sums.movedim(-1, args[1]) if data.dim() else sums.reshape(())
    return None


_COUNTS = frozenset({_aten.sum, _aten.count_nonzero})
# Of zeros and ones, these make zeros and ones of the same density (compared with 0 or 1, as masks are).
KEEP_DENSITY = frozenset({_aten._to_copy, _aten.clone, _aten.ne, _aten.eq, _aten.gt, _aten.ge})


def spread(shape: torch.Size, density: float) -> torch.Tensor:
    """Indices, as `nonzero` gives them, of a `density` of a tensor's elements, spread evenly."""
    total = shape.numel()
    number = round(density * total)
    flat = (torch.arange(number) * total).div(max(1, number), rounding_mode="floor")
    return torch.stack(torch.unravel_index(flat, shape), dim=1) if shape else flat.new_zeros(number, 0)


# Operator that gives all elements one value -> that value.
UNIFORM: dict[Any, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(
        (_aten.zeros, _aten.zeros_like, _aten.new_zeros, _aten.empty, _aten.empty_like, _aten.empty_strided,
         _aten.new_empty, _aten.new_empty_strided, _aten.zero_),
        lambda args, kwargs: 0,
    ),
    **dict.fromkeys((_aten.ones, _aten.ones_like, _aten.new_ones), lambda args, kwargs: 1),
    **dict.fromkeys((_aten.full, _aten.full_like), lambda args, kwargs: args[1] if len(args) > 1 else None),
    **dict.fromkeys((_aten.fill_, _aten.fill), lambda args, kwargs: args[1]),
    _aten.new_full: lambda args, kwargs: args[2],
}  # fmt: skip
# These make what may as well be zeros.
EMPTY = frozenset({_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided})
# Beside the operators on single elements, these make one value of one value.
ANY_ELEMENT = frozenset(
    {_aten.any, _aten.all, _aten.amax, _aten.amin, _aten.index_select, _aten._to_copy, _aten.repeat}
)
# Beside the operators on single elements, those whose work is about one visit of each.
LINEAR = frozenset(
    {
        *(_aten._to_copy, _aten.copy_, _aten.tril, _aten.triu, _aten.tril_, _aten.triu_, _aten.cat, _aten.stack),
        *(_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten.index_select, _aten.gather),
        *(_aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_, _aten.index_fill_, _aten.index_add_),
        *(_aten.index_copy_, _aten.masked_select, _aten.masked_scatter, _aten.masked_scatter_, _aten.nonzero),
        *(_aten.sum, _aten.any, _aten.all, _aten.amax, _aten.amin, _aten.max, _aten.min, _aten.argmax, _aten.argmin),
        *(_aten.count_nonzero, _aten.cumsum, _aten.sort, _aten.topk, _aten.isin, _aten.searchsorted, _aten.bucketize),
        *(_aten.flip, _aten.roll, _aten.repeat, _aten.repeat_interleave, _aten.constant_pad_nd, _aten.equal),
        *(_aten.arange, _aten.linspace, _aten.eye, _aten.randperm, _aten.randint, _aten.tril_indices, _aten.allclose),
        *(_aten.triu_indices, _aten._unique2, _aten.unique_consecutive, _aten.bincount, _aten.diagonal_copy),
        *(_aten._softmax, _aten._log_softmax, _aten.mean, _aten.prod, _aten.cumprod, _aten.logsumexp, _aten.var),
        *(_aten.linalg_vector_norm, _aten.avg_pool2d, _aten.max_pool2d_with_indices, _aten.upsample_nearest2d),
        *(_aten.upsample_bilinear2d, _aten._adaptive_avg_pool2d),
    }
)
# Operators whose last input is a matrix, or several: for each of its rows they visit their output once.
PRODUCTS = frozenset({_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm})
