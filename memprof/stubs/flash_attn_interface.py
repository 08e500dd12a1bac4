"""FlashAttention 3, whose package flash_attn_3 is imported as flash_attn_interface.

Sources: hopper/flash_attn_interface.py and hopper/flash_api.cpp (mha_fwd, mha_bwd) with heuristics.h and tile_size.h,
of Dao-AILab/flash-attention@v2.8.3. Float8 changes only the output's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from memprof.stubs.flash_attn.attention import efficient_split
from memprof.stubs.registry import register_in
from memprof.stubs.tools import (
    check_on_gpu,
    kernel,
    last_contiguous,
    mark_written,
    num_multiprocessors,
    refuse,
    require,
)
from memprof.units import round_up

_HEADS = (64, 96, 128, 192, 256)
_L2 = 50 * 1024 * 1024
_MOST_SPLIT_BATCH = 992
_NAME = "flash_attn_interface"
_SOURCE = "Dao-AILab/flash-attention@v2.8.3:hopper/flash_attn_interface.py, hopper/flash_api.cpp"
_public = register_in(_NAME, source=_SOURCE, in_graph=True)


class HopperOptions(NamedTuple):
    """The arguments of one call besides the tensors."""

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    splits: int = 1
    deterministic: bool = False
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    page_table: torch.Tensor | None = None
    # Used lengths and left padding: any of them makes the call one of varying lengths.
    others: tuple[torch.Tensor | None, ...] = ()
    scheduler_metadata: torch.Tensor | None = None

    @property
    def varies(self) -> bool:
        """Return whether the sequences may have different lengths."""
        return any(one is not None for one in (self.cu_seqlens_q, self.cu_seqlens_k, *self.others))


class _Sizes(NamedTuple):
    batch: int
    queries: int
    keys: int
    heads: int
    shared: int
    head: int
    head_v: int

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: HopperOptions) -> _Sizes:
        bounds, table = call.cu_seqlens_q, call.page_table
        batch = query.shape[0] if bounds is None else bounds.shape[0] - 1
        queries = query.shape[1] if bounds is None else int(call.max_seqlen_q or 0)
        if call.cu_seqlens_k is not None:
            keys = int(call.max_seqlen_k or 0)
        else:
            keys = key.shape[1] if table is None else table.shape[1] * key.shape[1]
        return cls(batch, queries, keys, query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1])


def _rounded_head(size: int) -> int:
    """Return a head's size as padded in a build with all sizes (round_up_headdim)."""
    return next((head for head in _HEADS if size <= head), 512)


def _arch() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _masks(call: HopperOptions, sizes: _Sizes) -> tuple[bool, bool]:
    """Return whether the kernel is causal, and whether it has a window (set_params_fprop)."""
    left, right = call.window_size
    left = -1 if left >= sizes.keys - 1 else left
    right = -1 if right >= sizes.queries - 1 else right
    if call.causal and not (sizes.queries == 1 and left == right == -1):
        right = 0
    causal = left < 0 and right == 0
    return causal, (left >= 0 or right >= 0) and not causal


