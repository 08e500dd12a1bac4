"""Sliding-window and block-sparse attention, by torch's flex_attention.
The mask is built from blocks (`BlockMask.from_kv_blocks`): no mask of all query-key pairs is allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WINDOW = 4096  # window of `sliding` for models without window: Mistral 7B's (arXiv 2310.06825, table 1)
BLOCK = 128  # tokens of a block: flex_attention's default
NUM_NEAR = 8
# `block-sparse`: a block of queries attends to itself, the 7 before, the first, and every eighth: in blocks, a fixed
# pattern like that of Sparse Transformers (arXiv 1904.10509, section 4.3).
PERIOD = 8


def attention(
    kind: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return attention output (B, T, H, D) and None, for transformers; query (B, H, T, D), key, value (B, K, S, D)."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    lengths = query.shape[2], key.shape[2]
    # Where ranks share a sequence, the model's own mask is for one rank's tokens.
    if not isinstance(mask, BlockMask) or tuple(mask.seq_lengths) != lengths:
        mask = make_block_mask(kind, get_window(module.config), *lengths, query.device)
    group = query.shape[1] // key.shape[1]
    # On a GPU flex_attention without the compiler computes the scores of all pairs.
    attend = torch.compile(flex_attention) if query.device.type == "cuda" else flex_attention
    output = attend(query, key, value, block_mask=mask, scale=scaling, enable_gqa=group > 1)
    return output.transpose(1, 2), None


def make_model_mask(kind: str, **model_inputs: Any) -> Any:
    """Return the `BlockMask` for all layers, or None without lengths or device; transformers calls it per forward."""
    config, device = model_inputs.get("config"), model_inputs.get("device")
    if device is None and (position := model_inputs.get("cache_position")) is not None:
        device = position.device
    queries, keys = model_inputs.get("q_length"), model_inputs.get("kv_length")
    if not isinstance(queries, int) or not isinstance(keys, int) or device is None:
        return None
    return make_block_mask(kind, get_window(config), queries, keys, device)


def get_window(config: Any) -> int:
    """Return the sliding window of a model's `config` in tokens; WINDOW if it has none."""
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else WINDOW


def make_block_mask(kind: str, window: int, queries: int, keys: int, device: Any) -> Any:
    """Return the `BlockMask` of `kind` for numbers of `queries` and `keys`; the queries are the last tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    mask_mod = _make_pattern(kind, window, keys - queries)
    rows = torch.arange(-(-queries // BLOCK), device=device)[:, None] * BLOCK
    columns = torch.arange(-(-keys // BLOCK), device=device)[None] * BLOCK
    positions = [(rows + a, columns + b) for a in (0, BLOCK - 1) for b in (0, BLOCK - 1)]
    corners = torch.stack([mask_mod(None, None, row.clamp(max=queries - 1), column) for row, column in positions])
    # A block whose four corners are visible is all visible: patterns are intervals of distances, or of blocks.
    full_blocks = corners.all(0) & (rows + BLOCK <= queries) & (columns + BLOCK <= keys)
    partial_blocks = _find_visible_blocks(kind, window, rows + keys - queries, columns) & ~full_blocks
    (counts, order), (full_counts, full_order) = map(_sort_blocks, (partial_blocks, full_blocks))
    return BlockMask.from_kv_blocks(
        counts, order, full_counts, full_order, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(queries, keys)
    )


def _make_pattern(kind: str, window: int, offset: int) -> Callable[..., Tensor]:
    """Return flex_attention's `mask_mod`: a function of (batch, head, query, key) that tells visible pairs."""

    def sliding(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        position = query + offset
        return (key <= position) & (key > position - window)

    def blocks(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        index, block = query + offset, key // BLOCK
        return (key <= index) & ((block == 0) | (block % PERIOD == PERIOD - 1) | (index // BLOCK - block < NUM_NEAR))

    return sliding if kind == "sliding" else blocks


def _find_visible_blocks(kind: str, window: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Return a boolean mask of the blocks that have a visible query-key pair; `rows` and `columns` are the positions of
    each block's first query and key."""
    reachable = columns <= rows + BLOCK - 1
    if kind == "sliding":
        return reachable & (columns + BLOCK - 1 > rows - window)
    block = columns // BLOCK
    is_near = rows // BLOCK - block < NUM_NEAR
    return reachable & ((block == 0) | (block % PERIOD == PERIOD - 1) | is_near)


def _sort_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return, per row of the mask `blocks`, the number of True blocks, and block indices with True ones first."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], order[None, None]
