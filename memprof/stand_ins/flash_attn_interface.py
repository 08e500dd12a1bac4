"""FlashAttention 3, as its package flash_attn_3 is imported: flash_attn_interface.

Python's part is hopper/flash_attn_interface.py, that of C++ hopper/flash_api.cpp (mha_fwd, mha_bwd) with heuristics.h
and tile_size.h, of Dao-AILab/flash-attention@v2.8.3. Float8 changes nothing but the output's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memprof.stand_ins.registry import stand_in
from memprof.stand_ins.tools import kernel, must, on_card, refused, written

_HEADS = (64, 96, 128, 192, 256)
_L2 = 50 * 1024 * 1024
_MOST_SPLIT_BATCH = 992


def _public(name: str) -> Callable[[Any], Any]:
    source = "Dao-AILab/flash-attention@v2.8.3:hopper/flash_attn_interface.py, hopper/flash_api.cpp"
    return stand_in(f"flash_attn_interface.{name}", source=source, in_graph="cache" not in name)


class _Call(NamedTuple):
    """What is asked of one call, beside the tensors."""

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
    others: tuple[torch.Tensor | None, ...] = ()
    """Lengths in use, and what pads on the left: any of them makes the call one of varying lengths."""
    scheduler_metadata: torch.Tensor | None = None

    @property
    def varies(self) -> bool:
        """Whether sequences may have several lengths."""
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
    def of(cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: _Call) -> _Sizes:
        bounds, table = call.cu_seqlens_q, call.page_table
        batch = query.shape[0] if bounds is None else bounds.shape[0] - 1
        queries = query.shape[1] if bounds is None else int(call.max_seqlen_q or 0)
        if call.cu_seqlens_k is not None:
            keys = int(call.max_seqlen_k or 0)
        else:
            keys = key.shape[1] if table is None else table.shape[1] * key.shape[1]
        return cls(batch, queries, keys, query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1])


def _last_contiguous(tensor: Any) -> Any:
    return tensor.contiguous() if tensor is not None and tensor.stride(-1) != 1 else tensor


def _rounded_head(size: int) -> int:
    """round_up_headdim, of a build with all sizes."""
    return next((head for head in _HEADS if size <= head), 512)


def _arch() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _masks(call: _Call, sizes: _Sizes) -> tuple[bool, bool]:
    """Whether the kernel is the causal one, and whether it is one of a window (set_params_fprop)."""
    left, right = call.window_size
    left = -1 if left >= sizes.keys - 1 else left
    right = -1 if right >= sizes.queries - 1 else right
    if call.causal and not (sizes.queries == 1 and left == right == -1):
        right = 0
    causal = left < 0 and right == 0
    return causal, (left >= 0 or right >= 0) and not causal


# -- the kernels ---------------------------------------------------------------------------------------------------


def _splits(sizes: _Sizes, call: _Call, element: int) -> int:
    """get_num_splits: into how many parts the keys are split, on Hopper."""
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
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    if total >= 0.8 * sms:
        long = bytes_of_head > _L2 and blocks >= 2 * sms and not (causal or local)
        return min(-(-bytes_of_head // _L2), 128) if long else 1
    if key_blocks <= 4:
        return 1
    efficiency = [(total * n / sms) / -(-(total * n) // sms) for n in range(1, min(128, sms, key_blocks) + 1)]
    return next(n for n, value in enumerate(efficiency, 1) if value >= 0.85 * max(efficiency))


def _tile(head: int, head_v: int, causal: bool, local: bool, element: int, paged: bool) -> tuple[int, int]:
    """tile_size_fwd_sm90: rows and columns that a block of threads works on; pages are not read by TMA here."""
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


def _forward(query: Any, key: Any, value: Any, call: _Call) -> tuple[torch.Tensor, ...]:
    """mha_fwd: output, log of the sums, and where the keys are split the parts of both."""
    query, key = _last_contiguous(query), _last_contiguous(key)
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


def _blocks(arch: int, head: int, causal: bool, local: bool, softcap: float) -> tuple[int, int]:
    """Rows and columns that a block of the backward works on (mha_bwd, kBlockM and kBlockN)."""
    if arch >= 90:
        if head <= 64:
            rows = 96 if causal and softcap > 0 else 128
        else:
            rows = 80 if 96 < head <= 128 and not (causal or local or softcap > 0) else 64
        return rows, 128 if head <= 128 else 96 if head <= 192 else 80
    if arch in (86, 89):
        return 64 if head <= 192 else 32, 128 if head <= 96 else 96 if head <= 128 else 64
    return 128 if head <= 64 else 64, 128 if head <= 128 else 80 if head <= 192 else 64


def _backward(gradient: Any, query: Any, key: Any, value: Any, out: Any, call: _Call) -> None:
    """mha_bwd beside the three gradients: two sums of rows, what accumulates the queries' gradient in float32, and, if
    heads share keys and values, theirs."""
    gradient, query, key, value, out = map(_last_contiguous, (gradient, query, key, value, out))
    sizes = _Sizes.of(query, key, value, call)
    head = _rounded_head(max(sizes.head, sizes.head_v))
    causal, local = _masks(call, sizes)
    rows, columns = _blocks(_arch(), head, causal, local, call.softcap)
    shared = (sizes.batch, sizes.shared)
    if call.varies:
        tokens = query.shape[0] if call.cu_seqlens_q is not None else sizes.batch * sizes.queries
        others = key.shape[0] if call.cu_seqlens_k is not None else sizes.batch * sizes.keys
        lines: tuple[int, ...] = (sizes.heads, -(-(tokens + sizes.batch * rows) // rows) * rows)
        shared = (sizes.shared,)  # type: ignore[assignment]
        key_lines = -(-(others + sizes.batch * columns) // columns) * columns
    else:
        lines = (sizes.batch, sizes.heads, -(-sizes.queries // rows) * rows)
        key_lines = -(-sizes.keys // columns) * columns
    scratch = [query.new_empty(lines, dtype=torch.float32) for _ in range(2)]
    scratch.append(query.new_empty((*lines, head), dtype=torch.float32))
    if sizes.shared != sizes.heads:
        scratch += [query.new_zeros((*shared, key_lines, head), dtype=torch.float32) for _ in range(2)]
    blocks = (-(-sizes.queries // rows), sizes.batch, sizes.heads)
    scratch.append(query.new_empty(blocks, dtype=torch.int32))
    if sizes.shared != sizes.heads and call.deterministic:
        of_keys = (-(-sizes.keys // columns), sizes.batch, sizes.shared)
        locks = [query.new_empty(of_keys, dtype=torch.int32) for _ in range(2)]
        del locks
    del scratch


# -- what a program calls ------------------------------------------------------------------------------------------


def _check(name: str, *tensors: torch.Tensor) -> None:
    """What flash_api.cpp refuses too.

    Raises:
        RuntimeError: a dtype or a size of heads that it does not take, or a card before Ampere.
    """
    on_card(f"flash_attn_interface.{name}", *tensors)
    dtype, head = tensors[0].dtype, tensors[0].shape[-1]
    if _arch() < 80:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if dtype not in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        raise RuntimeError("FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    if head > 256 or head % (16 if dtype == torch.float8_e4m3fn else 8):
        raise RuntimeError(f"head_size {head} is not supported by FlashAttention 3: at most 256, a multiple of 8")
    if len(tensors) == 3:
        query, key, value = tensors
        must(
            all(tensor.dtype == dtype for tensor in tensors),
            f"flash_attn_interface.{name}",
            "query, key and value of one dtype",
        )
        must(key.shape[-1] == head, f"flash_attn_interface.{name}", "queries and keys of one size of heads")
        must(
            key.shape[:-1] == value.shape[:-1],
            f"flash_attn_interface.{name}",
            "keys and values of one shape but the size of heads",
        )
        must(
            query.shape[-2] % key.shape[-2] == 0,
            f"flash_attn_interface.{name}",
            "heads of keys that divide those of queries",
        )
        must("varlen" in name or query.dim() == 4, f"flash_attn_interface.{name}", "queries of 4 dimensions")


def _call(name: str, inputs: tuple[Any, ...], call: _Call, heads: int | None = None) -> Any:
    """Saved for the backward: queries, keys, values, the output, its sums, and what says where sequences end."""
    _check(name, *inputs)
    number, packed = len(inputs), inputs[0].shape

    def unpacked(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(tensors) == 3:
            return tensors
        if tensors[0].dim() == 5:
            return tensors[0].unbind(-3)
        shared = (tensors[0].shape[2] - (heads or 0)) // 2
        return tensors[0].split([heads, shared, shared], dim=-2)

    def forward(*tensors: torch.Tensor) -> Any:
        query, key, value = unpacked(tensors)
        out, sums = _forward(query, key, value, call)[:2]
        return out, (query, key, value, out, sums, call.cu_seqlens_q, call.cu_seqlens_k, *call.others[:2])

    def backward(saved: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> Any:
        query, key, value, out = saved[:4]
        if number == 3:
            made: tuple[torch.Tensor, ...] = tuple(map(torch.empty_like, (query, key, value)))
        else:
            made = (query.new_empty(packed),)
        _backward(gradient, query, key, value, out, call)
        return made

    return kernel(forward, backward, *inputs)


@_public("flash_attn_func")
def flash_attn_func(
    q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: Any = False, qv: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, window_size: Any = (-1, -1), attention_chunk: Any = 0,
    softcap: Any = 0.0, num_splits: Any = 1, pack_gqa: Any = None, deterministic: Any = False, sm_margin: Any = 0,
) -> Any:  # fmt: skip
    """[batch, tokens, heads, size] each: the output, sums of rows, a scheduler's numbers, accumulators."""
    _know(attention_chunk, "flash_attn_func")
    return _call("flash_attn_func", (q, k, v), _Call(causal, window_size, softcap, num_splits, deterministic))