def _splits(sizes: _Sizes, call: HopperOptions, element: int) -> int:
    """Return the number of parts into which the keys are split, on Hopper (get_num_splits)."""
    causal, local = _masks(call, sizes)
    head, head_v = _rounded_head(sizes.head), _rounded_head(sizes.head_v)
    rows, columns = _tile(head, head_v, causal, local, element, paged=call.page_table is not None)
    packed = sizes.queries * (sizes.heads // sizes.shared)
    loaded = sizes.keys
    if local:
        loaded = max(0, min(sizes.keys, sum(call.window_size) + 1 + rows))
    key_blocks, blocks = -(-loaded // columns), -(-packed // rows)
    bytes_of_head = sizes.keys * (sizes.head + sizes.head_v) * element
    one_batch = call.varies and sizes.batch <= _MOST_SPLIT_BATCH
    total = (1 if one_batch else sizes.batch) * sizes.shared * blocks
    sms = num_multiprocessors()
    if total >= 0.8 * sms:
        long = bytes_of_head > _L2 and blocks >= 2 * sms and not (causal or local)
        return min(-(-bytes_of_head // _L2), 128) if long else 1
    if key_blocks <= 4:
        return 1
    return efficient_split(total, sms, range(1, min(128, sms, key_blocks) + 1))


def _tile(head: int, head_v: int, causal: bool, local: bool, element: int, paged: bool) -> tuple[int, int]:
    """Return rows and columns of a thread block's tile (tile_size_fwd_sm90); pages are not read by TMA here."""
    masked = causal or local
    if element == 1:
        sizes = {64: (192, 160), 96: (192, 128), 128: (128, 160 if paged else 224), 192: (128, 160)}
        return sizes.get(head, (128, 64 if local else 128))
    if head == 64:
        return {512: (64, 64), 256: (128, 96)}.get(head_v, (192, 128 if masked else 192))
    by_head = {
        96: (192, 128 if local or paged else 144),
        128: (128, 128 if masked or paged else 176),
        192: (128, 96 if local or paged else 128 if head_v <= 128 else 112),
    }
    return by_head.get(head, (128, 64 if local else 80))


def _forward(query, key, value, call: HopperOptions) -> tuple[torch.Tensor, ...]:
    """Return output and log of the sums, and for split keys the parts of both (mha_fwd)."""
    query, key = last_contiguous(query), last_contiguous(key)
    if value.stride(-1) != 1 and value.stride(-3) != 1:
        value = value.contiguous()
    sizes = _Sizes.of(query, key, value, call)
    halves = query.dtype if query.dtype != torch.float8_e4m3fn else torch.bfloat16
    out = query.new_empty((*query.shape[:-1], sizes.head_v), dtype=halves)
    rows = (sizes.batch, sizes.heads, sizes.queries) if call.cu_seqlens_q is None else (sizes.heads, query.shape[0])
    sums = query.new_empty(rows, dtype=torch.float32)
    splits = call.splits if call.splits > 0 else _splits(sizes, call, query.element_size())
    dynamic = call.varies and sizes.batch <= _MOST_SPLIT_BATCH
    causal, local = _masks(call, sizes)
    counts = ((causal or local) and splits == 1) or call.varies
    if _arch() < 90:
        counts = (causal and not call.varies) or (call.varies and splits > 1)
    metadata = None
    if (counts or dynamic) and call.scheduler_metadata is None:
        metadata = query.new_empty(int(counts) + int(dynamic) * sizes.batch, dtype=torch.int32)
    if splits <= 1:
        del metadata
        return out, sums
    parts = query.new_empty((splits, *rows, sizes.head_v), dtype=torch.float32)
    return out, sums, parts, query.new_empty((splits, *rows), dtype=torch.float32)


def _backward_tile(arch: int, head: int, causal: bool, local: bool, softcap: float) -> tuple[int, int]:
    """Return rows and columns of a thread block's tile in the backward (mha_bwd, kBlockM and kBlockN)."""
    if arch >= 90:
        if head <= 64:
            rows = 96 if causal and softcap > 0 else 128
        else:
            rows = 80 if 96 < head <= 128 and not (causal or local or softcap > 0) else 64
        return rows, 128 if head <= 128 else 96 if head <= 192 else 80
    if arch in (86, 89):
        return 64 if head <= 192 else 32, 128 if head <= 96 else 96 if head <= 128 else 64
    return 128 if head <= 64 else 64, 128 if head <= 128 else 80 if head <= 192 else 64


def _backward(gradient, query, key, value, out, call: HopperOptions) -> None:
    """Allocate the scratch of mha_bwd: two row sums, the float32 accumulator of the queries' gradient, and, if heads
    share keys and values, the accumulators of their gradients."""
    gradient, query, key, value, out = map(last_contiguous, (gradient, query, key, value, out))
    sizes = _Sizes.of(query, key, value, call)
    head = _rounded_head(max(sizes.head, sizes.head_v))
    causal, local = _masks(call, sizes)
    rows, columns = _backward_tile(_arch(), head, causal, local, call.softcap)
    if call.varies:
        tokens = query.shape[0] if call.cu_seqlens_q is not None else sizes.batch * sizes.queries
        others = key.shape[0] if call.cu_seqlens_k is not None else sizes.batch * sizes.keys
        lines: tuple[int, ...] = (sizes.heads, round_up(tokens + sizes.batch * rows, rows))
        key_lines: tuple[int, ...] = (sizes.shared, round_up(others + sizes.batch * columns, columns))
    else:
        lines = (sizes.batch, sizes.heads, round_up(sizes.queries, rows))
        key_lines = (sizes.batch, sizes.shared, round_up(sizes.keys, columns))
    scratch = [query.new_empty(lines, dtype=torch.float32) for _ in range(2)]
    scratch.append(query.new_empty((*lines, head), dtype=torch.float32))
    if sizes.shared != sizes.heads:
        scratch += [query.new_zeros((*key_lines, head), dtype=torch.float32) for _ in range(2)]
    blocks = (-(-sizes.queries // rows), sizes.batch, sizes.heads)
    scratch.append(query.new_empty(blocks, dtype=torch.int32))
    if sizes.shared != sizes.heads and call.deterministic:
        of_keys = (-(-sizes.keys // columns), sizes.batch, sizes.shared)
        locks = [query.new_empty(of_keys, dtype=torch.int32) for _ in range(2)]
        del locks
    del scratch


def _check(name: str, attention_chunk: int, *tensors: torch.Tensor) -> None:
    """Check the arguments as flash_api.cpp does. Raises MemprofError: attention in chunks, unsupported; RuntimeError:
    an unsupported dtype or head size, or a GPU before Ampere."""
    refuse(name, {f"attention_chunk={attention_chunk}": attention_chunk})
    check_on_gpu(name, *tensors)
    dtype, head = tensors[0].dtype, tensors[0].shape[-1]
    if _arch() < 80:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if dtype not in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        raise RuntimeError("FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    if head > 256 or head % (16 if dtype == torch.float8_e4m3fn else 8):
        raise RuntimeError(f"head_size {head} is not supported by FlashAttention 3: at most 256, a multiple of 8")
    if len(tensors) == 3:
        query, key, value = tensors
        require(all(tensor.dtype == dtype for tensor in tensors), name, "query, key and value of one dtype")
        require(key.shape[-1] == head, name, "queries and keys of one size of heads")
        require(key.shape[:-1] == value.shape[:-1], name, "keys and values of one shape but the size of heads")
        require(query.shape[-2] % key.shape[-2] == 0, name, "heads of keys that divide those of queries")
        require("varlen" in name or query.dim() == 4, name, "queries of 4 dimensions")


def _call(name: str, attention_chunk: int, inputs: tuple[torch.Tensor, ...], call: HopperOptions, heads: int = 0):
    """Run one call; saves queries, keys, values, the output, its sums, and the tensors of sequence bounds."""
    _check(f"{_NAME}.{name}", attention_chunk, *inputs)
    number, packed = len(inputs), inputs[0].shape

    def unpack(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if len(tensors) == 3:
            return tensors
        if tensors[0].dim() == 5:
            return tensors[0].unbind(-3)
        shared = (tensors[0].shape[2] - heads) // 2
        return tensors[0].split([heads, shared, shared], dim=-2)

    def forward(*tensors: torch.Tensor):
        query, key, value = unpack(tensors)
        out, sums = _forward(query, key, value, call)[:2]
        return out, (query, key, value, out, sums, call.cu_seqlens_q, call.cu_seqlens_k, *call.others[:2])

    def backward(saved: tuple[torch.Tensor, ...], gradient: torch.Tensor):
        query, key, value, out = saved[:4]
        if number == 3:
            made: tuple[torch.Tensor, ...] = tuple(map(torch.empty_like, (query, key, value)))
        else:
            made = (query.new_empty(packed),)
        _backward(gradient, query, key, value, out, call)
        return made

    return kernel(forward, backward, *inputs)


@_public
def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
):  # fmt: skip
    """Attend, with [batch, tokens, heads, size] each: the output, row sums, scheduler metadata, accumulators."""
    call = HopperOptions(causal, window_size, softcap, num_splits, deterministic)
    return _call("flash_attn_func", attention_chunk, (q, k, v), call)


@_public
def flash_attn_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0,
):  # fmt: skip
    """Attend, with all three as [batch, tokens, 3, heads, size] or concatenated along heads: one gradient."""
    call = HopperOptions(causal, window_size, softcap, 1, deterministic)
    return _call("flash_attn_qkvpacked_func", attention_chunk, (qkv,), call, num_heads_q or 0)


@_public
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
    causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
):  # fmt: skip
    """Attend as flash_attn_func, with [tokens, heads, size] each."""
    call = HopperOptions(
        causal, window_size, softcap, num_splits, deterministic, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, others=(seqused_q, seqused_k),
    )  # fmt: skip
    return _call("flash_attn_varlen_func", attention_chunk, (q, k, v), call)


@register_in(_NAME, source=_SOURCE)
def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """Attend with a cache that is filled in place; no backward exists."""
    _check(f"{_NAME}.flash_attn_with_kvcache", attention_chunk, q, k_cache)
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((k_cache.shape[0],), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    call = HopperOptions(
        causal, window_size, softcap, num_splits, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        page_table=page_table, others=(None, cache_seqlens, cache_leftpad), scheduler_metadata=scheduler_metadata,
    )  # fmt: skip
    new = [last_contiguous(tensor) for tensor in (k, v)]
    if k is not None:
        mark_written(k_cache, v_cache)
    made = _forward(q, k_cache, v_cache, call)
    del new
    return made if return_softmax_lse else made[0]
