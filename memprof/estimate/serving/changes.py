"""What to change in an engine's options, with the predicted effect of each, and the command that starts it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from memprof.device.catalog import Gpu, list_suggested_gpus
from memprof.errors import MemprofError
from memprof.estimate.serving.options import ServingOptions
from memprof.serving.budget import BudgetChange, EngineBudget
from memprof.units import GIB

Compute = Callable[[ServingOptions], EngineBudget]
MAX_GPUS = 64
_MIN_GAIN = 0.005  # Of the tokens; what gains less is not shown.
_MAX_CHANGES = 6
_PRECISION, _WEIGHT_PRECISION = "precision of keys and values", "precision of weights"


@dataclass(frozen=True, slots=True)
class Flags:
    """The names of an engine's options, and the beginning of its command; empty: it has no such option."""

    command: str
    utilization: str
    context_length: str
    tensor_parallel: str
    kv_cache_dtype: str
    fp8: str  # Name of an 8-bit cache.
    max_num_seqs: str
    max_num_batched_tokens: str
    eager: str
    # Formats to which the engine quantizes the weights that it loads, with the least compute capability of the GPU.
    quantizations: tuple[tuple[str, tuple[int, int]], ...] = ()


VLLM_FLAGS = Flags(
    "vllm serve {model}", "--gpu-memory-utilization", "--max-model-len", "--tensor-parallel-size", "--kv-cache-dtype",
    "fp8", "--max-num-seqs", "--max-num-batched-tokens", "--enforce-eager",
    (("fp8", (8, 9)), ("bitsandbytes", (7, 0))),
)  # fmt: skip
SGLANG_FLAGS = Flags(
    "python -m sglang.launch_server --model-path {model}", "--mem-fraction-static", "--context-length", "--tp-size",
    "--kv-cache-dtype", "fp8_e4m3", "--max-running-requests", "--chunked-prefill-size", "--disable-cuda-graph",
    (("fp8", (8, 9)),),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Change:
    flag: str
    options: ServingOptions
    cost: str = ""


def complete_budget(
    budget: EngineBudget, options: ServingOptions, compute: Compute, gpu: Gpu, flags: Flags, model_id: str
) -> EngineBudget:
    """Return `budget` with what to change, most tokens first, the least number of GPUs, and the command that starts
    what was asked: as given, else with the changes that cost least."""
    changes = [*_list_changes(budget, options, gpu, flags)]
    tried = [(change, _try(compute, change.options)) for change in changes]
    rows = [
        _make_row(change.flag, result, change.cost)
        for change, result in tried
        if result is not None and _gains(result, budget)
    ]
    rows.sort(key=lambda row: -row.num_tokens)
    starting = options if _serves(budget, options) else _find_starting(options, tried, compute)
    least = _find_least_gpus(options, compute) if starting is None else starting.tensor_parallel
    if starting is None and least is not None:
        starting = replace(options, tensor_parallel=least)
        if least > 2 * options.tensor_parallel:
            rows.append(_make_row(f"{flags.tensor_parallel} {least}", compute(starting), f"{least} GPUs"))
    return replace(
        budget, changes=tuple(rows[:_MAX_CHANGES]), requested_concurrency=options.concurrency, least_gpus=least,
        command="" if starting is None else make_command(flags, model_id, starting),
    )  # fmt: skip


def add_larger_gpu(
    budget: EngineBudget, options: ServingOptions, compute: Callable[[Gpu], EngineBudget]
) -> EngineBudget:
    """Return `budget`, of an engine that does not start, with the smallest GPU on which it does, last of the changes.

    Args:
        compute: returns the budget on another GPU with the same options.
    """
    for gpu in sorted(list_suggested_gpus(), key=lambda gpu: gpu.total_bytes):
        if gpu.total_bytes > (budget.total_bytes or 0):
            result = _try(lambda _, gpu=gpu: compute(gpu), options)  # type: ignore[misc]
            if result is not None and _serves(result, options):
                row = _make_row(f"another GPU: {gpu.key}", result, f"{gpu.total_bytes / GIB:.0f} GiB")
                return replace(budget, changes=(*budget.changes, row))
    return budget


def _make_row(flag: str, result: EngineBudget, cost: str) -> BudgetChange:
    return BudgetChange(
        flag, max(result.kv_cache_bytes or 0, 0), result.num_tokens or 0 if result.starts else 0, cost=cost
    )


def _serves(budget: EngineBudget, options: ServingOptions) -> bool:
    """Return whether the engine starts and holds the requested number of requests."""
    return budget.starts and (options.concurrency is None or (budget.concurrency or 0) >= options.concurrency)


def _gains(result: EngineBudget, budget: EngineBudget) -> bool:
    if not budget.starts:
        return result.starts
    return result.starts and (result.num_tokens or 0) > (budget.num_tokens or 0) * (1 + _MIN_GAIN)


def _list_changes(budget: EngineBudget, options: ServingOptions, gpu: Gpu, flags: Flags) -> Iterator[_Change]:
    """Yield single changes of options, those without a cost first."""
    if not budget.starts and budget.longest_context:
        length = budget.longest_context
        yield _Change(f"{flags.context_length} {length}", replace(options, context_length=length), "shorter requests")
    total = budget.total_bytes or gpu.total_bytes
    free_share = int((total - gpu.context_bytes) / total * 100) / 100
    target = min(0.95, free_share)
    if budget.utilization is not None and budget.utilization > free_share:
        yield _Change(f"{flags.utilization} {free_share:g}", replace(options, utilization=free_share))
    elif budget.utilization is not None and budget.utilization < target:
        cost = "less is left to others"
        if budget.profile_peak_bytes is None:  # Activations and graphs take what is left.
            target, cost = min(target, round(budget.utilization + 0.05, 2)), "less for activations, CUDA graphs"
        yield _Change(f"{flags.utilization} {target:g}", replace(options, utilization=target), cost)
    seqs = max(options.concurrency or 0, 64)
    if budget.max_num_seqs is not None and budget.max_num_seqs > seqs:
        yield _Change(f"{flags.max_num_seqs} {seqs}", replace(options, max_num_seqs=seqs), "fewer requests in a step")
    if budget.max_num_batched_tokens is not None and budget.max_num_batched_tokens > 2048:
        changed = replace(options, max_num_batched_tokens=2048)
        yield _Change(f"{flags.max_num_batched_tokens} 2048", changed, "slower prefill")
    if options.kv_cache_dtype == "auto" and gpu.compute_capability >= (8, 9):
        changed = replace(options, kv_cache_dtype=flags.fp8)
        yield _Change(f"{flags.kv_cache_dtype} {flags.fp8}", changed, _PRECISION)
    if not budget.starts and budget.quantization is None:
        for name, capability in flags.quantizations:
            if gpu.compute_capability >= capability:
                changed = replace(options, quantization=name)
                yield _Change(f"--quantization {name}", changed, _WEIGHT_PRECISION)
    if not options.is_eager and budget.graph_bytes:
        yield _Change(flags.eager, replace(options, is_eager=True), "slower decoding")
    gpus = 2 * options.tensor_parallel
    yield _Change(f"{flags.tensor_parallel} {gpus}", replace(options, tensor_parallel=gpus), f"{gpus} GPUs")


def _find_starting(
    options: ServingOptions, tried: list[tuple[_Change, EngineBudget | None]], compute: Compute
) -> ServingOptions | None:
    """Return the first options that start on the same GPUs: with one change, else with all that cost no precision."""
    same_gpus = [
        (change, result)
        for change, result in tried
        if change.options.tensor_parallel == options.tensor_parallel
        and change.cost not in (_PRECISION, _WEIGHT_PRECISION)
        and (options.context_length is None or change.options.context_length == options.context_length)
    ]
    for change, result in same_gpus:
        if result is not None and _serves(result, options):
            return change.options
    merged = options
    for change, _ in same_gpus:
        for name in ("utilization", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(change.options, name)
            if value != getattr(options, name):
                merged = replace(merged, **{name: value})
    result = _try(compute, merged)
    return merged if result is not None and _serves(result, options) else None


def _find_least_gpus(options: ServingOptions, compute: Compute) -> int | None:
    """Return the least power of two of GPUs that serves what was asked; None: up to 64 do not."""
    gpus = 2 * options.tensor_parallel
    while gpus <= MAX_GPUS:
        result = _try(compute, replace(options, tensor_parallel=gpus))
        if result is not None and _serves(result, options):
            return gpus
        gpus *= 2
    return None


def _try(compute: Compute, options: ServingOptions) -> EngineBudget | None:
    """Return the budget with `options`; None: they cannot be computed, as with heads that do not divide."""
    try:
        return compute(options)
    except MemprofError:
        return None


def make_command(flags: Flags, model_id: str, options: ServingOptions) -> str:
    """Return the command that starts the engine with `options`, without those left at their defaults."""
    words = [flags.command.format(model=shlex.quote(model_id))]
    values = (
        (flags.context_length, options.context_length),
        (flags.tensor_parallel, options.tensor_parallel if options.tensor_parallel > 1 else None),
        (flags.utilization, options.utilization),
        (flags.max_num_seqs, options.max_num_seqs),
        (flags.max_num_batched_tokens, options.max_num_batched_tokens),
        (flags.kv_cache_dtype, None if options.kv_cache_dtype == "auto" else options.kv_cache_dtype),
    )
    words += [f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}" for flag, value in values if value]
    if options.quantization in ("fp8", "bitsandbytes"):  # Other formats are those of a checkpoint.
        words.append(f"--quantization {options.quantization}")
    if options.max_loras:
        rank = f" --max-lora-rank {options.max_lora_rank}" if options.max_lora_rank else ""
        words.append(f"--enable-lora --max-loras {options.max_loras}{rank}")
    if options.is_eager:
        words.append(flags.eager)
    return " ".join(words)
