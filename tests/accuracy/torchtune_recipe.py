"""torchtune's single-device recipes for models of Llama's shape, as far as they touch the GPU.

Written after the recipes, modules and configurations of github.com/meta-pytorch/torchtune at 1814feb1 (18 November
2024), the commit that published the table of memory per technique. What decides memory there: parameters and AdamW's
state in bfloat16, AdamW fused (configs/llama3_2/3B_full.yaml), embedding and head tied, RMS norm by hand through
float32, rotary cache in float32 for 131,072 positions, keys and values expanded to all heads, logits cast to float32
by the model, and the logits let go before the backward.

Two things are replaced. Packed rows use flex attention, compiled: its output has the strides of the query and it
keeps query, key, value, output and a float32 log-sum-exp (torch/_inductor/kernel/flex_attention.py), as flash
attention does, which is used here. And `compiled_cross_entropy` is what one fused kernel of the compiled loss keeps and
makes. Layers are eager, or compiled one by one as there (torchtune/training/_compile.py). Of 4-bit weights (QLoRA,
torchao's NF4) the compiled layers unpack each into one tensor, for the product and again in the backward, which is
replaced by a stub; eager code would make indices of 64 bits first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Geometry:
    """A model of Llama's shape (torchtune/models/llama3_2/_model_builders.py and its neighbours)."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    positions: int
    tied: bool

    @property
    def head_size(self) -> int:
        return self.width // self.heads


LLAMA_3_2_3B = Geometry(3072, 8192, 28, 24, 8, 128_256, 131_072, tied=True)
LLAMA_3_1_8B = Geometry(4096, 14_336, 32, 32, 8, 128_256, 131_072, tied=False)
LLAMA_2_7B = Geometry(4096, 11_008, 32, 32, 32, 32_000, 4096, tied=False)
LAYERS = LLAMA_3_2_3B.layers
CHUNKS = 8  # Of the chunked cross-entropy, along the sequence.
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
    in_4_bits: bool = False  # The linear layers but the head are NF4 tensors of torchao; with lora_rank.
    unpacks_eagerly: bool = False  # torchao's own code unpacks them, as it does where nothing is compiled.
    eight_bit: str | None = None  # Whose 8-bit AdamW: bitsandbytes or torchao.
    batch_size: int = 2
    steps: int = 2
    geometry: Geometry = LLAMA_3_2_3B
    lora_on: str = "qvoghd"  # Which linear layers are adapted: query, key, value, output, gate, up (h), down.
    # The recipes of May 2024 (0217d44c2): the loop copies the logits without the last position, gives them to the loss
    # with the vocabulary as the second dimension, and keeps them until the next batch; AdamW is not fused.
    shifts: bool = False
    compiled: bool = False  # Each layer is compiled.
    # The optimizer's state is paged: in managed memory, which is not the allocator's (bitsandbytes, Paged*).
    paged: bool = False


class RootMeanSquareNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(states)
        return normed * self.scale


class Rotation(nn.Module):
    """Neighbouring channels are rotated as pairs, in float32."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(geometry.positions), torch.ones(geometry.head_size // 2)).float()
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

    def __init__(self, frozen: nn.Module, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.frozen(states) + 2.0 * self.up(self.down(states))


class UnpackedProduct(torch.autograd.Function):
    """Product with a weight that compiled code unpacks into a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        ctx.shape = shape
        return F.linear(states, states.new_empty(shape))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return gradient @ gradient.new_empty(ctx.shape), None


class FourBitWeights:
    """NF4 weights of one model: torchao converts one of each shape, and all get tensors like those that it made.

    Converting them all takes minutes, and would leave 13 MiB of rests in the blocks of the 3B model's weights."""

    def __init__(self) -> None:
        self._inner: dict[tuple[int, int], tuple[dict[str, tuple[torch.Size, torch.dtype]], Any]] = {}

    def make(self, outputs: int, inputs: int) -> nn.Parameter:
        if (outputs, inputs) not in self._inner:
            converted = _nf4_module().to_nf4(torch.empty(outputs, inputs))
            names, facts = converted.__tensor_flatten__()
            tensors = {name: getattr(converted, name) for name in names}
            self._inner[outputs, inputs] = {n: (t.size(), t.dtype) for n, t in tensors.items()}, facts
        described, facts = self._inner[outputs, inputs]
        # Converted, so that the virtual GPU knows no values that it would have to follow.
        inner = {name: torch.empty(size, dtype=torch.float32).to(dtype) for name, (size, dtype) in described.items()}
        weight = _nf4_module().NF4Tensor.__tensor_unflatten__(inner, facts, (outputs, inputs), (inputs, 1))
        return nn.Parameter(weight, requires_grad=False)


