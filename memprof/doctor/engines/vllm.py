"""vLLM: errors at its start, and torch's errors in its processes.

Messages: v1/core/kv_cache_planning.py, v1/worker/utils.py, v1/worker/gpu_worker.py and v1/worker/gpu_model_runner.py of
0.33, at other places in 0.11 and 0.19; worker/worker.py of 0.8 (V0). Options: engine/arg_utils.py, config/cache.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from memprof.doctor.diagnosis import Advice, Cause, EngineFigures, MessageSizes, PrintedSize
from memprof.doctor.engines.engine import (
    LIST_PROCESSES,
    Engine,
    EngineError,
    Stage,
    find_integer,
    find_number,
    round_fraction_down,
    round_fraction_up,
)
from memprof.doctor.message_sizes import read_message_sizes, read_size, subtract_sizes
from memprof.doctor.signature import make_signature
from memprof.units import GIB, format_bytes

_BLOCK_TOKENS = 16  # Tokens of a block of the KV cache (config/cache.py).
_MAX_FRACTION = 0.98  # CUDA's context and the memory of libraries take the rest.
_COMMON_FRACTION = 0.95
_DEFAULT_FRACTION = 0.92  # The default since 0.29; 0.9 before (config/cache.py).
_SMALL_GPU_BYTES, _LARGEST_GPU_BYTES = 4 * GIB, 192 * GIB  # Few have a larger one, and they know.
_SMALL_BATCH_TOKENS, _FEW_SEQUENCES = 1024, 64  # The defaults are 2,048 to 16,384 and 256 to 1,024 (arg_utils.py).

# Lines of a log that are printed once the KV cache is allocated.
_CACHE_LINES = re.compile(
    r"GPU KV cache size|# (?:cuda|GPU) blocks|Capturing (?:cudagraphs|CUDA graph|the model for CUDA)"
)
_BUDGET = re.compile(
    r"Free memory on device(?: \w+:(\d+))? \((\d+(?:\.\d+)?)/(\d+(?:\.\d+)?) GiB\) on startup is less than "
    r"(?:desired GPU memory utilization|the engine's budget after excluding external process's weights) "
    r"\((?:\d+(?:\.\d+)?), (\d+(?:\.\d+)?) GiB\)"
)


def read_budget(message: str) -> MessageSizes:
    """Return the sizes in the message of vLLM's check at startup: free and total memory; `tried` is its budget."""
    match = _BUDGET.search(message)
    if match is None:
        return MessageSizes(tried_is_segment=False)
    return MessageSizes(
        tried=read_size(match[4], "GiB"),
        tried_is_segment=False,
        device=int(match[1]) if match[1] else None,
        total=read_size(match[3], "GiB"),
        free=read_size(match[2], "GiB"),
    )


# Reads vLLM's message on a KV cache that is too small: needed and available bytes.
read_kv_cache = partial(
    read_message_sizes,
    tried=r"at least one request with the model\w*.?s max seq len \(\d+\),? ?\(?AMOUNT",
    free=r"available KV cache memory \(AMOUNT\)",
)


def read_figures(message: str, log: str) -> EngineFigures:
    """Return the figures in `message`, completed by those that vLLM printed in `log` before."""
    sizes = read_kv_cache(message)
    budget = read_budget(message)
    available = re.findall(r"Available KV cache memory: -(\d+(?:\.\d+)?) GiB", log)
    missing: PrintedSize | None = None
    if sizes.tried is not None and sizes.free is not None:
        missing = subtract_sizes(sizes.tried, sizes.free)
    elif budget.tried is not None and budget.free is not None:
        missing = subtract_sizes(budget.tried, budget.free)
    elif "No available memory for the cache blocks" in message and available:
        missing = read_size(available[-1], "GiB")
    fraction = find_number(r"(?:memory utilization|external process's weights) \((0?\.\d+|1(?:\.0*)?),", message)
    if fraction is None:
        option = r"gpu[_-]memory[_-]utilization['\"]?[ =:]+\(?(0?\.\d+|1(?:\.0*)?)\b"
        fraction = find_number(option, log)
    return EngineFigures(
        part="sampler" if "warming up sampler" in message + log else "",
        length=find_integer(r"max seq len \((\d+)\)", message),
        fitting_length=find_integer(
            r"(?:estimated maximum model length is|that can be stored in KV cache \() ?(\d+)", message
        ),
        batch=find_integer(r"warming up \w+ .{0,60}?with (\d+) dummy requests", message + log),
        fraction=fraction,
        missing=missing,
    )


