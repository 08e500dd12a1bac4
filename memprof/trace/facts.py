"""Facts of a run: its requested configuration, the actual one, the device, and versions.

Captures store these facts, and reports show them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from memprof.run_spec import RunSpec
from memprof.spec import DTYPES, TargetSpec
from memprof.trace.json_values import JsonValue, fields_from_plain, from_plain, json_name, to_plain
from memprof.version import __version__


@dataclass(frozen=True, slots=True)
class Target(JsonValue):
    """The target of `memprof profile`, as requested (`asked`) and as determined by the run; None: unknown.

    In JSON both are one object, in which determined values replace requested ones.
    """

    asked: TargetSpec = field(metadata=json_name(None))
    model: str  # The model's name; `asked.model` may be a path or a size.
    task: str | None = None
    num_parameters: int | None = None
    num_trainable_parameters: int | None = None
    context_length: int | None = None  # Tokens; None: the model takes none.
    dtype: str | None = None
    # Rows of the model's embedding; `asked_vocab_size` is the vocab_size of the config file where that is smaller.
    vocab_size: int | None = None
    asked_vocab_size: int | None = None
    max_positions: int | None = None
    # Tokens per sequence in each batch, padding included, where lengths vary.
    sequence_lengths: tuple[int, ...] = ()
    alloc_conf: str | None = None  # Settings in force at the end, from any source.

    @property
    def spec(self) -> TargetSpec:
        """Return the requested spec, with options that were left open replaced by values that the run determined."""
        return self.asked.edit(**_drop_custom_dtype({name: getattr(self, name) for name in _COMMON_FIELDS}))

    def to_json(self) -> dict[str, Any]:
        """Return requested and determined values as one object; "asked" has the requested values that were replaced."""
        asked = {name: to_plain(getattr(self.asked, name)) for name in _COMMON_FIELDS}
        return {**to_plain(self.asked), **super(Target, self).to_json(), "asked": asked}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Target:
        """Return the target from the result of `to_json`. Without "asked" (early releases), none is replaced."""
        asked = from_plain(TargetSpec, _drop_custom_dtype({**values, **values.get("asked", {})}))
        return cls(asked, **fields_from_plain(cls, values))


def _drop_custom_dtype(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values`; a dtype that no option can request (of a model that the user wrote) becomes None."""
    return values if values.get("dtype") in (None, *DTYPES) else {**values, "dtype": None}


_COMMON_FIELDS = [f.name for f in dataclasses.fields(Target) if f.name in TargetSpec.__dataclass_fields__]


# How a program may end (`memprof.script.EndReason`).
ENDINGS = ("steps", "ready", "exit", "timeout", "error", "not simulated", "refused", "another rank", "interrupted")


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """A script that was run: its command, its end, and its steps."""

    command: tuple[str, ...]
    ended: str  # One of `ENDINGS`.
    exit_code: int | None
    steps: int  # Training steps that the program began; 0 for a program that trains nothing.
    fixes: tuple[str, ...]  # Fixes in force.
    evaluated: bool = True  # Whether the program called a model in eval mode; True also where unknown.
    asked: RunSpec | None = None  # The spec of the run; None: a capture of an early release.
    # Training steps that the program's loops would have made without the limit; None: unknown.
    planned_steps: int | None = None
    misses_evaluation: bool = False  # Whether the program was stopped before the evaluation that its code has.
    # Whether the program was stopped before its training loop unfroze parameters, as its code does.
    misses_unfreezing: bool = False
    idle_optimizers: int = 0  # Optimizers that had made no step when the program was stopped.
    # Whether the program was stopped before a loop around its training steps built the next model.
    misses_model: bool = False
    evaluation_step: int | None = None  # The training step after which that evaluation comes; None: unknown.
    # Whether the program was stopped among the calls of models behind its last training step.
    misses_calls: bool = False

    def __post_init__(self) -> None:
        if self.ended not in ENDINGS:
            raise ValueError(f"a program does not end by {self.ended!r}")


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The rank of the run's process, and the number of ranks of the program."""

    rank: int = 0
    world_size: int = 1
    # The first and the last of the ranks that this one run stands for: all of them do the same.
    alike: tuple[int, ...] = ()
    without_nccl: bool = False  # Whether all process groups use a host backend (gloo, MPI).


