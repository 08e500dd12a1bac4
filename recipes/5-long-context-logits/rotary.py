"""The report's second bug in a small real model: positions made in host memory, frequencies on the GPU."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import memprof
from memprof.findings import Finding

CACHED = 64
"""Tokens whose rotary embedding is made once, with the model."""


class Rotary(nn.Module):
    """Rotary embedding as the report has it: cached for `CACHED` tokens, computed anew for longer sequences."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10_000 ** -(torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("cached", self.angles(CACHED))

    def angles(self, tokens: int) -> torch.Tensor:
        """Angles [tokens, head_dim / 2]."""
        t = torch.arange(tokens, dtype=self.inv_freq.dtype)
        return torch.outer(t, self.inv_freq)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [batch, heads, tokens, head_dim], turned by position."""
        tokens = x.shape[-2]
        angles = self.cached[:tokens] if tokens <= CACHED else self.angles(tokens)
        one, other = x.chunk(2, dim=-1)
        return torch.cat((one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), dim=-1)


class PlacedRotary(Rotary):
    """The report's fix: positions where the frequencies are."""

    def angles(self, tokens: int) -> torch.Tensor:
        """Angles [tokens, head_dim / 2]."""
        t = torch.arange(tokens, dtype=self.inv_freq.dtype, device=self.inv_freq.device)
        return torch.outer(t, self.inv_freq)


class Decoder(nn.Module):
    """Attention layers with rotary positions, and a head."""

    def __init__(self, rotary: type[Rotary] = Rotary, layers: int = 2, heads: int = 4, head_dim: int = 16) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads = heads
        self.embed = nn.Embedding(256, width)
        self.rotary = rotary(head_dim)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(width, 3 * width), nn.Linear(width, width)]) for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [batch, tokens, 256]."""
        x = self.embed(ids)
        for qkv, out in self.layers:
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv(x).chunk(3, dim=-1))
            attended = scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
            x = x + out(attended.transpose(1, 2).flatten(2))
        return self.head(x)


def before() -> Decoder:
    """The model with the bug."""
    return Decoder()


def after() -> Decoder:
    """The model without it."""
    return Decoder(PlacedRotary)


def mismatches(model: Decoder, tokens: int) -> list[Finding]:
    """What a step of `tokens` tokens on the virtual GPU finds about devices."""
    with memprof.virtual_gpu("h100-80gb", alloc_conf="") as gpu:
        model = model.to("cuda")
        model(torch.zeros(1, tokens, dtype=torch.int64, device="cuda")).sum().backward()
    return [finding for finding in gpu.report().findings if finding.id == "device-mismatch"]


def same_numbers(tokens: int) -> bool:
    """Whether both models give the same logits on this CPU, where the bug does not show."""
    one, other = before(), after()
    other.load_state_dict(one.state_dict())
    ids = torch.arange(tokens).remainder(256)[None]
    with torch.no_grad():
        return torch.equal(one(ids), other(ids))