def list_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice with vLLM's options, what helps most first."""
    if error.cause is Cause.ENGINE_BUDGET:
        return _list_budget_advice(error)
    if error.signature == "vllm-no-cache":
        return _list_no_cache_advice(error)
    if error.cause is Cause.KV_CACHE:
        return _list_length_advice(error)
    if _has_allocated_cache(error):
        return _list_advice_after_cache(error)
    if error.stage is Stage.PROFILE:
        return _list_advice_in_profile(error)
    return _list_weights_advice(error)


def _has_allocated_cache(error: EngineError) -> bool:
    """Return whether memory ran out when the KV cache was allocated, or later."""
    if error.signature == "vllm-warm-up" or error.stage in (Stage.WARM_UP, Stage.SERVE, Stage.CACHE):
        return True
    is_said = error.sizes.private_pools is not None or "when warming up" in error.log
    has_line = _CACHE_LINES.search(error.log) is not None
    return error.stage is Stage.UNKNOWN and (is_said or has_line)


def _make_command(error: EngineError, options: str) -> str:
    return f"vllm serve {error.model} {options}"


def _list_length_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice if one sequence of the configured length needs more KV cache than there is."""
    figures, needed, available = error.figures, error.sizes.tried, error.sizes.free
    length, fitting_length = figures.length, figures.fitting_length
    if fitting_length is not None:
        what = "the longest sequence that fits, by vLLM's own account"
        yield Advice(what, _make_command(error, f"--max-model-len {fitting_length}"))
    elif needed is not None and available is not None and length is not None:
        proportional = int(length * available.low / needed.high) // _BLOCK_TOKENS * _BLOCK_TOKENS
        if proportional:
            what = "shorter sequences: this is in proportion, and right if all layers have full attention"
            yield Advice(what, _make_command(error, f"--max-model-len {proportional}"))
    adapters = find_integer(r"max[_-]loras['\"]?[ =:]+(\d+)", error.log)
    if adapters is not None and adapters > 1 and re.search(r"enable[_-]lora['\"]?(?:[ =:]+True)?", error.log):
        yield Advice(
            f"fewer LoRA adapters at once: each has a slot of --max-lora-rank rows on the GPU; {adapters // 2} instead "
            f"of {adapters}",
            _make_command(error, f"--max-loras {adapters // 2}"),
        )
    if _fits_with_half_the_bytes(error):
        half = "" if needed is None else f": {format_bytes(needed.num_bytes // 2)} instead of {needed.text}, which fits"
        yield Advice(
            f"a KV cache of one byte a value{half} (costs: less precise keys and values)",
            _make_command(error, "--kv-cache-dtype fp8"),
        )
    yield from _list_fraction_advice(error)
    yield _spread(error, "each of two GPUs has half of the weights and of the cache")


def _fits_with_half_the_bytes(error: EngineError) -> bool:
    """Return whether the sequence fits if the KV cache has one byte a value instead of two."""
    if re.search(r"kv_cache_dtype=['\"]?fp8|fp8 data type to store kv cache|--kv-cache-dtype[ =]fp8", error.log):
        return False
    needed, available = error.sizes.tried, error.sizes.free
    if needed is not None and available is not None:
        return needed.high <= 2 * available.low
    length, fitting_length = error.figures.length, error.figures.fitting_length
    return length is not None and fitting_length is not None and length <= 2 * fitting_length


def _list_fraction_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice to give the engine the missing memory, by a fraction that is computed if the log has what it takes.

    It yields nothing if no fraction, or no GPU, is large enough.
    """
    missing, fraction, total_bytes = error.figures.missing, error.figures.fraction, _find_total_bytes(error)
    if missing is None:
        return
    if fraction is not None and total_bytes is not None:
        target = round_fraction_up(fraction + missing.high / total_bytes)
        if target <= _MAX_FRACTION:
            yield Advice(
                f"{missing.text} more of the GPU, if nobody else is on it: {target} of it instead of {fraction}",
                _make_command(error, f"--gpu-memory-utilization {target}"),
            )
        return
    present = fraction if fraction is not None else _DEFAULT_FRACTION
    has_bytes_option = error.sizes.tried is not None and _has_cache_bytes_option(error)
    target = _MAX_FRACTION if has_bytes_option else _COMMON_FRACTION
    least_bytes = missing.high / (target - present) if present < target else _LARGEST_GPU_BYTES
    if least_bytes >= _LARGEST_GPU_BYTES:
        return
    enough = f"enough on a GPU of {format_bytes(int(least_bytes))} or more" if least_bytes > _SMALL_GPU_BYTES else ""
    if has_bytes_option and error.sizes.tried is not None:
        option, what = f"--kv-cache-memory-bytes {error.sizes.tried.high}", "a KV cache of the size needed"
    else:
        name = f"{fraction}" if fraction is not None else "the default (0.9; since 0.29 0.92)"
        option, what = f"--gpu-memory-utilization {target}", f"a larger part of the GPU than {name}"
    conditions = ", ".join(filter(None, (enough, "if nobody else is on it")))
    yield Advice(f"{what}: {conditions}", _make_command(error, option))


