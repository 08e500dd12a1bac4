"""FlashAttention 3, whose package flash_attn_3 is imported as flash_attn_interface.

Sources: hopper/flash_attn_interface.py and hopper/flash_api.cpp (mha_fwd, mha_bwd) with heuristics.h and tile_size.h,
of Dao-AILab/flash-attention@v2.8.3. Float8 changes only the output's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from memprof.stubs.flash_attn.attention import fill_cache_lengths, find_efficient_split
from memprof.stubs.registry import register_in
from memprof.stubs.tools import (
    check_on_gpu,
    count_multiprocessors,
    kernel,
    mark_written,
    maybe_contiguous,
    refuse_if,
    require,
)
from memprof.units import round_up

_HEAD_SIZES = (64, 96, 128, 192, 256)
_L2_CACHE_BYTES = 50 * 1024 * 1024
_MAX_DYNAMIC_SPLIT_BATCH = 992  # largest batch with a number of splits for each sequence (use_dynamic_split)
_NAME = "flash_attn_interface"
_SOURCE = "Dao-AILab/flash-attention@v2.8.3:hopper/flash_attn_interface.py, hopper/flash_api.cpp"
_register = register_in(_NAME, source=_SOURCE, in_graph=True)


class HopperOptions(NamedTuple):
    """The arguments of an attention call other than queries, keys and values."""

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    num_splits: int = 1
    deterministic: bool = False
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    page_table: torch.Tensor | None = None
    # Used lengths of queries and keys, left padding: any of them makes the call one of varying lengths.
    used_lengths: tuple[torch.Tensor | None, ...] = ()
    scheduler_metadata: torch.Tensor | None = None

    @property
    def has_varying_lengths(self) -> bool:
        """Return whether the sequences may have different lengths."""
        return any(tensor is not None for tensor in (self.cu_seqlens_q, self.cu_seqlens_k, *self.used_lengths))


class _Sizes:
    """The sizes of an attention call: batch, tokens, heads; and whether its kernel is causal or has a window."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: HopperOptions) -> None:
        bounds, table = options.cu_seqlens_q, options.page_table
        self.batch = query.shape[0] if bounds is None else bounds.shape[0] - 1
        self.queries = query.shape[1] if bounds is None else int(options.max_seqlen_q or 0)
        if options.cu_seqlens_k is not None:
            self.keys = int(options.max_seqlen_k or 0)
        else:
            self.keys = key.shape[1] if table is None else table.shape[1] * key.shape[1]
        self.heads, self.key_heads = query.shape[-2], key.shape[-2]
        self.head, self.head_v = query.shape[-1], value.shape[-1]
        # Whether the kernel is causal, and whether it has a window (set_params_fprop).
        left, right = options.window_size
        left = -1 if left >= self.keys - 1 else left
        right = -1 if right >= self.queries - 1 else right
        if options.causal and not (self.queries == 1 and left == right == -1):
            right = 0
        self.is_causal = left < 0 and right == 0
        self.is_local = (left >= 0 or right >= 0) and not self.is_causal


def _round_head_size(size: int) -> int:
    """Return the head size to which the kernels pad `size` (round_up_headdim)."""
    return next((head for head in _HEAD_SIZES if size <= head), 512)


