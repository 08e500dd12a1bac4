"""Conversion of a trace to a snapshot, as torch's recorder would have written it.

The allocator's events come from the replay, so that addresses, segments and out-of-memory errors are those of the run
on the GPU that the trace names. A trace has no clock: event i of the trace happens at microsecond i.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from sortedcontainers import SortedDict

from memprof.allocator import (
    AllocatorConfig,
    Block,
    CachingAllocator,
    Completion,
    GpuMemory,
    OutOfMemory,
    SimulatedDriver,
)
from memprof.allocator.driver import UNKNOWN_SPACE
from memprof.allocator.replay import apply_stream_event, make_pool_id
from memprof.errors import UsageError
from memprof.ledger.categories import categorize
from memprof.ledger.stages import list_spans
from memprof.snapshots.origins import OUTSIDE_MODULES, Origin, Part
from memprof.trace.events import NONE, Event, EventKind, PhaseKind, Storage, Trace
from memprof.trace.snapshot import (
    DEFAULT_POOL,
    Action,
    BlockState,
    Frame,
    Snapshot,
    SnapshotEvent,
    SnapshotSegment,
    Stack,
)

_SOURCE_PATTERN = re.compile(r"(.*):(\d+)(?: (.*))?$", re.DOTALL)
_WORKLOAD_FOLDER = "/memprof/workload/"  # the training step of `memprof profile`
_PART_BY_PHASE = {
    PhaseKind.BACKWARD: Part.BACKWARD,
    PhaseKind.OPTIMIZER_STEP: Part.OPTIMIZER,
    PhaseKind.OPTIMIZER: Part.OPTIMIZER,
}


@dataclass(slots=True)
class TimelineSlice:
    """A named range of time, in microseconds; slices of one track nest."""

    name: str
    begin: int
    end: int
    track: str  # stages or modules.


@dataclass(slots=True)
class ConvertedTrace:
    """A trace converted to a snapshot, with data that has no place in a snapshot."""

    snapshot: Snapshot
    origins: list[Origin | None]  # of each allocation, in order
    slices: list[TimelineSlice] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # events of the snapshot at which a training step begins


class _RecordingDriver(SimulatedDriver):
    """A simulated driver that records segment allocations and frees as snapshot events."""

    def __init__(self, gpu: GpuMemory | None, events: list[SnapshotEvent]) -> None:
        super().__init__(*((None,) if gpu is None else (gpu.total_bytes, gpu.context_bytes)))
        self.events = events
        self.time = 0
        self.stack: Stack = ()
        self.stream = 0
        # Stream of each segment and of each range of mapped memory, by address.
        self._streams: SortedDict[int, int] = SortedDict()

    def malloc(self, size: int) -> int | None:
        address = super().malloc(size)
        if address is not None:
            self._write(Action.SEGMENT_ALLOC, address, size)
        return address

    def free(self, address: int, size: int) -> None:
        super().free(address, size)
        self._write(Action.SEGMENT_FREE, address, size)

    def map(self, address: int, size: int) -> bool:
        mapped = super().map(address, size)
        if mapped:
            self._write(Action.SEGMENT_MAP, address, size)
        return mapped

    def unmap(self, address: int, size: int) -> None:
        super().unmap(address, size)
        self._write(Action.SEGMENT_UNMAP, address, size)

    def _write(self, action: Action, address: int, size: int) -> None:
        if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            self._streams[address] = self.stream
        # What is unmapped may begin inside a range that was mapped at once.
        _, stream = self._streams.peekitem(self._streams.bisect_right(address) - 1)
        self.events.append(SnapshotEvent(action, address, size, stream, DEFAULT_POOL, self.time, self.stack))


def convert_to_snapshot(trace: Trace, config: AllocatorConfig, gpu: GpuMemory | None) -> ConvertedTrace:
    """Return `trace`, simulated or measured, as torch would have recorded it with `config` on one GPU (None: no limit).

    After the first out-of-memory error, which is recorded, the run continues on a GPU without limit, unless the program
    continued without the failed allocation. Raises UsageError: the run was on MPS, of which torch records nothing.
    """
    if trace.device.startswith("mps"):
        raise UsageError(
            "a run on MPS has no snapshot: torch records those of its caching allocator",
            value=trace.device,
            hint="memprof show FILE has its report; --html and --csv have its parts",
        )
    converted = _convert(trace, config, gpu, unlimited=False)
    if config.expandable_segments and any(event.action is Action.OOM for event in converted.snapshot.traces[0]):
        # Without a limit of memory, the address space that torch reserves for the GPU must not be a limit either.
        converted = _convert(trace, config, gpu, unlimited=True)
    return converted


def _convert(trace: Trace, config: AllocatorConfig, gpu: GpuMemory | None, *, unlimited: bool) -> ConvertedTrace:
    events: list[SnapshotEvent] = []
    driver = _RecordingDriver(gpu, events)
    allocator = CachingAllocator(driver.total_bytes, config, driver=driver, completion=Completion.ORDERED)
    if unlimited:
        allocator.segment_store.address_space = UNKNOWN_SPACE
    origins = _Origins(trace)
    refused_storages = frozenset(trace.refused) | trace.optional_storages()
    converted = ConvertedTrace(Snapshot(), [])
    live: dict[int, Block] = {}
    pool = DEFAULT_POOL
    stacks: dict[int, Stack] = {}
    seen_steps: set[int] = set()
    pending = allocator.pending
    release = pending.release

    def write_event(action: Action, block: Block) -> None:
        size, stream = block.requested, block.owner.stream
        events.append(SnapshotEvent(action, block.address, size, stream, block.owner.pool.pool_id, driver.time, ()))

    def complete(block: Block) -> None:
        write_event(Action.FREE_COMPLETED, block)
        release(block)

    pending.release = complete
    for time, (kind, ref) in enumerate(trace.events):
        driver.time = time
        if kind is EventKind.PHASE and trace.phases[ref].step and trace.phases[ref].step not in seen_steps:
            seen_steps.add(trace.phases[ref].step)
            converted.steps.append(len(events))
        if kind is EventKind.ALLOC:
            storage = trace.storages[ref]
            if storage.device != trace.device or not storage.num_bytes:
                continue
            driver.stack = stack = origins.stack(ref, storage)
            try:
                block = allocator.malloc(storage.num_bytes, driver.stream, pool)
            except OutOfMemory as error:
                free = error.report.free_bytes
                failure = SnapshotEvent(Action.OOM, free, storage.num_bytes, driver.stream, pool, time, stack)
                events.append(failure)
                if ref in refused_storages:
                    continue
                driver.lift_limit()
                allocator.lift_limit()
                block = allocator.malloc(storage.num_bytes, driver.stream, pool)
            live[ref] = block
            stacks[block.address] = stack
            size, stream = storage.num_bytes, driver.stream
            events.append(SnapshotEvent(Action.ALLOC, block.address, size, stream, pool, time, stack))
            converted.origins.append(origins.origin(ref, storage))
        elif kind is EventKind.FREE and ref in live:
            driver.stack = ()
            block = live.pop(ref)
            write_event(Action.FREE_REQUESTED, block)
            if not block.uses:
                write_event(Action.FREE_COMPLETED, block)
            pending.now = time
            allocator.free(block)
        elif kind is EventKind.EMPTY_CACHE:
            driver.stack = ()
            allocator.empty_cache()
        elif kind is EventKind.STREAM:
            driver.stream = ref
        elif kind is EventKind.POOL:
            pool = make_pool_id(ref)
            allocator.create_pool(pool)
        elif kind is EventKind.POOL_FREE:
            allocator.retire_pool(make_pool_id(ref))
        else:
            apply_stream_event(trace, allocator, live, time, Event(kind, ref))
    converted.slices = slices(trace)
    converted.snapshot = Snapshot(
        segments=_make_segments(allocator, stacks),
        traces=[events],
        settings=_make_settings(config),
        annotations=_make_annotations(converted.slices),
        source=trace.source,
    )
    return converted


class _Origins:
    """Stacks and origins of storages, each created once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.categories = categorize(trace, list_spans(trace))
        self.stacks: dict[tuple[int, int, int], Stack] = {}

    def stack(self, ref: int, storage: Storage) -> Stack:
        """Return a stack whose frames are the operator, source line and module of storage `ref`."""
        key = (storage.op, storage.source, storage.module)
        stack = self.stacks.get(key)
        if stack is None:
            frames = [Frame("", 0, self.trace.op(storage))]
            source = self.trace.source_line(storage)
            match = _SOURCE_PATTERN.match(source) if source is not None else None
            if match is not None:
                frames.append(Frame(match[1], int(match[2]), match[3] or ""))
            elif source is not None:
                frames.append(Frame(source, 0, ""))
            if storage.module != NONE:
                module = self.trace.modules[storage.module]
                frames.append(Frame(module.path or "(root)", 0, module.class_name))
            stack = self.stacks[key] = tuple(frames)
        return stack

    def origin(self, ref: int, storage: Storage) -> Origin:
        """Return the origin of a storage, from the trace."""
        path = self.trace.module_path(storage)
        owner = self.trace.owners.get(ref)
        part = _PART_BY_PHASE.get(self.trace.phases[storage.phase].kind, Part.FORWARD)
        source = self.trace.source_line(storage)
        if owner is not None and (source is None or _WORKLOAD_FOLDER in source.replace("\\", "/")):
            # No line of the user's code allocated the storage: its name tells more than memprof's line.
            source = f"{owner.role} {owner.name}"
        return Origin(
            source=source or self.trace.op(storage),
            op=self.trace.op(storage),
            module=OUTSIDE_MODULES if path is None else path or "(root)",
            part=part,
            category=self.categories[ref],
            in_module=path is not None,
        )


