"""Native sparse attention (arXiv 2502.11089): three attentions per query, to compressed, chosen and recent tokens.

* Compression: an MLP with position encoding maps keys and values of 32 tokens, a block every 16, to one each.
* Selection: each query attends to the tokens of the 16 blocks of 64 with the highest compressed attention, over the
  heads that share keys; the first block, the query's own and the block before are always included.
* A window of the last 512 tokens.

Gates between 0 and 1, an MLP of the layer's input, weigh the three. Each has keys and values of its own, so the layer's
projections of both are three times as wide, and learn. What the paper leaves open: both MLPs have one hidden layer as
wide as a head; the first is shared by the heads; keys are compressed after the model's rotary embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memprof.errors import UsageError
from memprof.workload.attention.kernels import Attend, choose_blocks

# Tokens of a compressed block, and from one to the next (section 4.1 of the paper, as those below).
LENGTH, STRIDE = 32, 16
BLOCK, COUNT = 64, 16  # tokens of a selected block, and blocks that a query selects
WINDOW = 512


class Compression(nn.Module):
    """MLP with position encoding that compresses each block of keys or values to one."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(LENGTH, width, **options))
        self.inner = nn.Linear(LENGTH * width, width, **options)
        self.outer = nn.Linear(width, width, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Compress (B, K, S, D) to (B, K, blocks, D), for complete blocks.

        Blocks overlap, so each stride of tokens is multiplied once for each of its places in a block; blocks are not
        copied.
        """
        blocks = max(0, (x.shape[2] - LENGTH) // STRIDE + 1)
        places = LENGTH // STRIDE
        if not blocks:
            return x[:, :, :0]
        strides = x[:, :, : (blocks + places - 1) * STRIDE].unflatten(2, (-1, STRIDE)).flatten(-2)
        first = functional.linear(self.position.flatten(), self.inner.weight, self.inner.bias)
        for place, weight in enumerate(self.inner.weight.chunk(places, 1)):
            first = first + functional.linear(strides[:, :, place : place + blocks], weight)
        compressed: Tensor = self.outer(functional.gelu(first))
        return compressed


class SparseParts(nn.Module):
    """Parts of a layer's attention besides its projections: compression of keys and of values, and gates."""

    def __init__(self, hidden: int, heads: int, width: int, **options: Any) -> None:
        super().__init__()
        self.compress_key = Compression(width, **options)
        self.compress_value = Compression(width, **options)
        self.gates = nn.Sequential(
            nn.Linear(hidden, width, **options), nn.SiLU(), nn.Linear(width, 3 * heads, **options), nn.Sigmoid()
        )
        self.given: Tensor | None = None  # gates of the running call


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float | None = None,
    eager: bool = False, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention as a function of transformers: query (B, H, T, D), key and value (B, 3K, S, D), to (B, T, H,
    D).

    `eager` keeps every score in memory, and a mask for each branch.
    """
    parts: SparseParts = module.sparse
    gates, parts.given = parts.given, None
    assert gates is not None
    keys, values = (x.unflatten(1, (-1, 3)).unbind(2) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    branches = three(
        query, keys, values, parts.compress_key(keys[0]), parts.compress_value(values[0]), scale, eager=eager
    )
    heads = gates.unflatten(-1, (3, -1)).unsqueeze(-1).unbind(-3)  # (B, T, H, 1) each
    total = heads[0] * branches[0].transpose(1, 2)
    for gate, branch in zip(heads[1:], branches[1:], strict=True):
        total = total + gate * branch.transpose(1, 2)
    return total, None


def three(
    query: Tensor, keys: Any, values: Any, short_key: Tensor, short_value: Tensor, scale: float, *, eager: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention to compressed, chosen and recent tokens, (B, H, T, D) each.

    `keys` and `values` have one tensor (B, K, S, D) per branch; `short_key` and `short_value` are the first branch's,
    compressed. `eager` keeps the scores of all queries.
    """
    tokens = keys[1].shape[2]
    offset = tokens - query.shape[2]
    run = _attend_dense if eager else Attend.apply
    compressed, lse = run(query, short_key, short_value, None, scale, offset, LENGTH, STRIDE, 0)
    with torch.no_grad():
        arguments = (scale, offset, LENGTH, STRIDE, BLOCK, COUNT)
        chosen = choose_blocks(query.detach(), short_key.detach(), lse.detach(), tokens, *arguments)
    selected, _ = run(query, keys[1], values[1], chosen, scale, offset, BLOCK, 0, 0)
    recent, _ = run(query, keys[2], values[2], None, scale, offset, 0, 0, WINDOW)
    return compressed, selected, recent


def _attend_dense(
    query: Tensor, key: Tensor, value: Tensor, blocks: Tensor | None, scale: float, offset: int, length: int,
    stride: int, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention in plain PyTorch with autograd: masked scores of every pair, as in eager attention."""
    at = torch.arange(query.shape[2], device=query.device)[:, None] + offset
    places = torch.arange(key.shape[2], device=query.device)
    if blocks is not None:
        count = -(-key.shape[2] // length)
        of_block = torch.zeros(*blocks.shape[:3], count + 1, dtype=torch.bool, device=query.device)
        of_block.scatter_(-1, blocks.long().add(1), value=True)  # the first column is for -1
        seen = of_block[..., 1:].repeat_interleave(length, -1)[..., : key.shape[2]] & (places <= at)
        seen = seen.unsqueeze(2)
    elif window:
        seen = ((places <= at) & (places > at - window))[None, None, None]
    else:
        seen = (places * stride + length - 1 <= at)[None, None, None]
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2)) * scale
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    own = torch.promote_types(query.dtype, torch.float32)
    lse = scores.detach().to(own).logsumexp(-1)
    weights = functional.softmax(scores, dim=-1, dtype=own).to(query.dtype)
    weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0)  # a query without visible keys
    return torch.matmul(weights, value.unsqueeze(2)).flatten(1, 2), lse.flatten(1, 2)


def install(name: str, module: nn.Module) -> None:
    """Give the attention layer `name` projections for three branches; raise UsageError if the layer lacks its own."""
    key, value, out = (getattr(module, f"{which}_proj", None) for which in ("k", "v", "o"))
    width = getattr(module, "head_dim", None)
    norm = getattr(getattr(module, "k_norm", None), "weight", None)
    linear = [layer for layer in (key, value, out) if type(layer) is nn.Linear]
    if len(linear) < 3 or not isinstance(width, int) or (norm is not None and norm.numel() != width):
        raise UsageError(
            "native sparse attention needs k_proj, v_proj and o_proj of its own in each layer",
            value=f"{type(module).__name__} in {name}",
            hint="Llama, Qwen, Mistral and Gemma have them; --attention linear takes any",
        )
    assert isinstance(key, nn.Linear) and isinstance(value, nn.Linear) and isinstance(out, nn.Linear)
    options = {"dtype": key.weight.dtype, "device": key.weight.device}
    for which, layer in (("k_proj", key), ("v_proj", value)):
        wider = nn.Linear(layer.in_features, 3 * layer.out_features, layer.bias is not None, **options)
        setattr(module, which, wider)
    module.sparse = SparseParts(key.in_features, out.in_features // width, width, **options)
    module.register_forward_pre_hook(_compute_gates, with_kwargs=True)


def _compute_gates(module: Any, args: Any, kwargs: Any) -> None:
    """Compute the gates from the layer's input, which the layer's attention function does not get."""
    module.sparse.given = module.sparse.gates(args[0] if args else kwargs["hidden_states"])
