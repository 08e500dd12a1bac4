"""The trace: all memory events of a run, simulated or measured.

`events` is the time axis: an event's index is its time. The objects that events refer to (storages, phases, modules,
sources, operators) are tables of the trace. The analysis packages read only the trace, and do not need torch.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import itertools
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from memprof.trace.facts import Facts
from memprof.trace.json_values import json_name

NONE = -1  # an index that points nowhere: no module, no source, no forward event

GPU = "cuda:0"  # the device whose memory is profiled unless the trace says another; of several GPUs, the first

GPU_TYPES = ("cuda", "mps", "xpu")  # torch's types of devices that are GPUs; ROCm's are "cuda" too

HOST = "cpu"

CPU = "cpu:0"  # the device of a run that is measured on the CPU. What belongs to the host on any device stays `HOST`.


def is_gpu(device: str) -> bool:
    """Return whether `device` is a GPU, such as "cuda:0" or "mps:0"."""
    return device.startswith(GPU_TYPES)


def gpu_index(device: str) -> int:
    """Return the index of a GPU: 1 for `cuda:1`."""
    return int(device.partition(":")[2])


class EventKind(enum.IntEnum):
    """The kind of an event; the comments say which table an event's `ref` is an index of."""

    ALLOC = 0  # Trace.storages
    FREE = 1  # Trace.storages
    PHASE = 2  # Trace.phases: this phase begins, and the one before it ends
    ENTER = 3  # Trace.modules: a module's forward begins
    EXIT = 4  # Trace.modules: a module's forward ends
    EMPTY_CACHE = 5  # always 0: torch.cuda.empty_cache() was called
    STREAM = 6  # the number of a stream (0: the default stream): later allocations are on this stream
    USE = 7  # Trace.uses: Tensor.record_stream was called
    WAIT = 8  # Trace.waits
    POOL = 9  # the number of a private pool (0: the default pool): later allocations are from this pool
    POOL_FREE = 10  # the number of a private pool: the pool is no longer in use


class Event(NamedTuple):
    """One event of a trace; its index in the trace is its time."""

    kind: EventKind
    ref: int


class Storage(NamedTuple):
    """One allocation, until its free: the memory of one or more tensors."""

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


class Caller(NamedTuple):
    """A line of the program's own files that leads to the line `Storage.source` of a large storage."""

    storage: int  # index in Trace.storages
    source: int  # index in Trace.sources
    by: str  # the function of torch that the line calls, and that runs the rest, such as `torch.func.vmap`; "": unnamed


class CheckpointedLine(NamedTuple):
    """A line that runs in torch.utils.checkpoint.checkpoint, and the line that calls this; indices in Trace.sources."""

    source: int
    caller: int


class ModuleRole(enum.StrEnum):
    """The role of a module in its model, which determines the stages of the run."""

    OTHER = ""
    ROOT = "root"
    EMBEDDING = "embedding"
    LAYER = "layer"
    CHILD = "child"  # a direct child of a root without a stack of layers, or a module in a child that is a bare list
    NORM = "norm"
    HEAD = "head"


class Module(NamedTuple):
    """One nn.Module of the run."""

    path: str  # qualified name below its root, such as `model.layers.3.mlp`; empty for the root
    class_name: str
    role: ModuleRole
    # The path of the list that holds the module: for a layer, such as `model.layers`; for a child, if the list holds
    # modules of several classes and is not called itself.
    stack: str

    @property
    def number(self) -> int:
        """Return the module's index in its list `stack`. Raises ValueError: it is not in a list."""
        return int(self.path.removeprefix(f"{self.stack}.").partition(".")[0])


class PhaseKind(enum.StrEnum):
    """The kind of a phase: the part of a run in which the program is."""

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

    @property
    def computes(self) -> bool:
        """Return whether a model or an optimizer computes in the phase."""
        return self in _COMPUTING


_COMPUTING = frozenset(
    {PhaseKind.FORWARD, PhaseKind.DECODE, PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP, PhaseKind.EVALUATION}
)


class Phase(NamedTuple):
    """A phase of the run: kind, training step (from 1; 0 outside steps), and micro-batch of the step (from 1)."""

    kind: PhaseKind
    step: int
    micro_batch: int