def slices(trace: Trace) -> list[TimelineSlice]:
    """Return the stages of a trace and the calls of modules as slices."""
    stages = []
    for span in list_spans(trace):
        step = f" (step {span.step})" if span.step else ""
        stages.append(TimelineSlice(f"{span.name}{step}", span.begin, span.end, "stages"))
    open_calls: list[tuple[int, int]] = []
    calls: list[TimelineSlice] = []
    for time, event in enumerate(trace.events):
        if event.kind is EventKind.ENTER:
            open_calls.append((event.ref, time))
        elif event.kind is EventKind.EXIT and open_calls and any(ref == event.ref for ref, _ in open_calls):
            while open_calls:  # a module that raised has no EXIT: the exit of an outer module ends it
                ref, begin = open_calls.pop()
                calls.append(TimelineSlice(_format_module_name(trace, ref), begin, time, "modules"))
                if ref == event.ref:
                    break
    for ref, begin in reversed(open_calls):
        calls.append(TimelineSlice(_format_module_name(trace, ref), begin, len(trace.events), "modules"))
    return stages + sorted(calls, key=lambda call: (call.begin, -call.end))


def _format_module_name(trace: Trace, ref: int) -> str:
    module = trace.modules[ref]
    return f"{module.path} ({module.class_name})" if module.path else module.class_name


