"""llama.cpp's memory in closed form: GGUF weights by layer, KV cache, compute buffer, and what goes to the CPU.

Read in releases of 2025: src/llama-quant.cpp (which tensors get more bits), ggml/src/ggml-common.h (bytes of a block),
src/llama-kv-cache.cpp, src/llama-context.cpp and common/common.h (defaults).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from memprof.device.catalog import Gpu
from memprof.errors import unknown_name
from memprof.estimate.serving.model import LATENT, STATE, ServedModel
from memprof.estimate.serving.options import ServingOptions
from memprof.estimate.serving.weights import list_parts
from memprof.serving.budget import BudgetChange, EngineBudget
from memprof.units import GIB

# Bytes and weights of a block of each type.
_BLOCKS = {
    "q4_0": (18, 32), "q8_0": (34, 32), "q4_k": (144, 256), "q5_k": (176, 256), "q6_k": (210, 256), "f16": (2, 1),
    "bf16": (2, 1), "f32": (4, 1), "mxfp4": (17, 32),
}  # fmt: skip
# File type -> type of most matrices, of those with more bits, and of the output head.
GGUF_TYPES = {
    "q4_k_m": ("q4_k", "q6_k", "q6_k"), "q4_k_s": ("q4_k", "q4_k", "q6_k"), "q5_k_m": ("q5_k", "q6_k", "q6_k"),
    "q6_k": ("q6_k", "q6_k", "q6_k"), "q8_0": ("q8_0", "q8_0", "q8_0"), "q4_0": ("q4_0", "q4_0", "q6_k"),
    "f16": ("f16", "f16", "f16"), "bf16": ("bf16", "bf16", "bf16"), "mxfp4": ("mxfp4", "mxfp4", "q8_0"),
}  # fmt: skip
_CACHE_TYPES = {"auto": "f16", "fp8": "q8_0", "q8_0": "q8_0", "q4_0": "q4_0"}
_UBATCH = 512  # Tokens computed together (common.h, n_ubatch).
_OUTSIDE = round(0.45 * GIB)  # CUDA context and cuBLAS, which llama.cpp's buffers do not include.


def compute_llama_cpp_budget(model: ServedModel, gpu: Gpu, options: ServingOptions) -> EngineBudget:
    """Return the memory of llama.cpp on one GPU: with all layers on it, else with as many as fit beside the cache.

    Raises UsageError: the type of file or of cache is not known.
    """
    gguf_type = options.quantization or ("mxfp4" if model.family == "gpt_oss" else "q4_k_m")
    if gguf_type not in GGUF_TYPES:
        raise unknown_name("--gguf-type", gguf_type, GGUF_TYPES)
    total, length = options.total_bytes or gpu.total_bytes, options.context_length or min(model.max_positions, 4096)
    sequences = options.concurrency or 1
    layers, fixed = [*_list_layer_bytes(model, gguf_type)], _count_output_bytes(model, gguf_type)
    rate = count_cache_token_bytes(model, options.kv_cache_dtype)
    states = 0 if model.state is None else sequences * model.state.count_bytes(1, 4) * _count_states(model)
    compute = _count_compute_bytes(model, options.max_num_batched_tokens or _UBATCH)
    cache = round(rate * length * sequences) + states
    room = total - _OUTSIDE - compute - fixed
    num_layers = _count_fitting(layers, cache, room)
    is_whole = num_layers == len(layers)
    weights = fixed + sum(layers[len(layers) - num_layers :])
    left = room - sum(layers) - states
    longest = max(int(left // rate), 0) if rate else model.max_positions
    refusal = "" if num_layers else f"no layer fits beside its {length:,} tokens of cache"
    shown_type = gguf_type if is_whole else f"{gguf_type}, {num_layers} of {len(layers)} layers"
    command = _make_command(model, options, length, sequences, num_layers, is_whole=is_whole)
    return EngineBudget(
        engine="llama.cpp", model=model.name, gpu=gpu.key, quantization=shown_type,
        kv_cache_dtype=_CACHE_TYPES.get(options.kv_cache_dtype, "f16"), context_length=length, max_num_seqs=sequences,
        max_num_batched_tokens=options.max_num_batched_tokens or _UBATCH, total_bytes=total, utilization=1.0,
        weights_bytes=weights, outside_torch_bytes=_OUTSIDE,
        profile_peak_bytes=compute, profile_peak_reason="logits and hidden states of a batch in float32",
        kv_cache_bytes=cache * num_layers // len(layers), num_tokens=length * sequences,
        longest_context=min(longest, model.max_positions),
        concurrency=float(sequences), requested_concurrency=options.concurrency,
        refusal=refusal, command=command, assumptions=_ASSUMPTIONS,
        changes=tuple(_list_changes(model, gpu, options, gguf_type, cache)),
    )  # fmt: skip


def _count_fitting(layers: list[int], cache: int, room: int) -> int:
    """Return how many of the last layers fit into `room` bytes with their part of the cache: llama.cpp puts those on
    the GPU (--n-gpu-layers)."""
    count = 0
    for size in reversed(layers):
        room -= size + cache // len(layers)
        if room < 0:
            break
        count += 1
    return count


def _has_more_bits(index: int, count: int) -> bool:
    """Return whether a layer's values and down projection have more bits (llama-quant.cpp, use_more_bits)."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def _count_type_bytes(count: int, name: str) -> int:
    num_bytes, weights = _BLOCKS[name]
    return count * num_bytes // weights