@_public("flash_attn_qkvpacked_func")
def flash_attn_qkvpacked_func(
    qkv: Any, softmax_scale: Any = None, causal: Any = False, q_descale: Any = None, k_descale: Any = None,
    v_descale: Any = None, window_size: Any = (-1, -1), attention_chunk: Any = 0, softcap: Any = 0.0,
    deterministic: Any = False, num_heads_q: Any = None, sm_margin: Any = 0,
) -> Any:  # fmt: skip
    """All three as [batch, tokens, 3, heads, size], or side by side as [batch, tokens, heads, size]: one gradient."""
    _know(attention_chunk, "flash_attn_qkvpacked_func")
    call = _Call(causal, window_size, softcap, 1, deterministic)
    return _call("flash_attn_qkvpacked_func", (qkv,), call, num_heads_q)


@_public("flash_attn_varlen_func")
def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    seqused_q: Any = None, seqused_k: Any = None, softmax_scale: Any = None, causal: Any = False, qv: Any = None,
    q_descale: Any = None, k_descale: Any = None, v_descale: Any = None, window_size: Any = (-1, -1),
    attention_chunk: Any = 0, softcap: Any = 0.0, num_splits: Any = 1, pack_gqa: Any = None,
    deterministic: Any = False, sm_margin: Any = 0,
) -> Any:  # fmt: skip
    """[tokens, heads, size] each, as flash_attn_func."""
    _know(attention_chunk, "flash_attn_varlen_func")
    call = _Call(
        causal, window_size, softcap, num_splits, deterministic, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, others=(seqused_q, seqused_k),
    )  # fmt: skip
    return _call("flash_attn_varlen_func", (q, k, v), call)


