"""Native sparse attention (arXiv 2502.11089): three attentions per query, to compressed, chosen and recent tokens.

* Compression: an MLP with position encoding maps keys and values of 32 tokens, at a stride of 16, to one each.
* Selection: each query attends to the tokens of the 16 blocks of 64 with the highest compressed attention, over the
  heads that share keys; the first block, the query's own and the block before are always included.
* A window of the last 512 tokens.

Gates between 0 and 1, computed from the layer's input by an MLP, weigh the three. Each has its own keys and values, so
key and value projections are three times as wide, and trained. Where the paper is silent: MLPs have one hidden layer as
wide as a head; heads share the compression MLP; keys are compressed after the model's rotary embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memprof.errors import UsageError
from memprof.workload.attention.kernels import Attend, choose_blocks

# Tokens of a compressed block, and between starts of blocks (section 4.1 of the paper, as the constants below).
COMPRESSED_LENGTH, STRIDE = 32, 16
SELECTED_LENGTH, NUM_SELECTED = 64, 16  # tokens of a selected block, and blocks that a query selects
WINDOW = 512


class Compression(nn.Module):
    """MLP with position encoding that compresses each block of keys, or of values, to one."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(COMPRESSED_LENGTH, width, **options))
        self.inner = nn.Linear(COMPRESSED_LENGTH * width, width, **options)
        self.outer = nn.Linear(width, width, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Return keys or values `x` (B, K, S, D) compressed to (B, K, blocks, D); an incomplete block is left out.
        Blocks overlap: each stride of tokens is multiplied once for each of its offsets in a block, without copies."""
        num_blocks = max(0, (x.shape[2] - COMPRESSED_LENGTH) // STRIDE + 1)
        strides_per_block = COMPRESSED_LENGTH // STRIDE
        if not num_blocks:
            return x[:, :, :0]
        strides = x[:, :, : (num_blocks + strides_per_block - 1) * STRIDE].unflatten(2, (-1, STRIDE)).flatten(-2)
        hidden = functional.linear(self.position.flatten(), self.inner.weight, self.inner.bias)
        for offset, weight in enumerate(self.inner.weight.chunk(strides_per_block, 1)):
            hidden = hidden + functional.linear(strides[:, :, offset : offset + num_blocks], weight)
        compressed: Tensor = self.outer(functional.gelu(hidden))
        return compressed


class SparseParts(nn.Module):
    """Modules that native sparse attention adds to a layer: compression of keys and of values, and gates."""

    def __init__(self, hidden: int, heads: int, width: int, **options: Any) -> None:
        super().__init__()
        self.compress_key = Compression(width, **options)
        self.compress_value = Compression(width, **options)
        self.gates = nn.Sequential(
            nn.Linear(hidden, width, **options), nn.SiLU(), nn.Linear(width, 3 * heads, **options), nn.Sigmoid()
        )
        self.current_gates: Tensor | None = None  # gates of the running call


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float | None = None,
    eager: bool = False, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return attention output (B, T, H, D) and None, for transformers; query (B, H, T, D), key, value (B, 3K, S, D).
    `eager` keeps every score in memory, and a mask for each of the three branches."""
    sparse: SparseParts = module.sparse
    gates, sparse.current_gates = sparse.current_gates, None
    assert gates is not None
    keys, values = (x.unflatten(1, (-1, 3)).unbind(2) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    branches = attend_branches(
        query, keys, values, sparse.compress_key(keys[0]), sparse.compress_value(values[0]), scale, eager=eager
    )
    branch_gates = gates.unflatten(-1, (3, -1)).unsqueeze(-1).unbind(-3)  # (B, T, H, 1) each
    total = branch_gates[0] * branches[0].transpose(1, 2)
    for gate, branch in zip(branch_gates[1:], branches[1:], strict=True):
        total = total + gate * branch.transpose(1, 2)
    return total, None


def attend_branches(
    query: Tensor, keys: Any, values: Any, short_key: Tensor, short_value: Tensor, scale: float, *, eager: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention to compressed, selected and recent tokens, (B, H, T, D) each.

    `keys` and `values` have one tensor (B, K, S, D) per branch; `short_key` and `short_value` are the compressed keys
    and values of the first branch. `eager` keeps the scores of all queries.
    """
    tokens = keys[1].shape[2]
    offset = tokens - query.shape[2]
    attend = _attend_dense if eager else Attend.apply
    compressed, lse = attend(query, short_key, short_value, None, scale, offset, COMPRESSED_LENGTH, STRIDE, 0)
    with torch.no_grad():
        arguments = (scale, offset, COMPRESSED_LENGTH, STRIDE, SELECTED_LENGTH, NUM_SELECTED)
        selected_blocks = choose_blocks(query.detach(), short_key.detach(), lse.detach(), tokens, *arguments)
    selected, _ = attend(query, keys[1], values[1], selected_blocks, scale, offset, SELECTED_LENGTH, 0, 0)
    recent, _ = attend(query, keys[2], values[2], None, scale, offset, 0, 0, WINDOW)
    return compressed, selected, recent


def _attend_dense(
    query: Tensor, key: Tensor, value: Tensor, blocks: Tensor | None, scale: float, offset: int, length: int,
    stride: int, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what `Attend` returns, in plain PyTorch with autograd: scores of every pair, as in eager attention."""
    query_index = torch.arange(query.shape[2], device=query.device)[:, None] + offset
    key_index = torch.arange(key.shape[2], device=query.device)
    if blocks is not None:
        num_blocks = -(-key.shape[2] // length)
        block_mask = torch.zeros(*blocks.shape[:3], num_blocks + 1, dtype=torch.bool, device=query.device)
        block_mask.scatter_(-1, blocks.long().add(1), value=True)  # the first column is for -1
        visible = block_mask[..., 1:].repeat_interleave(length, -1)[..., : key.shape[2]] & (key_index <= query_index)
        visible = visible.unsqueeze(2)
    elif window:
        visible = ((key_index <= query_index) & (key_index > query_index - window))[None, None, None]
    else:
        visible = (key_index * stride + length - 1 <= query_index)[None, None, None]
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2)) * scale
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    sum_dtype = torch.promote_types(query.dtype, torch.float32)
    lse = scores.detach().to(sum_dtype).logsumexp(-1)
    weights = functional.softmax(scores, dim=-1, dtype=sum_dtype).to(query.dtype)
    weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0)  # a query without visible keys
    return torch.matmul(weights, value.unsqueeze(2)).flatten(1, 2), lse.flatten(1, 2)


def install(name: str, module: nn.Module) -> None:
    """Widen the key and value projections of attention layer `name` to three branches, and add gates and compression.
    Raises UsageError if the layer has no separate k_proj, v_proj and o_proj."""
    key, value, output = (getattr(module, f"{projection_name}_proj", None) for projection_name in ("k", "v", "o"))
    width = getattr(module, "head_dim", None)
    norm = getattr(getattr(module, "k_norm", None), "weight", None)
    linear = [layer for layer in (key, value, output) if type(layer) is nn.Linear]
    if len(linear) < 3 or not isinstance(width, int) or (norm is not None and norm.numel() != width):
        raise UsageError(
            "native sparse attention needs k_proj, v_proj and o_proj of its own in each layer",
            value=f"{type(module).__name__} in {name}",
            hint="Llama, Qwen, Mistral and Gemma have them; --attention linear takes any",
        )
    assert isinstance(key, nn.Linear) and isinstance(value, nn.Linear) and isinstance(output, nn.Linear)
    options = {"dtype": key.weight.dtype, "device": key.weight.device}
    for projection_name, layer in (("k_proj", key), ("v_proj", value)):
        widened = nn.Linear(layer.in_features, 3 * layer.out_features, layer.bias is not None, **options)
        setattr(module, projection_name, widened)
    module.sparse = SparseParts(key.in_features, output.in_features // width, width, **options)
    module.register_forward_pre_hook(_compute_gates, with_kwargs=True)


def _compute_gates(module: Any, args: Any, kwargs: Any) -> None:
    """Compute the gates from the layer's input (a forward pre-hook: the attention function does not get the input)."""
    module.sparse.current_gates = module.sparse.gates(args[0] if args else kwargs["hidden_states"])