class FourBitLinear(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.shape = tuple(weight.shape)
        self.weight = weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return UnpackedProduct.apply(states, self.shape)


@functools.cache
def _nf4_module() -> Any:
    """torchao's NF4, which has moved."""
    for name in ("torchao.dtypes.nf4tensor", "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise ImportError("no to_nf4 in this torchao")


class EagerFourBitLinear(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _nf4_module().linear_nf4(input=states, weight=self.weight)
        return product


def linear(recipe: Recipe, weights: FourBitWeights, name: str, inputs: int, outputs: int) -> nn.Module:
    """One of a layer's products; `name` is its letter in `Recipe.lora_on`."""
    base: nn.Module
    if recipe.in_4_bits:
        base = (EagerFourBitLinear if recipe.unpacks_eagerly else FourBitLinear)(weights.make(outputs, inputs))
    else:
        base = nn.Linear(inputs, outputs, bias=False)
    if recipe.lora_rank is None or name not in recipe.lora_on:
        return base
    return LowRankLinear(base, inputs, outputs, recipe.lora_rank)


class Layer(nn.Module):
    def __init__(self, recipe: Recipe, rotation: Rotation, weights: FourBitWeights) -> None:
        super().__init__()
        geometry = self.geometry = recipe.geometry
        width, inner, kv_width = geometry.width, geometry.inner, geometry.kv_heads * geometry.head_size
        make = functools.partial(linear, recipe, weights)
        self.query, self.value = make("q", width, width), make("v", width, kv_width)
        self.key, self.output = make("k", width, kv_width), make("o", width, width)
        self.gate, self.up, self.down = make("g", width, inner), make("h", width, inner), make("d", inner, width)
        self.attention_norm, self.mlp_norm = RootMeanSquareNorm(width), RootMeanSquareNorm(width)
        self.rotation = rotation

    def forward(self, states: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        states = self.attention(self.attention_norm(states), positions) + states
        return states + self.mlp(self.mlp_norm(states))

    def attention(self, states: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        batch, length, _ = states.shape
        heads, kv_heads, head_size = self.geometry.heads, self.geometry.kv_heads, self.geometry.head_size
        query = self.query(states).view(batch, length, heads, head_size)
        query = self.rotation(query, positions).transpose(1, 2)
        key, value = (layer(states).view(batch, length, -1, head_size) for layer in (self.key, self.value))
        key = self.rotation(key, positions)
        shape = (batch, kv_heads, heads // kv_heads, -1, head_size)
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
        geometry = recipe.geometry
        rotation, weights = Rotation(geometry), FourBitWeights()
        self.recipe = recipe
        self.embedding = nn.Embedding(geometry.vocabulary, geometry.width)
        self.layers = nn.ModuleList(Layer(recipe, rotation, weights) for _ in range(geometry.layers))
        for layer in self.layers if recipe.compiled else ():
            layer.compile()
        self.norm = RootMeanSquareNorm(geometry.width)
        self.head = None if geometry.tied else nn.Linear(geometry.width, geometry.vocabulary, bias=False)
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
        # There the final norm is inside too, but offloading keeps the last five tensors that it was given on the GPU
        # (max_fwd_stash_size in training/_activation_offloading.py), and those are the norm's.
        states = self.norm(states)
        weight = self.embedding.weight if self.head is None else self.head.weight
        if self.recipe.chunked_loss:
            return [F.linear(chunk, weight) for chunk in states.chunk(CHUNKS, dim=1)]
        return F.linear(states, weight).float()


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


def adamw(recipe: Recipe, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if recipe.eight_bit is None and not recipe.paged:
        return torch.optim.AdamW(parameters, fused=not recipe.shifts)
    name = f"{'Paged' if recipe.paged else ''}AdamW{'8bit' if recipe.eight_bit else ''}"
    module = importlib.import_module(f"{recipe.eight_bit or 'bitsandbytes'}.optim")
    return getattr(module, name)(parameters)  # type: ignore[no-any-return]


def train(recipe: Recipe) -> None:
    with _bfloat16(), torch.device("cuda"):
        model = Llama(recipe)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = None
    if recipe.optimizer_in_backward:
        optimizers = {parameter: adamw(recipe, [parameter]) for parameter in trained}
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(functools.partial(_step_in_backward, optimizers))
    else:
        optimizer = adamw(recipe, trained)
    if recipe.shifts:
        _loop_of_may_2024(recipe, model, optimizer)
        return
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


def _loop_of_may_2024(recipe: Recipe, model: Llama, optimizer: torch.optim.Optimizer | None) -> None:
    shape = (recipe.batch_size, recipe.length)
    for _ in range(recipe.steps):
        tokens, labels = (torch.zeros(shape, dtype=torch.int64).to("cuda") for _ in range(2))
        logits = model(tokens, None)
        logits = logits[..., :-1, :].contiguous()
        labels = labels[..., 1:].contiguous()
        logits = logits.transpose(1, 2)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _loss(model: Llama, tokens: torch.Tensor, positions: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    # In a function of its own, as there: the logits are gone when the backward begins.
    outputs = model(tokens, positions)
    if isinstance(outputs, list):
        return chunked_loss(outputs, labels)
    return F.cross_entropy(outputs.reshape(-1, outputs.size(-1)), labels.reshape(-1))
