"""Attention of each query to a subset of keys, as custom operators with the results and allocations of fused kernels.

A fused kernel reads queries, keys and values, and writes the output and a float32 logsumexp of each query's scores; the
backward recomputes the scores. The operators compute the same in plain PyTorch, some queries at a time, with
temporaries of up to `WORKSPACE_BYTES`, where a kernel has registers and shared memory. Tensors saved for the backward
are the kernel's: query, key, value, output, logsumexp and chosen blocks (as in flash-linear-attention,
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
    """Softmax attention of queries (B, H, T, D) to a subset of the keys (B, K, S, D).

    One of `blocks`, `stride` and `window` defines the keys that a query attends to:
        blocks: (B, K, T, n) int32, indices of blocks of `length` keys each; -1 means no block. In the query's own
            block, later keys are masked.
        stride: key j stands for `length` tokens from j x stride on, and is visible to queries at or after the last.
        window: the last `window` keys up to the query's position.
    The output of a query without visible keys is zero.
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
        results = attend_backward(gradients[0], query, key, value, blocks, output, lse, *ctx.pattern)
        return (*results[:3], *[None] * 6)


@torch.library.custom_op("memprof::attend", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, blocks: Tensor | None, scale: float, offset: int, length: int,
    stride: int, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return attention output (B, H, T, D) and logsumexp (B, H, T); `Attend` documents the parameters."""
    output, lse = _make_outputs(query, value)
    kv_heads = key.shape[1]
    for rows, keys, values, mask, _ in _iterate_rows(query, key, value, blocks, offset, length, stride, window):
        scores = _multiply_keys(_group_heads(query[:, :, rows], kv_heads), keys) * scale
        scores = scores.masked_fill(~mask, -math.inf)
        row_lse = scores.logsumexp(-1)
        weights = (scores - row_lse.masked_fill(row_lse == -math.inf, 0).unsqueeze(-1)).exp()
        output[:, :, rows] = _weight_values(weights, values).flatten(1, 2).to(output.dtype)
        lse[:, :, rows] = row_lse.flatten(1, 2)
    return output, lse


@attend.register_fake
def _attend_fake(query: Tensor, key: Tensor, value: Tensor, *pattern: Any) -> tuple[Tensor, Tensor]:
    return _make_outputs(query, value)


@torch.library.custom_op("memprof::attend_backward", mutates_args=())
def attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, blocks: Tensor | None, output: Tensor, lse: Tensor,
    scale: float, offset: int, length: int, stride: int, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, and delta (B, H, T), the sum over D of gradient x output."""
    dtype = lse.dtype
    delta = (gradient.to(dtype) * output.to(dtype)).sum(-1)
    query_gradient = torch.empty_like(query)
    key_gradient, value_gradient = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (key, value))
    kv_heads = key.shape[1]
    for rows, keys, values, mask, index in _iterate_rows(query, key, value, blocks, offset, length, stride, window):
        queries, output_gradients = (_group_heads(x[:, :, rows], kv_heads) for x in (query, gradient))
        row_lse = _group_heads(lse[:, :, rows].unsqueeze(-1), kv_heads)
        scores = (_multiply_keys(queries, keys) * scale).masked_fill(~mask, -math.inf)
        weights = (scores - row_lse.masked_fill(row_lse == -math.inf, 0)).exp()
        diff = _multiply_keys(output_gradients, values) - _group_heads(delta[:, :, rows].unsqueeze(-1), kv_heads)
        score_gradient = weights * diff * scale
        query_gradient[:, :, rows] = _weight_values(score_gradient, keys).flatten(1, 2).to(query.dtype)
        for total, left, right in (
            (key_gradient, score_gradient, queries),
            (value_gradient, weights, output_gradients),
        ):
            if isinstance(index, slice):
                total[:, :, index] += torch.einsum("bkgtl,bkgtd->bkld", left, right.to(dtype))
            else:
                total.index_put_(index, torch.einsum("bkgtl,bkgtd->bktld", left, right.to(dtype)), accumulate=True)
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
    """Return the indices of the `count` blocks of `block` tokens that each query attends to, (B, K, T, count) int32.

    A block's score is the sum of the softmax weights (with logsumexp `lse`) of its compressed keys, over the heads that
    share keys. `key` (B, K, S, D) has a compressed key for `length` tokens at every `stride`; it counts once for each
    of its strides in the block (equations 9 and 10 of arXiv 2502.11089, with indices from 1). The first block, the
    query's own and the one before are always chosen. Index -1 means that there are fewer blocks.
    """
    kv_heads, device = key.shape[1], query.device
    chosen = _make_chosen_blocks(query, key, tokens, block, count)
    num_strides, num_chosen = block // stride, chosen.shape[-1]
    indices = torch.arange(-(-tokens // block), device=device)
    for rows, keys, _, mask, _ in _iterate_rows(query, key, key, None, offset, length, stride, 0):
        scores = (_multiply_keys(_group_heads(query[:, :, rows], kv_heads), keys) * scale).masked_fill(~mask, -math.inf)
        row_lse = _group_heads(lse[:, :, rows].unsqueeze(-1), kv_heads)
        weights = (scores - row_lse.masked_fill(row_lse == -math.inf, 0)).exp().sum(2)
        padded = torch.nn.functional.pad(
            weights, (length // stride - 1, len(indices) * num_strides - weights.shape[-1])
        )
        overlapping = padded.unfold(-1, length // stride, 1).sum(-1)
        block_scores = overlapping.unflatten(-1, (len(indices), num_strides)).sum(-1)
        own_block = (torch.arange(rows.start, rows.stop, device=device) + offset).div(block, rounding_mode="floor")[
            :, None
        ]
        always_chosen = (indices == 0) | (indices == own_block) | (indices == own_block - 1)
        block_scores = block_scores.masked_fill(always_chosen, math.inf).masked_fill(indices > own_block, -math.inf)
        top = block_scores.topk(num_chosen, dim=-1)
        chosen[:, :, rows] = top.indices.masked_fill(top.values == -math.inf, -1).to(torch.int32)
    return chosen


@choose_blocks.register_fake
def _choose_blocks_fake(query: Tensor, key: Tensor, lse: Tensor, tokens: int, *pattern: Any) -> Tensor:
    return _make_chosen_blocks(query, key, tokens, *pattern[-2:])


def _make_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized tensors for the output (B, H, T, D), laid out in memory as (B, T, H, D), and logsumexp."""
    batch, heads, tokens, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty(batch, heads, tokens, dtype=dtype)


def _make_chosen_blocks(query: Tensor, key: Tensor, tokens: int, block: int, count: int) -> Tensor:
    shape = (*key.shape[:2], query.shape[2], min(count, -(-tokens // block)))
    return query.new_empty(shape, dtype=torch.int32)


def _group_heads(x: Tensor, kv_heads: int) -> Tensor:
    """Return `x` (B, H, ...) viewed as (B, K, G, ...): query heads grouped by the key-value head that they share."""
    return x.unflatten(1, (kv_heads, -1))


def _multiply_keys(left: Tensor, right: Tensor) -> Tensor:
    """Return dot products (B, K, G, t, L) of `left` (B, K, G, t, D) with keys `right`: (B, K, L, D), or one set of keys
    for each query, (B, K, t, L, D)."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    equation = "bkgtd,bkld->bkgtl" if right.dim() == 4 else "bkgtd,bktld->bkgtl"
    return torch.einsum(equation, left.to(dtype), right.to(dtype))


def _weight_values(weights: Tensor, values: Tensor) -> Tensor:
    equation = "bkgtl,bkld->bkgtd" if values.dim() == 4 else "bkgtl,bktld->bkgtd"
    return torch.einsum(equation, weights, values.to(weights.dtype))


def _iterate_rows(
    query: Tensor, key: Tensor, value: Tensor, blocks: Tensor | None, offset: int, length: int, stride: int, window: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Any]]:
    """Yield blocks of queries: the slice of query rows, their keys and values, the mask of visible keys (batch or 1, KV
    heads or 1, 1, query rows, keys), and the index of these keys in `key`."""
    (batch, heads, tokens, width), (kv_heads, num_keys) = query.shape, key.shape[1:3]
    bytes_per_query = 4 * batch * heads * (window or num_keys)
    if blocks is not None:
        bytes_per_query = 4 * batch * kv_heads * blocks.shape[-1] * length * (2 * width + heads // kv_heads)
    step = max(1, min(tokens, WORKSPACE_BYTES // max(1, bytes_per_query)))
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        queries = torch.arange(rows.start, rows.stop, device=query.device) + offset
        if blocks is not None:
            chosen = blocks[:, :, rows].long()
            keys = (chosen.unsqueeze(-1) * length + torch.arange(length, device=query.device)).flatten(-2)
            mask = (chosen >= 0).repeat_interleave(length, -1) & (keys <= queries[:, None]) & (keys < num_keys)
            keys = keys.clamp(0, num_keys - 1)
            batch_index = torch.arange(batch, device=query.device)[:, None, None, None]
            index = (batch_index, torch.arange(kv_heads, device=query.device)[:, None, None], keys)
            yield rows, key[index], value[index], mask.unsqueeze(2), index
        elif window:
            key_range = slice(max(0, rows.start + offset - window + 1), min(num_keys, rows.stop + offset))
            keys = torch.arange(key_range.start, key_range.stop, device=query.device)
            mask = (keys <= queries[:, None]) & (keys > queries[:, None] - window)
            yield rows, key[:, :, key_range], value[:, :, key_range], mask[None, None, None], key_range
        else:
            last_tokens = torch.arange(num_keys, device=query.device) * stride + length - 1
            yield rows, key, value, (last_tokens <= queries[:, None])[None, None, None], slice(0, num_keys)


def _count_forward_flops(
    query: Any, key: Any, value: Any, blocks: Any, scale: float, offset: int, length: int, stride: int, window: int,
    **kwargs: Any,
) -> int:  # fmt: skip
    """Return the FLOPs of the forward's two matrix products; tensor parameters are shapes (torch's flop counter)."""
    (batch, heads, tokens, width), num_keys = query, key[2]
    num_visible = blocks[-1] * length if blocks is not None else min(window, num_keys) if window else num_keys / 2
    return int(2 * batch * heads * tokens * num_visible * (width + value[-1]))


def _count_backward_flops(
    gradient: Any, query: Any, key: Any, value: Any, blocks: Any, output: Any, lse: Any, *pattern: Any, **kwargs: Any
) -> int:
    """Return the FLOPs of the backward's five matrix products: one for the scores, four for the gradients."""
    return _count_forward_flops(query, key, value, blocks, *pattern) * 5 // 2


def _count_choice_flops(query: Any, key: Any, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of the scores of all queries and compressed keys; `query` and `key` are shapes."""
    return _count_forward_flops(query, key, key, None, 0, 0, 0, 0, 0) // 2


_flop_counter = import_quietly("torch.utils.flop_counter")
for _operator, _count_flops in (
    (torch.ops.memprof.attend, _count_forward_flops),
    (torch.ops.memprof.attend_backward, _count_backward_flops),
    (torch.ops.memprof.choose_blocks, _count_choice_flops),
):
    _flop_counter.register_flop_formula(_operator)(_count_flops)
