"""Attention to some blocks of keys, by torch's flex_attention: a sliding window, and a fixed pattern of blocks.

The mask is made block by block (`BlockMask.from_kv_blocks`): no mask of all pairs of positions is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WINDOW = 4096  # window of `sliding` for models without window: Mistral 7B's (arXiv 2310.06825, table 1)
BLOCK = 128  # tokens of a block: flex_attention's default
NEAR = 8
# `block-sparse`: a block of queries sees itself, the 7 before, the first, and every eighth. A fixed pattern like
# that of Sparse Transformers (arXiv 1904.10509, section 4.3), in blocks.
EVERY = 8


def attention(
    kind: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention as a function of transformers: query (B, H, T, D), key, value (B, K, S, D) to (B, T, H, D)."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    lengths = query.shape[2], key.shape[2]
    # Where ranks share a sequence, the model's own mask is for one rank's tokens.
    if not isinstance(mask, BlockMask) or tuple(mask.seq_lengths) != lengths:
        mask = block_mask(kind, window_of(module.config), *lengths, query.device)
    group = query.shape[1] // key.shape[1]
    # On a GPU flex_attention without the compiler computes the scores of all pairs.
    attend = torch.compile(flex_attention) if query.device.type == "cuda" else flex_attention
    output = attend(query, key, value, block_mask=mask, scale=scaling, enable_gqa=group > 1)
    return output.transpose(1, 2), None


def mask_of_model(kind: str, **given: Any) -> Any:
    """Return the mask as a function of transformers: once per forward of the model, for all layers."""
    config, device = given.get("config"), given.get("device")
    if device is None and (position := given.get("cache_position")) is not None:
        device = position.device
    queries, keys = given.get("q_length"), given.get("kv_length")
    if not isinstance(queries, int) or not isinstance(keys, int) or device is None:
        return None
    return block_mask(kind, window_of(config), queries, keys, device)


def window_of(config: Any) -> int:
    """Return the model's window in tokens, or else WINDOW."""
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else WINDOW


def block_mask(kind: str, window: int, queries: int, keys: int, device: Any) -> Any:
    """Return the `BlockMask` of `kind` for `queries` and `keys`; queries are at the last of the keys' positions."""
    from torch.nn.attention.flex_attention import BlockMask

    sees = _make_pattern(kind, window, keys - queries)
    rows = torch.arange(-(-queries // BLOCK), device=device)[:, None] * BLOCK
    columns = torch.arange(-(-keys // BLOCK), device=device)[None] * BLOCK
    ends = [(rows + a, columns + b) for a in (0, BLOCK - 1) for b in (0, BLOCK - 1)]
    corners = torch.stack([sees(None, None, row.clamp(max=queries - 1), column) for row, column in ends])
    # A block whose four corners are visible is all visible: patterns are intervals of distances, or of blocks.
    whole = corners.all(0) & (rows + BLOCK <= queries) & (columns + BLOCK <= keys)
    partial_blocks = _find_visible_blocks(kind, window, rows + keys - queries, columns) & ~whole
    (some, where), (full, where_full) = map(_sort_blocks, (partial_blocks, whole))
    return BlockMask.from_kv_blocks(
        some, where, full, where_full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(queries, keys)
    )


def _make_pattern(kind: str, window: int, offset: int) -> Callable[..., Tensor]:
    """Return the function of (batch, head, query, key) that returns whether the query sees the key."""

    def sliding(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        at = query + offset
        return (key <= at) & (key > at - window)

    def blocks(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        at, block = query + offset, key // BLOCK
        return (key <= at) & ((block == 0) | (block % EVERY == EVERY - 1) | (at // BLOCK - block < NEAR))

    return sliding if kind == "sliding" else blocks


def _find_visible_blocks(kind: str, window: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Return a mask of the blocks with a visible pair; `rows` and `columns` are positions of each block's first query
    and key."""
    past = columns <= rows + BLOCK - 1
    if kind == "sliding":
        return past & (columns + BLOCK - 1 > rows - window)
    block = columns // BLOCK
    near = rows // BLOCK - block < NEAR
    return past & ((block == 0) | (block % EVERY == EVERY - 1) | near)


def _sort_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks per row, and the sorted block numbers, as flex_attention needs them."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], order[None, None]