def _has_cache_bytes_option(error: EngineError) -> bool:
    """Return whether this vLLM has --kv-cache-memory-bytes: since 0.11, and in later wordings."""
    version = re.search(r"(?:vLLM API server version|LLM engine \(v|vllm[=-]{1,2})\s?v?(\d+)\.(\d+)", error.log)
    if version is not None:
        return (int(version[1]), int(version[2])) >= (0, 11)
    return "configuration/conserving_memory" in error.log or "with the model's max seq len" in error.log


def _find_total_bytes(error: EngineError) -> int | None:
    """Return the bytes of the GPU, from the message or from what vLLM printed before; None if unknown."""
    if error.sizes.total is not None:
        return error.sizes.total.num_bytes
    total = find_number(
        r"(?:total_gpu_memory \(|total capacity of |Free memory on device [^/]{0,40}/)(\d+(?:\.\d+)?) ?GiB", error.log
    )
    return None if total is None else int(total * GIB)


def _list_no_cache_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice if weights and activations leave nothing for the KV cache."""
    fraction, missing = error.figures.fraction, error.figures.missing
    if fraction is not None and fraction < 0.9:
        yield Advice(
            f"the fraction is of the whole GPU, for weights, activations and cache together: {fraction} is less than "
            "the first two take",
            _make_command(error, f"--gpu-memory-utilization {_DEFAULT_FRACTION}"),
        )
    else:
        yield from _list_fraction_advice(error)
    yield _shrink_batch(error)
    weights = find_number(r"Model loading took (\d+(?:\.\d+)?) GiB", error.log)
    if not error.is_quantized and (weights is None or missing is None or weights / 2 * GIB > missing.num_bytes):
        half = "" if weights is None else f": {weights / 2:.2f} GiB instead of {weights:.2f}"
        yield Advice(
            f"weights of one byte a parameter, if they have two now{half}", _make_command(error, "--quantization fp8")
        )
    yield _spread(error, "each of two GPUs has half of the weights")


def _list_budget_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice if less memory is free at the start than the engine is to take."""
    free, total = error.sizes.free, error.sizes.total
    yield LIST_PROCESSES
    yield Advice("end what is left over of an earlier engine: its worker processes may outlive it", "kill PID")
    if free is not None and total is not None:
        target = round_fraction_down(free.low / total.high)
        if target >= 0.05:
            yield Advice(
                f"or take no more than the {free.text} that are free, if weights and cache fit into that",
                _make_command(error, f"--gpu-memory-utilization {target}"),
            )


def _list_advice_after_cache(error: EngineError) -> Iterator[Advice]:
    """Yield advice if memory runs out beside the full KV cache: in a warm-up, a graph capture, or a request."""
    yield from _list_lower_fraction_advice(error)
    if error.figures.batch is not None and error.figures.batch > 1:
        batch = error.figures.batch
        yield Advice(
            f"the warm-up has logits of {batch} sequences: half as many take half",
            _make_command(error, f"--max-num-seqs {batch // 2}"),
        )
    elif error.stage is Stage.SERVE:
        yield _shrink_batch(error)
    if error.stage is not Stage.SERVE:
        yield Advice(
            "no CUDA graphs, which take memory beside the cache (costs: slower decoding)",
            _make_command(error, "--enforce-eager"),
        )


