"""torchtune's single-device recipes for Llama 3.2 3B, as far as they touch the card.

Written after the recipes, modules and configurations of github.com/meta-pytorch/torchtune at 1814feb1 (18 November
2024), the commit that published the table of memory per technique. What decides memory there: parameters and AdamW's
state in bfloat16, AdamW fused (configs/llama3_2/3B_full.yaml), embedding and head tied, RMS norm by hand through
float32, rotary cache in float32 for 131,072 positions, keys and values expanded to all heads, logits cast to float32
by the model, and the logits let go before the backward.

Two things are stood in for. Packed rows use flex attention, compiled: its output has the strides of the query and it
keeps query, key, value, output and a float32 log-sum-exp (torch/_inductor/kernel/flex_attention.py), as flash
attention does, which is used here. And `compiled_cross_entropy` is what one fused kernel of the compiled loss keeps and
makes. Compiled layers are not stood in for: their activations are eager ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 3072, 8192, 28, 24, 8, 128
VOCABULARY, POSITIONS = 128_256, 131_072
CHUNKS = 8
"""Of the chunked cross-entropy, along the sequence."""
IGNORED = -100


@dataclass(frozen=True)
class Recipe:
    """One row of the table: the techniques that are on."""

    length: int = 4096
    packed: bool = True
    chunked_loss: bool = False
    checkpointing: bool = False
    optimizer_in_backward: bool = False
    offloading: bool = False
    lora_rank: int | None = None
    batch_size: int = 2
    steps: int = 2


class RootMeanSquareNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(states)
        return normed * self.scale


class Rotation(nn.Module):
    """Neighbouring channels are rotated as pairs, in float32."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(POSITIONS), torch.ones(HEAD_SIZE // 2)).float()
        self.register_buffer("cache", torch.stack([angles.cos(), angles.sin()], -1), persistent=False)

    def forward(self, states: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        cache = self.cache[: states.size(1)] if positions is None else self.cache[positions]
        pairs = states.float().reshape(*states.shape[:-1], -1, 2)
        cache = cache.view(-1, pairs.size(1), 1, pairs.size(3), 2)
        turned = [
            pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1],
            pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1],
        ]
        return torch.stack(turned, -1).flatten(3).type_as(states)


