"""vLLM's memory at start-up in closed form: total x utilization - weights - outside torch - profile run - CUDA graphs
is the KV cache (v1/worker/gpu_worker.py, determine_available_memory)."""

from __future__ import annotations

from memprof.device.catalog import Gpu
from memprof.estimate.serving.cache import CacheLayout, build_layout
from memprof.estimate.serving.graphs import estimate_graph_bytes
from memprof.estimate.serving.lora import DEFAULT_RANK, count_lora_bytes
from memprof.estimate.serving.model import ServedModel
from memprof.estimate.serving.options import ServingOptions
from memprof.estimate.serving.profile import ProfileSettings, compute_profile_peak, uses_second_runner
from memprof.estimate.serving.weights import count_weight_bytes, find_weight_format
from memprof.serving.budget import EngineBudget
from memprof.serving.outside_torch import estimate_outside_torch
from memprof.serving.releases import LATEST_VLLM, VllmRules, read_vllm_rules
from memprof.units import GIB

# Of tokens, around the closed form: 16 of 17 published logs are within, and of those found later 7 of 10
# (docs/serving.md).
_BAND = 0.06
_MIN_CAPABILITY = (7, 0)  # "CUDA Archs" of its build flags, 0.18.


def compute_vllm_budget(model: ServedModel, gpu: Gpu, options: ServingOptions) -> EngineBudget:
    """Return the memory of one of the GPUs after vLLM's start, or why it does not start.

    Raises UsageError: the release has no V1 engine, the model's heads cannot be divided over the GPUs, an option is not
    known, or slots of adapters are requested for a model whose slots are not.
    """
    rules = read_vllm_rules(options.release)
    total = options.total_bytes or gpu.total_bytes
    seqs, tokens, length = _choose_limits(model, gpu, options, rules, total)
    weight_format = find_weight_format(model, options.quantization)
    tp = options.tensor_parallel
    weights = count_weight_bytes(
        model, weight_format, tp, gpu.compute_capability, has_images=options.profiles_images,
        limits_splits=rules.limits_splits,
    )  # fmt: skip
    adapters = 0
    if options.max_loras:
        adapters = count_lora_bytes(model, options.max_loras, options.max_lora_rank or DEFAULT_RANK, tp)
        weights += adapters
    settings = ProfileSettings(
        rules, gpu, tp, seqs, tokens, length, weight_format, is_eager=options.is_eager,
        profiles_images=options.profiles_images,
    )  # fmt: skip
    peak = compute_profile_peak(model, settings)
    outside = options.outside_torch_bytes
    outside = estimate_outside_torch(gpu, rules, tp) if outside is None else outside
    graphs = None
    is_second_runner = uses_second_runner(model, rules, weight_format)
    if rules.subtracts_graphs(is_second_runner=is_second_runner) and not options.is_eager:
        graphs = estimate_graph_bytes(
            model, gpu, options.kv_cache_dtype, seqs, tokens, has_loras=bool(options.max_loras)
        )
    utilization = options.utilization or rules.default_utilization
    available = int(total * utilization) - weights - outside - peak.num_bytes - (graphs or 0)
    layout = build_layout(
        model, rules, tp, options.kv_cache_dtype, tokens, block_size=options.block_size,
        prefix_caching=options.prefix_caching, is_latent_block_large=gpu.compute_capability[0] in (9, 10),
    )  # fmt: skip
    refusal = _find_invalid(model, gpu, length, seqs, tokens) or _find_refusal(
        layout, available, length, total, utilization, weights + peak.num_bytes, gpu, options
    )
    count = layout.count_tokens(available, length)
    margin = round(_BAND * count) + round(0.15 * GIB / max(layout.block_bytes / layout.block_size, 1))
    return EngineBudget(
        engine="vllm", release=options.release or LATEST_VLLM, model=model.name, gpu=gpu.key, tensor_parallel=tp,
        dtype=model.dtype, quantization=weight_format.name if weight_format else None,
        kv_cache_dtype=options.kv_cache_dtype, context_length=length, max_num_seqs=seqs, max_num_batched_tokens=tokens,
        total_bytes=total, utilization=utilization, weights_bytes=weights, outside_torch_bytes=outside,
        profile_peak_bytes=peak.num_bytes, profile_peak_reason=peak.reason, graph_bytes=graphs,
        kv_cache_bytes=available, block_size=layout.block_size, num_blocks=layout.count_blocks(available),
        num_tokens=count, num_tokens_low=max(count - margin, 0), num_tokens_high=count + margin,
        longest_context=layout.find_longest(available, model.max_positions),
        concurrency=layout.compute_concurrency(available, length), refusal=refusal,
        assumptions=_list_assumptions(rules, gpu, adapters),
    )  # fmt: skip