def _make_segments(allocator: CachingAllocator, stacks: dict[int, Stack]) -> list[SnapshotSegment]:
    """Return the final segments, with the stack of each block in use."""
    return [
        segment._replace(
            blocks=tuple(
                block if block.state is BlockState.INACTIVE else block._replace(frames=stacks[block.address])
                for block in segment.blocks
            )
        )
        for segment in allocator.segments()
    ]


def _make_settings(config: AllocatorConfig) -> dict[str, Any]:
    """Return the settings as in the entry "allocator_settings" of a snapshot of torch."""
    divisions = config.roundup_power2_divisions or (0,) * 16
    return {
        "PYTORCH_CUDA_ALLOC_CONF": config.text,
        "max_split_size": config.reported_max_split_size,
        "garbage_collection_threshold": config.garbage_collection_threshold,
        "expandable_segments": config.expandable_segments,
        "roundup_power2_divisions": {str(1 << octave): parts for octave, parts in enumerate(divisions)},
    }


def _make_annotations(slices: list[TimelineSlice]) -> list[dict[str, object]]:
    """Return a START and an END annotation for each stage, as torch writes them for record_function."""
    annotations: list[dict[str, object]] = []
    for stage in slices:
        if stage.track == "stages":
            annotations.append({"stage": "START", "name": stage.name, "device": 0, "time_us": stage.begin})
            annotations.append({"stage": "END", "name": stage.name, "device": 0, "time_us": stage.end})
    return annotations