class Role(enum.StrEnum):
    """The role of a storage, recorded after its allocation (a gradient is known once `.grad` holds it)."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    INPUT = "input"
    KV_CACHE = "KV cache"
    # Allocated by torch.distributed: buckets, gathered or scattered tensors, flat buffers of collectives.
    COMMUNICATION = "communication"
    UNSHARDED = "unsharded parameter"  # A parameter that ranks share in parts, gathered while it is used


ROLES_OF_MODELS = frozenset({Role.PARAMETER, Role.BUFFER, Role.OPTIMIZER_STATE})

ROLES_PER_STEP = frozenset(
    {Role.INPUT, Role.GRADIENT}
)  # by each step; all else that has a role is there for the whole run


class Owner(NamedTuple):
    """The role of a storage, and its name, such as `model.norm.weight` or `exp_avg`."""

    role: Role
    name: str


class Work(NamedTuple):
    """FLOPs and bytes of identical calls of one operator in one phase."""

    phase: int  # index in Trace.phases
    op: int  # index in Trace.ops
    device: str
    dtype: str
    operations: int  # floating-point operations of one call (a product and its sum are two), of products of matrices
    num_bytes: int  # read and written by one call
    to_device_bytes: int  # copied from host memory to the GPU by one call
    to_host_bytes: int
    calls: int  # number of identical calls
    link_bytes: int = 0  # sent to other GPUs by one call


class Workspace(NamedTuple):
    """Memory that a library allocates during one call only; its size is estimated."""

    event: int  # number of events before the call; also the index of the allocation, unless `num_bytes` is 0
    device: str
    num_bytes: int
    most_bytes: int  # upper bound of the size


class Use(NamedTuple):
    """Use of a storage by a stream other than its own (Tensor.record_stream): its free waits for that stream."""

    storage: int
    stream: int


class StreamEvent(NamedTuple):
    """All work that is enqueued on a stream of a GPU before the event at index `before`."""

    device: str
    stream: int
    before: int


class Wait(NamedTuple):
    """A wait of the host, or of a stream, for work of other streams. Recorded only in traces with a `Use`."""

    by_host: bool
    done: tuple[StreamEvent, ...]  # including the work that the awaited streams themselves had waited for


class Sample(NamedTuple):
    """Memory counters of a measured run, read between two events; None: unknown."""

    event: int  # the last event before it; -1 before the first
    seconds: float  # since the run's beginning
    allocated_bytes: int | None  # as torch counts it
    peak_allocated_bytes: int | None  # the highest since the sample before
    reserved_bytes: int | None
    device_used_bytes: int | None  # of the whole GPU, by all processes
    resident_bytes: int | None  # resident memory of the process


class Operand(NamedTuple):
    """One tensor of a device mismatch: device, shape, dtype and the line that created the tensor (NONE if unknown)."""

    device: str
    shape: tuple[int, ...]
    dtype: str
    source: int


class DeviceMismatch(NamedTuple):
    """An operator call with tensors on different devices, which on a real GPU raises a RuntimeError."""

    event: int
    op: int
    module: int
    source: int
    operands: tuple[Operand, ...]


class Forward(NamedTuple):
    """One outermost call of a module, in a program that does not mark its phases itself."""

    begin: int  # events before the call; `end`: before its return
    end: int
    module: int  # index in Trace.modules
    source: int  # index in Trace.sources: the line that calls it
    training: bool  # the module's own flag
    nodes: int  # Autograd nodes that the call made: 0 without gradients
    outputs: tuple[int, ...]  # the storages of the tensors that it returned
    caller: int = NONE  # index in Trace.sources: the line that calls the function of `source`; NONE: none does


class InnerCall(NamedTuple):
    """The first call of a module by another one."""

    module: int  # index in Trace.modules
    source: int  # index in Trace.sources: the innermost line outside torch that calls it; NONE: none does


class EvalCall(NamedTuple):
    """A call of `eval()` of a model that was in training mode."""

    event: int  # events before it
    module: int  # index in Trace.modules
    source: int  # index in Trace.sources: the line that calls it


class FrozenInVain(NamedTuple):
    """A module whose attribute `requires_grad` the program has set to False, which does nothing to its parameters."""

    module: int  # index in Trace.modules
    source: str | None  # `file:line function` of the line that sets it; None: not known
    parameters: tuple[int, ...]  # storages of its parameters, which all require gradients


class Holder(NamedTuple):
    """The variable or container that keeps accumulating tensors live, as found while the program ran."""

    event: int  # number of events before the search
    kind: str  # class of the container, such as `list`; "" if a variable or an attribute is the tensor itself
    name: str  # as in the program: `losses`, or `Meter.values` for an attribute of an object of class Meter
    # `file:line function` of the line that adds the tensors; where the code does not show that line, of the one that
    # assigns to the variable, of the variable's function or the attribute's class. None: no source code.
    source: str | None
    fills: bool  # whether `source` is that line
    limit: int | None  # the capacity (a deque with maxlen); None: unlimited
    storages: tuple[int, ...]  # the storages that it holds, directly or indirectly
    nodes: int  # Autograd nodes that the tensors keep alive; 0: no graph
    node_steps: int  # number of different steps that made these nodes
    batches: int | None  # length of the only data loader in the functions that were running; None: not known
    # Whether it, or the object whose attribute it is, has a method `reset`, as metrics do, and the code that was
    # running calls none.
    has_reset: bool = False
    is_read_later: bool = False  # whether the code that was running may read the variable, before it assigns to it
    # Of what is kept and not used: number of events as the last phase began before which none of it was used; 0: none.
    unused_until: int = 0

    held_bytes: int | None = None  # of the tensors: less than of `storages` if these are views; None: not known
    length: int | None = None  # the number of items of a container with a capacity; None: not known

    @property
    def is_handler(self) -> bool:
        """Return whether this is an `except` block, in which an error keeps the tensors of what has failed."""
        return self.kind == HANDLER_KIND

    @property
    def is_cycle(self) -> bool:
        """Return whether this is a reference cycle."""
        return self.kind in set(CycleKind)


class CycleKind(enum.StrEnum):
    """`Holder.kind` of a reference cycle; `name` shows it, and `source` is the line that closes it."""

    GRAD = "cycle through .grad"  # backward(create_graph=True): the gradient has a graph, which has the tensor
    CTX = "cycle through ctx"  # an output of a custom autograd Function in an attribute of its ctx
    FUNCTION = "cycle through a function"  # such as a hook that refers to the tensor on which it is registered
    OBJECTS = "reference cycle"  # of Python objects


HANDLER_KIND = "except"  # `Holder.kind` of an `except` block; `name` is its function, `source` the line that it runs
HOOK_KIND = "hook"  # that of hooks with one code on one module; `name` is their function, `source` registers them
AUTOCAST_KIND = "autocast"  # that of an autocast block, which keeps copies of weights; `source` is its line


class UntrainedSpan(NamedTuple):
    """Events of a forward whose operators lead to parameters that no optimizer has, and to no others."""

    begin: int  # events before the first of the operators, or before the call of a module that runs it
    end: int  # events before the next operator with another autograd node
    storages: tuple[int, ...]  # large ones that modules made then, and that autograd keeps for these gradients
    last_uses: tuple[int, ...]  # of each: as in `Trace.last_uses`, but before the backward


class FirstStep(NamedTuple):
    """First step of an optimizer, where memory ran out before its end; each field has an entry per parameter."""

    parameters: tuple[int, ...]  # storages
    gradients: tuple[int, ...]  # of each, the storage of its gradient; NONE: it has none yet
    states: tuple[int, ...]  # of each, how many tensors of its size the optimizer still makes as its state


class MovedModel(NamedTuple):
    """A model that was being moved when memory ran out."""

    class_name: str
    num_parameters: int
    num_bytes: int  # of its parameters and buffers, moved or not
    dtype: str  # of most of these bytes
    largest: str = ""  # path of its largest parameter, with its shape and bytes
    largest_shape: tuple[int, ...] = ()
    largest_bytes: int = 0


class VmapCall(NamedTuple):
    """One call that torch.func.vmap makes of a function for a batch, or for a chunk of it."""

    begin: int  # events before the call; `end`: before its return
    end: int
    rows: int  # size of the batch or chunk
    function: str  # the function of torch.func that the program called: vmap, jacrev, jacfwd
    source: int  # index in Trace.sources: the line that calls it


class BatchLoader(NamedTuple):
    """A DataLoader that the program iterates over, from when it yields after another one did."""

    batch_size: int
    source: int  # index in Trace.sources: the program's own line that made it, or else a library's
    event: int = 0  # events before; older captures have none


class GraphBackward(NamedTuple):
    """One backward pass whose gradients have a graph of their own (create_graph=True)."""

    begin: int  # events before the pass; `end`: before its return
    end: int
    source: int  # index in Trace.sources: the line that calls it
    caller: int  # index in Trace.sources: the line that calls the function of `source`; NONE: none does


class GraphBreak(NamedTuple):
    """A graph break of torch.compile: the line where a graph ends inside its function."""

    source: str  # `file:line function` of the program
    why: str
    num_bytes: int  # bytes that the graph keeps for the code after the break


class CompiledSavedTensors(NamedTuple):
    """Results of an operator that a compiled graph saves for its backward pass, and eager code does not."""

    graph: int  # index among the graphs that save more
    more_bytes: int  # bytes that each call of that graph saves in all, minus what eager code saves
    op: str
    source: str  # `file:line function` of the program; "" if that is not known
    num_bytes: int  # of one result; a call has `times` of them
    times: int
    again: bool  # whether the program's own backward computes it again


class CudaGraphed(NamedTuple):
    """Compiled code that runs in CUDA graphs."""

    source: str  # `file:line function` of the program that is compiled, or that calls code of a library's
    # Number of different input shapes: each has its own graphs, in a pool that only graphs use.
    sizes: int


class GraphPool(NamedTuple):
    """A private pool into which the program captures CUDA graphs itself."""

    pool: int  # as in EventKind.POOL
    source: str  # `file:line function` of the first capture


class CompileStats(NamedTuple):
    """The cost of torch.compile in a run, on the machine that ran it."""

    seconds: float  # of Dynamo, AOTAutograd and Inductor, without the compilation of kernels
    kernels: int  # different kernels that Inductor generated


class FailureKind(enum.StrEnum):
    """The kind of a failure, which determines the hint for the user."""

    ERROR = "error"  # an error of the program, or an unknown one
    GAP = "gap"  # a gap of the virtual GPU: the error is about tensors without data, which a real GPU does not have
    NO_META_KERNEL = "no meta kernel"  # an operator that cannot run without data
    OUT_OF_MEMORY = "out of memory"  # on a real device
    CUSTOM_KERNEL = "custom kernel"  # code below torch: Triton, a C++ or CUDA extension
    TRACING = "tracing"  # a model was exported: torch's own tracing tensors replace the virtual ones
    OTHER_THREAD = "other thread"  # a thread used CUDA where the virtual GPU is not active
    UNKNOWN_VALUE = "unknown value"  # the program read a number that is not computed
    REFUSED = "refused"  # the program, or a child process, did something that memprof does not simulate
    INTERRUPTED = "interrupted"  # by the user
    OTHER_RANK = "other rank"  # ranks of the program do not agree, or another one failed


# Kinds of an error that occurs on the virtual GPU alone, and is not an error of the program.
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
    """A failure that ended the run early. The trace has the events until then."""

    kind: FailureKind
    phase: str  # the current phase, such as `forward of step 1`
    error: str  # class of the exception
    message: str  # first line of the message
    op: str | None  # operator or kernel that could not run, such as `mylib.fused_rope`
    module: str | None  # path of the module whose code was running; "" is the root itself, None outside every module
    source: str | None  # `file:line function` of the program
    read: str | None  # for an unknown value: the line that read the value, and the answer
    hint: str | None = None  # how to fix the failure, where known
    caller: str | None = None  # of a source in an installed library: the program's own line that led to it


@dataclass(slots=True)
class Trace:
    """The complete record of one run.

    `events` is the time axis; most other attributes are tables that events refer to. `facts` has versions, the GPU, the
    command.
    """

    source: str = "simulated"
    device: str = GPU  # the device whose memory is profiled: GPU, another GPU, or CPU
    # For several GPUs: whether each was used, and so has a CUDA context.
    gpus: dict[str, bool] = field(default_factory=dict, metadata=json_name("cards"))
    events: list[Event] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    # For each storage, the number of events up to the end of the last operator that read or wrote it; NONE: none did.
    # Empty if uses were not recorded: a measured run, a capture of an earlier release.
    last_uses: list[int] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    modules: list[Module] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    # For large storages of a simulated run, by ascending index of the storage, innermost first: the program's own line,
    # if `Storage.source` is a library's; and the outermost own line from which torch called the function with the line
    # before (a call of a model, a torch.func transform, a checkpoint or a backward pass), if it is another line.
    callers: list[Caller] = field(default_factory=list)
    # Of lines that allocate large storages; of a simulated run.
    checkpointed_lines: list[CheckpointedLine] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    owners: dict[int, Owner] = field(default_factory=dict)
    mismatches: list[DeviceMismatch] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)  # of a measured run
    times: list[int] = field(default_factory=list)  # of a measured run: nanoseconds of each event since the first
    work: list[Work] = field(default_factory=list)  # empty if work was not counted
    workspaces: list[Workspace] = field(default_factory=list)  # of a simulated run
    uses: list[Use] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)
    failure: Failure | None = None  # None if the run came to its end
    # Whether a program that names no phases has called a model with gradients, even without a backward.
    trains: bool = False
    # Whether the code of the program, which memory ended, may train; False: it only infers, even with gradients.
    may_train: bool = True
    # Whether the program updates parameters itself, without an optimizer of torch (in a simulated run).
    updates_parameters_manually: bool = field(default=False, metadata=json_name("updates_itself"))
    # Whether the program ended with a failed allocation: the last ALLOC.
    ended_out_of_memory: bool = field(default=False, metadata=json_name("cut_short"))
    # Storages of failed allocations after which the program went on (it caught torch.OutOfMemoryError). Each has an
    # ALLOC, at the request, and a FREE right after it.
    refused: list[int] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)  # of a program that names no phases itself
    # The outermost call in which the program ran out of memory, if it did not go on; of a simulated run.
    failed_forward: Forward | None = None
    eval_calls: list[EvalCall] = field(default_factory=list)  # of models that were called before; of a simulated run
    # Storages of pairs of a column [N, 1] and a row [N], the first of each shape and line; of a simulated run.
    column_broadcasts: list[int] = field(default_factory=list)
    # Storages of copies that Tensor.repeat makes along dimensions of one element; of a simulated run.
    repeats: list[int] = field(default_factory=list)
    frozen_in_vain: list[FrozenInVain] = field(default_factory=list)  # of a simulated run
    # `file:line function` of statements that are a call of torch.no_grad() or inference_mode() alone, which does
    # nothing, in the files that called models with gradients; of a simulated run.
    unused_no_grads: list[str] = field(default_factory=list)
    # Whether the program has switched on activation checkpointing in a model that it trains (in a simulated run).
    checkpoints: bool = False
    holders: list[Holder] = field(default_factory=list)  # holders of accumulating tensors
    idle_holders: list[Holder] = field(default_factory=list)  # of tensors that are kept and not used; autocast blocks
    # Holders of out-of-memory errors that the program caught; `storages` are those that the errors' tracebacks keep.
    error_holders: list[Holder] = field(default_factory=list)
    # Gradients of parameters that no optimizer has, and the forward that was differentiated for these alone, once an
    # optimizer exists; of a simulated run of one process.
    untrained_gradients: list[int] = field(default_factory=list)
    # The same of parameters whose optimizer has made no step with these gradients before they were set to None.
    discarded_gradients: list[int] = field(default_factory=list)
    untrained_spans: list[UntrainedSpan] = field(default_factory=list)
    # Of optimizers that had made no step; of a simulated run that a failed allocation ended.
    first_steps: list[FirstStep] = field(default_factory=list)
    moved_model: MovedModel | None = None  # of a simulated run that a failed allocation ended
    vmaps: list[VmapCall] = field(default_factory=list)  # in the order of their ends; of a simulated run
    # In the order in which iterations began, a loader once for several in a row; of a simulated run.
    loaders: list[BatchLoader] = field(default_factory=list)
    graph_backwards: list[GraphBackward] = field(default_factory=list)  # of a simulated run, without torch.func's
    graph_ends: list[GraphBreak] = field(default_factory=list)
    compiled_keeps: list[CompiledSavedTensors] = field(default_factory=list)
    graphed: list[CudaGraphed] = field(default_factory=list)
    graph_pools: list[GraphPool] = field(default_factory=list)
    inner_calls: list[InnerCall] = field(default_factory=list)
    compiling: CompileStats | None = None  # None: nothing was compiled, or the cost was not recorded
    others: list[Trace] = field(default_factory=list)  # the other ranks that ran together; equal traces are one object

    def select_device(self, device: str) -> Trace:
        """Return this trace with `device` as the profiled GPU. Both share their tables: later records are in both."""
        return dataclasses.replace(self, device=device)

    def optional_storages(self) -> frozenset[int]:
        """Return the indices of workspace storages, which are optional: without room, the library runs without them."""
        events = self.events
        return frozenset(events[w.event].ref for w in self.workspaces if w.num_bytes and w.event < len(events))

    def list_phase_begins(self) -> list[tuple[int, Phase]]:
        """Return the phases in order, each with the index of the event at which it begins."""
        phase, phases = EventKind.PHASE, self.phases
        return [(time, phases[ref]) for time, (kind, ref) in enumerate(self.events) if kind is phase]

    def list_calls(self) -> list[Forward]:
        """Return the forwards, and the one in which memory ran out."""
        return [*self.forwards, *([] if self.failed_forward is None else [self.failed_forward])]

    def lifetimes(self) -> tuple[list[int], list[int]]:
        """Return the events of each storage's allocation and free; the trace's length if there is no such event."""
        births, deaths = ([len(self.events)] * len(self.storages) for _ in range(2))
        alloc, free = EventKind.ALLOC, EventKind.FREE
        for time, (kind, ref) in enumerate(self.events):
            if kind is alloc:
                births[ref] = time
            elif kind is free:
                deaths[ref] = time
        return births, deaths

    def op(self, storage: Storage) -> str:
        """Return the name of the operator that allocated `storage`."""
        return self.ops[storage.op]

    def module_path(self, storage: Storage) -> str | None:
        """Return the path of the module that allocated `storage`; "" for the root module, None outside modules."""
        return None if storage.module == NONE else self.modules[storage.module].path

    def source_line(self, storage: Storage) -> str | None:
        """Return the `file:line function` that allocated `storage`; None if unknown."""
        return self.source_at(storage.source)

    def list_callers(self, index: int) -> list[Caller]:
        """Return the recorded callers of the storage `index`, innermost first."""
        begin = bisect.bisect_left(self.callers, (index,))
        return list(itertools.takewhile(lambda caller: caller.storage == index, self.callers[begin : begin + 2]))

    def find_own_line(self, index: int) -> str | None:
        """Return the line of the program's own code that led to the allocation of the storage `index`, if that is
        known; else of the library that allocated it."""
        line, callers = self.source_line(self.storages[index]), self.list_callers(index)
        is_own = line is None or is_own_source(line)
        return line if is_own or not callers else self.source_at(callers[0].source)

    def source_at(self, index: int) -> str | None:
        """Return the `file:line function` with this index in `sources`; None if it is NONE."""
        return None if index == NONE else self.sources[index]


_LIBRARIES = "-packages"  # in the paths of installed libraries: site-packages, dist-packages

_LAYER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def without_numbers(path: str) -> str:
    """Return the path of a module or parameter with numbers replaced by `*`, so that all layers have equal paths."""
    return _LAYER.sub("*", path)


def is_own_source(source: str) -> bool:
    """Return whether the line `file:line function` is of the program's own code, and not of an installed library."""
    return _LIBRARIES not in source


def short_source(source: str) -> str:
    """Return `folder/file.py:line` for a source `file:line function`."""
    path, _, line = (source.rpartition(" ")[0] or source).rpartition(":")
    return "/".join(path.replace("\\", "/").split("/")[-2:]) + f":{line}"