class LowRankLinear(nn.Module):
    """A frozen layer and, beside it, two trained ones in the model's own dtype."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, self.weight) + 2.0 * self.up(self.down(states))


def linear(inputs: int, outputs: int, rank: int | None) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False) if rank is None else LowRankLinear(inputs, outputs, rank)


class Layer(nn.Module):
    def __init__(self, rotation: Rotation, rank: int | None) -> None:
        super().__init__()
        self.query, self.value = linear(WIDTH, WIDTH, rank), linear(WIDTH, KV_HEADS * HEAD_SIZE, rank)
        # Keys are not adapted in the configuration.
        self.key, self.output = linear(WIDTH, KV_HEADS * HEAD_SIZE, None), linear(WIDTH, WIDTH, rank)
        self.gate, self.up, self.down = (
            linear(WIDTH, INNER, rank),
            linear(WIDTH, INNER, rank),
            linear(INNER, WIDTH, rank),
        )
        self.attention_norm, self.mlp_norm = RootMeanSquareNorm(), RootMeanSquareNorm()
        self.rotation = rotation

    def forward(self, states: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        states = self.attention(self.attention_norm(states), positions) + states
        return states + self.mlp(self.mlp_norm(states))

    def attention(self, states: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        batch, length, _ = states.shape
        query = self.query(states).view(batch, length, HEADS, HEAD_SIZE)
        query = self.rotation(query, positions).transpose(1, 2)
        key, value = (layer(states).view(batch, length, -1, HEAD_SIZE) for layer in (self.key, self.value))
        key = self.rotation(key, positions)
        shape = (batch, KV_HEADS, HEADS // KV_HEADS, -1, HEAD_SIZE)
        key, value = (part.transpose(1, 2).unsqueeze(2).expand(shape).flatten(1, 2) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).contiguous().view(batch, length, -1))

    def mlp(self, states: torch.Tensor) -> torch.Tensor:
        gated = F.silu(self.gate(states))
        gated = gated * self.up(states)
        return self.down(gated)


class Llama(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        rotation = Rotation()
        self.recipe = recipe
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(rotation, recipe.lora_rank) for _ in range(LAYERS))
        self.norm = RootMeanSquareNorm()
        if recipe.lora_rank is not None:
            self.requires_grad_(False)
            for module in self.modules():
                if isinstance(module, LowRankLinear):
                    module.down.requires_grad_(True)
                    module.up.requires_grad_(True)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor | list[torch.Tensor]:
        with offloaded() if self.recipe.offloading else contextlib.nullcontext():
            states = self.embedding(tokens)
            for layer in self.layers:
                if self.recipe.checkpointing:
                    states = checkpoint(layer, states, positions, use_reentrant=False)
                else:
                    states = layer(states, positions)
        # There the final norm is inside too, but offloading keeps the last five tensors that it was given on the card
        # (max_fwd_stash_size in training/_activation_offloading.py), and those are the norm's.
        states = self.norm(states)
        if self.recipe.chunked_loss:
            return [F.linear(chunk, self.embedding.weight) for chunk in states.chunk(CHUNKS, dim=1)]
        return F.linear(states, self.embedding.weight).float()


def offloaded() -> contextlib.AbstractContextManager[object]:
    """Saved activations wait in pinned host memory."""
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


class CompiledCrossEntropy(torch.autograd.Function):
    """Upcast and cross-entropy in one kernel: two float32 numbers per token beside the half-precision logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        largest, log_sum = (torch.empty(len(logits), 1, dtype=torch.float32, device="cuda") for _ in range(2))
        ctx.save_for_backward(logits, labels, largest, log_sum)
        return torch.zeros((), dtype=torch.float32, device="cuda")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, *_ = ctx.saved_tensors
        return torch.empty_like(logits), None


def chunked_loss(chunks: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    parts = [part.reshape(-1) for part in labels.chunk(CHUNKS, dim=1)]
    chunks = [chunk.reshape(-1, chunk.size(-1)) for chunk in chunks]
    total: Any = 0.0
    for chunk, part in zip(chunks, parts, strict=True):
        total = total + CompiledCrossEntropy.apply(chunk, part)
    return total / (labels != IGNORED).sum()


@contextlib.contextmanager
def _bfloat16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _step_in_backward(optimizers: dict[nn.Parameter, torch.optim.Optimizer], parameter: nn.Parameter) -> None:
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


def train(recipe: Recipe) -> None:
    """The recipe's steps on "cuda"."""
    with _bfloat16(), torch.device("cuda"):
        model = Llama(recipe)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = None
    if recipe.optimizer_in_backward:
        optimizers = {parameter: torch.optim.AdamW([parameter], fused=True) for parameter in trained}
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(functools.partial(_step_in_backward, optimizers))
    else:
        optimizer = torch.optim.AdamW(trained, fused=True)
    ignored = torch.full((recipe.batch_size, 1), IGNORED, device="cuda")
    shape = (recipe.batch_size, recipe.length)
    for _ in range(recipe.steps):
        tokens, labels = (torch.zeros(shape, dtype=torch.int64).to("cuda") for _ in range(2))
        positions = torch.zeros(shape, dtype=torch.int64).to("cuda") if recipe.packed else None
        num_tokens = (labels != IGNORED).sum()
        loss = _loss(model, tokens, positions, torch.hstack((labels[..., 1:], ignored))) * num_tokens
        loss.backward()
        if optimizer is not None:
            for parameter in trained:
                parameter.grad *= 1 / num_tokens  # type: ignore[operator]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _loss(model: Llama, tokens: torch.Tensor, positions: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    # In a function of its own, as there: the logits are gone when the backward begins.
    outputs = model(tokens, positions)
    if isinstance(outputs, list):
        return chunked_loss(outputs, labels)
    return F.cross_entropy(outputs.reshape(-1, outputs.size(-1)), labels.reshape(-1))