def _list_layer_bytes(model: ServedModel, gguf_type: str) -> Iterator[int]:
    """Yield the bytes of each layer's weights: an even part of all matrices, and more bits for some."""
    main, more, _ = GGUF_TYPES[gguf_type]
    g = model.geometry
    parts = [part for part in list_parts(model) if part.name not in ("embedding", "output head", "positions")]
    matrices = sum(part.count * part.copies for part in parts if part.block)
    others = sum(part.count * part.copies for part in parts if not part.block)
    values = g.hidden * g.kv_width if model.latent is None else 0
    down = sum(part.count * part.copies for part in parts if part.name in ("MLP down", "experts' down")) // g.layers
    for index in range(g.layers):
        larger = values + down if _has_more_bits(index, g.layers) else 0
        plain = matrices // g.layers - larger
        size = _count_type_bytes(plain, main) + _count_type_bytes(larger, more)
        yield size + 4 * others // g.layers


def _count_output_bytes(model: ServedModel, gguf_type: str) -> int:
    """Return the bytes of the output head; the token embedding stays on the CPU, and a tied one is on both."""
    g = model.geometry
    return _count_type_bytes(g.vocab * g.hidden, GGUF_TYPES[gguf_type][2])


def count_cache_token_bytes(model: ServedModel, cache_dtype: str) -> float:
    """Return the bytes of a token in the KV cache of all layers; windowed layers keep all tokens here (--swa-full)."""
    num_bytes, weights = _BLOCKS[_CACHE_TYPES.get(cache_dtype, "f16")]
    elements = sum(
        (1 if layer.kind == LATENT else 2 * layer.kv_heads) * layer.head_dim
        for layer in model.layers
        if layer.kind != STATE
    )
    return elements * num_bytes / weights


def _count_states(model: ServedModel) -> int:
    return sum(layer.kind == STATE for layer in model.layers)


def _count_compute_bytes(model: ServedModel, tokens: int) -> int:
    """Return the compute buffer: logits and hidden states of a batch in float32 (258.5 MiB for Llama 3.1 8B)."""
    g = model.geometry
    width = max(g.vocab + g.hidden, 3 * g.intermediate + 2 * g.hidden)
    return tokens * width * 4


def _list_changes(
    model: ServedModel, gpu: Gpu, options: ServingOptions, gguf_type: str, cache: int
) -> Iterator[BudgetChange]:
    """Yield smaller caches and weights, and for experts how many layers have theirs on the CPU."""
    rate = count_cache_token_bytes(model, "fp8")
    if options.kv_cache_dtype == "auto" and rate:
        base = count_cache_token_bytes(model, "auto")
        flag = "--flash-attn on --cache-type-k q8_0 --cache-type-v q8_0"
        size = round(cache * rate / base)
        yield BudgetChange(flag, size, round(cache / base), cost="precision of keys and values")
    total = options.total_bytes or gpu.total_bytes
    layers = [*_list_layer_bytes(model, gguf_type)]
    excess = sum(layers) + cache + _count_output_bytes(model, gguf_type) + _OUTSIDE - total
    excess += _count_compute_bytes(model, options.max_num_batched_tokens or _UBATCH)
    if model.experts is not None and excess > 0:
        main = GGUF_TYPES[gguf_type][0]
        per_layer = sum(_count_type_bytes(part.count, main) for part in list_parts(model) if part.block == "experts")
        count = -(-excess // per_layer)
        if count <= model.experts.num_layers:
            tokens = round(cache / count_cache_token_bytes(model, options.kv_cache_dtype))
            yield BudgetChange(f"--n-cpu-moe {count}", cache, tokens, cost="experts of these layers run on the CPU")


def _make_command(
    model: ServedModel, options: ServingOptions, length: int, sequences: int, num_layers: int, *, is_whole: bool
) -> str:
    words = ["llama-server", "--model", shlex.quote(f"{model.name.rpartition('/')[2]}.gguf")]
    words += ["--ctx-size", str(length * sequences), "--n-gpu-layers", "999" if is_whole else str(max(num_layers, 0))]
    if sequences > 1:
        words += ["--parallel", str(sequences)]
    if _CACHE_TYPES.get(options.kv_cache_dtype, "f16") != "f16":
        words += ["--flash-attn on --cache-type-k q8_0 --cache-type-v q8_0"]
    return " ".join(words)


_ASSUMPTIONS = (
    "GGUF weights by llama.cpp's rules of 2025 for the type of file; the token embedding is in host memory.",
    "Flash attention, as by default; layers with a sliding window keep all tokens (--swa-full) in this figure.",
    "Compute buffer for 512 tokens (--ubatch-size); CUDA context and cuBLAS are taken as 0.45 GiB.",
)
