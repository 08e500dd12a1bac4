"""SGLang's memory at start-up in closed form: what is free before loading x mem_fraction_static - weights is the pool
of keys and values.

Read in release 0.5.13: srt/server_args.py (_handle_gpu_memory_settings), srt/model_executor/
model_runner_kv_cache_mixin.py (_profile_available_bytes) and pool_configurator.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memprof.device.catalog import Gpu
from memprof.errors import UsageError
from memprof.estimate.serving.cache import ELEMENT_BYTES
from memprof.estimate.serving.model import FULL, ITEMSIZE, LATENT, STATE, WINDOW, ServedModel
from memprof.estimate.serving.options import ServingOptions
from memprof.estimate.serving.weights import count_weight_bytes, find_weight_format
from memprof.serving.budget import EngineBudget
from memprof.units import GIB, MIB

LATEST_SGLANG = "0.5.13"
SWA_FULL_TOKENS_RATIO = 0.8  # Tokens of windowed layers for each token of full ones (server_args.py).
_MAMBA_FULL_MEMORY_RATIO = 0.9  # Memory of states for each byte of the cache (server_args.py).
_BAND = 0.06
# Free memory before loading is less than the GPU's by CUDA's context, cuBLAS and, with several GPUs, NCCL: 23.06 of
# 23.58 GiB in published logs of two RTX 3090s.
_BEFORE_LOADING = round(0.52 * GIB)


@dataclass(frozen=True, slots=True)
class SglangDefaults:
    """Options that SGLang chooses by the GPU's memory."""

    chunked_prefill_size: int
    max_graph_batch: int  # cuda_graph_max_bs
    fraction: float  # mem_fraction_static


def choose_sglang_defaults(
    model: ServedModel, total_bytes: int, tensor_parallel: int, *, has_images: bool, chunk: int | None = None
) -> SglangDefaults:
    """Return SGLang's defaults; nvidia-smi's memory, which it reads, is taken as 1.5% above CUDA's."""
    mib, is_small = total_bytes * 1.015 / MIB, tensor_parallel < 4
    tiers = (
        (20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (160, 8192, 256, 512), (1 << 20, 16384, 512, 512),
    )  # fmt: skip
    _, default_chunk, few, many = next(tier for tier in tiers if mib < tier[0] * 1024)
    chunk, graphs = chunk or default_chunk, few if is_small else many
    reserved = 512 + max(chunk, 2048) * 1.5 + graphs * 2 + tensor_parallel / 8 * 1024
    reserved += 1536 if model.latent else 8 * _count_piecewise_sizes(chunk)
    if mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    fraction = round((mib - reserved) / mib, 3)
    if has_images and model.images is not None:
        complexity = model.images.layers * model.images.hidden**2 / (24 * 1024**2)
        fraction *= 0.95 * max(0.8, min(1.05, 1 - 0.1 * (complexity - 1)))
    return SglangDefaults(chunk, graphs, fraction)


def _count_piecewise_sizes(limit: int) -> int:
    """Return the number of token counts for which piecewise CUDA graphs are captured."""
    ranges = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, limit + 1, 512))
    return sum(size <= limit for bounds in ranges for size in range(*bounds))


