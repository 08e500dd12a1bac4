"""llama.cpp and Ollama, whose memory ggml allocates: buffers for weights, KV cache and computation.

Messages: ggml/src/ggml-cuda/ggml-cuda.cu, ggml/src/ggml-alloc.c, src/llama-model.cpp, src/llama-kv-cache.cpp and
src/llama-context.cpp of llama.cpp; llm/server.go of Ollama up to 0.12 for host memory. Options: common/arg.cpp
(tools/server/README.md), and envconfig/config.go and docs/faq.mdx of Ollama.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from memprof.doctor.diagnosis import Advice, Cause, EngineFigures, MessageSizes
from memprof.doctor.engines.engine import (
    COMPUTE_BUFFER,
    KV_CACHE,
    LIST_PROCESSES,
    WEIGHTS,
    Engine,
    EngineError,
    find_integer,
    find_number,
)
from memprof.doctor.message_sizes import format_size, read_message_sizes, subtract_sizes
from memprof.doctor.signature import make_signature
from memprof.units import GIB, MIB, format_bytes

_CONTEXT_MULTIPLE = 256  # llama.cpp pads the context to a multiple of this (src/llama-context.cpp).
_Q8_SHARE = 34 / 64  # q8_0 has 34 bytes for 32 values, f16 64 (ggml/src/ggml-common.h).
_DEFAULT_UBATCH = 512  # --ubatch-size
# Phrases after the failed allocation that name its buffer; the first that is found decides.
_PHRASES_BY_PART = {
    KV_CACHE: ("buffer for kv cache", "llama_kv_cache_init", "unable to allocate kv", "KV cache"),
    COMPUTE_BUFFER: ("compute buffers", "graph_reserve", "gallocr_reserve", "compute pp buffers", "compute tg buffers"),
    WEIGHTS: ("error loading model", "unable to allocate", "failed to load model"),
}


def read_cuda_sizes(message: str) -> MessageSizes:
    """Return the size and device of a failed allocation of ggml, from either of its two lines on it."""
    sizes = read_message_sizes(message, r"allocating AMOUNT on device", device=r"on device (\d+)")
    num_bytes = find_integer(r"failed to allocate \S+ buffer of size (\d+)", message)
    if sizes.tried is not None or num_bytes is None:
        return sizes
    device = find_integer(r"failed to allocate [A-Za-z]+(\d+) buffer", message)
    return replace(sizes, tried=format_size(num_bytes), device=device)


# Reads Ollama's message on host memory.
read_host_sizes = partial(
    read_message_sizes, tried=r"requires more system memory \(AMOUNT\)", free=r"is available \(AMOUNT\)"
)


def read_figures(message: str, log: str) -> EngineFigures:
    """Return the buffer that could not be allocated, and the context's length and batch that `log` names."""
    host = read_host_sizes(message)
    return EngineFigures(
        part=_find_part(message),
        length=_find_first(log, r"\bn_ctx\s*=\s*(\d+)", r"(?:--ctx-size|-c) (\d+)", r"MiB \( *(\d+) cells"),
        batch=_find_first(
            log, r"\bn_ubatch\s*=\s*(\d+)", r"(?:--ubatch-size|-ub) (\d+)", r"worst-case: n_tokens = (\d+)"
        ),
        missing=subtract_sizes(host.tried, host.free) if host.tried and host.free else None,
    )


def _find_first(log: str, *patterns: str) -> int | None:
    """Return the whole number of the first of `patterns` that `log` has; None if it has none."""
    return next((number for pattern in patterns if (number := find_integer(pattern, log)) is not None), None)


def _find_part(message: str) -> str:
    """Return the buffer that the lines after the failed allocation name; empty if they name none."""
    found = [
        (message.find(phrase), part)
        for part, phrases in _PHRASES_BY_PART.items()
        for phrase in phrases
        if phrase in message
    ]
    return min(found)[1] if found else ""


def _find_room(error: EngineError) -> int | None:
    """Return the bytes that were free for the buffer: of the device, without buffers that were allocated before."""
    device = error.sizes.device or 0
    free = find_number(rf"using device \w+?{device} \(.*?\) - (\d+) MiB free", error.log)
    if free is None:
        return None
    buffers = re.findall(rf"\b[A-Za-z]+{device} (?:model |KV )?buffer size = +(\d+(?:\.\d+)?) MiB", error.log)
    return int((free - sum(map(float, buffers))) * MIB)