def _choose_limits(
    model: ServedModel, gpu: Gpu, options: ServingOptions, rules: VllmRules, total: int
) -> tuple[int, int, int]:
    """Return max_num_seqs, max_num_batched_tokens and max_model_len, with the defaults of `vllm serve`
    (vllm/engine/arg_utils.py, _set_default_max_num_seqs_and_batched_tokens_args, 0.19)."""
    length = options.context_length or model.default_length
    default_seqs, default_tokens = rules.choose_batch_limits(total, gpu.name)
    seqs, tokens = options.max_num_seqs or default_seqs, options.max_num_batched_tokens
    if tokens is None:
        tokens = min(default_tokens, seqs * length)
    return (options.max_num_seqs or min(seqs, tokens)), tokens, length


def _find_invalid(model: ServedModel, gpu: Gpu, length: int, seqs: int, tokens: int) -> str:
    """Return why the engine refuses its options before it loads anything; empty: it does not."""
    if gpu.compute_capability < _MIN_CAPABILITY and not gpu.name.startswith("AMD"):
        major, minor = gpu.compute_capability
        return f"this GPU has compute capability {major}.{minor}, and vLLM is built for 7.0 and later"
    if length > model.max_positions:
        return (
            f"User-specified max_model_len ({length}) is greater than the derived max_model_len "
            f"({model.max_positions}); VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 allows it"
        )
    if tokens < seqs:
        return f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs})."
    return ""


def _find_refusal(
    layout: CacheLayout, available: int, length: int, total: int, utilization: float, peak: int, gpu: Gpu,
    options: ServingOptions,
) -> str:  # fmt: skip
    """Return why the engine does not start, in its own words where it has some; empty: it starts."""
    free = options.free_bytes or total - gpu.context_bytes
    if total * utilization > free:
        return (
            f"Free memory on device ({free / GIB:.2f}/{total / GIB:.2f} GiB) on startup is less than desired GPU "
            f"memory utilization ({utilization:g}, {total * utilization / GIB:.2f} GiB)"
        )
    if peak > free:
        return f"CUDA out of memory: weights and profile run need {peak / GIB:.2f} GiB of {free / GIB:.2f} GiB free"
    if available <= 0 or layout.count_blocks(available) == 0:
        return f"No available memory for the cache blocks ({available / GIB:.2f} GiB)"
    needed = layout.count_request_blocks(length) * layout.block_bytes
    if needed > available:
        longest = layout.find_longest(available, length)
        return (
            f"one request of max_model_len {length:,} needs {needed / GIB:.2f} GiB of KV cache, and "
            f"{available / GIB:.2f} GiB are available; at most {longest:,} tokens fit"
        )
    return ""


def _list_assumptions(rules: VllmRules, gpu: Gpu, adapters: int) -> tuple[str, ...]:
    latest = read_vllm_rules()
    release = ".".join(map(str, min(rules, latest, key=lambda known: known.release).release))
    amd = ("On AMD GPUs the sampler and graphs follow other rules, which were not read.",)
    return (
        *(amd if gpu.name.startswith("AMD") else ()),
        f"Rules of vLLM {release} as read in its source; defaults are those of `vllm serve` (the class LLM has other "
        "ones for max_num_batched_tokens).",
        "Nothing else is on the GPU; the driver's figure of total memory is the catalog's.",
        "Memory outside torch and of CUDA graphs is from published logs: 0.25 GiB on an H100, elsewhere 2.3 MiB for "
        "each multiprocessor; with several GPUs 2.1 GiB over NVLink, else 0.55 GiB.",
        "The sampler is FlashInfer's where the release has it as default, which needs a CUDA toolkit or its cached "
        "kernels; without it the profile run's peak is lower.",
        f"{adapters / GIB:.2f} GiB of the weights are slots of LoRA adapters (--max-loras)."
        if adapters
        else "No slots of LoRA adapters (--max-loras).",
        "The block size is the attention backend's default on this GPU; no speculative decoding.",
    )
