"""Attention of each query to a subset of keys, as custom operators with the results and allocations of fused kernels.

A fused kernel reads queries, keys and values, and writes the output and a float32 logsumexp of each query's scores; the
backward recomputes the scores. The operators compute the same in plain PyTorch, some queries at a time, with
temporaries of `WORKSPACE_BYTES`, which a kernel has in registers and shared memory. Tensors kept from forward to
backward are the kernel's: query, key, value, output, logsumexp and chosen blocks (as in flash-linear-attention,
fla/ops/nsa/parallel.py). On meta tensors, and so on the virtual GPU, each operator is one kernel without workspace.

Shapes: batch B, query heads H, key heads K (H = K x G), queries T, keys S, width D. A query's position is its row plus
`offset`, because after a cache there are fewer queries than keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from memprof.units import MIB
from memprof.workload.quantization import import_quietly

# Size limit of a set of scores, or of gathered keys and values, in plain PyTorch.
WORKSPACE_BYTES = 64 * MIB


class Attend(torch.autograd.Function):
    """Softmax attention of (B, H, T, D) to the keys (B, K, S, D) that a pattern lets each query see.

    Of `blocks`, `stride` and `window`, one says which those are:
        blocks: (B, K, T, n) int32, numbers of blocks of `length` keys; -1: none. Of its own block a query sees the
            keys up to its own.
        stride: key j stands for `length` tokens from j x stride on; it is seen once the last of them is.
        window: so many keys up to the query's own.
    A query that sees nothing gives zeros.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Tensor | None, scale: float, offset: int,
        length: int, stride: int, window: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the output (B, H, T, D) in the query's dtype, and logsumexp (B, H, T)."""
        ctx.pattern = (scale, offset, length, stride, window)
        output, lse = attend(query, key, value, blocks, *ctx.pattern)
        ctx.save_for_backward(query, key, value, blocks, output, lse)
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of query, key and value."""
        query, key, value, blocks, output, lse = ctx.saved_tensors
        found = attend_backward(gradients[0], query, key, value, blocks, output, lse, *ctx.pattern)
        return (*found[:3], *[None] * 6)


@torch.library.custom_op("memprof::attend", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, blocks: Tensor | None, scale: float, offset: int, length: int,
    stride: int, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the forward of `Attend`."""
    output, lse = _make_outputs(query, value)
    shared = key.shape[1]
    for rows, keys, values, seen, _ in _iterate_parts(query, key, value, blocks, offset, length, stride, window):
        scores = _multiply_keys(_group_heads(query[:, :, rows], shared), keys) * scale
        scores = scores.masked_fill(~seen, -math.inf)
        each = scores.logsumexp(-1)
        weights = (scores - each.masked_fill(each == -math.inf, 0).unsqueeze(-1)).exp()
        output[:, :, rows] = _weight_values(weights, values).flatten(1, 2).to(output.dtype)
        lse[:, :, rows] = each.flatten(1, 2)
    return output, lse


@attend.register_fake
def _attend_fake(query: Tensor, key: Tensor, value: Tensor, *pattern: Any) -> tuple[Tensor, Tensor]:
    return _make_outputs(query, value)


@torch.library.custom_op("memprof::attend_backward", mutates_args=())
def attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, blocks: Tensor | None, output: Tensor, lse: Tensor,
    scale: float, offset: int, length: int, stride: int, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, and the kernel's temporary: the sum over D of gradient x output."""
    own = lse.dtype
    delta = (gradient.to(own) * output.to(own)).sum(-1)
    query_gradient = torch.empty_like(query)
    key_gradient, value_gradient = (torch.zeros(x.shape, dtype=own, device=x.device) for x in (key, value))
    shared = key.shape[1]
    for rows, keys, values, seen, places in _iterate_parts(query, key, value, blocks, offset, length, stride, window):
        queries, output_gradients = (_group_heads(x[:, :, rows], shared) for x in (query, gradient))
        each = _group_heads(lse[:, :, rows].unsqueeze(-1), shared)
        scores = (_multiply_keys(queries, keys) * scale).masked_fill(~seen, -math.inf)
        weights = (scores - each.masked_fill(each == -math.inf, 0)).exp()
        inner = _multiply_keys(output_gradients, values) - _group_heads(delta[:, :, rows].unsqueeze(-1), shared)
        score_gradient = weights * inner * scale
        query_gradient[:, :, rows] = _weight_values(score_gradient, keys).flatten(1, 2).to(query.dtype)
        for total, left, right in (
            (key_gradient, score_gradient, queries),
            (value_gradient, weights, output_gradients),
        ):
            if isinstance(places, slice):
                total[:, :, places] += torch.einsum("bkgtl,bkgtd->bkld", left, right.to(own))
            else:
                total.index_put_(places, torch.einsum("bkgtl,bkgtd->bktld", left, right.to(own)), accumulate=True)
    return query_gradient, key_gradient.to(key.dtype), value_gradient.to(value.dtype), delta


