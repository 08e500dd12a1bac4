"""XLA under JAX and torch_xla, and TensorFlow: runtime and compiler find too little memory on a GPU or TPU.

Messages: xla/tsl/framework/bfc_allocator.cc, docs/errors of openxla/xla (E1000, E1001, E0100), and TPU runtimes, whose
source is not public. Options: docs/gpu_memory_allocation.rst of jax (XLA_PYTHON_CLIENT_MEM_FRACTION is also
XLA_CLIENT_MEM_FRACTION in recent releases), and torch_xla/utils/checkpoint.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from memprof.doctor.diagnosis import Advice, Cause, EngineFigures, MessageSizes, PrintedSize
from memprof.doctor.engines.engine import LIST_PROCESSES, Engine, EngineError
from memprof.doctor.message_sizes import add_sizes, format_size, read_message_sizes, read_size, subtract_sizes
from memprof.doctor.signature import make_signature
from memprof.units import format_bytes

# Bytes of an element of TensorFlow's types.
_TYPES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int32": 4, "int64": 8, "int8": 1, "uint8": 1, "bool": 1}
_HBM = "TPU program"
_FRACTION = 0.95


def read_xla(message: str) -> MessageSizes:
    """Return the sizes in a message of XLA or TensorFlow: bytes, a shape, or what a program uses and the TPU has."""
    program = read_message_sizes(
        message,
        r"(?:Used|Hbm usage:) AMOUNT",
        total=r"(?:Used [\d.]+[KMG](?:iB)? of|exceeding available bytes:) AMOUNT",
    )
    if program.tried is not None:
        match = re.search(r"SparseCore Hbm usage:? (\d+(?:\.\d+)?)([KMG])", message)
        return replace(program, tried=add_sizes(program.tried, read_size(match[1], match[2]))) if match else program
    tensor = re.search(r"OOM when allocating tensor with shape\[([\d,]+)\] and type (\w+)", message)
    if tensor is None or tensor[2] not in _TYPES:
        return read_message_sizes(
            message,
            r"(?:trying to allocate|[Aa]ttempting to (?:allocate|reserve)|Out of memory allocating|request for) AMOUNT",
            free=r"There are AMOUNT free",
        )
    num_bytes = math.prod(map(int, tensor[1].split(","))) * _TYPES[tensor[2]]
    return replace(MessageSizes(tried_is_segment=False), tried=format_size(num_bytes))


def read_figures(message: str, log: str) -> EngineFigures:
    """Return whether a program of a TPU is too large, and what is missing."""
    sizes = read_xla(message)
    if sizes.tried is not None and sizes.total is not None:
        return EngineFigures(part=_HBM, missing=subtract_sizes(sizes.tried, sizes.total))
    missing = subtract_sizes(sizes.tried, sizes.free) if sizes.tried is not None and sizes.free is not None else None
    return EngineFigures(part=_HBM if "Error loading program" in message else "", missing=missing)


def _is_tpu(error: EngineError) -> bool:
    return error.figures.part == _HBM or bool(re.search(r"\bhbm\b|HBM|TPU|libtpu", error.log))


def _list_batch_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice to compute less at once: how much, if the message has what the program uses and what there is."""
    used, total = error.sizes.tried, error.sizes.total
    if used is not None and total is not None:
        share = total.num_bytes / used.num_bytes
        yield Advice(
            f"a smaller batch, or shorter sequences: the program may use {100 * share:.0f}% of what it uses "
            f"(parameters and optimizer state do not shrink with the batch)"
        )
        return
    shape = re.search(r"OOM when allocating tensor with shape\[(\d+),", error.log)
    first = f": the first dimension of the tensor, usually the batch, is {shape[1]}" if shape else ""
    yield Advice(f"a smaller batch, or shorter sequences{first}")


