"""SGLang: errors at its start and of its pool of tokens, and torch's errors in its processes.

Messages: srt/mem_cache/kv_cache_configurator.py, srt/mem_cache/allocation.py, srt/mem_cache/pool_host/base.py,
srt/model_executor/pool_configurator.py, srt/model_executor/runner_backend_utils and srt/managers/utils.py of 0.5.23;
srt/model_executor/model_runner.py and cuda_graph_runner.py of 0.4.6 and 0.5.5. Options: srt/arg_groups/fields, and
srt/server_args.py in the older ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memprof.doctor.diagnosis import Advice, Cause, EngineFigures, MessageSizes
from memprof.doctor.engines.engine import (
    Engine,
    EngineError,
    Stage,
    find_integer,
    find_number,
    round_fraction_down,
    round_fraction_up,
)
from memprof.doctor.message_sizes import read_size, subtract_sizes
from memprof.doctor.signature import make_signature
from memprof.units import format_bytes

_MAX_FRACTION = 0.97  # The rest is for activations, CUDA's context and libraries.
_HOST_SIZES = re.compile(r"Requesting (\d+(?:\.\d+)?) GB but only have (\d+(?:\.\d+)?) GB free")
_FRACTION = r"mem[_-]fraction[_-]static['\"]?[ =:]+(0?\.\d+|1(?:\.0*)?)\b"


def read_host_sizes(message: str) -> MessageSizes:
    """Return the sizes in the message on a host pool of the KV cache; its GB are 10^9 bytes."""
    match = _HOST_SIZES.search(message)
    if match is None:
        return MessageSizes(tried_is_segment=False)
    return MessageSizes(
        tried=read_size(match[1], "GB", decimal=True),
        tried_is_segment=False,
        free=read_size(match[2], "GB", decimal=True),
    )


def read_figures(message: str, log: str) -> EngineFigures:
    """Return the figures in `message`, completed by those that SGLang printed in `log` before."""
    host = read_host_sizes(message)
    fraction = find_number(_FRACTION, message)
    least_fraction = find_number(r"minimum viable = 1 - available/pre = (\d?\.\d+)", message)
    if least_fraction is None and "Not enough memory" in message:
        least_fraction = _compute_least_fraction(log)
    return EngineFigures(
        part="KV cache in host memory" if host.tried is not None else "",
        length=find_integer(r"Input length \((\d+) tokens\)", message),
        fitting_length=find_integer(r"maximum allowed length \((\d+) tokens\)", message),
        batch=find_integer(r"[Tt]ry to allocate (\d+) tokens", message),
        fraction=fraction if fraction is not None else find_number(_FRACTION, log),
        least_fraction=least_fraction,
        missing=subtract_sizes(host.tried, host.free) if host.tried and host.free else None,
    )


def _compute_least_fraction(log: str) -> float | None:
    """Return the fraction of the GPU that the loaded weights take, from SGLang's line on them; None without it.

    The KV cache gets what is available after loading, without the part of the memory available before that
    --mem-fraction-static leaves alone (`_profile_available_bytes` in kv_cache_configurator.py).
    """
    available = find_number(r"Load weight end\..{0,300}?avail mem=(\d+(?:\.\d+)?) GB", log)
    taken = find_number(r"Load weight end\..{0,400}?mem usage=(\d+(?:\.\d+)?) GB", log)
    return None if available is None or not taken else taken / (available + taken)


def list_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice with SGLang's options, what helps most first."""
    if error.cause is Cause.HOST_MEMORY:
        return _list_host_advice(error)
    if error.signature in ("sglang-tokens", "sglang-length"):
        return _list_pool_advice(error)
    if error.cause is Cause.KV_CACHE:
        return _list_fraction_advice(error)
    if error.stage is Stage.LOAD:
        return _list_weights_advice(error)
    return _list_advice_after_cache(error)


def _make_command(error: EngineError, options: str) -> str:
    return f"python -m sglang.launch_server --model-path {error.model} {options}"


def _list_fraction_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice if the weights leave nothing for the KV cache under the fraction."""
    fraction, least = error.figures.fraction, error.figures.least_fraction
    target = _choose_fraction(fraction, least)
    if target is not None:
        if least is not None:
            what = f"weights take {least:.4f} of the GPU: each hundredth above that is cache"
        else:
            name = f"{fraction}, half way to all of the GPU" if fraction is not None else "its default"
            what = f"weights and cache get a larger part of the GPU than {name}"
        yield Advice(what, _make_command(error, f"--mem-fraction-static {target}"))
    yield from _list_weights_advice(error)


def _choose_fraction(fraction: float | None, least: float | None) -> float | None:
    """Return a fraction that leaves room for a KV cache; None if none does, or more than the fraction is lacking."""
    if least is not None:
        if fraction is not None and fraction > least:
            return None
        target = round_fraction_up(least)
        target = target if target - least >= 0.005 else round_fraction_up(target + 0.01)
    elif fraction is not None:
        target = round_fraction_down((1 + fraction) / 2)
    else:
        target = 0.95
    return target if target <= _MAX_FRACTION else None


def _list_weights_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice that makes the weights of one GPU smaller."""
    yield _spread(error, "each of two GPUs has half of the weights")
    if not error.is_quantized:
        what = "weights of one byte a parameter, if they have two now"
        yield Advice(what, _make_command(error, "--quantization fp8"))


def _spread(error: EngineError, what: str) -> Advice:
    size = find_integer(r"(?:tp[_-]size|tensor[_-]parallel[_-]size|--tp)['\"]?[ =:]+(\d+)", error.log) or 1
    if size > 1:
        what = f"spread the model over {2 * size} GPUs instead of {size}"
    return Advice(what, _make_command(error, f"--tp-size {2 * size}"))