@attend_backward.register_fake
def _attend_backward_fake(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, blocks: Tensor | None, output: Tensor, lse: Tensor,
    *pattern: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), torch.empty_like(lse)


@torch.library.custom_op("memprof::choose_blocks", mutates_args=())
def choose_blocks(
    query: Tensor, key: Tensor, lse: Tensor, tokens: int, scale: float, offset: int, length: int, stride: int,
    block: int, count: int,
) -> Tensor:  # fmt: skip
    """Return the `count` blocks of `block` tokens that each query attends to, (B, K, T, count) int32; -1 for missing
    blocks.

    A block's score is the sum of its compressed keys' weights (B, K, S, D; `length` tokens each, one every `stride`) in
    the query's softmax (with logsumexp `lse`), over the heads that share keys; each key counts once for each of its
    strides in the block (equations 9 and 10 of arXiv 2502.11089, with indices from 1). The first block, the query's own
    block and the block before are always chosen.
    """
    shared, device = key.shape[1], query.device
    chosen = _make_chosen_blocks(query, key, tokens, block, count)
    parts, width = block // stride, chosen.shape[-1]
    numbers = torch.arange(-(-tokens // block), device=device)
    for rows, keys, _, seen, _ in _iterate_parts(query, key, key, None, offset, length, stride, 0):
        scores = (_multiply_keys(_group_heads(query[:, :, rows], shared), keys) * scale).masked_fill(~seen, -math.inf)
        each = _group_heads(lse[:, :, rows].unsqueeze(-1), shared)
        weights = (scores - each.masked_fill(each == -math.inf, 0)).exp().sum(2)
        padded = torch.nn.functional.pad(weights, (length // stride - 1, len(numbers) * parts - weights.shape[-1]))
        overlapping = padded.unfold(-1, length // stride, 1).sum(-1)
        summed = overlapping.unflatten(-1, (len(numbers), parts)).sum(-1)
        own = (torch.arange(rows.start, rows.stop, device=device) + offset).div(block, rounding_mode="floor")[:, None]
        fixed = (numbers == 0) | (numbers == own) | (numbers == own - 1)
        summed = summed.masked_fill(fixed, math.inf).masked_fill(numbers > own, -math.inf)
        best = summed.topk(width, dim=-1)
        chosen[:, :, rows] = best.indices.masked_fill(best.values == -math.inf, -1).to(torch.int32)
    return chosen


@choose_blocks.register_fake
def _choose_blocks_fake(query: Tensor, key: Tensor, lse: Tensor, tokens: int, *pattern: Any) -> Tensor:
    return _make_chosen_blocks(query, key, tokens, *pattern[-2:])


def _make_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return an empty output, with the memory layout of (B, T, H, D) as models use it, and an empty logsumexp."""
    batch, heads, tokens, _ = query.shape
    own = torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty(batch, heads, tokens, dtype=own)


def _make_chosen_blocks(query: Tensor, key: Tensor, tokens: int, block: int, count: int) -> Tensor:
    shape = (*key.shape[:2], query.shape[2], min(count, -(-tokens // block)))
    return query.new_empty(shape, dtype=torch.int32)


def _group_heads(x: Tensor, shared: int) -> Tensor:
    """Return (B, H, ...) as (B, K, G, ...)."""
    return x.unflatten(1, (shared, -1))


def _multiply_keys(left: Tensor, right: Tensor) -> Tensor:
    """Return products of (B, K, G, t, D) with keys (B, K, L, D), or each query's keys (B, K, t, L, D), as (B, K, G, t,
    L)."""
    own = torch.promote_types(left.dtype, torch.float32)
    form = "bkgtd,bkld->bkgtl" if right.dim() == 4 else "bkgtd,bktld->bkgtl"
    return torch.einsum(form, left.to(own), right.to(own))


def _weight_values(weights: Tensor, values: Tensor) -> Tensor:
    form = "bkgtl,bkld->bkgtd" if values.dim() == 4 else "bkgtl,bktld->bkgtd"
    return torch.einsum(form, weights, values.to(weights.dtype))


def _iterate_parts(
    query: Tensor, key: Tensor, value: Tensor, blocks: Tensor | None, offset: int, length: int, stride: int, window: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Any]]:
    """Yield rows of queries, their keys and values, the visibility mask (B or 1, K or 1, 1, t, L), and
    key positions."""
    (batch, heads, tokens, width), (shared, num_keys) = query.shape, key.shape[1:3]
    each = 4 * batch * heads * (window or num_keys)
    if blocks is not None:
        each = 4 * batch * shared * blocks.shape[-1] * length * (2 * width + heads // shared)
    step = max(1, min(tokens, WORKSPACE_BYTES // max(1, each)))
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        at = torch.arange(rows.start, rows.stop, device=query.device) + offset
        if blocks is not None:
            chosen = blocks[:, :, rows].long()
            place = (chosen.unsqueeze(-1) * length + torch.arange(length, device=query.device)).flatten(-2)
            seen = (chosen >= 0).repeat_interleave(length, -1) & (place <= at[:, None]) & (place < num_keys)
            place = place.clamp(0, num_keys - 1)
            which = torch.arange(batch, device=query.device)[:, None, None, None]
            places = (which, torch.arange(shared, device=query.device)[:, None, None], place)
            yield rows, key[places], value[places], seen.unsqueeze(2), places
        elif window:
            part = slice(max(0, rows.start + offset - window + 1), min(num_keys, rows.stop + offset))
            place = torch.arange(part.start, part.stop, device=query.device)
            seen = (place <= at[:, None]) & (place > at[:, None] - window)
            yield rows, key[:, :, part], value[:, :, part], seen[None, None, None], part
        else:
            last = torch.arange(num_keys, device=query.device) * stride + length - 1
            yield rows, key, value, (last <= at[:, None])[None, None, None], slice(0, num_keys)


def _count_forward_flops(
    query: Any, key: Any, value: Any, blocks: Any, scale: float, offset: int, length: int, stride: int, window: int,
    **kwargs: Any,
) -> int:  # fmt: skip
    """Return the FLOPs of a forward's two products, by shapes: chosen keys, a window, or half of the
    compressed keys."""
    (batch, heads, tokens, width), keys = query, key[2]
    seen = blocks[-1] * length if blocks is not None else min(window, keys) if window else keys / 2
    return int(2 * batch * heads * tokens * seen * (width + value[-1]))


def _count_backward_flops(
    gradient: Any, query: Any, key: Any, value: Any, blocks: Any, output: Any, lse: Any, *pattern: Any, **kwargs: Any
) -> int:
    """Return the FLOPs of a backward's five products: scores, and four for the gradients."""
    return _count_forward_flops(query, key, value, blocks, *pattern) * 5 // 2


def _count_choice_flops(query: Any, key: Any, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of the scores of compressed keys."""
    return _count_forward_flops(query, key, key, None, 0, 0, 0, 0, 0) // 2


_counter = import_quietly("torch.utils.flop_counter")
for _operator, _formula in (
    (torch.ops.memprof.attend, _count_forward_flops),
    (torch.ops.memprof.attend_backward, _count_backward_flops),
    (torch.ops.memprof.choose_blocks, _count_choice_flops),
):
    _counter.register_flop_formula(_operator)(_formula)
