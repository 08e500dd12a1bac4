"""flash_attn.flash_attn_interface: attention, packed or not, of equal or varying lengths, and with a cache.

Sources: flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp (mha_fwd, mha_varlen_fwd, mha_bwd,
mha_varlen_bwd, mha_fwd_kvcache) of Dao-AILab/flash-attention@v2.8.3. ALiBi slopes, windows, soft capping and scales
change numbers, and memory only where the queries of a group are merged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from memprof.stubs.registry import register_in, stub
from memprof.stubs.tools import (
    HALF,
    check_on_gpu,
    count_multiprocessors,
    kernel,
    mark_written,
    maybe_contiguous,
    require,
)
from memprof.units import round_up

_SOURCE = "Dao-AILab/flash-attention@v2.8.3:flash_attn/flash_attn_interface.py, csrc/flash_attn/flash_api.cpp"
_MODULE = "flash_attn.flash_attn_interface"
_register = register_in(_MODULE, "flash_attn", source=_SOURCE, in_graph=True)


def _register_inner(name: str):
    """Return a decorator for flash_attn's internal function `name`, which other packages call (ring attention)."""
    return stub(f"{_MODULE}._flash_attn_{name}", f"{_MODULE}._wrapped_flash_attn_{name}", source=_SOURCE)


class SeqLengths(NamedTuple):
    """The lengths of concatenated sequences, whose tensors are [tokens, heads, size] without a batch dimension."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class AttentionOptions(NamedTuple):
    """The arguments of an attention call other than queries, keys and values."""

    dropout_p: float
    window_size: tuple[int, int]
    alibi_slopes: torch.Tensor | None
    deterministic: bool
    return_attn_probs: bool
    lengths: SeqLengths | None = None


def _round_head_size(size: int) -> int:
    """Return the head size to which the kernels pad `size` (head_size_rounded)."""
    return round_up(size, 32 if size <= 128 else 64)


def _pad_head(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a copy whose last dimension is padded to a multiple of 8."""
    size = tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, 8 - size % 8)) if size % 8 else tensor


def fill_cache_lengths(cache_seqlens, k_cache: torch.Tensor):
    """Return `cache_seqlens` as a tensor: a new one [batch] if it is one integer for all sequences."""
    if not isinstance(cache_seqlens, int):
        return cache_seqlens
    return torch.full((k_cache.shape[0],), cache_seqlens, dtype=torch.int32, device=k_cache.device)


def _check(name: str, *tensors: torch.Tensor) -> None:
    """Raise RuntimeError where flash_api.cpp does: a wrong dtype, heads that are too large or cannot be grouped."""
    check_on_gpu(name, *tensors)
    query, key = tensors[0], tensors[-1]
    if query.dtype not in HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if any(tensor.dtype != query.dtype for tensor in tensors):
        raise RuntimeError("query, key and value must have the same dtype")
    if query.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    if len(tensors) > 1 and query.shape[-2] % key.shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    require(all(tensor.shape[-1] == query.shape[-1] for tensor in tensors), name, "heads of one size")


