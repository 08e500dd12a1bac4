"""Sequence parallelism of DeepSpeed's Ulysses (arXiv:2309.14509): each rank has a part of every sequence and, in
attention, after an all-to-all, full sequences for a part of the heads.

Attention itself is the model's own. If there are fewer key and value heads than ranks, these heads are repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


class _Exchange(torch.autograd.Function):
    """(batch, heads, tokens of this rank, width) to (batch, heads of this rank, tokens, width), or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, to_heads: bool) -> torch.Tensor:
        """Return the all-to-all of contiguous parts."""
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange_parts(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient, by the all-to-all in the other direction."""
        return _exchange_parts(gradients[0], ctx.group, not ctx.to_heads), None, None


def _exchange_parts(x: torch.Tensor, group: Any, to_heads: bool) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    batch, heads, tokens, width = x.shape
    if to_heads:
        sent = x.view(batch, ranks, heads // ranks, tokens, width).transpose(0, 1).contiguous()
    else:
        sent = x.view(batch, heads, ranks, tokens // ranks, width).permute(2, 0, 1, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    del sent
    if to_heads:  # a part of the tokens from each
        return received.permute(1, 2, 0, 3, 4).reshape(batch, heads // ranks, tokens * ranks, width)
    return received.transpose(0, 1).reshape(batch, heads * ranks, tokens // ranks, width)


@contextlib.contextmanager
def exchange_heads(group: Any) -> Iterator[None]:
    """Context manager: make every attention of transformers' models exchange heads for tokens before,
    and back after."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions  # noqa: N811

    ranks = dist.get_world_size(group)

    def spread(original: Any) -> Any:
        def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **options: Any) -> Any:
            repeats = -(-ranks // key.shape[1])
            if key.shape[1] * repeats % ranks:
                repeats = query.shape[1] // key.shape[1]
            if repeats > 1:
                key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
            query, key, value = (_Exchange.apply(x, group, True) for x in (query, key, value))
            before = getattr(module, "num_key_value_groups", None)
            if before is not None:
                module.num_key_value_groups = query.shape[1] // key.shape[1]
            try:
                output, weights = original(module, query, key, value, mask, *args, **options)
            finally:
                if before is not None:
                    module.num_key_value_groups = before
            # (batch, tokens, heads of this rank, width), as transformers' attention functions give it
            return _Exchange.apply(output.transpose(1, 2), group, False).transpose(1, 2), weights

        return attention

    names = [name for name in functions.valid_keys() if name != "eager"]
    before = {name: functions._local_mapping.get(name) for name in names}
    for name in names:
        functions[name] = spread(functions[name])
    try:
        yield
    finally:
        for name, original in before.items():
            if original is None:
                functions._local_mapping.pop(name, None)
            else:
                functions._local_mapping[name] = original
