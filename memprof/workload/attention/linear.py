"""Causal linear attention with the feature map elu + 1 (Katharopoulos et al., arXiv 2006.16236), in chunks of tokens.

A query's output is the sum of φ(q)·φ(k) v over all keys up to the query's position, divided by the sum of φ(q)·φ(k).
The keys of earlier chunks are summed into one D x D matrix. It is plain PyTorch; autograd saves these matrices and the
products inside the chunks, so memory is linear in the number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Tokens whose pairs are computed; equal to the usual head width, where products and sums take about equal memory.
CHUNK = 128


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
    """Compute attention as a function of transformers: query (B, H, T, D), key, value (B, K, S, D) to (B, T, H, D)."""
    return linear_attention(query, key, value).transpose(1, 2), None


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention (B, H, T, D) of queries to keys and values (B, K, S, D); earlier keys come before the
    queries' own."""
    tokens, own = query.shape[2], torch.promote_types(query.dtype, torch.float32)
    before = key.shape[2] - tokens
    query, key = functional.elu(query) + 1, functional.elu(key) + 1
    # A value of ones is appended: its sum is the divisor.
    value = functional.pad(value, (0, 1), value=1.0)
    first = torch.einsum("bksd,bkse->bkde", key[:, :, :before], value[:, :, :before]).to(own)
    rest = -tokens % CHUNK
    # Padding queries in the last chunk are ones, so that their divisors are not zero.
    query, key, value = (
        functional.pad(x, (0, 0, 0, rest), value=filling).unflatten(2, (-1, CHUNK))
        for x, filling in ((query, 1.0), (key[:, :, before:], 0.0), (value[:, :, before:], 0.0))
    )
    chunk_sums = torch.einsum("bknsd,bknse->bknde", key, value)
    sums = torch.cat([first.unsqueeze(2), chunk_sums[:, :, :-1].to(own)], 2).cumsum(2).to(query.dtype)
    grouped = query.unflatten(1, (key.shape[1], -1))
    near = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2)).tril()
    summed = torch.matmul(near, value.unsqueeze(2)) + torch.matmul(grouped, sums.unsqueeze(2))
    output = summed[..., :-1] / summed[..., -1:]
    return output.flatten(1, 2).flatten(2, 3)[:, :, :tokens]