def find_efficient_split(blocks: int, sms: int, split_counts: Iterable[int]) -> int:
    """Return the first of `split_counts` with 85% of the best use of `sms` multiprocessors by `blocks` per split."""
    efficiency = {splits: (blocks * splits / sms) / -(-blocks * splits // sms) for splits in split_counts}
    best_efficiency = max(efficiency.values(), default=0.0)
    return next((splits for splits, value in efficiency.items() if value >= 0.85 * best_efficiency), 1)


def _choose_num_splits(blocks: int, sms: int, key_blocks: int) -> int:
    """Return the number of parts of the keys that keeps all multiprocessors busy (num_splits_heuristic)."""
    if blocks >= 0.8 * sms:
        return 1
    part_sizes = {splits: -(-key_blocks // splits) for splits in range(1, min(128, sms, key_blocks) + 1)}
    return find_efficient_split(blocks, sms, [n for n in part_sizes if part_sizes[n] != part_sizes.get(n - 1)])


def allocate_splits(
    query: torch.Tensor, batch: int, heads: int, head: int, queries: int, keys: int, splits: int
) -> tuple[torch.Tensor, ...]:
    """Return log-sum-exp and output of each part of split keys (set_params_splitkv); chooses `splits` if below 1."""
    if splits < 1:
        block = 256 if head <= 64 else 128 if head <= 128 else 64
        splits = _choose_num_splits(batch * heads * -(-queries // 64), 2 * count_multiprocessors(), -(-keys // block))
    if splits <= 1:
        return ()
    shape = (splits, batch, heads, queries)
    return tuple(query.new_empty(dims, dtype=torch.float32) for dims in (shape, (*shape, _round_head_size(head))))


def run_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions, return_softmax: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, log-sum-exp, probabilities (empty unless returned) and RNG state (mha_fwd, mha_varlen_fwd)."""
    query, key, value = map(maybe_contiguous, (query, key, value))
    lengths = options.lengths
    heads, head = query.shape[-2:]
    if lengths is None:
        batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    else:
        batch, queries, keys = lengths.cu_seqlens_q.numel() - 1, lengths.max_seqlen_q, lengths.max_seqlen_k
    out = torch.empty_like(query)
    groups = heads // key.shape[-2]
    no_dropout = options.dropout_p == 0
    swaps_groups = queries == 1 and groups > 1 and max(options.window_size) < 0 and options.alibi_slopes is None
    lse_shape = (batch, heads, queries) if lengths is None else (heads, query.shape[0])
    lse = query.new_empty(lse_shape, dtype=torch.float32)
    shape = (batch, heads, round_up(queries, 128), round_up(keys, 128))
    probabilities = query.new_empty(shape if return_softmax else (0,))
    splits: tuple[torch.Tensor, ...] = ()
    if no_dropout and (lengths is None or swaps_groups):
        heads, queries = (key.shape[-2], groups) if swaps_groups else (heads, queries)
        splits = allocate_splits(query, batch, heads, head, queries, keys, 0)
    rng_state = torch.empty(2, dtype=torch.int64, device=query.device)
    del splits
    return out, lse, probabilities, rng_state


def run_backward(
    gradient, query, key, value, out, gradients: Iterable[torch.Tensor], deterministic: bool, lengths: SeqLengths | None
) -> torch.Tensor:
    """Write `gradients` of keys and values; return softmax_d, a float32 value per row (mha_bwd, mha_varlen_bwd).

    Scratch: float32 accumulators of the queries' gradient (several if `deterministic`), and for grouped queries the
    gradients of keys and values for each query head.
    """
    gradient, query, key, value, out = map(maybe_contiguous, (gradient, query, key, value, out))
    heads, head = query.shape[-2:]
    if lengths is None:
        batch, padded_length = query.shape[0], round_up(query.shape[1], 128)
        rows: tuple[int, ...] = (batch, padded_length)
        row_sums = query.new_empty((batch, heads, padded_length), dtype=torch.float32)
    else:
        batch = lengths.cu_seqlens_q.numel() - 1
        rows = (query.shape[0] + 128 * batch,)
        row_sums = query.new_empty((heads, *rows), dtype=torch.float32)
    shape = (*rows, heads, _round_head_size(head))
    if deterministic:
        num_parts = -(-count_multiprocessors() // (batch * heads))
        accumulator = query.new_zeros((num_parts, *shape), dtype=torch.float32)
    else:
        accumulator = query.new_empty(shape, dtype=torch.float32)
    if (key_heads := key.shape[-2]) != heads:
        head_gradients = [key.new_empty((*key.shape[:-2], heads, head)) for _ in range(2)]
        for head_gradient, total in zip(head_gradients, gradients, strict=True):
            torch.sum(head_gradient.view(*key.shape[:-2], key_heads, heads // key_heads, head), dim=-2, out=total)
    del accumulator
    return row_sums


def _attend(name: str, inputs: tuple[torch.Tensor, ...], *arguments):
    """Run an attention function with a backward on `inputs`: queries, keys, values, or tensors that pack them.

    Saved for the backward: the three tensors (padded if needed), output, log-sum-exp, cu_seqlens and RNG state.
    """
    name, options = f"flash_attn.{name}", AttentionOptions(*arguments)
    _check(name, *inputs)
    head, num_inputs, lengths = inputs[0].shape[-1], len(inputs), options.lengths
    is_packed, rows = num_inputs < 3, 4 if lengths is None else 3
    require(inputs[0].dim() == rows + (num_inputs == 1), name, f"queries of {rows} dimensions")
    if lengths is None:
        require(inputs[-1].dim() == rows + is_packed, name, f"keys of {rows + is_packed} dimensions")
        require(inputs[0].shape[0] == inputs[-1].shape[0], name, "queries and keys of one batch size")
    else:
        require(all(t.dtype == torch.int32 for t in lengths[:2]), name, "cu_seqlens of dtype int32")

    def forward(*tensors: torch.Tensor):
        query, key, value = map(_pad_head, _unpack(tensors))
        return_softmax = options.return_attn_probs and options.dropout_p > 0
        out, lse, probabilities, rng_state = run_forward(query, key, value, options, return_softmax)
        saved = (query, key, value, out, lse, *(lengths[:2] if lengths else ()), rng_state)
        result = out[..., :head]
        return ((result, lse, probabilities) if options.return_attn_probs else result), saved

    def backward(saved: tuple[torch.Tensor, ...], gradient: torch.Tensor, *other_gradients):
        query, key, value, out = saved[:4]
        gradients = _allocate_gradients(num_inputs, query, key, value)
        gradient = _pad_head(gradient)
        run_backward(gradient, query, key, value, out, _unpack(gradients)[1:], options.deterministic, lengths)
        return tuple(tensor[..., :head] for tensor in gradients)

    return kernel(forward, backward, *inputs)


def _unpack(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return queries, keys and values from one tensor [..., 3, heads, size], from two (q, [..., 2, ...]), or three."""
    if len(tensors) == 3:
        return tensors
    return (*tensors[:-1], *(part.detach() for part in tensors[-1].unbind(-3)))


def _allocate_gradients(num_inputs: int, query, key, value) -> tuple[torch.Tensor, ...]:
    if num_inputs == 3:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    packed = query.new_empty((*key.shape[:-2], 4 - num_inputs, *key.shape[-2:]))
    return (packed,) if num_inputs == 1 else (torch.empty_like(query), packed)


@_register
def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Attention, with q, k, v [batch, tokens, heads, size]: output, log-sum-exp in float32, copies of padded heads."""
    return _attend("flash_attn_func", (q, k, v), dropout_p, window_size, alibi_slopes, deterministic, return_attn_probs)


@_register
def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Attention as flash_attn_func, with `kv` [batch, tokens, 2, heads, size], whose gradient is one tensor."""
    return _attend(
        "flash_attn_kvpacked_func", (q, kv), dropout_p, window_size, alibi_slopes, deterministic, return_attn_probs
    )


@_register
def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Attention as flash_attn_func, with `qkv` [batch, tokens, 3, heads, size], whose gradient is one tensor."""
    return _attend(
        "flash_attn_qkvpacked_func", (qkv,), dropout_p, window_size, alibi_slopes, deterministic, return_attn_probs
    )


@_register
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """Attention over concatenated sequences, with q, k, v [tokens, heads, size], or a paged cache (block_table)."""
    lengths = SeqLengths(cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    options = (dropout_p, window_size, alibi_slopes, deterministic, return_attn_probs, lengths)
    return _attend("flash_attn_varlen_func", (q, k, v), *options)


@_register
def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Attention over concatenated sequences, with `kv` [tokens, 2, heads, size], whose gradient is one tensor."""
    lengths = SeqLengths(cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    options = (dropout_p, window_size, alibi_slopes, deterministic, return_attn_probs, lengths)
    return _attend("flash_attn_varlen_kvpacked_func", (q, kv), *options)


@_register
def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Attention over concatenated sequences, with `qkv` [tokens, 3, heads, size], whose gradient is one tensor."""
    lengths = SeqLengths(cu_seqlens, cu_seqlens, int(max_seqlen), int(max_seqlen))
    options = (dropout_p, window_size, alibi_slopes, deterministic, return_attn_probs, lengths)
    return _attend("flash_attn_varlen_qkvpacked_func", (qkv,), *options)


@register_in(_MODULE, "flash_attn", source=_SOURCE)
def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """Attention with a KV cache that is written in place (mha_fwd_kvcache); copies the cache if heads need padding."""
    _check("flash_attn.flash_attn_with_kvcache", q, k_cache)
    q, k, v = map(maybe_contiguous, (q, k, v))
    cache_seqlens = fill_cache_lengths(cache_seqlens, k_cache)
    batch, queries, heads, head_size = q.shape
    keys = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    key_heads, groups = k_cache.shape[-2], heads // k_cache.shape[-2]
    swaps_groups = queries == 1 and groups > 1 and max(window_size) < 0 and head_size % 8 == 0 and alibi_slopes is None
    caches = [_pad_head(k_cache), _pad_head(v_cache)]
    query = _pad_head(q)
    out = torch.empty_like(query)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    new_tokens = [_pad_head(tensor) for tensor in (k, v) if tensor is not None]
    if new_tokens:
        mark_written(k_cache, v_cache)
    rows, split_heads = (groups, key_heads) if swaps_groups else (queries, heads)
    splits = allocate_splits(q, batch, split_heads, round_up(head_size, 8), rows, keys, num_splits)
    if head_size % 8:
        out = out[..., :head_size]
        if k is not None:
            k_cache.copy_(caches[0][..., :head_size])
            v_cache.copy_(caches[1][..., :head_size])
    del new_tokens, splits
    return (out, lse) if return_softmax_lse else out


@_register_inner("forward")
def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    """Return output, log-sum-exp, probabilities and RNG state of attention over [batch, tokens, heads, size]."""
    _check(f"{_MODULE}._flash_attn_forward", q, k, v)
    options = AttentionOptions(dropout_p, (window_size_left, window_size_right), alibi_slopes, False, return_softmax)
    return run_forward(q, k, v, options, return_softmax)


@_register_inner("varlen_forward")
def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    """Return output, log-sum-exp, probabilities and RNG state of attention over [tokens, heads, size]."""
    _check(f"{_MODULE}._flash_attn_varlen_forward", q, k, v)
    lengths = SeqLengths(cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    window = (window_size_left, window_size_right)
    options = AttentionOptions(dropout_p, window, alibi_slopes, False, return_softmax, lengths)
    return run_forward(q, k, v, options, return_softmax)


@_register_inner("backward")
def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    """Write the gradients into `dq`, `dk` and `dv`; return softmax_d, a float32 value per row."""
    _check(f"{_MODULE}._flash_attn_backward", q, k, v)
    gradients = [torch.empty_like(x) if dx is None else dx for dx, x in ((dq, q), (dk, k), (dv, v))]
    return run_backward(dout, q, k, v, out, gradients[1:], deterministic, None)


@_register_inner("varlen_backward")
def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    """Write the gradients of concatenated sequences into `dq`, `dk` and `dv`; return softmax_d."""
    _check(f"{_MODULE}._flash_attn_varlen_backward", q, k, v)
    gradients = [torch.empty_like(x) if dx is None else dx for dx, x in ((dq, q), (dk, k), (dv, v))]
    lengths = SeqLengths(cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    return run_backward(dout, q, k, v, out, gradients[1:], deterministic, lengths)
