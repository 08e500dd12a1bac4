"""Sequence parallelism as in DeepSpeed Ulysses (arXiv:2309.14509): each rank has a part of every sequence, but in
attention, between two all-to-alls, the full sequence and a part of the heads.

The attention itself is the model's own. Key-value heads are repeated if there are fewer of them than ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


class _Exchange(torch.autograd.Function):
    """All-to-all between (batch, heads, this rank's tokens, width) and (batch, this rank's heads, tokens, width)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, to_heads: bool) -> torch.Tensor:
        """Return `x` exchanged among the ranks of `group`; `to_heads` selects the direction."""
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange_parts(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient of `x`, exchanged in the other direction."""
        return _exchange_parts(gradients[0], ctx.group, not ctx.to_heads), None, None


def _exchange_parts(x: torch.Tensor, group: Any, to_heads: bool) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    batch, heads, tokens, width = x.shape
    if to_heads:
        send_buffer = x.view(batch, ranks, heads // ranks, tokens, width).transpose(0, 1).contiguous()
    else:
        send_buffer = x.view(batch, heads, ranks, tokens // ranks, width).permute(2, 0, 1, 3, 4).contiguous()
    receive_buffer = torch.empty_like(send_buffer)
    dist.all_to_all_single(receive_buffer, send_buffer, group=group)
    del send_buffer
    if to_heads:  # a part of the tokens from each
        return receive_buffer.permute(1, 2, 0, 3, 4).reshape(batch, heads // ranks, tokens * ranks, width)
    return receive_buffer.transpose(0, 1).reshape(batch, heads * ranks, tokens // ranks, width)


@contextlib.contextmanager
def exchange_heads(group: Any) -> Iterator[None]:
    """Context manager: make attention functions of transformers run on full sequences with a part of the heads, by
    all-to-alls over `group` before and after."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attention_functions  # noqa: N811

    ranks = dist.get_world_size(group)

    def wrap(original: Any) -> Any:
        def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **options: Any) -> Any:
            repeats = -(-ranks // key.shape[1])
            if key.shape[1] * repeats % ranks:
                repeats = query.shape[1] // key.shape[1]
            if repeats > 1:
                key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
            query, key, value = (_Exchange.apply(x, group, True) for x in (query, key, value))
            previous = getattr(module, "num_key_value_groups", None)
            if previous is not None:
                module.num_key_value_groups = query.shape[1] // key.shape[1]
            try:
                output, weights = original(module, query, key, value, mask, *args, **options)
            finally:
                if previous is not None:
                    module.num_key_value_groups = previous
            # (batch, tokens, heads of this rank, width), as transformers' attention functions give it
            return _Exchange.apply(output.transpose(1, 2), group, False).transpose(1, 2), weights

        return attention

    names = [name for name in attention_functions.valid_keys() if name != "eager"]
    previous = {name: attention_functions._local_mapping.get(name) for name in names}
    for name in names:
        attention_functions[name] = wrap(attention_functions[name])
    try:
        yield
    finally:
        for name, original in previous.items():
            if original is None:
                attention_functions._local_mapping.pop(name, None)
            else:
                attention_functions._local_mapping[name] = original