def _list_pool_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice if the pool of tokens is too small for a request, or for the requests that run together."""
    figures = error.figures
    length, fitting_length = figures.length, figures.fitting_length
    if length is None:
        yield Advice("fewer requests at once", _make_command(error, "--max-running-requests 32"))
        yield Advice(
            "admit requests only with more of the pool free", _make_command(error, "--schedule-conservativeness 1.3")
        )
    has_two_bytes = re.search(r"kv[_-]cache[_-]dtype['\"]?[ =:]+['\"]?fp8", error.log) is None
    if has_two_bytes and (length is None or fitting_length is None or length <= 2 * fitting_length):
        yield Advice(
            "a KV cache of one byte a value: twice the tokens (costs: less precise keys and values)",
            _make_command(error, "--kv-cache-dtype fp8_e5m2"),
        )
    target = _choose_fraction(figures.fraction, None)
    if target is not None:
        yield Advice("a larger pool", _make_command(error, f"--mem-fraction-static {target}"))
    if length is not None:
        yield _spread(error, "each of two GPUs has half of the weights and of the cache")
        yield Advice("or cut inputs to what fits", _make_command(error, "--allow-auto-truncate"))


def _list_advice_after_cache(error: EngineError) -> Iterator[Advice]:
    """Yield advice if memory runs out beside the pool: at the capture of CUDA graphs, or in a request."""
    fraction, shortfall, total = error.figures.fraction, error.shortfall, error.sizes.total
    present = fraction if fraction is not None else 0.85
    if shortfall and total is not None:
        target = round_fraction_down(present - shortfall / total.num_bytes)
        what = f"leave {format_bytes(shortfall)} more beside weights and cache"
    else:
        target, what = round_fraction_down(present - 0.05), "leave more beside weights and cache"
    if target > 0:
        name = str(fraction) if fraction is not None else "its default"
        yield Advice(f"{what}: {target} instead of {name}", _make_command(error, f"--mem-fraction-static {target}"))
    if error.stage is Stage.WARM_UP:
        # Since 0.5.2x the option has a name for decoding and one for prefill, and the message names it.
        option = "--cuda-graph-max-bs-decode" if "cuda-graph-max-bs-decode" in error.log else "--cuda-graph-max-bs"
        yield Advice("CUDA graphs for small batches alone", _make_command(error, f"{option} 16"))
    else:
        tokens = find_integer(r"chunked[_-]prefill[_-]size['\"]?[ =:]+(\d+)", error.log) or 8192
        yield Advice(
            "smaller activations: fewer tokens of a prompt at once",
            _make_command(error, f"--chunked-prefill-size {max(tokens // 4, 512)}"),
        )
    yield _spread(error, "each of two GPUs has half of the weights and of the cache")


def _list_host_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice if the second level of the KV cache does not fit into host memory."""
    free = error.sizes.free
    ranks = find_integer(r"(?:tp[_-]size|--tp)['\"]?[ =:]+(\d+)", error.log) or 1
    if free is not None and free.low // 10**9 // ranks:
        yield Advice(
            "a host pool for each rank that fits what is free",
            _make_command(error, f"--enable-hierarchical-cache --hicache-size {free.low // 10**9 // ranks}"),
        )
    yield Advice("how much host memory there is, a container's limit among it", "memprof doctor --env")


SGLANG = Engine(
    name="SGLang",
    list_advice=list_advice,
    read_figures=read_figures,
    paths=r"[/\\]sglang[/\\]srt[/\\]",
    log_marks=r"sglang\.launch_server|sglang serve |server_args=ServerArgs\(|[/\\]sglang[/\\]srt[/\\]",
    functions={
        Stage.LOAD: ("load_model", "load_weights"),
        Stage.CACHE: ("init_memory_pool", "_create_buffers", "init_kv_cache"),
        Stage.WARM_UP: (
            "init_cuda_graphs", "init_device_graphs", "init_decode_cuda_graph", "capture", "capture_one_batch_size",
            "kernel_warmup",
        ),
        Stage.SERVE: (
            "event_loop_normal", "event_loop_overlap", "run_batch", "forward_batch_generation", "forward_thread_func_",
        ),
    },
    signatures=(
        make_signature(
            "sglang-cache", "Not enough memory. Please try to increase|leave no GPU memory for the KV cache",
            r"Not enough memory\. Please try to increase --mem-f|weights leave no GPU memory for the KV cache",
            source="SGLang", cause=Cause.KV_CACHE,
        ),
        make_signature(
            "sglang-state", "Not enough GPU memory for hybrid", source="SGLang", cause=Cause.KV_CACHE,
        ),
        make_signature(
            "sglang-tokens", "out of memory. Try to lower your batch|Out of memory. Try to lower your batch",
            source="SGLang", cause=Cause.KV_CACHE,
        ),
        make_signature(
            "sglang-length", "exceeds the maximum allowed length",
            r"Input length \(\d+ tokens\) exceeds the maximum allowed length \(\d+ tokens\)", source="SGLang",
            cause=Cause.KV_CACHE, priority=2,
        ),
        make_signature(
            "sglang-host", "Not enough host memory available", source="SGLang", cause=Cause.HOST_MEMORY,
            get_sizes=read_host_sizes,
        ),
        make_signature(
            "sglang-graphs", "out of memory",
            r"Capture (?:cuda|CUDA) graph failed: .{0,200}?out of memory(?!\. Tried to allocate)", source="SGLang",
            cause=Cause.ENGINE_BATCH,
        ),
    ),
)  # fmt: skip