def list_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice with llama.cpp's options, what helps most first."""
    part, room = error.figures.part, _find_room(error)
    if "retrying without pipeline parallelism" in error.log:
        yield Advice("nothing, if it runs: llama.cpp tried again without pipeline parallelism, which takes less")
    if part == KV_CACHE:
        yield from _list_cache_advice(error, room)
    elif part == COMPUTE_BUFFER:
        yield from _list_batch_advice(error)
        yield from _list_context_advice(error)
        yield from _list_layer_advice(error, room)
    else:
        yield from _list_layer_advice(error, room)
        yield from _list_context_advice(error)
    yield LIST_PROCESSES


def _make_command(error: EngineError, options: str) -> str:
    model = error.model if error.model.endswith(".gguf") else "MODEL.gguf"
    return f"llama-server --model {model} {options}"


def _list_cache_advice(error: EngineError, room: int | None) -> Iterator[Advice]:
    """Yield advice that makes the KV cache smaller; `room` has the bytes free for it, None if unknown."""
    needed = error.sizes.tried
    share = room / needed.num_bytes if room is not None and needed is not None and needed.num_bytes else None
    yield from _list_context_advice(error, share if share is not None and share < 1 else None)
    if needed is not None and (share is None or share > _Q8_SHARE):
        yield Advice(
            f"a KV cache of one byte a value: {format_bytes(int(needed.num_bytes * _Q8_SHARE))} instead of "
            f"{needed.text}, if it is f16 now",
            _make_command(error, "--flash-attn on --cache-type-k q8_0 --cache-type-v q8_0"),
        )
    yield Advice("or the KV cache in host memory (costs: slower attention)", _make_command(error, "--no-kv-offload"))


