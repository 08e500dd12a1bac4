"""flashinfer's paged keys and values, and merges of partial attention results.

Sources: flashinfer/page.py, cascade.py and utils.py (_unpack_paged_kv_cache) of flashinfer-ai/flashinfer@v0.6.17.
"""

from __future__ import annotations

import torch

from memprof.stubs.flashinfer.layers import register
from memprof.stubs.tools import check_on_gpu, mark_written

LAYOUTS = ("NHD", "HND")


def check_layout(kv_layout: str) -> None:
    """Raise KeyError unless `kv_layout` is "NHD" (tokens before heads) or "HND" (heads before tokens)."""
    if kv_layout not in LAYOUTS:
        raise KeyError(f"Invalid kv_layout {kv_layout}")


def unpack_cache(cache, kv_layout: str) -> tuple[torch.Tensor, ...]:
    """Return the pages of keys and of values, each with four dimensions, from one tensor with both or from a pair."""
    dim = -3 if kv_layout == "NHD" else -2
    if isinstance(cache, tuple):
        keys, values = cache
        if not all(tensor.ndim in (3, 4) for tensor in cache):
            raise ValueError("x must be 3D or 4D")
        return tuple(tensor.unsqueeze(dim) if tensor.ndim == 3 else tensor for tensor in (keys, values))
    if not isinstance(cache, torch.Tensor):
        raise KeyError(f"Unrecognized paged_kv_cache type {type(cache)}, expect a single tensor or a tuple of tensor.")
    if cache.ndim not in (4, 5):
        raise ValueError("x must be 4D or 5D")
    return (cache.unsqueeze(dim) if cache.ndim == 4 else cache).unbind(dim=1)


@register("page", "get_seq_lens")
def get_seq_lens(kv_indptr, kv_last_page_len, page_size):
    """Return the number of tokens of each sequence, computed by torch's own functions."""
    return torch.clamp(kv_indptr[1:] - kv_indptr[:-1] - 1, min=0) * page_size + kv_last_page_len


@register("page", "get_batch_indices_positions")
def get_batch_indices_positions(append_indptr, seq_lens, nnz, batch_indices=None, positions=None):
    """Return the sequence and the position of each of `nnz` new tokens, as two int32 tensors."""
    check_on_gpu("flashinfer.get_batch_indices_positions", append_indptr, seq_lens)
    outputs = []
    for out in (batch_indices, positions):
        out = torch.empty((nnz,), device=append_indptr.device, dtype=torch.int32) if out is None else out
        if out.shape != (nnz,) or out.dtype != torch.int32:
            raise ValueError(f"expected ({nnz},) of torch.int32, got {tuple(out.shape)} of {out.dtype}")
        mark_written(out)
        outputs.append(out)
    return tuple(outputs)


@register("page", "append_paged_kv_cache")
def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len,
    kv_layout="NHD",
):  # fmt: skip
    """Write keys and values into pages in place; copies index tensors that are not int32."""
    check_layout(kv_layout)
    caches = unpack_cache(paged_kv_cache, kv_layout)
    _append("append_paged_kv_cache", caches, (append_key, append_value), positions, batch_indices, kv_indices,
              kv_indptr, kv_last_page_len)  # fmt: skip


@register("page", "append_paged_mla_kv_cache")
def append_paged_mla_kv_cache(
    append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_last_page_len
):
    """Write MLA's latent keys and values and rotary keys into pages in place; copies indices that are not int32."""
    _append("append_paged_mla_kv_cache", (ckv_cache, kpe_cache), (append_ckv, append_kpe), positions, batch_indices,
              kv_indices, kv_indptr, kv_last_page_len)  # fmt: skip


def _append(name: str, caches, new_tokens: tuple[torch.Tensor, ...], *indices: torch.Tensor) -> None:
    check_on_gpu(f"flashinfer.{name}", *caches, *new_tokens, *indices)
    for cache, tokens in zip(caches, new_tokens, strict=True):
        if cache.dtype != tokens.dtype or cache.shape[-1] != tokens.shape[-1]:
            raise RuntimeError(f"flashinfer.{name}: {tokens.dtype} of {tokens.shape[-1]} into pages of {cache.dtype} of {cache.shape[-1]}")  # fmt: skip  # noqa: E501
    copies = [tensor.int() for tensor in indices]
    mark_written(*caches)
    del copies


@register("cascade", "merge_state")
def merge_state(v_a, s_a, v_b, s_b):
    """Return the merge of two partial attention outputs, and its log-sum-exp in float32."""
    check_on_gpu("flashinfer.merge_state", v_a, s_a, v_b, s_b)
    s_a, s_b = s_a.float(), s_b.float()
    return torch.empty_like(v_a), torch.empty_like(s_a)


@register("cascade", "merge_state_in_place")
def merge_state_in_place(v, s, v_other, s_other, mask=None):
    """Merge two partial attention outputs into `v` and `s`; copies log-sum-exps that are not float32."""
    check_on_gpu("flashinfer.merge_state_in_place", v, s, v_other, s_other, mask)
    s, s_other = s.float(), s_other.float()
    mark_written(v, s)


@register("cascade", "merge_states")
def merge_states(v, s):
    """Return the merge of any number of partial attention outputs, and its log-sum-exp in float32."""
    check_on_gpu("flashinfer.merge_states", v, s)
    s = s.float()
    length, _, heads, size = v.size()
    output = torch.empty(length, heads, size, dtype=v.dtype, device=v.device)
    return output, torch.empty(length, heads, dtype=torch.float32, device=v.device)
