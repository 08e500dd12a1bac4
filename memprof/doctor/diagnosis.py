"""The doctor's answer, as plain data. All amounts are bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from memprof.trace.json_values import JsonValue


class Cause(StrEnum):
    """The cause of a failed run, as far as the message shows it; each has a headline."""

    headline: str

    def __new__(cls, value: str, headline: str = "") -> Cause:
        """Return the member for a value (a string), with its headline."""
        made = str.__new__(cls, value)
        made._value_, made.headline = value, headline
        return made

    GPU_FULL = "gpu-full", "The GPU is full of this process's own tensors"
    # One request is larger than the GPU, or a quarter of it and more.
    LARGE_TENSOR = "large-tensor", "One tensor is too large"
    FRAGMENTATION = "fragmentation", "Fragmentation: enough is reserved and unused, in pieces too small"
    # The request would fit if nobody else were on it.
    OTHER_PROCESSES = "other-processes", "Other processes have the GPU"
    MEMORY_LIMIT = "memory-limit", "The program reached a memory limit that it was given"
    FREE_REFUSED = "free-refused", "The driver refused memory that it calls free"
    DEVICE_MEMORY = "device-memory", "Out of device memory; the message says no more"
    # cuBLAS, cuDNN or NCCL found no room beside the allocator's.
    LIBRARY_HANDLE = "library-handle", "A CUDA library found no memory for itself"
    KV_CACHE = "kv-cache", "The engine has too little room for its KV cache"
    ENGINE_BUDGET = "engine-budget", "Less of the GPU is free than the engine was told to take"
    MODEL_SPILLS = "model-spills", "The model does not fit the GPU, and part of it was put elsewhere"
    HOST_KILLED = "host-killed", "Killed from outside: nearly always the kernel, for want of host memory"
    HOST_MEMORY = "host-memory", "A request for host memory was refused"
    SHARED_MEMORY = "shared-memory", "/dev/shm is full"
    NOT_KNOWN = "not-known", "The message does not say whether memory was the matter"
    DEVICE_MISMATCH = "device-mismatch"  # An operator was given tensors of two devices, which its headline names.


@dataclass(frozen=True, slots=True)
class Size:
    """An amount as a message printed it: what was printed, and the bytes that print so."""

    text: str  # as printed, such as "37.09 GiB".
    num_bytes: int  # the middle of them.
    low: int  # the smallest.
    high: int  # the largest.


@dataclass(frozen=True, slots=True)
class Figures:
    """The amounts of an error message; None where it does not give one."""

    tried: Size | None = None  # the segment, or the request, that was refused.
    # whether `tried` is what torch's caching allocator asked of the driver for the request.
    tried_is_segment: bool = True
    device: int | None = None
    total: Size | None = None
    free: Size | None = None  # free according to the driver, after the allocator released what it could.
    process: Size | None = None  # all that this process has on the GPU.
    others: tuple[tuple[int, Size], ...] = ()  # what each other process has, by pid.
    allowed: Size | None = None  # limit set by a memory fraction.
    allocated: Size | None = None
    reserved: Size | None = None  # of the caching allocator; allocated is part of it, and so are private pools.
    private_pools: Size | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor of which the failed allocation may have been."""

    shape: tuple[int, ...]
    dtype: str
    role: str  # what it would be, such as "logits".
    num_bytes: int
    model: str = ""  # the catalog's model whose dimensions were taken; empty: none.
    why: str = ""  # what speaks for it, one line.
    exact: bool = False  # whether every size was known and the bytes are within what the message can mean.


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to try: what, why, and the command (shell, unless `code` is "python")."""

    what: str
    command: str = ""
    code: str = "sh"
    fix: str = ""  # Its name among memprof's fixes, if it is one.

    @classmethod
    def python(cls, what: str, command: str) -> Advice:
        """Return an advice whose command is Python."""
        return cls(what, command, "python")


@dataclass(frozen=True, slots=True)
class Diagnosis(JsonValue):
    """One error, explained."""

    cause: Cause
    title: str  # one line for people.
    source: str  # what printed it: "torch", "vllm", "the kernel", ...
    message: str  # the error's own line.
    line: int  # its number in the log, from 1.
    count: int = 1  # how often it stands there; of one wording the first 60 places are looked at.
    figures: Figures = field(default_factory=Figures)
    explanation: tuple[str, ...] = ()  # one line each.
    where: tuple[str, ...] = ()  # the frames of the traceback that matter, the guilty one first.
    tensors: tuple[Candidate, ...] = ()  # candidates for the failed allocation, likeliest first.
    devices: tuple[str, ...] = ()  # of a device mismatch, those that met.
    steps: tuple[Advice, ...] = ()  # what to do, in order.
