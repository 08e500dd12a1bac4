"""flashinfer's sampling: a token for each row, from probabilities in float32 (cast if needed), without sorting.

Sources: flashinfer/sampling.py, topk.py (radix_topk) and utils.py (_get_cache_buf) of flashinfer-ai/flashinfer@v0.6.17.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.stubs.flashinfer.layers import register
from memprof.stubs.tools import check_on_gpu, keep_for_run, unsupported_error
from memprof.units import round_up

_BUFFER_BYTES = 1024 * 1024
_MAX_TOP_K, _MIN_VOCABULARY = 256, 65536  # limits of the path with top-k first
_BLACKWELL = 10


def _keep_buffer(name: str, device: torch.device) -> None:
    """Allocate a buffer of 1 MiB at the first call with `name` and `device`; it lives until the run ends."""
    keep_for_run(("flashinfer", name, device), lambda: torch.empty(_BUFFER_BYTES, dtype=torch.uint8, device=device))


def _check(name: str, rows: torch.Tensor, check_nan: bool) -> None:
    check_on_gpu(f"flashinfer.{name}", rows)
    if rows.dim() != 2:
        raise RuntimeError(f"flashinfer.{name}: expected two dimensions, got {rows.dim()}")
    if check_nan and torch.any(torch.isnan(rows)):
        raise ValueError("Input contains NaN.")


def _sample(name: str, rows: torch.Tensor, indices, *thresholds, check_nan: bool, return_valid: bool | None = False):
    """Return a token for each row, and if `return_valid` whether it is valid (None: validity is not allocated)."""
    _check(name, rows, check_nan)
    rows = rows.float()
    float_thresholds = [threshold.float() for threshold in thresholds if isinstance(threshold, torch.Tensor)]
    num_samples = rows.size(0) if indices is None else indices.size(0)
    samples = torch.empty(num_samples, dtype=torch.int32 if indices is None else indices.dtype, device=rows.device)
    if return_valid is None:
        return samples
    is_valid = torch.empty(num_samples, dtype=torch.bool, device=rows.device)
    del float_thresholds
    return (samples, is_valid) if return_valid else samples


@register("sampling", "softmax")
def softmax(logits, temperature=None, enable_pdl=None):
    """Return probabilities in float32; keeps a buffer of 1 MiB."""
    _check("softmax", logits, False)
    _keep_buffer("softmax_workspace", logits.device)
    logits = logits.float()
    divisors = temperature.float() if isinstance(temperature, torch.Tensor) else None
    probs = torch.empty_like(logits)
    del divisors
    return probs


@register("sampling", "sampling_from_logits")
def sampling_from_logits(
    logits, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None
):
    """Return a token for each row; casts logits to float32."""
    return _sample("sampling_from_logits", logits, indices, check_nan=check_nan, return_valid=None)


@register("sampling", "sampling_from_probs")
def sampling_from_probs(
    probs, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None, return_valid=False
):
    """Return a token for each row, and if `return_valid` whether it is valid; casts probabilities to float32."""
    return _sample("sampling_from_probs", probs, indices, check_nan=check_nan, return_valid=return_valid)


@register("sampling", "top_p_sampling_from_probs")
def top_p_sampling_from_probs(
    probs, top_p, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None,
    return_valid=False,
):  # fmt: skip
    """Return a token for each row by top-p sampling; allocates as sampling_from_probs does."""
    return _sample("top_p_sampling_from_probs", probs, indices, top_p, check_nan=check_nan, return_valid=return_valid)


@register("sampling", "top_k_sampling_from_probs")
def top_k_sampling_from_probs(
    probs, top_k, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None,
    return_valid=False,
):  # fmt: skip
    """Return a token for each row by top-k sampling; allocates as sampling_from_probs does."""
    return _sample("top_k_sampling_from_probs", probs, indices, top_k, check_nan=check_nan, return_valid=return_valid)


@register("sampling", "min_p_sampling_from_probs")
def min_p_sampling_from_probs(
    probs, min_p, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None,
    return_valid=False,
):  # fmt: skip
    """Return a token for each row by min-p sampling; allocates as sampling_from_probs does."""
    return _sample("min_p_sampling_from_probs", probs, indices, min_p, check_nan=check_nan, return_valid=return_valid)


@register("sampling", "top_k_top_p_sampling_from_logits")
def top_k_top_p_sampling_from_logits(
    logits, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True, generator=None,
    check_nan=False, seed=None, offset=None,
):  # fmt: skip
    """Return a token for each row by top-k and top-p; allocates masked logits, or only the top k if k <= 256."""
    return _sample_top_k_top_p(
        True, logits, top_k, top_p, indices, filter_apply_order, deterministic, check_nan, return_valid=False
    )


@register("sampling", "top_k_top_p_sampling_from_probs")
def top_k_top_p_sampling_from_probs(
    probs, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True, generator=None,
    check_nan=False, seed=None, offset=None, return_valid=False,
):  # fmt: skip
    """Return a token for each row by top-k and top-p; allocates new probabilities, or only the top k if k <= 256."""
    return _sample_top_k_top_p(
        False, probs, top_k, top_p, indices, filter_apply_order, deterministic, check_nan, return_valid=return_valid
    )


def _sample_top_k_top_p(
    from_logits: bool, rows: torch.Tensor, top_k, top_p, indices, order: str, deterministic: bool, check_nan: bool, *,
    return_valid: bool,
):  # fmt: skip
    name = f"top_k_top_p_sampling_from_{'logits' if from_logits else 'probs'}"
    _check(name, rows, False)
    if order == "joint":
        probs = torch.softmax(rows, dim=-1) if from_logits else rows
        return _sample(name, probs, indices, top_k, top_p, check_nan=check_nan, return_valid=return_valid)
    if order != "top_k_first":
        raise ValueError(f"Invalid filter_apply_order: {order}")
    options = {"deterministic": deterministic, "check_nan": check_nan, "return_valid": return_valid}
    # _top_k_first_fast_path_applicable
    is_large = rows.size(-1) >= _MIN_VOCABULARY
    if indices is None and isinstance(top_k, int) and is_large and 0 < top_k <= min(_MAX_TOP_K, rows.size(-1) - 1):
        return _sample_top_k_first(name, from_logits, rows, top_k, top_p, options)
    top_k_rows = top_k_mask_logits(rows, top_k) if from_logits else top_k_renorm_probs(rows, top_k)
    probs = torch.softmax(top_k_rows, dim=-1) if from_logits else top_k_rows
    return top_p_sampling_from_probs(probs, top_p, indices, **options)


def _sample_top_k_first(name: str, from_logits: bool, rows: torch.Tensor, top_k: int, top_p, options: dict[str, Any]):
    if not options["deterministic"] and torch.cuda.get_device_capability(rows.device)[0] == _BLACKWELL:
        raise unsupported_error(f"flashinfer.{name}", "deterministic=False on a GPU of compute capability 10.0")
    _keep_buffer("radix_topk_row_states", rows.device)
    values = torch.empty(rows.size(0), top_k, dtype=rows.dtype, device=rows.device)
    tokens = torch.empty(rows.size(0), top_k, dtype=torch.int32, device=rows.device).long()
    if not options["deterministic"]:
        values, order = torch.sort(values, dim=-1, descending=True)
        tokens = torch.gather(tokens, dim=-1, index=order)
    values = values.float()
    probs = torch.softmax(values, dim=-1) if from_logits else values / values.sum(dim=-1, keepdim=True)
    sampled = top_p_sampling_from_probs(probs, top_p, None, **options)
    positions = sampled[0] if options["return_valid"] else sampled
    samples = tokens.gather(1, positions.view(-1, 1).long()).squeeze(1).to(torch.int32)
    return (samples, sampled[1]) if options["return_valid"] else samples


@register("sampling", "top_p_renorm_probs")
def top_p_renorm_probs(probs, top_p, is_deterministic=False):
    """Return renormalized probabilities in float32; scratch per row: counters, histograms, two lists of candidates."""
    _check("top_p_renorm_probs", probs, False)
    batch, vocabulary = probs.shape
    candidates = max(round_up(vocabulary // 32, 256), 256)
    counters, histograms = 384 * batch, 4 * 2048 * batch
    buffer_sizes = (counters, histograms * (2 if is_deterministic else 1), histograms, *(4 * candidates * batch,) * 2)
    num_bytes = sum(round_up(size, 256) for size in buffer_sizes)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=probs.device)
    result = torch.empty_like(probs.float())
    del workspace
    return result


def _filter_top_k(name: str, rows: torch.Tensor, top_k) -> torch.Tensor:
    _check(name, rows, False)
    if rows.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise AssertionError(f"Unsupported dtype {rows.dtype}, expected float32, float16, or bfloat16")
    _keep_buffer(name, rows.device)
    limits = top_k.int() if isinstance(top_k, torch.Tensor) else None
    result = torch.empty_like(rows)
    del limits
    return result


@register("sampling", "top_k_renorm_probs")
def top_k_renorm_probs(probs, top_k):
    """Return renormalized probabilities in their dtype; keeps a buffer of 1 MiB."""
    return _filter_top_k("top_k_renorm_probs", probs, top_k)


@register("sampling", "top_k_mask_logits")
def top_k_mask_logits(logits, top_k):
    """Return masked logits in their dtype; keeps a buffer of 1 MiB."""
    return _filter_top_k("top_k_mask_logits", logits, top_k)