@dataclass(frozen=True, slots=True)
class ShardedGroup:
    """Parameters that torch.distributed communicates together: those of one fully_shard call, FSDP or DDP module."""

    api: str  # `fully_shard`, `FullyShardedDataParallel` or `DistributedDataParallel`, which does not shard
    module: str  # path of the wrapped module; "" is the root
    ranks: int  # number of ranks that hold a part of each parameter, or with DDP all of it
    parameters: tuple[str, ...]  # names in the model
    shapes: tuple[tuple[int, ...], ...]  # unsharded shape of each parameter
    dtype: str  # dtype of the gathered parameters
    views: bool = False  # DDP: whether gradients lie in its buckets (gradient_as_bucket_view)
    kept: bool = False  # whether parameters stay gathered between forward and backward (reshard_after_forward=False)
    ahead: int = 0  # groups that are prefetched while this one computes, as the program set; 0: FSDP's default
    unlimited: bool = False  # FullyShardedDataParallel: whether prefetching is unlimited (limit_all_gathers=False)


@dataclass(frozen=True, slots=True)
class DeviceFacts(JsonValue):
    """The device of a run; None: unknown."""

    name: str = "a GPU"
    total_bytes: int | None = None
    # Bytes for the allocator: without the CUDA context and, where measured, without other processes.
    usable_bytes: int | None = None
    context_bytes: int = 0  # Of the CUDA context; 0 on a CPU.
    host_memory_bytes: int | None = None  # Memory of the host, where its limit counts (`--host-memory`).
    backend: str = "cuda"  # torch's: "cuda", "hip" (ROCm), "mps" or "xpu".
    # Memory that the GPU shares with the host; None: the GPU has its own. Of "mps", `total_bytes` is the working set
    # that Metal recommends, and `usable_bytes` the limit above which allocations fail.
    unified_bytes: int | None = None
    has_bfloat16: bool = True  # whether it computes in bfloat16 at full speed

    @property
    def has_cuda_context(self) -> bool:
        """Return whether a process has a context of CUDA or ROCm on the device."""
        return self.backend in ("cuda", "hip")

    @property
    def resident_bytes(self) -> int | None:
        """Return the bytes that the allocator can reserve without paging; None: unknown."""
        total, usable = self.total_bytes, self.usable_bytes
        if self.unified_bytes is None or total is None or usable is None:
            return usable
        return min(usable, total - self.context_bytes)

    def would_page(self, needed_bytes: int) -> bool:
        """Return whether a run that does not stay in memory pages, and no allocation fails: it needs no more than the
        allocator may reserve of the memory that GPU and host share."""
        usable_bytes = self.usable_bytes
        return (
            self.unified_bytes is not None
            and usable_bytes is not None
            and needed_bytes <= usable_bytes + self.context_bytes
        )

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain JSON values; without those that a GPU of CUDA with its own memory and
        bfloat16 has not."""
        usual = (("backend", "cuda"), ("unified_bytes", None), ("has_bfloat16", True))
        return {k: v for k, v in super(DeviceFacts, self).to_json().items() if (k, v) not in usual}


@dataclass(frozen=True, slots=True)
class AllocatorFacts:
    """The caching allocator of a run: torch's version, the settings, and where they come from (None: defaults)."""

    torch: str | None = None
    alloc_conf: str | None = None
    alloc_conf_from: str | None = None


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """Another process on the GPU, as NVML reports it."""

    pid: int
    name: str
    used_bytes: int | None = field(default=None, metadata=json_name("bytes"))


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """Memory that NVML reports at the end of a measured run, in bytes; None: not available."""

    reserved_bytes: int | None = None  # torch's reserved memory at the time of the reading
    process_bytes: int | None = None  # of this process
    used_bytes: int | None = None  # of the GPU
    processes: tuple[OtherProcess, ...] | None = None  # the other processes on the GPU
    note: str = ""  # the reason for a None


@dataclass(frozen=True, slots=True)
class Facts(JsonValue):
    """All facts of a run."""

    command: str = ""
    memprof_version: str = __version__
    target: Target | None = None  # None: a script or a function of the user's, which has no spec
    program: ProgramFacts | None = None
    device: DeviceFacts = DeviceFacts()
    allocator: AllocatorFacts | None = None  # None: a capture of an early release
    nvml: NvmlFacts | None = None
    rank: RankFacts | None = None  # None: a program of one process
    groups: tuple[ShardedGroup, ...] = ()  # in the state after the first backward pass

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain JSON values, as in a capture file."""
        return super(Facts, self).to_json() | {"target": target_to_json(self.target)}


def target_to_json(target: Target | None) -> dict[str, Any]:
    """Return `target` as plain JSON values; an empty object for None."""
    return {} if target is None else target.to_json()