def _list_lower_fraction_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice to leave memory beside the KV cache: what the failed allocation lacks, or a few hundredths."""
    fraction, shortfall, total_bytes = error.figures.fraction, error.shortfall, _find_total_bytes(error)
    present = fraction if fraction is not None else 0.9
    if shortfall and total_bytes is not None:
        target = round_fraction_down(present - shortfall / total_bytes)
        what = f"leave {format_bytes(shortfall)} more beside the KV cache"
    else:
        target = round_fraction_down(present - 0.05)
        what = "leave more beside the KV cache"
    if target > 0:
        name = str(fraction) if fraction is not None else "the default (0.9; since 0.29 0.92)"
        yield Advice(f"{what}: {target} instead of {name}", _make_command(error, f"--gpu-memory-utilization {target}"))


def _list_advice_in_profile(error: EngineError) -> Iterator[Advice]:
    """Yield advice if the forward of the largest batch, which measures activations, runs out of memory."""
    yield _shrink_batch(error)
    yield from _list_weights_advice(error)


def _shrink_batch(error: EngineError) -> Advice:
    """Return the advice to compute fewer tokens and sequences together: a quarter of those that the log names."""
    tokens = find_integer(r"max[_-]num[_-]batched[_-]tokens['\"]?[ =:]+(\d+)", error.log)
    sequences = find_integer(r"max[_-]num[_-]seqs['\"]?[ =:]+(\d+)", error.log)
    few_tokens = _SMALL_BATCH_TOKENS if tokens is None else max(1, tokens // 4)
    few_sequences = min(few_tokens, _FEW_SEQUENCES if sequences is None else max(1, sequences // 4))
    return Advice(
        "smaller activations and logits: fewer tokens and sequences are computed together",
        _make_command(error, f"--max-num-batched-tokens {few_tokens} --max-num-seqs {few_sequences}"),
    )


def _list_weights_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice if the weights alone fill the GPU."""
    yield _spread(error, "each of two GPUs has half of the weights")
    if not error.is_quantized:
        what = "weights of one byte a parameter, if they have two now"
        yield Advice(what, _make_command(error, "--quantization fp8"))


def _spread(error: EngineError, what: str) -> Advice:
    """Return the advice to double the tensor-parallel GPUs; `what` is for one GPU."""
    size, stages = (
        find_integer(rf"{name}[_-]parallel[_-]size['\"]?[ =:]+(\d+)", error.log) or 1 for name in ("tensor", "pipeline")
    )
    if size * stages > 1:
        what = f"spread the model over {2 * size * stages} GPUs instead of {size * stages}"
    return Advice(what, _make_command(error, f"--tensor-parallel-size {2 * size}"))


VLLM = Engine(
    name="vLLM",
    list_advice=list_advice,
    read_figures=read_figures,
    paths=r"[/\\]vllm[/\\](?:v1|worker|engine|executor|model_executor|attention|entrypoints|distributed)[/\\]",
    log_marks=r"\((?:EngineCore|VllmWorker|RayWorkerWrapper|Worker_TP|APIServer pid)|vllm serve |vllm[./]entrypoints"
    r"|vLLM API server",
    functions={
        Stage.LOAD: ("load_model", "load_weights", "create_weights"),
        Stage.PROFILE: (
            "profile_run", "determine_available_memory", "determine_num_available_blocks", "profile_multimodal_encoder",
        ),
        Stage.CACHE: (
            "initialize_kv_cache", "initialize_from_config", "initialize_kv_cache_tensors", "_allocate_kv_cache",
        ),
        Stage.WARM_UP: (
            "compile_or_warm_up_model", "capture_model", "_dummy_sampler_run", "_dummy_pooler_run", "kernel_warmup",
            "capture_begin", "capture_end",
        ),
        Stage.SERVE: ("execute_model", "run_busy_loop", "step_with_batch_queue"),
    },
    signatures=(
        make_signature(
            "vllm-budget", "on startup is less than",
            r"Free memory on device.{0,60}on startup is less than (?:desired GPU memory|the engine's budget)",
            source="vLLM", cause=Cause.ENGINE_BUDGET, get_sizes=read_budget,
        ),
        make_signature(
            "vllm-no-cache", "No available memory for the cache blocks", source="vLLM", cause=Cause.KV_CACHE,
        ),
        make_signature(
            "vllm-cache", "that can be stored in KV cache|To serve at least one request",
            r"(?:max seq len \(\d+\) is )?larger than the maximum number of tokens that can be stored in KV cache"
            r"|To serve at least one request with the model\w*.?s max seq len",
            source="vLLM", cause=Cause.KV_CACHE, get_sizes=read_kv_cache,
        ),
        make_signature(
            "vllm-warm-up", "out of memory occurred when warming up", source="vLLM", cause=Cause.ENGINE_BATCH,
        ),
    ),
)  # fmt: skip
