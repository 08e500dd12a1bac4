"""Data classes of a diagnosis: cause, sizes, candidate tensors, advice. Sizes are in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from memprof.trace.json_values import JsonValue


class Cause(StrEnum):
    """The cause of a failed run; `headline` describes it in one line of the report."""

    headline: str

    def __new__(cls, value: str, headline: str = "") -> Cause:
        """Return the enum member with this value and headline."""
        member = str.__new__(cls, value)
        member._value_, member.headline = value, headline
        return member

    GPU_FULL = "gpu-full", "The GPU is full of this process's own tensors"
    # One request has a quarter of the GPU or more.
    LARGE_TENSOR = "large-tensor", "One tensor is too large"
    FRAGMENTATION = "fragmentation", "Fragmentation: enough is reserved and unused, but in pieces that are too small"
    # The request would fit without other processes.
    OTHER_PROCESSES = "other-processes", "Other processes have the GPU"
    MEMORY_LIMIT = "memory-limit", "The program reached a memory limit that it was given"
    FREE_REFUSED = "free-refused", "The driver refused memory that it calls free"
    DEVICE_MEMORY = "device-memory", "Out of device memory"
    # cuBLAS, cuDNN or NCCL found no memory outside the caching allocator.
    LIBRARY_HANDLE = "library-handle", "A CUDA library found no memory for itself"
    KV_CACHE = "kv-cache", "The engine has too little room for its KV cache"
    # A forward, a buffer or a graph of an engine.
    ENGINE_BATCH = "engine-batch", "The engine has too little room for the largest batch"
    WEIGHTS = "weights", "The weights do not fit the GPU"
    ENGINE_BUDGET = "engine-budget", "Less of the GPU is free than the engine was told to take"
    MODEL_SPILLS = "model-spills", "The model does not fit the GPU, and part of it was put elsewhere"
    HOST_KILLED = "host-killed", "Killed from outside: nearly always the kernel, for want of host memory"
    HOST_MEMORY = "host-memory", "A request for host memory was refused"
    SHARED_MEMORY = "shared-memory", "/dev/shm is full"
    NOT_KNOWN = "not-known", "The message does not say whether memory was the matter"
    DEVICE_MISMATCH = "device-mismatch"  # Tensors of one operator are on two devices.


@dataclass(frozen=True, slots=True)
class PrintedSize:
    """A size in a message: the printed string, and the range of bytes that print as this string."""

    text: str  # As printed, such as "37.09 GiB".
    num_bytes: int  # Middle of the range.
    low: int  # Smallest number of bytes that prints as `text`.
    high: int  # Largest number of bytes that prints as `text`.


@dataclass(frozen=True, slots=True)
class MessageSizes:
    """The sizes in an error message; None for those that the message lacks."""

    tried: PrintedSize | None = None  # The segment, or the request, of the failed allocation.
    # Whether `tried` is the segment that torch's caching allocator requested from the driver.
    tried_is_segment: bool = True
    device: int | None = None
    total: PrintedSize | None = None
    free: PrintedSize | None = (
        None  # Free memory according to the driver, after the allocator released its cached segments.
    )
    process: PrintedSize | None = None  # All memory of this process on the GPU.
    others: tuple[tuple[int, PrintedSize], ...] = ()  # Pid and memory of each other process.
    allowed: PrintedSize | None = None  # Limit of the process (set_per_process_memory_fraction).
    allocated: PrintedSize | None = None
    reserved: PrintedSize | None = None  # Reserved memory, which includes `allocated` and `private_pools`.
    private_pools: PrintedSize | None = None
    # Memory of the GPU that is neither free nor reserved by torch, if the message does not say whose it is.
    outside: PrintedSize | None = None


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The figures other than sizes in the message and log of an inference engine; None for those that they lack."""

    part: str = ""  # What found no room, such as "KV cache"; empty: the message does not say.
    length: int | None = None  # Tokens of the longest sequence, as configured or requested.
    fitting_length: int | None = None  # Tokens of the longest sequence that fits, by the engine's own account.
    batch: int | None = None  # Sequences, or tokens of all sequences, that are computed together.
    fraction: float | None = None  # Fraction of the GPU that the engine was told to take.
    least_fraction: float | None = None  # Fraction from which on it starts, by the engine's own account.
    missing: PrintedSize | None = None  # Memory that is missing at least.


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor that the failed allocation may be for."""

    shape: tuple[int, ...]
    dtype: str
    role: str  # Role of the tensor, such as "logits".
    num_bytes: int
    model: str = ""  # Model of the catalog with these dimensions; empty: none.
    why: str = ""  # The evidence, in one line.
    exact: bool = False  # Whether all dimensions were known, and the bytes match the message.
    is_guess: bool = False  # Whether the model is not known, but one of the catalog that has this size.
    in_traceback: bool = False  # Whether the traceback mentions the role.


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece of advice, with a command (shell, unless `code` is "python")."""

    what: str
    command: str = ""
    code: str = "sh"
    fix: str = ""  # Name of memprof's fix; empty: none.

    @classmethod
    def python(cls, what: str, command: str) -> Advice:
        """Return advice whose command is Python code."""
        return cls(what, command, "python")


@dataclass(frozen=True, slots=True)
class Diagnosis(JsonValue):
    """The diagnosis of one error in a log."""

    cause: Cause
    title: str  # The diagnosis in one line.
    source: str  # What printed the error: "torch", "vLLM", "the kernel", ...
    message: str  # The line of the error.
    line: int  # Number of the line in the log, from 1.
    count: int = 1  # Occurrences in the log; at most 60 per wording are searched.
    figures: MessageSizes = field(default_factory=MessageSizes)
    engine: EngineFigures | None = None  # None: the error is not an engine's.
    explanation: tuple[str, ...] = ()  # Sentences, one per line.
    where: tuple[str, ...] = ()  # Relevant frames of the traceback, innermost first.
    tensors: tuple[Candidate, ...] = ()  # Candidates for the failed allocation, likeliest first.
    devices: tuple[str, ...] = ()  # The devices of a mismatch.
    steps: tuple[Advice, ...] = ()  # Advice, in order.
