"""The trace: what one run did to memory, event by event. A simulated and a measured run meet here.

A trace is columnar and plain: `events` is the time axis (an event's index is its time), and everything an event refers
to (storages, phases, modules, sources, operators) is a table beside it. Everything right of capture/ reads this and
nothing else, and needs no torch.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from memprof.trace.facts import Facts
from memprof.trace.json_values import json_name

NONE = -1  # an index that points nowhere: no module, no source, no forward event

GPU = "cuda:0"  # the device whose memory is profiled; of several GPUs, the first

HOST = "cpu"

CPU = "cpu:0"  # the device of a run that is measured on the CPU. What belongs to the host on any device stays `HOST`.


def is_gpu(device: str) -> bool:
    """Return whether a device is a GPU."""
    return device.startswith("cuda")


def gpu_index(device: str) -> int:
    """Return the number of a GPU: 1 of `cuda:1`."""
    return int(device.removeprefix("cuda:"))


class EventKind(enum.IntEnum):
    """The kind of an event; the comment says what the event's `ref` indexes."""

    ALLOC = 0  # Trace.storages
    FREE = 1  # Trace.storages
    PHASE = 2  # Trace.phases: this phase begins, and the one before it ends
    ENTER = 3  # Trace.modules: a module's forward begins
    EXIT = 4  # Trace.modules: a module's forward ends
    EMPTY_CACHE = 5  # nothing, 0: torch.cuda.empty_cache() was called
    STREAM = 6  # nothing, the stream's own number (0: the default one): memory is taken on it from here on
    USE = 7  # Trace.uses: Tensor.record_stream was called
    WAIT = 8  # Trace.waits
    POOL = 9  # nothing, a private pool's own number (0: the default one): memory is taken from it from here on
    POOL_FREE = 10  # the same: nothing keeps it any more


class Event(NamedTuple):
    """One point of the time axis."""

    kind: EventKind
    ref: int


class Storage(NamedTuple):
    """One allocation, from birth to death: the memory behind one or more tensors."""

    num_bytes: int  # bytes requested, before the allocator rounds
    shape: tuple[int, ...]  # shape of the tensor that the storage was allocated for
    dtype: str
    device: str
    op: int  # index in Trace.ops
    module: int  # index in Trace.modules; in a backward pass, the module whose forward is being differentiated
    source: int  # index in Trace.sources: the innermost line outside torch and memprof
    phase: int  # index in Trace.phases
    forward_event: int  # in a backward pass, the event at which the differentiated operator ran forward; else NONE
    hidden: bool  # True for memory that CUDA libraries take and no tensor shows (workspaces, kernel temporaries)


class ModuleRole(enum.StrEnum):
    """The role of a module in its model, as far as stages are concerned."""

    OTHER = ""
    ROOT = "root"
    EMBEDDING = "embedding"
    LAYER = "layer"
    CHILD = "child"  # a direct child of a root that has no stack of layers, or what is in a child that is a bare list
    NORM = "norm"
    HEAD = "head"


class Module(NamedTuple):
    """One nn.Module of the run."""

    path: str  # qualified name below its root, such as `model.layers.3.mlp`; empty for the root
    class_name: str
    role: ModuleRole
    # The path of the list that it is in: of a layer, such as `model.layers`; of a child, if the list holds modules of
    # several kinds and is not called itself.
    stack: str

    @property
    def number(self) -> int:
        """Return a layer's place in its list. Raises ValueError: it is in none."""
        return int(self.path.removeprefix(f"{self.stack}.").partition(".")[0])


class PhaseKind(enum.StrEnum):
    """The phase that the program was in."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    INPUTS = "inputs"
    FORWARD = "forward"
    DECODE = "decode"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer step"
    ZERO_GRAD = "zero_grad"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    OTHER = "other"


class Phase(NamedTuple):
    """A stretch of the run: a kind, the training step (from 1; 0 outside steps) and the micro-batch in it (from 1)."""

    kind: PhaseKind
    step: int
    micro_batch: int


class Role(enum.StrEnum):
    """The role of a storage, learnt after its birth (a gradient is only known when it reaches `.grad`)."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    INPUT = "input"
    KV_CACHE = "KV cache"
    # Taken by torch.distributed: buckets, what is gathered or scattered, what collectives lay flat.
    COMMUNICATION = "communication"
    UNSHARDED = "unsharded parameter"  # A parameter of which each rank has a part, whole for as long as it is used


