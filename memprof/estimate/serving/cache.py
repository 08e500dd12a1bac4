"""vLLM's KV cache: pages of layers, groups of layers that share blocks, and how many tokens and requests they hold.

Read in v1/core/kv_cache_utils.py (0.11 to 0.29) and kv_cache_planning.py (0.33), v1/kv_cache_interface.py, and for
layers with a state in platforms/interface.py (_align_hybrid_block_size).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from memprof.estimate.serving.model import ITEMSIZE, LATENT, STATE, WINDOW, CachedLayer, ServedModel
from memprof.serving.releases import VllmRules
from memprof.units import round_up

BLOCK_SIZE = 16  # Tokens (vllm/config/cache.py, DEFAULT_BLOCK_SIZE).
LATENT_BLOCK_SIZE = 64  # Of FlashMLA, which Hopper and Blackwell use (vllm/platforms/cuda.py).
# Bytes of an element; nvfp4 has a byte of scale for 16 elements (nvfp4_kv_cache_full_dim).
ELEMENT_BYTES = {"fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "nvfp4": 0.5 + 1 / 16, "float32": 4.0}
_ALIGNED_STATES = 2  # States of a request with prefix caching (MambaSpec.max_memory_usage_bytes, "align").


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table: each block has a page in every layer of the group."""

    kind: str
    layers: int
    block_size: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How the KV cache of one rank is divided."""

    page_bytes: int  # Of a block in one layer.
    pools: int  # Layers of the largest group; a block takes a page in each.
    groups: tuple[Group, ...]
    block_size: int  # The smallest of the groups.
    states: int = 1  # States that a request has in a layer.
    max_num_batched_tokens: int = 2048
    steps_in_flight: int = 1
    prints_by_length: bool = True

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block in all layers that it has a page in."""
        return self.page_bytes * self.pools

    def count_request_blocks(self, length: int) -> int:
        """Return the blocks of a request of `length` tokens."""
        return sum(self._count_group_blocks(group, length) for group in self.groups)

    def _count_group_blocks(self, group: Group, length: int) -> int:
        if group.kind == STATE:
            return self.states
        if group.kind == WINDOW:
            held = min(group.window - 1 + self.steps_in_flight * self.max_num_batched_tokens, length)
            return -(-held // group.block_size) + 1  # A window may begin within a block.
        return -(-length // group.block_size)

    def count_blocks(self, cache_bytes: int) -> int:
        """Return the blocks in a cache of `cache_bytes`."""
        return max(cache_bytes, 0) // self.block_bytes

    def compute_concurrency(self, cache_bytes: int, length: int) -> float:
        """Return the requests of `length` tokens that a cache of `cache_bytes` holds at once."""
        return self.count_blocks(cache_bytes) / self.count_request_blocks(length)

    def count_tokens(self, cache_bytes: int, length: int) -> int:
        """Return the tokens of a cache as the engine prints them with max_model_len `length`."""
        if self.prints_by_length:
            return int(self.compute_concurrency(cache_bytes, length) * length)
        return self.count_blocks(cache_bytes) // len(self.groups) * self.block_size

    def find_longest(self, cache_bytes: int, limit: int) -> int:
        """Return the longest context up to `limit` tokens with which one request fits; 0: none."""
        blocks = self.count_blocks(cache_bytes)
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.count_request_blocks(middle) <= blocks else (low, middle - 1)
        return low


def build_layout(
    model: ServedModel, rules: VllmRules, tensor_parallel: int, kv_cache_dtype: str, max_num_batched_tokens: int,
    *, block_size: int | None = None, prefix_caching: bool = True, is_latent_block_large: bool = True,
) -> CacheLayout:  # fmt: skip
    """Return the layout of a model's KV cache on one rank; `kv_cache_dtype` is "auto" or in ELEMENT_BYTES."""
    element = ELEMENT_BYTES.get(kv_cache_dtype, float(ITEMSIZE))
    has_latent = any(layer.kind == LATENT for layer in model.layers)
    size = block_size or (LATENT_BLOCK_SIZE if has_latent and is_latent_block_large else BLOCK_SIZE)
    common: dict[str, Any] = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "steps_in_flight": 2 if rules.counts_tokens_in_flight else 1,
        "prints_by_length": rules.prints_tokens_by_length,
    }
    rates = {layer: _count_token_bytes(layer, tensor_parallel, element) for layer in set(model.layers)}
    if model.is_hybrid:
        return _build_hybrid_layout(model, rates, tensor_parallel, size, rules, prefix_caching, common)
    kinds = Counter(model.layers)
    if len({layer.kind for layer in kinds}) == 1 and len({layer.window for layer in kinds}) == 1:
        # One group, each layer with a page of its own size.
        page = round(sum(size * rates[layer] * count for layer, count in kinds.items()))
        kind, window = model.layers[0].kind, model.layers[0].window
        return CacheLayout(page, 1, (Group(kind, len(model.layers), size, window),), size, **common)
    largest = max(rates.values())
    groups = []
    pools = _choose_group_size(list(kinds.values()), rules)
    for layer, count in kinds.items():
        # Layers with smaller pages get longer blocks, so that all pages are equal.
        tokens = size * int(largest // rates[layer])
        groups += [Group(layer.kind, pools, tokens, layer.window)] * -(-count // pools)
    return CacheLayout(round(size * largest), pools, tuple(groups), min(g.block_size for g in groups), **common)


def _count_token_bytes(layer: CachedLayer, tensor_parallel: int, element: float) -> float:
    """Return the bytes of a token in a layer on one rank: keys and values, or the one latent vector."""
    if layer.kind == STATE:
        return 0.0
    vectors = 1 if layer.kind == LATENT else 2
    return vectors * max(1, layer.kv_heads // tensor_parallel) * layer.head_dim * element


def _choose_group_size(counts: list[int], rules: VllmRules) -> int:
    """Return the layers in a group: those of the rarest kind, or of the most frequent one if it is not much larger."""
    return max(counts) if max(counts) < min(counts) * rules.padded_group_ratio else min(counts)


def _build_hybrid_layout(
    model: ServedModel, rates: dict[CachedLayer, float], tensor_parallel: int, size: int, rules: VllmRules,
    prefix_caching: bool, common: dict[str, Any],
) -> CacheLayout:  # fmt: skip
    """Return the layout of a model with states: blocks are so long that a layer's page holds a state."""
    assert model.state is not None
    state_bytes = model.state.count_bytes(tensor_parallel, ITEMSIZE)
    kinds = Counter(model.layers)
    rate = max(rates.values())
    aligned = round_up(-(-state_bytes // round(rate)), size)
    counts = [sum(n for layer, n in kinds.items() if (layer.kind == STATE) is states) for states in (False, True)]
    pools = _choose_group_size(counts, rules)
    groups = []
    for layer, count in kinds.items():
        groups += [Group(layer.kind, pools, aligned, layer.window)] * -(-count // pools)
    page = round(aligned * rate)
    states = _ALIGNED_STATES if prefix_caching and rules.caches_prefixes_of_states else 1
    return CacheLayout(page, pools, tuple(groups), aligned, states=states, **common)
