"""flashinfer's sampling: a token for each row, from probabilities in float32 (cast if needed), without sorting.

Sources: flashinfer/sampling.py, topk.py (radix_topk) and utils.py (_get_cache_buf) of flashinfer-ai/flashinfer@v0.6.17.
"""

from __future__ import annotations

import torch

from memprof.stubs.flashinfer.layers import public
from memprof.stubs.tools import check_on_gpu, keep_for_run, unsupported_error

_ROW_STATES = 1024 * 1024
_MAX_TOP_K, _MIN_VOCABULARY = 256, 65536  # limits of the path with top-k first
_BLACKWELL = 10


def _buffer(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the buffer that the package allocates once for a GPU, and keeps."""
    return keep_for_run(
        ("flashinfer", name, like.device), lambda: torch.empty(_ROW_STATES, dtype=torch.uint8, device=like.device)
    )


def _check(name: str, rows: torch.Tensor, check_nan: bool) -> None:
    check_on_gpu(f"flashinfer.{name}", rows)
    if rows.dim() != 2:
        raise RuntimeError(f"flashinfer.{name}: expected two dimensions, got {rows.dim()}")
    if check_nan and torch.any(torch.isnan(rows)):
        raise ValueError("Input contains NaN.")


def _sample(name: str, rows: torch.Tensor, indices, *thresholds, check_nan: bool, valid: bool | None = False):
    """Return the tokens, and whether each is valid; with `valid` None the latter is not allocated."""
    _check(name, rows, check_nan)
    rows = rows.float()
    in_float = [each.float() for each in thresholds if isinstance(each, torch.Tensor)]
    number = rows.size(0) if indices is None else indices.size(0)
    dtype = torch.int32 if indices is None else indices.dtype
    samples = torch.empty(number, dtype=dtype, device=rows.device)
    if valid is None:
        return samples
    is_valid = torch.empty(number, dtype=torch.bool, device=rows.device)
    del in_float
    return (samples, is_valid) if valid else samples


@public("sampling", "softmax")
def softmax(logits, temperature=None, enable_pdl=None):
    """Return probabilities in float32; a buffer of 1 MiB is kept."""
    _check("softmax", logits, False)
    _buffer("softmax_workspace", logits)
    in_float = logits.float()
    divisors = temperature.float() if isinstance(temperature, torch.Tensor) else None
    made = torch.empty_like(in_float)
    del divisors
    return made


@public("sampling", "sampling_from_logits")
def sampling_from_logits(
    logits, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None
):
    """Return a token for each row; logits that are not float32 are cast."""
    return _sample("sampling_from_logits", logits, indices, check_nan=check_nan, valid=None)


@public("sampling", "sampling_from_probs")
def sampling_from_probs(
    probs, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None, return_valid=False
):
    """Return a token for each row, and whether it is valid; probabilities that are not float32 are cast."""
    return _sample("sampling_from_probs", probs, indices, check_nan=check_nan, valid=return_valid)


@public("sampling", "top_p_sampling_from_probs")
def top_p_sampling_from_probs(
    probs, top_p, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None,
    return_valid=False,
):  # fmt: skip
    """Return a token for each row among the most probable, as sampling_from_probs does."""
    return _sample("top_p_sampling_from_probs", probs, indices, top_p, check_nan=check_nan, valid=return_valid)


@public("sampling", "top_k_sampling_from_probs")
def top_k_sampling_from_probs(
    probs, top_k, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None,
    return_valid=False,
):  # fmt: skip
    """Return a token for each row among the most probable, as sampling_from_probs does."""
    return _sample("top_k_sampling_from_probs", probs, indices, top_k, check_nan=check_nan, valid=return_valid)


@public("sampling", "min_p_sampling_from_probs")
def min_p_sampling_from_probs(
    probs, min_p, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None,
    return_valid=False,
):  # fmt: skip
    """Return a token for each row among the most probable, as sampling_from_probs does."""
    return _sample("min_p_sampling_from_probs", probs, indices, min_p, check_nan=check_nan, valid=return_valid)


@public("sampling", "top_k_top_p_sampling_from_logits")
def top_k_top_p_sampling_from_logits(
    logits, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True, generator=None,
    check_nan=False, seed=None, offset=None,
):  # fmt: skip
    """Return tokens from masked logits' probabilities; with up to 256 of a large vocabulary, from these alone."""
    name, order = "top_k_top_p_sampling_from_logits", filter_apply_order
    return _top_k_top_p(name, logits, top_k, top_p, indices, order, deterministic, check_nan, valid=False, logits=True)


@public("sampling", "top_k_top_p_sampling_from_probs")
def top_k_top_p_sampling_from_probs(
    probs, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True, generator=None,
    check_nan=False, seed=None, offset=None, return_valid=False,
):  # fmt: skip
    """Return tokens from renormalized probabilities; with up to 256 of a large vocabulary, from these alone."""
    name, order, valid = "top_k_top_p_sampling_from_probs", filter_apply_order, return_valid
    return _top_k_top_p(name, probs, top_k, top_p, indices, order, deterministic, check_nan, valid=valid, logits=False)


def _top_k_top_p(
    name: str, rows: torch.Tensor, top_k, top_p, indices, order: str, deterministic: bool, check_nan: bool, *,
    valid: bool, logits: bool,
):  # fmt: skip
    _check(name, rows, False)
    if order == "joint":
        probs = torch.softmax(rows, dim=-1) if logits else rows
        return _sample(name, probs, indices, top_k, top_p, check_nan=check_nan, valid=valid)
    if order != "top_k_first":
        raise ValueError(f"Invalid filter_apply_order: {order}")
    if _is_few(rows, top_k, indices):
        return _sample_top_k_first(name, rows, top_k, top_p, deterministic, check_nan, valid=valid, logits=logits)
    left = top_k_mask_logits(rows, top_k) if logits else top_k_renorm_probs(rows, top_k)
    probs = torch.softmax(left, dim=-1) if logits else left
    return top_p_sampling_from_probs(probs, top_p, indices, deterministic, check_nan=check_nan, return_valid=valid)


def _is_few(rows: torch.Tensor, top_k, indices) -> bool:
    """Return whether the fast path of top-k first applies (_top_k_first_fast_path_applicable)."""
    large = rows.size(-1) >= _MIN_VOCABULARY
    return indices is None and isinstance(top_k, int) and 0 < top_k <= _MAX_TOP_K and large and top_k < rows.size(-1)


def _sample_top_k_first(
    name: str, rows: torch.Tensor, top_k: int, top_p, deterministic: bool, check_nan: bool, *, valid: bool, logits: bool
):
    if not deterministic and torch.cuda.get_device_capability(rows.device)[0] == _BLACKWELL:
        raise unsupported_error(f"flashinfer.{name}", "deterministic=False on a GPU of compute capability 10.0")
    _buffer("radix_topk_row_states", rows)
    values = torch.empty(rows.size(0), top_k, dtype=rows.dtype, device=rows.device)
    places = torch.empty(rows.size(0), top_k, dtype=torch.int32, device=rows.device).long()
    if not deterministic:
        values, order = torch.sort(values, dim=-1, descending=True)
        places = torch.gather(places, dim=-1, index=order)
    values = values.float()
    probs = torch.softmax(values, dim=-1) if logits else values / values.sum(dim=-1, keepdim=True)
    found = top_p_sampling_from_probs(probs, top_p, None, deterministic, check_nan=check_nan, return_valid=valid)
    local = found[0] if valid else found
    mapped = places.gather(1, local.view(-1, 1).long()).squeeze(1).to(torch.int32)
    return (mapped, found[1]) if valid else mapped


@public("sampling", "top_p_renorm_probs")
def top_p_renorm_probs(probs, top_p, is_deterministic=False):
    """Return probabilities in float32; scratch for each row: counters, histograms and two lists of candidates."""
    _check("top_p_renorm_probs", probs, False)
    batch, vocabulary = probs.shape
    left = max(_align(vocabulary // 32), 256)
    parts = (384 * batch, (8 if is_deterministic else 4) * 2048 * batch, 4 * 2048 * batch, 4 * left * batch)
    workspace = torch.empty(
        sum(map(_align, (*parts, parts[-1]))), dtype=torch.uint8, device=probs.device
    )  # fmt: skip
    made = torch.empty_like(probs.float())
    del workspace
    return made


def _align(size: int) -> int:
    return -(-size // 256) * 256


def _filter_top_k(name: str, rows: torch.Tensor, top_k) -> torch.Tensor:
    _check(name, rows, False)
    if rows.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise AssertionError(f"Unsupported dtype {rows.dtype}, expected float32, float16, or bfloat16")
    _buffer(name, rows)
    numbers = top_k.int() if isinstance(top_k, torch.Tensor) else None
    made = torch.empty_like(rows)
    del numbers
    return made


@public("sampling", "top_k_renorm_probs")
def top_k_renorm_probs(probs, top_k):
    """Return probabilities in their dtype; a buffer of 1 MiB is kept."""
    return _filter_top_k("top_k_renorm_probs", probs, top_k)


@public("sampling", "top_k_mask_logits")
def top_k_mask_logits(logits, top_k):
    """Return logits in their dtype; a buffer of 1 MiB is kept."""
    return _filter_top_k("top_k_mask_logits", logits, top_k)