ROLES_PER_STEP = frozenset(
    {Role.INPUT, Role.GRADIENT}
)  # by each step; all else that has a role is there for the whole run


class Owner(NamedTuple):
    """The role of a storage and the name it has in that role, such as `model.norm.weight` or `exp_avg`."""

    role: Role
    name: str


class Work(NamedTuple):
    """The work of equal calls of one operator in one phase."""

    phase: int  # index in Trace.phases
    op: int  # index in Trace.ops
    device: str
    dtype: str
    operations: int  # floating-point operations of one call (a product and its sum are two), of products of matrices
    num_bytes: int  # read and written by one call
    to_device_bytes: int  # copied from host memory to the GPU by one call
    to_host_bytes: int
    calls: int  # how many there were
    link_bytes: int = 0  # sent to other GPUs by one call


class Workspace(NamedTuple):
    """Memory that a library took for one call and released at once: its size is a rule's, and not known."""

    event: int  # events before it: that of its allocation, unless `num_bytes` is 0
    device: str
    num_bytes: int
    most_bytes: int  # the bound of what it may be


class Use(NamedTuple):
    """A stream works on memory that was taken on another (Tensor.record_stream): once freed, it waits for that."""

    storage: int
    stream: int


class StreamEvent(NamedTuple):
    """A wait, or other work, given to a stream of a GPU before an event."""

    device: str
    stream: int
    before: int


class Wait(NamedTuple):
    """The host, or a stream, was made to wait for work of streams. Noted once a trace has a `Use`."""

    by_host: bool
    done: tuple[StreamEvent, ...]  # also what the awaited streams themselves had waited for


class Sample(NamedTuple):
    """Counters of a measured run, read between two events; None: not known."""

    event: int  # the last event before it; -1 before the first
    seconds: float  # since the run's beginning
    allocated_bytes: int | None  # as torch counts it
    peak_allocated_bytes: int | None  # the highest since the sample before
    reserved_bytes: int | None
    device_used_bytes: int | None  # of the whole GPU, by everybody
    resident_bytes: int | None  # resident memory of the process


class Operand(NamedTuple):
    """One tensor of a device mismatch: where it is, what it is, and the line that made it (NONE if not seen)."""

    device: str
    shape: tuple[int, ...]
    dtype: str
    source: int


class DeviceMismatch(NamedTuple):
    """An operator was given tensors on different devices; on a real GPU the run ends here with a RuntimeError."""

    event: int
    op: int
    module: int
    source: int
    operands: tuple[Operand, ...]


class Forward(NamedTuple):
    """One call of a module from outside all others, in a program that names no phases of its own."""

    begin: int  # events before the call; `end`: before its return
    end: int
    module: int  # index in Trace.modules
    source: int  # index in Trace.sources: the line that calls it
    training: bool  # the module's own flag
    nodes: int  # Autograd nodes that the call made: 0 without gradients
    outputs: tuple[int, ...]  # the storages of the tensors that it returned


class Holder(NamedTuple):
    """The part of the program that keeps tensors live that pile up, as seen while it ran."""

    event: int  # events before it was looked for
    kind: str  # class of the container, such as `list`; "" if a variable or an attribute is the tensor itself
    name: str  # as the program says it: `losses`, or `Meter.values` for an attribute of an object of class Meter
    # `file:line function` of the line that puts tensors there; where it cannot be read off the code, of the variable's
    # function or the attribute's class. None: no source code.
    source: str | None
    fills: bool  # whether `source` is that line
    limit: int | None  # how many it can hold (a deque with maxlen); None: any number
    storages: tuple[int, ...]  # those that it holds, itself or through what is in it
    nodes: int  # Autograd nodes that hang on its tensors; 0: they carry no graph
    node_steps: int  # how many different steps made these nodes
    batches: int | None  # length of the only data loader in the functions that were running; None: not known


