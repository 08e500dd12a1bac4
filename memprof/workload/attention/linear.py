"""Causal linear attention with the feature map elu + 1 (Katharopoulos et al., arXiv 2006.16236), some tokens at a time.

A query's output is the sum of φ(q)·φ(k) v over the keys up to its own, divided by the sum of φ(q)·φ(k). Keys of earlier
chunks are summed up as one D x D matrix, so that no query meets each key. Plain PyTorch under autograd, which keeps
those matrices and the products inside the chunks: all of it grows with the number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Tokens that meet each other one by one; as wide as the usual head, where products and sums take about the same.
CHUNK = 128


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
    """Attend as a function of transformers: query (B, H, T, D), key and value (B, K, S, D), to (B, T, H, D)."""
    return linear_attention(query, key, value).transpose(1, 2), None


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return (B, H, T, D) of keys and values (B, K, S, D), of which those before the first query come first."""
    tokens, own = query.shape[2], torch.promote_types(query.dtype, torch.float32)
    before = key.shape[2] - tokens
    query, key = functional.elu(query) + 1, functional.elu(key) + 1
    # A value of ones beside the others: its sum is the divisor.
    value = functional.pad(value, (0, 1), value=1.0)
    first = torch.einsum("bksd,bkse->bkde", key[:, :, :before], value[:, :, :before]).to(own)
    rest = -tokens % CHUNK
    # Queries that fill the last chunk up are ones, so that no divisor of theirs is zero.
    query, key, value = (
        functional.pad(x, (0, 0, 0, rest), value=filling).unflatten(2, (-1, CHUNK))
        for x, filling in ((query, 1.0), (key[:, :, before:], 0.0), (value[:, :, before:], 0.0))
    )
    of_chunks = torch.einsum("bknsd,bknse->bknde", key, value)
    sums = torch.cat([first.unsqueeze(2), of_chunks[:, :, :-1].to(own)], 2).cumsum(2).to(query.dtype)
    grouped = query.unflatten(1, (key.shape[1], -1))
    near = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2)).tril()
    summed = torch.matmul(near, value.unsqueeze(2)) + torch.matmul(grouped, sums.unsqueeze(2))
    output = summed[..., :-1] / summed[..., -1:]
    return output.flatten(1, 2).flatten(2, 3)[:, :, :tokens]