def compute_sglang_budget(model: ServedModel, gpu: Gpu, options: ServingOptions) -> EngineBudget:
    """Return the memory of one of the GPUs after SGLang's start, or why it does not start.

    Raises UsageError: the model's heads cannot be divided over the GPUs, or an option or the release is not known.
    """
    _check_release(options.release)
    total, tp = options.total_bytes or gpu.total_bytes, options.tensor_parallel
    defaults = choose_sglang_defaults(
        model, total, tp, has_images=options.profiles_images, chunk=options.max_num_batched_tokens
    )
    fraction = options.utilization or defaults.fraction
    weight_format = find_weight_format(model, options.quantization)
    weights = count_weight_bytes(model, weight_format, tp, gpu.compute_capability, has_images=options.profiles_images)
    before = options.free_bytes or total - _BEFORE_LOADING
    outside = round((total - before) * fraction)
    available = int(total * fraction) - outside - weights
    states = 0
    if model.state is not None:
        ratio = _MAMBA_FULL_MEMORY_RATIO
        states = int(available * ratio / (1 + ratio)) if available > 0 else 0
    rate = count_pool_token_bytes(model, tp, options.kv_cache_dtype)
    cache = available - states
    tokens = max(int(cache // rate), 0)
    length = options.context_length or model.max_positions
    refusal = _find_invalid(model, gpu, length, fraction)
    if refusal:
        pass
    elif weights > before:
        refusal = f"CUDA out of memory: weights of {weights / GIB:.2f} GiB, {before / GIB:.2f} GiB free"
    elif tokens <= 0:
        least = min((weights + rate * 512) / before, 0.99)
        refusal = (
            f"Not enough memory. Please try to increase --mem-fraction-static (it is {fraction:g}; weights alone need "
            f"{least:.3f})"
        )
    margin = round(_BAND * tokens) + round(0.15 * GIB / rate)
    return EngineBudget(
        engine="sglang", release=options.release or LATEST_SGLANG, model=model.name, gpu=gpu.key, tensor_parallel=tp,
        dtype=model.dtype, quantization=weight_format.name if weight_format else None,
        kv_cache_dtype=options.kv_cache_dtype, context_length=length, max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=defaults.chunked_prefill_size, total_bytes=total, utilization=fraction,
        weights_bytes=weights, outside_torch_bytes=outside, kv_cache_bytes=cache, block_size=1, num_tokens=tokens,
        num_tokens_low=max(tokens - margin, 0), num_tokens_high=tokens + margin,
        longest_context=min(tokens, model.max_positions), concurrency=tokens / length, refusal=refusal,
        assumptions=_list_assumptions(states),
    )  # fmt: skip


def _find_invalid(model: ServedModel, gpu: Gpu, length: int, fraction: float) -> str:
    """Return why the engine refuses its options before it loads anything (srt/model_executor/model_runner.py,
    load_model; srt/configs/model_config.py); empty: it does not."""
    if gpu.compute_capability < (7, 5) and not gpu.name.startswith("AMD"):
        return "SGLang only supports sm75 and above."
    if length > model.max_positions:
        return (
            f"User-specified context_length ({length}) is greater than the derived context_length "
            f"({model.max_positions}); SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 allows it"
        )
    if fraction <= 0:
        return "activations of one --chunked-prefill-size leave nothing to weights and cache; make it smaller"
    return ""


def _check_release(release: str | None) -> None:
    if release is not None and re.match(r"v?0\.[45](\.|$)", release) is None:
        hint = f"the rules are those of {LATEST_SGLANG}; give one such as that"
        raise UsageError("this release of SGLang is not known here", value=release, hint=hint)


def count_pool_token_bytes(
    model: ServedModel, tensor_parallel: int, kv_cache_dtype: str, window_ratio: float = SWA_FULL_TOKENS_RATIO
) -> float:
    """Return the bytes of a token in the pool of one GPU: all full layers, and of windowed layers the part that
    `window_ratio` says; layers that share another one's keys and values have their own here."""
    element = ELEMENT_BYTES.get(kv_cache_dtype, float(ITEMSIZE))
    g = model.geometry
    kinds = [layer for layer in model.layers if layer.kind != STATE]
    shared = int(model.text.get("num_kv_shared_layers") or 0)
    counts = {
        kind: [layer for layer in kinds if layer.kind == kind] for kind in (FULL, LATENT, WINDOW)
    }  # fmt: skip
    full, latent, window = counts[FULL], counts[LATENT], counts[WINDOW]
    if latent:
        return len(latent) * latent[0].head_dim * element
    num_full, num_window = len(full), len(window)
    if shared:
        types = list(model.text.get("layer_types") or ())
        num_full = types.count("full_attention") or g.layers // 6
        num_window = g.layers - num_full

    def count(layer_heads: int, head_dim: int) -> float:
        return 2 * max(1, layer_heads // tensor_parallel) * head_dim * element

    full_bytes = num_full * count(full[0].kv_heads, full[0].head_dim) if full else 0.0
    window_bytes = num_window * count(window[0].kv_heads, window[0].head_dim) if window else 0.0
    return full_bytes + window_bytes * (window_ratio if full else 1.0)


def _list_assumptions(states: int) -> tuple[str, ...]:
    texts = [
        f"Rules of SGLang {LATEST_SGLANG} as read in its source; later ones may size the pool after capturing graphs.",
        "Nothing else is on the GPU. The fraction is of what is free before loading; the part of CUDA's context is "
        "counted outside torch.",
        "Activations and CUDA graphs come from what the fraction leaves; they are not subtracted.",
    ]
    if states:
        texts.append(
            f"{states / GIB:.2f} GiB of the pool hold states of linear attention (mamba_full_memory_ratio 0.9)."
        )
    return tuple(texts)