class GraphBreak(NamedTuple):
    """The place where a graph of torch.compile ends although its function goes on."""

    source: str  # `file:line function` of the program
    why: str
    num_bytes: int  # what the graph leaves in memory there for what follows


class CompiledSavedTensors(NamedTuple):
    """Results of one operator that a compiled graph keeps for its backward, and eager code would not."""

    graph: int  # of those that keep more, which one
    more_bytes: int  # what each call of that graph keeps in all, less what eager code would keep
    op: str
    source: str  # `file:line function` of the program; "" if that is not known
    num_bytes: int  # of one result; a call has `times` of them
    times: int
    again: bool  # whether the program's own backward computes it again


class CudaGraphed(NamedTuple):
    """Compiled code that runs in CUDA graphs."""

    source: str  # `file:line function` of the program that is compiled, or that calls code of a library's
    # Of inputs that it was called with, compiled again or not: each has graphs of its own, in a pool that all graphs
    # share and nothing else takes from.
    sizes: int


class CompileStats(NamedTuple):
    """The cost of torch.compile in a run, on the machine that the run was made on."""

    seconds: float  # of Dynamo, AOTAutograd and Inductor, down to the code around kernels; these are not made
    kernels: int  # different ones that Inductor wrote


class FailureKind(enum.StrEnum):
    """Why a run could not go on, as far as that decides what to do about it."""

    ERROR = "error"  # the program's own, or one that memprof does not know
    GAP = "gap"  # of the virtual GPU: it speaks of tensors without data, which no real one has
    NO_META_KERNEL = "no meta kernel"  # an operator that cannot run without data
    OUT_OF_MEMORY = "out of memory"  # on a real device
    CUSTOM_KERNEL = "custom kernel"  # code below torch: Triton, a C++ or CUDA extension
    TRACING = "tracing"  # a model was exported: its operators would run on tensors of torch's own
    OTHER_THREAD = "other thread"  # CUDA was requested where the virtual GPU is not seen
    UNKNOWN_VALUE = "unknown value"  # the program judged a number that is not computed
    REFUSED = "refused"  # the program, or a process that it started, did what memprof does not simulate
    INTERRUPTED = "interrupted"  # by the user
    OTHER_RANK = "other rank"  # ranks of the program do not agree, or another one failed


# Kinds of an error that the program meets on the virtual GPU alone: it is not the program's own.
NOT_SIMULATED = frozenset(
    {
        FailureKind.GAP,
        FailureKind.NO_META_KERNEL,
        FailureKind.CUSTOM_KERNEL,
        FailureKind.TRACING,
        FailureKind.OTHER_THREAD,
        FailureKind.UNKNOWN_VALUE,
    }
)


class Failure(NamedTuple):
    """The run ended before its time; everything in the trace is what happened until then."""

    kind: FailureKind
    phase: str  # what was being done, such as `forward of step 1`
    error: str  # class of the exception
    message: str  # its first line
    op: str | None  # operator or kernel that could not run, such as `mylib.fused_rope`
    module: str | None  # path of the module whose code was running; "" is the root itself, None outside every module
    source: str | None  # `file:line function` of the program
    read: str | None  # for an unknown value: the line that read it, and what it was told
    hint: str | None = None  # what to do, where that is known


