"""Causal linear attention with the feature map elu + 1 (Katharopoulos et al., arXiv 2006.16236), in chunks of tokens.

A query's output is the sum of φ(q)·φ(k) v over the keys up to its position, divided by the sum of φ(q)·φ(k). Earlier
chunks are summed into one D x D matrix, which replaces their keys. Plain PyTorch under autograd, which saves these
matrices and the products inside the chunks: memory is linear in the number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Tokens of a chunk; equal to the usual head width, at which products and sums take about equal memory.
CHUNK = 128


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
    """Return attention output (B, T, H, D) and None, for transformers; query (B, H, T, D), key, value (B, K, S, D)."""
    return linear_attention(query, key, value).transpose(1, 2), None


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal linear attention (B, H, T, D) to keys and values (B, K, S, D); with S > T, the first S - T keys are
    of earlier tokens."""
    tokens, sum_dtype = query.shape[2], torch.promote_types(query.dtype, torch.float32)
    num_earlier = key.shape[2] - tokens
    query, key = functional.elu(query) + 1, functional.elu(key) + 1
    # A value of ones is appended: its sum is the divisor.
    value = functional.pad(value, (0, 1), value=1.0)
    earlier_sum = torch.einsum("bksd,bkse->bkde", key[:, :, :num_earlier], value[:, :, :num_earlier]).to(sum_dtype)
    padding = -tokens % CHUNK
    # Padding queries in the last chunk are ones, so that their divisors are not zero.
    query, key, value = (
        functional.pad(x, (0, 0, 0, padding), value=fill_value).unflatten(2, (-1, CHUNK))
        for x, fill_value in ((query, 1.0), (key[:, :, num_earlier:], 0.0), (value[:, :, num_earlier:], 0.0))
    )
    chunk_sums = torch.einsum("bknsd,bknse->bknde", key, value)
    sums = torch.cat([earlier_sum.unsqueeze(2), chunk_sums[:, :, :-1].to(sum_dtype)], 2).cumsum(2).to(query.dtype)
    grouped = query.unflatten(1, (key.shape[1], -1))
    chunk_scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2)).tril()
    weighted = torch.matmul(chunk_scores, value.unsqueeze(2)) + torch.matmul(grouped, sums.unsqueeze(2))
    output = weighted[..., :-1] / weighted[..., -1:]
    return output.flatten(1, 2).flatten(2, 3)[:, :, :tokens]