def _list_batch_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice that makes the compute buffer smaller."""
    batch, needed = error.figures.batch or _DEFAULT_UBATCH, error.sizes.tried
    quarter = "" if needed is None else f", about {format_bytes(needed.num_bytes // 4)} instead of {needed.text}"
    yield Advice(
        f"the buffer grows with the tokens that are computed together: a quarter of {batch:,}{quarter}",
        _make_command(error, f"--ubatch-size {max(32, batch // 4)}"),
    )
    if re.search(r"flash_attn\s*=\s*(?:0|disabled)", error.log):
        what = "and with the square of the length, without flash attention"
        yield Advice(what, _make_command(error, "--flash-attn on"))


def _list_context_advice(error: EngineError, share: float | None = None) -> Iterator[Advice]:
    """Yield advice for a shorter context: `share` of the present one, half of it if None."""
    length = error.figures.length
    if length is None:
        yield Advice("a shorter context, if it is longer than this now", _make_command(error, "--ctx-size 4096"))
        return
    fitting = int(length * (share or 0.5)) // _CONTEXT_MULTIPLE * _CONTEXT_MULTIPLE
    if fitting:
        what = "the context whose cache fits, beside which graphs take memory too" if share else "half of the context"
        yield Advice(f"{what}: {fitting:,} tokens instead of {length:,}", _make_command(error, f"--ctx-size {fitting}"))


def _list_layer_advice(error: EngineError, room: int | None) -> Iterator[Advice]:
    """Yield advice to keep layers on the CPU: as many as the figures say."""
    layers = find_integer(r"offloaded (\d+)/\d+ layers to GPU", error.log)
    needed = error.sizes.tried
    if layers and room is not None and needed is not None and error.figures.part == WEIGHTS:
        fitting = int(layers * room / needed.num_bytes)
        what = f"{fitting} of {layers} layers have room for their weights; cache and graphs need some of it"
        yield Advice(what, _make_command(error, f"--n-gpu-layers {fitting}"))
    elif layers and layers > 1:
        what = f"fewer layers on the GPU: {layers * 3 // 4} instead of {layers}"
        yield Advice(what, _make_command(error, f"--n-gpu-layers {layers * 3 // 4}"))
    else:
        what = "fewer layers on the GPU, for instance 20: the rest runs on the CPU"
        yield Advice(what, _make_command(error, "--n-gpu-layers 20"))
    if re.search(r"n_expert\s*=\s*[1-9]", error.log):
        yield Advice("or the experts' weights alone on the CPU", _make_command(error, "--cpu-moe"))


def list_ollama_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice with Ollama's settings, what helps most first."""
    unload = Advice("unload models that are loaded: `ollama ps` lists them", "ollama stop MODEL")
    if error.cause is Cause.HOST_MEMORY:
        needed, available, missing = error.sizes.tried, error.sizes.free, error.figures.missing
        amount = "" if missing is None else f": {missing.text} are missing"
        smaller = Advice(
            f"a model of fewer parameters or bits, or more memory (WSL and containers have limits){amount}"
        )
        if needed is not None and available is not None and needed.num_bytes > 2 * available.num_bytes:
            yield smaller
        yield unload
        yield Advice("a shorter context, whose cache is part of the figure", "OLLAMA_CONTEXT_LENGTH=4096 ollama serve")
        yield smaller
        return
    length = error.figures.length
    half = "" if length is None else f": {length // 2:,} tokens instead of {length:,}"
    context = Advice(f"a shorter context{half}", f"OLLAMA_CONTEXT_LENGTH={(length or 8192) // 2} ollama serve")
    cache = Advice(
        "a KV cache of one byte a value, with flash attention",
        "OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE=q8_0 ollama serve",
    )
    if error.figures.part in (KV_CACHE, COMPUTE_BUFFER):
        yield context
    if error.figures.part == KV_CACHE:
        yield cache
    if (needed := error.sizes.tried) is not None:
        reserve = -(-needed.num_bytes // GIB) * GIB if needed.num_bytes < 8 * GIB else None
        if reserve is not None:
            yield Advice(
                f"plan with {format_bytes(reserve)} less on each GPU, so that more layers go to the CPU",
                f"OLLAMA_GPU_OVERHEAD={reserve} ollama serve",
            )
    layers = find_integer(r"offloaded (\d+)/\d+ layers to GPU", error.log)
    count = layers * 3 // 4 if layers else 20
    instead = f" instead of {layers}" if layers else ", for instance"
    yield Advice(
        f"{count} layers on the GPU{instead}, at the prompt of `ollama run`", f"/set parameter num_gpu {count}"
    )
    yield unload
    if error.figures.part not in (KV_CACHE, COMPUTE_BUFFER):
        yield context


_GGML_SIGNATURES = (
    make_signature(
        "ggml", "cudaMalloc failed: out of memory|hipMalloc failed: out of memory",
        r"(?:allocating [\d.]+ MiB on device \d+: )?(?:cuda|hip)Malloc failed: out of memory", source="ggml",
        cause=Cause.DEVICE_MEMORY, get_sizes=read_cuda_sizes, priority=0,
    ),
    make_signature(
        "ggml-cuda", "CUDA error: out of memory|ROCm error: out of memory",
        r"(?:CUDA|ROCm) error: out of memory.{0,240}?ggml", source="ggml", cause=Cause.DEVICE_MEMORY, priority=0,
    ),
    make_signature(
        "ggml-host", "failed to allocate CPU buffer of size", r"failed to allocate CPU buffer of size \d+",
        source="ggml", cause=Cause.HOST_MEMORY, get_sizes=read_cuda_sizes,
    ),
    make_signature(
        "ggml-buffer", "buffer of size",
        r"(?:alloc_tensor_range|gallocr_reserve_n\w*): failed to allocate \S+ buffer of size \d+",
        source="ggml", cause=Cause.DEVICE_MEMORY, get_sizes=read_cuda_sizes,
    ),
    make_signature(
        "ggml-weights", "unable to allocate", r"error loading model: unable to allocate (?!CPU)\S+ buffer",
        source="ggml", cause=Cause.DEVICE_MEMORY,
    ),
)  # fmt: skip
LLAMA_CPP = Engine(
    name="llama.cpp",
    list_advice=list_advice,
    read_figures=read_figures,
    log_marks=r"llama_model_load|llama_context|llama-server|llama_init_from_model",
    signatures=_GGML_SIGNATURES,
)
OLLAMA = Engine(
    name="Ollama",
    list_advice=list_ollama_advice,
    read_figures=read_figures,
    log_marks=r"\bollama\b|OLLAMA_|llama runner process",
    signatures=(
        make_signature(
            "ollama-host", "requires more system memory", r"model requires more system memory \([\d.]+ [KMGT]iB\)",
            source="Ollama", cause=Cause.HOST_MEMORY, get_sizes=read_host_sizes,
        ),
    ),
)  # fmt: skip
