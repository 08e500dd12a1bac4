"""TensorRT-LLM: errors of its executor (torch) and of its C++ runtime.

Messages: _torch/pyexecutor/py_executor_creator.py (0.19 to 1.x), cpp/include/tensorrt_llm/common/cudaUtils.h, and
cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp. Options: commands/serve.py and commands/build.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memprof.doctor.diagnosis import Advice, Cause, EngineFigures, MessageSizes
from memprof.doctor.engines.engine import (
    COMPUTE_BUFFER,
    KV_CACHE,
    LIST_PROCESSES,
    WEIGHTS,
    Engine,
    EngineError,
    Stage,
    find_integer,
    find_number,
)
from memprof.doctor.message_sizes import read_size
from memprof.doctor.signature import make_signature

_DEFAULT_FRACTION = 0.9  # --kv_cache_free_gpu_memory_fraction (commands/serve.py)
_DEFAULT_TOKENS = 8192  # --max_num_tokens (builder.py)


def read_executor_sizes(message: str) -> MessageSizes:
    """Return the total memory, and the free memory before the component that could not be created."""
    total = find_number(r"Total GPU memory \(GiB\): (\d+(?:\.\d+)?)", message)
    free = find_number(r"before component creation attempt \(GiB\): (\d+(?:\.\d+)?)", message)
    return MessageSizes(
        tried_is_segment=False,
        total=None if total is None else read_size(f"{total:.2f}", "GiB"),
        free=None if free is None else read_size(f"{free:.2f}", "GiB"),
    )


def read_figures(message: str, log: str) -> EngineFigures:
    """Return what could not be created, the largest batch of the engine, and the fraction for the KV cache."""
    return EngineFigures(
        part=_find_part(message + log),
        batch=find_integer(r"(?:max[_-]?batch[_-]?size|maxBatchSize)['\"]?[ =:]+(\d+)", log),
        fraction=find_number(r"free_gpu_mem(?:ory)?_fraction['\"]?[ =:]+(0?\.\d+)", log),
    )


# Components of the executor, and what they are here; of those that are not named, the buffers grow with the batch.
_PARTS = (
    ("KV cache", KV_CACHE),
    ("Model resources", COMPUTE_BUFFER),
    ("Model", WEIGHTS),
    ("Draft model", WEIGHTS),
    ("", COMPUTE_BUFFER),
)


def _find_part(text: str) -> str:
    match = re.search(r"could not be created: (\w[\w ]*)", text)
    return "" if match is None else next(part for name, part in _PARTS if match[1].startswith(name))


def list_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice with TensorRT-LLM's options, what helps most first."""
    if error.signature == "tensorrt-runtime":
        return _list_runtime_advice(error)
    if error.figures.part == KV_CACHE:
        return _list_cache_advice(error)
    if error.figures.part == COMPUTE_BUFFER:
        return _list_token_advice(error)
    return _list_weights_advice(error)


def _make_command(error: EngineError, options: str) -> str:
    return f"trtllm-serve {error.model} {options}"


def _list_cache_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice if the KV cache, a fraction of what is free after loading, leaves too little for the rest."""
    present = error.figures.fraction or _DEFAULT_FRACTION
    what = f"a smaller part of the free memory for the KV cache: {present - 0.1:.1f} instead of {present}"
    yield Advice(what, _make_command(error, f"--kv_cache_free_gpu_memory_fraction {present - 0.1:.1f}"))
    yield from _list_token_advice(error)


def _list_token_advice(error: EngineError) -> Iterator[Advice]:
    tokens = find_integer(r"max[_-]num[_-]tokens['\"]?[ =:]+(\d+)", error.log) or _DEFAULT_TOKENS
    what = "activations grow with the tokens that are computed together: half of them"
    yield Advice(what, _make_command(error, f"--max_num_tokens {tokens // 2}"))
    yield from _list_batch_advice(error)


def _list_batch_advice(error: EngineError) -> Iterator[Advice]:
    if error.figures.batch is not None and error.figures.batch > 1:
        what = f"{error.figures.batch // 2} sequences at once instead of {error.figures.batch}"
        yield Advice(what, _make_command(error, f"--max_batch_size {error.figures.batch // 2}"))
    else:
        yield Advice("fewer sequences at once", _make_command(error, "--max_batch_size 64"))
    yield _spread(error)


def _list_weights_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice if the weights do not fit."""
    yield _spread(error)
    total, free = error.sizes.total, error.sizes.free
    if total is not None and free is not None and free.num_bytes < 0.95 * total.num_bytes:
        yield LIST_PROCESSES
    tokens = find_integer(r"max[_-]num[_-]tokens['\"]?[ =:]+(\d+)", error.log) or _DEFAULT_TOKENS
    yield Advice("smaller buffers for activations", _make_command(error, f"--max_num_tokens {tokens // 2}"))


def _spread(error: EngineError) -> Advice:
    size = find_integer(r"tp[_-]size['\"]?[ =:]+(\d+)", error.log) or 1
    what = f"spread the weights over {2 * size} GPUs instead of {size}"
    return Advice(what, _make_command(error, f"--tp_size {2 * size}"))


def _list_runtime_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice if the C++ runtime, with an engine that was built for some largest batch, finds no memory."""
    available = find_number(r"in paged kv cache: total: \d+(?:\.\d+)? GiB, available: (\d+(?:\.\d+)?) GiB", error.log)
    if available is not None and available < 1:
        what = f"only {available} GiB were left for the KV cache after loading: weights, or others, have the rest"
        yield Advice(f"{what}; see who", LIST_PROCESSES.command)
    batch = error.figures.batch
    if batch is not None and batch > 1:
        yield Advice(
            f"the engine was built for {batch} sequences, and its buffers are for all of them: build it for half",
            f"trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE --max_batch_size {batch // 2}",
        )
    else:
        yield Advice(
            "buffers are for the largest batch of which the engine was built: build it for a smaller one",
            "trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE --max_batch_size 8 --max_num_tokens 4096",
        )
    present = error.figures.fraction or _DEFAULT_FRACTION
    yield Advice(
        "leave more of the free memory to what is allocated after the KV cache",
        _make_command(error, f"--kv_cache_free_gpu_memory_fraction {present - 0.1:.1f}"),
    )
    yield _spread(error)


TENSORRT_LLM = Engine(
    name="TensorRT-LLM",
    list_advice=list_advice,
    read_figures=read_figures,
    paths=r"[/\\]tensorrt_llm[/\\]",
    log_marks=r"\[TensorRT-LLM\]|\[TRT-LLM\]|trtllm-serve",
    functions={Stage.LOAD: ("load", "load_weights"), Stage.SERVE: ("_executor_loop", "_forward_step")},
    signatures=(
        make_signature(
            "tensorrt-executor",
            "Executor creation failed due to insufficient GPU memory|which might indicate insufficient GPU memory",
            r"Executor creation failed (?:due to insufficient GPU|with an error which might indicate insufficient)",
            source="TensorRT-LLM", cause=Cause.DEVICE_MEMORY, get_sizes=read_executor_sizes, priority=0,
        ),
        make_signature(
            "tensorrt-runtime", "CUDA runtime error in",
            r"\[TensorRT-LLM\]\[ERROR\] CUDA runtime error in .{0,120}?: out of memory", source="TensorRT-LLM",
            cause=Cause.DEVICE_MEMORY, priority=0,
        ),
    ),
)  # fmt: skip
