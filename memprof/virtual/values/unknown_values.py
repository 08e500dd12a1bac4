"""Results that are assumed for operators on unknown values: random choices are spread evenly, masks have a count."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from typing import Any

import torch

_aten = torch.ops.aten

CHOICES_ASSUMPTION = (
    "Choices by values that are not known (topk, argmax, sort, multinomial) are spread evenly. "
    "A chosen token is not one that ends a text: generation goes on to its longest length."
)
# Number of experts of the largest published mixture. A choice from more alternatives is a choice of tokens from a
# vocabulary, unless all alternatives are chosen.
MAX_EXPERTS = 512
# First placeholder as a fraction of the vocabulary: far from both ends, where published tokenizers have the tokens that
# end or pad a text.
_FIRST_PLACEHOLDER_FRACTION = 0.6180339887


def spread_choices(
    overload: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor], avoided_tokens: Collection[int]
) -> tuple[torch.Tensor, range] | None:
    """Return indices that `overload` is assumed to choose (shaped as `outputs[-1]`), and the range of chosen tokens.

    None if `overload` does not choose indices. Each index is chosen equally often over all rows, and not twice in a
    row. Tokens in `avoided_tokens` are not chosen if possible.
    """
    dim_argument = _DIM_ARGUMENTS.get(overload.overloadpacket)
    if dim_argument is None or (overload.overloadpacket in _CHOOSING_WITH_TWO_RESULTS and len(outputs) != 2):
        return None
    position, default = dim_argument
    dim = args[position] if len(args) > position else kwargs.get("dim", default)
    data, output = args[0], outputs[-1]
    is_flat = dim is None or not data.dim()
    dim = 0 if is_flat else dim % data.dim()
    size, rows = max(1, data.numel() if is_flat else data.shape[dim]), output.reshape(-1) if is_flat else output
    num_chosen = output.numel()
    last_start = max(0, size - num_chosen)
    start = min(int(_FIRST_PLACEHOLDER_FRACTION * size), last_start)
    starts = chain(range(start, last_start + 1), range(start))
    start = next((s for s in starts if not any(s <= token < s + num_chosen for token in avoided_tokens)), start)
    tokens = range(start, start + num_chosen) if size > max(MAX_EXPERTS, num_chosen) else range(0)
    indices = (torch.arange(num_chosen) + start).remainder(size).to(output.dtype)
    if not output.dim() or output.dim() != data.dim() or output.shape[dim] == 1:
        return indices.reshape(output.shape), tokens
    return indices.reshape(rows.movedim(dim, -1).shape).movedim(-1, dim).reshape(output.shape), tokens


# Operator that chooses -> position of its argument `dim` (9: no such argument), and the default (None: all dimensions).
_DIM_ARGUMENTS: dict[Any, tuple[int, int | None]] = {
    **dict.fromkeys((_aten.argmax, _aten.argmin), (1, None)),
    **dict.fromkeys((_aten.max, _aten.min, _aten.median, _aten.nanmedian, _aten.cummax, _aten.cummin), (1, -1)),
    **dict.fromkeys((_aten.sort, _aten.argsort, _aten.mode), (1, -1)),
    **dict.fromkeys((_aten.topk, _aten.kthvalue), (2, -1)),
    _aten.multinomial: (9, -1),
}
# Operators that choose only in the overloads with two results, values and indices.
_CHOOSING_WITH_TWO_RESULTS = frozenset({_aten.max, _aten.min, _aten.median, _aten.nanmedian})


def count_mask(overload: Any, args: Any, output: torch.Tensor, density: float) -> torch.Tensor | None:
    """Return the count of true elements of the mask `args[0]`, by its `density`; None if `overload` does not count."""
    packet, data = overload.overloadpacket, args[0]
    if packet in _COUNTING and not output.is_floating_point():
        total = round(density * data.numel())
        quotient, remainder = divmod(total, max(1, output.numel()))
        return (quotient + (torch.arange(output.numel()) < remainder)).to(output.dtype).reshape(output.shape)
    if packet is _aten._to_copy and density == 1.0 and not output.is_floating_point():
        return torch.ones((), dtype=output.dtype).expand(output.shape)
    if packet is _aten.cumsum and density == 1.0:  # all rows are equal
        shape = data.movedim(args[1], -1).shape if data.dim() else torch.Size([1])
        sums = torch.arange(1, shape[-1] + 1, dtype=output.dtype).expand(shape)
        return sums.movedim(-1, args[1]) if data.dim() else sums.reshape(())
    return None


_COUNTING = frozenset({_aten.sum, _aten.count_nonzero})
# Operators that keep the density of a tensor of zeros and ones (comparisons are with 0 or 1, as for masks).
DENSITY_PRESERVING = frozenset({_aten._to_copy, _aten.clone, _aten.ne, _aten.eq, _aten.gt, _aten.ge})


def spread_indices(shape: torch.Size, density: float) -> torch.Tensor:
    """Return evenly spread indices of a fraction `density` of the elements, int64 [num_indices, len(shape)]."""
    total = shape.numel()
    num_indices = round(density * total)
    flat = (torch.arange(num_indices) * total).div(max(1, num_indices), rounding_mode="floor")
    return torch.stack(torch.unravel_index(flat, shape), dim=1) if shape else flat.new_zeros(num_indices, 0)


# Operator that sets all elements to one value -> function of (args, kwargs) that returns the value.
UNIFORM_FILLS: dict[Any, Callable[[Any, Any], Any]] = {
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
# Operators whose results have undefined contents, which are taken as zeros.
UNINITIALIZED = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
)
# Operators, besides pointwise ones, whose result has equal elements if the input has.
UNIFORM_PRESERVING = frozenset(
    {_aten.any, _aten.all, _aten.amax, _aten.amin, _aten.index_select, _aten._to_copy, _aten.repeat}
)
# Operators, besides pointwise ones, that visit each element about once.
LINEAR_COST = frozenset(
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
        # Pointwise, and not tagged as such by torch.
        *(
            _aten.zero_,
            _aten.fill_,
            _aten.masked_fill_,
            _aten.eq_,
            _aten.ne_,
            _aten.lt_,
            _aten.le_,
            _aten.gt_,
            _aten.ge_,
        ),
        *(_aten.abs_, _aten.cumsum_, _aten.cumprod_, _aten.floor_divide, _aten.floor_divide_),
    }
)
# Matrix products.
MATRIX_PRODUCTS = frozenset({_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm})