@_public("flash_attn_with_kvcache")
def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, qv: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    page_table: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: Any = None,
    rotary_seqlens: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    softmax_scale: Any = None, causal: Any = False, window_size: Any = (-1, -1), attention_chunk: Any = 0,
    softcap: Any = 0.0, rotary_interleaved: Any = True, scheduler_metadata: Any = None, num_splits: Any = 0,
    pack_gqa: Any = None, sm_margin: Any = 0, return_softmax_lse: Any = False,
) -> Any:  # fmt: skip
    """The cache is filled where it lies; there is no backward."""
    _know(attention_chunk, "flash_attn_with_kvcache")
    _check("flash_attn_with_kvcache", q, k_cache)
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((k_cache.shape[0],), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    call = _Call(
        causal, window_size, softcap, num_splits, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        page_table=page_table, others=(None, cache_seqlens, cache_leftpad), scheduler_metadata=scheduler_metadata,
    )  # fmt: skip
    new = [_last_contiguous(tensor) for tensor in (k, v)]
    if k is not None:
        written(k_cache, v_cache)
    made = _forward(q, k_cache, v_cache, call)
    del new
    return made if return_softmax_lse else made[0]


def _know(attention_chunk: int, name: str) -> None:
    if attention_chunk:
        raise refused(f"flash_attn_interface.{name}", f"attention_chunk={attention_chunk}")