def _get_arch() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _choose_num_splits(sizes: _Sizes, options: HopperOptions, element_bytes: int) -> int:
    """Return the number of parts into which Hopper's kernel splits the keys (get_num_splits)."""
    rows, columns = _get_forward_tile(sizes, element_bytes, is_paged=options.page_table is not None)
    packed_queries = sizes.queries * (sizes.heads // sizes.key_heads)
    loaded_keys = sizes.keys
    if sizes.is_local:
        loaded_keys = max(0, min(sizes.keys, sum(options.window_size) + 1 + rows))
    key_blocks, blocks = -(-loaded_keys // columns), -(-packed_queries // rows)
    head_bytes = sizes.keys * (sizes.head + sizes.head_v) * element_bytes
    batch = 1 if options.has_varying_lengths and sizes.batch <= _MAX_DYNAMIC_SPLIT_BATCH else sizes.batch
    total_blocks = batch * sizes.key_heads * blocks
    sms = count_multiprocessors()
    if total_blocks >= 0.8 * sms:
        exceeds_cache = head_bytes > _L2_CACHE_BYTES and blocks >= 2 * sms and not (sizes.is_causal or sizes.is_local)
        return min(-(-head_bytes // _L2_CACHE_BYTES), 128) if exceeds_cache else 1
    if key_blocks <= 4:
        return 1
    return find_efficient_split(total_blocks, sms, range(1, min(128, sms, key_blocks) + 1))


def _get_forward_tile(sizes: _Sizes, element_bytes: int, *, is_paged: bool) -> tuple[int, int]:
    """Return rows and columns of a thread block's tile in the forward (tile_size_fwd_sm90)."""
    head, head_v = _round_head_size(sizes.head), _round_head_size(sizes.head_v)
    is_local = sizes.is_local
    is_masked = sizes.is_causal or is_local
    if element_bytes == 1:
        tiles = {64: (192, 160), 96: (192, 128), 128: (128, 160 if is_paged else 224), 192: (128, 160)}
        return tiles.get(head, (128, 64 if is_local else 128))
    if head == 64:
        return {512: (64, 64), 256: (128, 96)}.get(head_v, (192, 128 if is_masked else 192))
    tiles = {
        96: (192, 128 if is_local or is_paged else 144),
        128: (128, 128 if is_masked or is_paged else 176),
        192: (128, 96 if is_local or is_paged else 128 if head_v <= 128 else 112),
    }
    return tiles.get(head, (128, 64 if is_local else 80))


def run_forward(query, key, value, options: HopperOptions, out=None) -> tuple[torch.Tensor, ...]:
    """Return output (`out`, or a new tensor) and log-sum-exp, and if keys are split also both for each part in float32
    (mha_fwd)."""
    query, key = maybe_contiguous(query), maybe_contiguous(key)
    if value.stride(-1) != 1 and value.stride(-3) != 1:
        value = value.contiguous()
    sizes, has_varying_lengths = _Sizes(query, key, value, options), options.has_varying_lengths
    dtype = query.dtype if query.dtype != torch.float8_e4m3fn else torch.bfloat16
    if out is None:
        out = query.new_empty((*query.shape[:-1], sizes.head_v), dtype=dtype)
    rows = (sizes.batch, sizes.heads, sizes.queries) if options.cu_seqlens_q is None else (sizes.heads, query.shape[0])
    lse = query.new_empty(rows, dtype=torch.float32)
    splits = options.num_splits if options.num_splits > 0 else _choose_num_splits(sizes, options, query.element_size())
    has_dynamic_splits = has_varying_lengths and sizes.batch <= _MAX_DYNAMIC_SPLIT_BATCH
    has_counter = ((sizes.is_causal or sizes.is_local) and splits == 1) or has_varying_lengths
    if _get_arch() < 90:
        has_counter = (sizes.is_causal and not has_varying_lengths) or (has_varying_lengths and splits > 1)
    metadata = None
    if (has_counter or has_dynamic_splits) and options.scheduler_metadata is None:
        metadata = query.new_empty(int(has_counter) + int(has_dynamic_splits) * sizes.batch, dtype=torch.int32)
    if splits <= 1:
        del metadata
        return out, lse
    split_outputs = query.new_empty((splits, *rows, sizes.head_v), dtype=torch.float32)
    return out, lse, split_outputs, query.new_empty((splits, *rows), dtype=torch.float32)


def _get_backward_tile(head: int, sizes: _Sizes, softcap: float) -> tuple[int, int]:
    """Return rows and columns of a thread block's tile in the backward (mha_bwd, kBlockM and kBlockN)."""
    arch = _get_arch()
    if arch >= 90:
        if head <= 64:
            rows = 96 if sizes.is_causal and softcap > 0 else 128
        else:
            rows = 80 if 96 < head <= 128 and not (sizes.is_causal or sizes.is_local or softcap > 0) else 64
        return rows, 128 if head <= 128 else 96 if head <= 192 else 80
    if arch in (86, 89):
        return 64 if head <= 192 else 32, 128 if head <= 96 else 96 if head <= 128 else 64
    return 128 if head <= 64 else 64, 128 if head <= 128 else 80 if head <= 192 else 64


def allocate_backward_scratch(gradient, query, key, value, out, options: HopperOptions) -> None:
    """Allocate and free the scratch of mha_bwd: two float32 values per row, a float32 accumulator of the queries'
    gradient, and for grouped queries also of the keys' and values'."""
    gradient, query, key, value, out = map(maybe_contiguous, (gradient, query, key, value, out))
    sizes = _Sizes(query, key, value, options)
    head = _round_head_size(max(sizes.head, sizes.head_v))
    rows, columns = _get_backward_tile(head, sizes, options.softcap)
    if options.has_varying_lengths:
        queries = query.shape[0] if options.cu_seqlens_q is not None else sizes.batch * sizes.queries
        keys = key.shape[0] if options.cu_seqlens_k is not None else sizes.batch * sizes.keys
        query_shape: tuple[int, ...] = (sizes.heads, round_up(queries + sizes.batch * rows, rows))
        key_shape: tuple[int, ...] = (sizes.key_heads, round_up(keys + sizes.batch * columns, columns))
    else:
        query_shape = (sizes.batch, sizes.heads, round_up(sizes.queries, rows))
        key_shape = (sizes.batch, sizes.key_heads, round_up(sizes.keys, columns))
    scratch = [query.new_empty(query_shape, dtype=torch.float32) for _ in range(2)]
    scratch.append(query.new_empty((*query_shape, head), dtype=torch.float32))
    if sizes.key_heads != sizes.heads:
        scratch += [query.new_zeros((*key_shape, head), dtype=torch.float32) for _ in range(2)]
    scratch.append(query.new_empty((-(-sizes.queries // rows), sizes.batch, sizes.heads), dtype=torch.int32))
    if sizes.key_heads != sizes.heads and options.deterministic:
        blocks = (-(-sizes.keys // columns), sizes.batch, sizes.key_heads)
        locks = [query.new_empty(blocks, dtype=torch.int32) for _ in range(2)]
        del locks
    del scratch


def _check(name: str, attention_chunk: int, *tensors: torch.Tensor) -> None:
    """Check the arguments as flash_api.cpp does. Raises MemprofError: `attention_chunk` is set; RuntimeError: an
    unsupported dtype or head size, or a GPU before Ampere."""
    refuse_if(name, {f"attention_chunk={attention_chunk}": attention_chunk})
    check_on_gpu(name, *tensors)
    dtype, head = tensors[0].dtype, tensors[0].shape[-1]
    if _get_arch() < 80:
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


def _attend(name: str, attention_chunk: int, inputs: tuple[torch.Tensor, ...], options: HopperOptions, heads: int = 0):
    """Run an attention function with a backward; saves queries, keys, values, output, log-sum-exp and cu_seqlens."""
    _check(f"{_NAME}.{name}", attention_chunk, *inputs)
    packed_shape = inputs[0].shape if len(inputs) == 1 else None

    def unpack(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if len(tensors) == 3:
            return tensors
        if tensors[0].dim() == 5:
            return tensors[0].unbind(-3)
        key_heads = (tensors[0].shape[2] - heads) // 2
        return tensors[0].split([heads, key_heads, key_heads], dim=-2)

    def forward(*tensors: torch.Tensor):
        query, key, value = unpack(tensors)
        out, lse = run_forward(query, key, value, options)[:2]
        bounds = (options.cu_seqlens_q, options.cu_seqlens_k, *options.used_lengths[:2])
        return out, (query, key, value, out, lse, *bounds)

    def backward(saved: tuple[torch.Tensor, ...], gradient: torch.Tensor):
        query, key, value, out = saved[:4]
        gradients = (
            tuple(map(torch.empty_like, (query, key, value)))
            if packed_shape is None
            else (query.new_empty(packed_shape),)
        )
        allocate_backward_scratch(gradient, query, key, value, out, options)
        return gradients

    return kernel(forward, backward, *inputs)


@_register
def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
):  # fmt: skip
    """Attention, with q, k, v [batch, tokens, heads, size]: output, log-sum-exp; accumulators in the backward."""
    options = HopperOptions(causal, window_size, softcap, num_splits, deterministic)
    return _attend("flash_attn_func", attention_chunk, (q, k, v), options)


@_register
def flash_attn_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0,
):  # fmt: skip
    """Attention, with `qkv` [batch, tokens, 3, heads, size] or joined along heads; its gradient is one tensor."""
    options = HopperOptions(causal, window_size, softcap, 1, deterministic)
    return _attend("flash_attn_qkvpacked_func", attention_chunk, (qkv,), options, num_heads_q or 0)


@_register
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
    causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
):  # fmt: skip
    """Attention over concatenated sequences, with q, k, v [tokens, heads, size]; allocates as flash_attn_func."""
    options = HopperOptions(
        causal, window_size, softcap, num_splits, deterministic, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, used_lengths=(seqused_q, seqused_k),
    )  # fmt: skip
    return _attend("flash_attn_varlen_func", attention_chunk, (q, k, v), options)


@register_in(_NAME, source=_SOURCE)
def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """Attention with a KV cache that is written in place, without a backward; allocates output and log-sum-exp."""
    _check(f"{_NAME}.flash_attn_with_kvcache", attention_chunk, q, k_cache)
    cache_seqlens = fill_cache_lengths(cache_seqlens, k_cache)
    options = HopperOptions(
        causal, window_size, softcap, num_splits, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        page_table=page_table, used_lengths=(None, cache_seqlens, cache_leftpad), scheduler_metadata=scheduler_metadata,
    )  # fmt: skip
    new_tokens = [maybe_contiguous(tensor) for tensor in (k, v)]
    if k is not None:
        mark_written(k_cache, v_cache)
    outputs = run_forward(q, k_cache, v_cache, options)
    del new_tokens
    return outputs if return_softmax_lse else outputs[0]