def _find_size_of_program(log: str) -> PrintedSize | None:
    """Return the size of all buffers of the compiled program, which XLA prints after its error; None without it."""
    match = re.search(r"total allocation: +(\d+(?:\.\d+)?)([KMG]iB)", log)
    return read_size(match[1], match[2]) if match else None


def list_jax_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice for JAX, what helps most first."""
    remat = Advice.python(
        "layers keep their inputs alone and run again in the backward", "layer = jax.checkpoint(layer)"
    )
    donate = Advice.python(
        "old parameters and state make room for the new ones", "step = jax.jit(step, donate_argnums=0)"
    )
    if _is_tpu(error):
        yield from _list_batch_advice(error)
        yield remat
        yield donate
        return
    program = _find_size_of_program(error.log)
    enough = ""
    if program is not None:
        least_bytes = int(program.num_bytes / _FRACTION)
        enough = f"; the program takes {program.text}: enough on a GPU of {format_bytes(least_bytes)} or more"
    yield Advice(
        f"JAX takes three quarters of the GPU unless told otherwise: more, if nobody else is on it{enough}",
        f"export XLA_PYTHON_CLIENT_MEM_FRACTION={_FRACTION}",
    )
    yield LIST_PROCESSES
    yield from _list_batch_advice(error)
    yield remat


def list_torch_xla_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice for torch_xla, what helps most first."""
    yield from _list_batch_advice(error)
    yield Advice.python("run each step by itself: without this, graphs of several steps become one", "torch_xla.sync()")
    yield Advice.python(
        "layers keep their inputs alone and run again in the backward",
        "from torch_xla.utils.checkpoint import checkpoint\n       hidden = checkpoint(layer, hidden)",
    )
    if not _is_tpu(error):
        yield LIST_PROCESSES


def list_tensorflow_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice for TensorFlow, what helps most first."""
    yield from _list_batch_advice(error)
    if error.cause is Cause.HOST_MEMORY:
        return
    yield LIST_PROCESSES
    yield Advice(
        "take memory as it is needed, which leaves some to other processes", "export TF_FORCE_GPU_ALLOW_GROWTH=true"
    )
    yield Advice("CUDA's own allocator, if memory is in pieces", "export TF_GPU_ALLOCATOR=cuda_malloc_async")


JAX = Engine(
    name="JAX",
    list_advice=list_jax_advice,
    read_figures=read_figures,
    paths=r"[/\\]jax(?:lib)?[/\\]|[/\\]flax[/\\]",
    log_marks=r"\bjax\b|jaxlib|XlaRuntimeError|JaxRuntimeError|\bjit\(",
    signatures=(
        make_signature(
            "tensorflow-host", "OOM when allocating tensor",
            r"OOM when allocating tensor.{0,200}(?:CPU:\d|by allocator cpu)", source="TensorFlow",
            cause=Cause.HOST_MEMORY, get_sizes=read_xla,
        ),
        make_signature(
            "xla", "RESOURCE_EXHAUSTED|Resource exhausted|ResourceExhaustedError|Ran out of memory in memory space hbm",
            r"RESOURCE_EXHAUSTED|Resource exhausted: |ResourceExhaustedError|Ran out of memory in memory space hbm",
            source="XLA", cause=Cause.DEVICE_MEMORY, get_sizes=read_xla,
        ),
    ),
)  # fmt: skip
TORCH_XLA = Engine(
    name="torch_xla",
    list_advice=list_torch_xla_advice,
    read_figures=read_figures,
    paths=r"[/\\]torch_xla[/\\]",
    log_marks=r"torch[_-]xla|\bxm\.|xla_model|XLA_USE_BF16|PJRT_DEVICE|xla/xla_client/|XRTExecute",
)
TENSORFLOW = Engine(
    name="TensorFlow",
    list_advice=list_tensorflow_advice,
    read_figures=read_figures,
    paths=r"[/\\](?:tensorflow|keras)[/\\]",
    log_marks=r"tensorflow|keras|ResourceExhaustedError|OOM when allocating tensor",
)