@dataclass(slots=True)
class Trace:
    """The whole record of one run.

    `events` is the time axis, and each other attribute a table of the capture. What is no event (versions, GPU, what
    was requested) is in `facts`.
    """

    source: str = "simulated"
    device: str = GPU  # the device whose memory is profiled: GPU, another GPU, or CPU
    # Of several: whether each was used, and has a CUDA context.
    gpus: dict[str, bool] = field(default_factory=dict, metadata=json_name("cards"))
    events: list[Event] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    modules: list[Module] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    owners: dict[int, Owner] = field(default_factory=dict)
    mismatches: list[DeviceMismatch] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)  # of a measured run
    times: list[int] = field(default_factory=list)  # of a measured run: nanoseconds of each event since the first
    work: list[Work] = field(default_factory=list)  # empty if it was not counted
    workspaces: list[Workspace] = field(default_factory=list)  # of a simulated run
    uses: list[Use] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)
    failure: Failure | None = None  # None if the run came to its end
    # Whether a program that names no phases has called a model with gradients; it may not have come to a backward.
    trains: bool = False
    # Whether the program updates parameters itself, by no optimizer of torch's (those of a simulated run).
    updates_parameters_manually: bool = field(default=False, metadata=json_name("updates_itself"))
    # Whether the program ended with a failed allocation: the last request for its memory.
    ended_out_of_memory: bool = field(default=False, metadata=json_name("cut_short"))
    # Storages that the GPU had no room for, where the program was told so (torch.OutOfMemoryError) and went on. Each
    # has an ALLOC, when it was requested, and a FREE right after it.
    refused: list[int] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)  # of a program that names no phases of its own
    holders: list[Holder] = field(default_factory=list)  # of what piled up
    graph_ends: list[GraphBreak] = field(default_factory=list)
    compiled_keeps: list[CompiledSavedTensors] = field(default_factory=list)
    graphed: list[CudaGraphed] = field(default_factory=list)
    compiling: CompileStats | None = None  # None: nothing was compiled, or it was not noted
    others: list[Trace] = field(default_factory=list)  # the other ranks that ran together; what is equal is shared

    def on(self, device: str) -> Trace:
        """Return the same run, seen from another GPU; what is recorded from now on is in both."""
        return dataclasses.replace(self, device=device)

    def optional_storages(self) -> frozenset[int]:
        """Return the storages of workspaces that their library does without where the GPU has no room."""
        events = self.events
        return frozenset(events[one.event].ref for one in self.workspaces if one.num_bytes and one.event < len(events))

    def begun(self) -> list[tuple[int, Phase]]:
        """Return the phases in order, each with the event at which it begins."""
        phase, phases = EventKind.PHASE, self.phases
        return [(time, phases[ref]) for time, (kind, ref) in enumerate(self.events) if kind is phase]

    def lifetimes(self) -> tuple[list[int], list[int]]:
        """Return the events at which each storage was allocated, and freed; the end of the trace if it never was."""
        births, deaths = ([len(self.events)] * len(self.storages) for _ in range(2))
        alloc, free = EventKind.ALLOC, EventKind.FREE
        for time, (kind, ref) in enumerate(self.events):
            if kind is alloc:
                births[ref] = time
            elif kind is free:
                deaths[ref] = time
        return births, deaths

    def op(self, storage: Storage) -> str:
        """Return the operator that allocated `storage`."""
        return self.ops[storage.op]

    def module_path(self, storage: Storage) -> str | None:
        """Return path of the module that `storage` belongs to: None outside every module, "" in the root's own code."""
        return None if storage.module == NONE else self.modules[storage.module].path

    def source_line(self, storage: Storage) -> str | None:
        """`file:line function` that allocated `storage`, None if no line outside torch was running."""
        return self.source_at(storage.source)

    def source_at(self, index: int) -> str | None:
        """Return the source of this index; None for NONE."""
        return None if index == NONE else self.sources[index]


_LAYER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def without_numbers(path: str) -> str:
    """Return a module's path, or the name of what is in it, with layer numbers replaced by `*`: alike in all layers."""
    return _LAYER.sub("*", path)


def short_source(source: str) -> str:
    """`folder/file.py:line` of a source `file:line function`: enough to find it, short enough for a sentence."""
    path, _, line = (source.rpartition(" ")[0] or source).rpartition(":")
    return "/".join(path.replace("\\", "/").split("/")[-2:]) + f":{line}"
