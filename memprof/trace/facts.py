"""Facts of a run beside its events: what was requested, what it turned out to be, and where it ran.

A capture keeps the facts, and a report shows them: both write and read them here.
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
    """The target of `memprof profile`, as asked and as it turned out to be; None: not known.

    In JSON both are one object, in which what turned out stands in place of what was asked.
    """

    asked: TargetSpec = field(metadata=json_name(None))
    model: str  # Its name, where `asked.model` may be a path or a size.
    task: str | None = None
    num_parameters: int | None = None
    num_trainable_parameters: int | None = None
    context_length: int | None = None  # Tokens; None: the model takes none.
    dtype: str | None = None
    # Rows of the model's embedding; `asked_vocab_size` what a config file asks for where that is less.
    vocab_size: int | None = None
    asked_vocab_size: int | None = None
    max_positions: int | None = None
    # Tokens per sequence in each batch that was fed, padding included, where lengths vary.
    sequence_lengths: tuple[int, ...] = ()
    alloc_conf: str | None = None  # Settings that were in force at the end, wherever they came from.

    @property
    def spec(self) -> TargetSpec:
        """Return the spec, with nothing left open that can be requested."""
        return self.asked.edit(**_askable({name: getattr(self, name) for name in _BOTH}))

    def to_json(self) -> dict[str, Any]:
        """Return both in one object, and what was asked of that which turned out."""
        asked = {name: to_plain(getattr(self.asked, name)) for name in _BOTH}
        return {**to_plain(self.asked), **super(Target, self).to_json(), "asked": asked}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Target:
        """Return the reverse; of what early releases wrote as JSON, what turned out counts as asked."""
        asked = from_plain(TargetSpec, _askable({**values, **values.get("asked", {})}))
        return cls(asked, **fields_from_plain(cls, values))


def _askable(values: dict[str, Any]) -> dict[str, Any]:
    """`values` without a dtype that a model of the user's own has, and no option asks for."""
    return values if values.get("dtype") in (None, *DTYPES) else {**values, "dtype": None}


_BOTH = [one.name for one in dataclasses.fields(Target) if one.name in TargetSpec.__dataclass_fields__]


# How a program may end (`memprof.script.EndReason`).
ENDINGS = ("steps", "exit", "timeout", "error", "not simulated", "refused", "another rank", "interrupted")


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """A script that was run."""

    command: tuple[str, ...]
    ended: str  # One of `ENDINGS`.
    exit_code: int | None
    steps: int  # Training steps that it began; none where nothing is learned.
    fixes: tuple[str, ...]  # Fixes in force.
    evaluated: bool = True  # Whether it called a model in eval mode; True too where that was not noted.
    asked: RunSpec | None = None  # How it was run; None: a capture of an early release.
    # Training steps that it would have made had it not been stopped, by its loops; None: they do not tell.
    planned_steps: int | None = None

    def __post_init__(self) -> None:
        if self.ended not in ENDINGS:
            raise ValueError(f"a program does not end by {self.ended!r}")


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The rank of the run's process, in the group that the program joined."""

    rank: int = 0
    world_size: int = 1
    # The first and the last of the ranks that it was run for, alone: all of them do the same.
    alike: tuple[int, ...] = ()
    without_nccl: bool = False  # Whether all its groups are those of hosts (gloo, MPI).


@dataclass(frozen=True, slots=True)
class ShardedGroup:
    """Parameters that torch.distributed communicates together: of one call of fully_shard, one FSDP or DDP module."""

    api: str  # `fully_shard`, `FullyShardedDataParallel` or `DistributedDataParallel`, which keeps them whole
    module: str  # path of the module that was given; "" is the root
    ranks: int  # so many have a part of each, or in DDP all of it
    parameters: tuple[str, ...]  # their names, as the model has them
    shapes: tuple[tuple[int, ...], ...]  # of each parameter, whole
    dtype: str  # in which they are gathered
    views: bool = False  # DDP: whether gradients lie in its buckets (gradient_as_bucket_view)
    kept: bool = False  # whether the program requested them to stay whole between forward and backward
    ahead: int = 0  # groups that are gathered while this one computes, as the program asked; 0: as FSDP has it
    unlimited: bool = False  # FullyShardedDataParallel: whether any number may be gathered ahead (limit_all_gathers)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device that a run was on; None: not known."""

    name: str = "a GPU"
    total_bytes: int | None = None
    # What is left for the allocator beside the CUDA context, and beside other processes where that was measured.
    usable_bytes: int | None = None
    context_bytes: int = 0  # Of the CUDA context; 0 on a CPU.
    host_memory_bytes: int | None = None  # Of its machine, where it counts (`--host-memory`).


@dataclass(frozen=True, slots=True)
class AllocatorFacts:
    """Whose caching allocator: version of torch, its settings, and where these came from (None: its defaults)."""

    torch: str | None = None
    alloc_conf: str | None = None
    alloc_conf_from: str | None = None


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """Another process on the GPU, as NVML names it."""

    pid: int
    name: str
    used_bytes: int | None = field(default=None, metadata=json_name("bytes"))


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """NVML's readings at the end of a measured run, in bytes; None: it cannot be asked, or may not say."""

    reserved_bytes: int | None = None  # what torch had reserved when NVML was asked
    process_bytes: int | None = None  # of this process
    used_bytes: int | None = None  # of the GPU
    processes: tuple[OtherProcess, ...] | None = None  # the others on the GPU
    note: str = ""  # why something is None


@dataclass(frozen=True, slots=True)
class Facts(JsonValue):
    """All of them."""

    command: str = ""
    memprof_version: str = __version__
    target: Target | None = None  # None: a script or a function of the user's, which has no spec
    program: ProgramFacts | None = None
    device: DeviceFacts = DeviceFacts()
    allocator: AllocatorFacts | None = None  # None: a capture of an early release
    nvml: NvmlFacts | None = None
    rank: RankFacts | None = None  # None: a program of one process
    groups: tuple[ShardedGroup, ...] = ()  # as they were after the first backward pass

    def to_json(self) -> dict[str, Any]:
        """Return the value as a capture has it."""
        return super(Facts, self).to_json() | {"target": target_to_json(self.target)}


def target_to_json(target: Target | None) -> dict[str, Any]:
    """Empty where there is none."""
    return {} if target is None else target.to_json()
