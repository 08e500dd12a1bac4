"""The ledger: bytes by stage, and at the peak by category, module and tensor. Its rows sum to the peak, exactly."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from memprof.allocator.on_gpu import GpuReplay, replay_on_gpu
from memprof.allocator.replay import FirstOom
from memprof.allocator.rounding import round_request
from memprof.errors import MemprofError
from memprof.ledger.categories import Category, categorize
from memprof.ledger.stage_amounts import OutOfMemoryMoment, Stage, build_stages
from memprof.ledger.stages import Span, list_spans
from memprof.trace.events import HOST, NONE, EventKind, Trace, without_numbers
from memprof.trace.json_values import json_name


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A group of storages live at the peak with equal shape, dtype, category, operator, source line and module path."""

    num_bytes: int = field(metadata=json_name("bytes"))  # Requested bytes of one storage.
    count: int
    allocated_bytes: int = field(metadata=json_name("total_bytes"))  # Bytes of all storages, each rounded to 512 bytes.
    shape: tuple[int, ...]
    dtype: str
    category: Category
    module: str | None  # Path of the module, layer numbers replaced by `*` where `count` storages differ in them.
    op: str
    source: str | None
    name: str | None  # The name of the parameter, gradient or optimizer state.
    phase: str = field(default="", metadata=json_name(None))
    storages: tuple[int, ...] = field(default=(), metadata=json_name(None))
    caller: str | None = field(default=None, metadata=json_name(None))  # The program's own line that led to `source`.


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the ledger at the peak: bytes by category, module and phase of the allocation."""

    category: Category
    module: str
    phase: str
    allocated_bytes: int = field(metadata=json_name("bytes"))


@dataclass(slots=True)
class Ledger:
    """All memory amounts of a report, as integers: one attribute for each displayed value."""

    trace: Trace
    spans: list[Span]
    stages: list[Stage]
    categories: list[Category]  # of every storage, by index
    run: GpuReplay = field(repr=False)  # the allocator's replay
    allocated: array[int] = field(repr=False)  # allocated bytes after every event
    peak_event: int
    peak_bytes: int
    peak_stage: Span
    live: list[LiveTensor]  # live tensors at the peak, largest first
    rows: list[Row]
    host: list[int] = field(repr=False)  # bytes of tensors in host memory after every event
    peak_reserved_bytes: int
    peak_reserved_event: int  # the first event with this amount
    peak_reserved_stage: Span
    out_of_memory: OutOfMemoryMoment | None  # None: the run fits the GPU, or no GPU is given

    @property
    def host_peak_bytes(self) -> int:
        """Return the highest number of bytes of tensors in host memory."""
        return max(self.host, default=0)

    def sum_by_category(self) -> dict[Category, int]:
        """Return the allocated bytes at the peak by category, largest first."""
        sums = Counter[Category]()
        for row in self.rows:
            sums[row.category] += row.allocated_bytes
        return dict(sums.most_common())

    def span_at(self, time: int) -> Span:
        """Return the stage that contains the event with index `time`."""
        return _find_span(self.spans, time)


class EmptyTraceError(MemprofError, ValueError):
    """The run allocated no memory on the GPU, so that a ledger would be empty."""


def build_ledger(trace: Trace, run: GpuReplay | None = None) -> Ledger:
    """Return the ledger of a trace and its allocator replay `run` (None: replayed with default settings, without a
    memory limit). Raises EmptyTraceError: the trace has no allocation on the GPU."""
    run = replay_on_gpu(trace, None) if run is None else run
    timeline = run.timeline
    allocated = timeline.allocated
    host = _compute_host_curve(trace)
    if not any(allocated):
        raise EmptyTraceError(
            "the trace holds no allocation on the GPU", hint='move the model and its inputs to "cuda" inside the run'
        )
    stage_spans = list_spans(trace)
    categories = categorize(trace, stage_spans)
    out_of_memory = _build_oom_moment(trace, run.first_oom, stage_spans)
    peak_bytes = max(allocated)
    # The last event with the peak: in the steady state rather than in the first step. A failed allocation does not
    # count, even if as much is allocated at that time.
    failed_storages = run.refused
    peak_event = max(
        time
        for time, ((kind, ref), num_bytes) in enumerate(zip(trace.events, allocated, strict=True))
        if num_bytes == peak_bytes
        and kind is EventKind.ALLOC
        and trace.storages[ref].device == trace.device
        and ref not in failed_storages
    )
    live = _group_live_tensors(trace, categories, peak_event, run)
    rows: dict[tuple[Category, str, str], int] = defaultdict(int)
    for tensor in live:
        rows[tensor.category, tensor.module or "", tensor.phase] += tensor.allocated_bytes
        # Blocks are larger than their tensors where a rest of up to 1 MiB is not split off.
        block_bytes = sum(timeline.blocks.get(index, 0) for index in tensor.storages)
        if block_bytes > tensor.allocated_bytes:
            rows[Category.FRAGMENTATION, "", ""] += block_bytes - tensor.allocated_bytes
    ledger = Ledger(
        trace=trace,
        spans=stage_spans,
        stages=build_stages(trace, run, stage_spans, host, out_of_memory),
        categories=categories,
        run=run,
        allocated=allocated,
        peak_event=peak_event,
        peak_bytes=peak_bytes,
        peak_stage=_find_span(stage_spans, peak_event),
        live=live,
        rows=[Row(*key, num_bytes) for key, num_bytes in sorted(rows.items(), key=lambda item: -item[1])],
        host=host,
        peak_reserved_bytes=timeline.peak_reserved.num_bytes,
        peak_reserved_event=timeline.peak_reserved.event,
        peak_reserved_stage=_find_span(stage_spans, timeline.peak_reserved.event),
        out_of_memory=out_of_memory,
    )
    if sum(row.allocated_bytes for row in ledger.rows) != peak_bytes:
        raise AssertionError("the ledger's rows do not sum to the peak")
    return ledger


def _find_span(spans: list[Span], time: int) -> Span:
    return next(span for span in spans if span.begin <= time < span.end)


def _build_oom_moment(trace: Trace, oom: FirstOom | None, spans: list[Span]) -> OutOfMemoryMoment | None:
    if oom is None:
        return None
    report = oom.report
    available = report.free_bytes + report.reserved_bytes
    return OutOfMemoryMoment(
        event=oom.event,
        stage=_find_span(spans, oom.event),
        storage=trace.events[oom.event].ref,
        tried_bytes=report.tried_bytes,
        limit_bytes=available if report.allowed_bytes is None else min(available, report.allowed_bytes),
        in_use_bytes=report.allocated_bytes,
        reserved_bytes=report.reserved_bytes,
        free_bytes=report.free_bytes,
        message=oom.message,
        max_buffer_bytes=report.max_buffer_bytes,
    )


def _compute_host_curve(trace: Trace) -> list[int]:
    """Return the bytes of tensors in host memory after every event."""
    host: list[int] = []
    storages, alloc, free = trace.storages, EventKind.ALLOC, EventKind.FREE
    host_bytes = 0
    for kind, ref in trace.events:
        if (kind is alloc or kind is free) and storages[ref].device == HOST:
            host_bytes += storages[ref].num_bytes if kind is alloc else -storages[ref].num_bytes
        host.append(host_bytes)
    return host


def find_live_storages(trace: Trace, time: int, failed_storages: frozenset[int]) -> list[int]:
    """Return the indices of GPU storages live after the event with index `time`, without `failed_storages`."""
    live: dict[int, None] = {}
    storages, alloc, free = trace.storages, EventKind.ALLOC, EventKind.FREE
    for kind, ref in trace.events[: time + 1]:
        if kind is alloc and storages[ref].device == trace.device:
            live[ref] = None
        elif kind is free:
            live.pop(ref, None)
    return [index for index in live if index not in failed_storages]


def _group_live_tensors(trace: Trace, categories: list[Category], time: int, run: GpuReplay) -> list[LiveTensor]:
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    names: dict[int, list[str | None]] = {}
    for index in find_live_storages(trace, time, run.refused):
        storage, owner = trace.storages[index], trace.owners.get(index)
        names[index] = [trace.module_path(storage), (owner.name or None) if owner else None]
        key = (
            storage.num_bytes,
            storage.shape,
            storage.dtype,
            categories[index],
            storage.op,
            storage.source,
            *_mask_all_layer_numbers(names[index]),
            trace.phases[storage.phase].kind,
        )
        groups[key].append(index)
    result = []
    for indices in groups.values():
        storage = trace.storages[indices[0]]
        module, name = names[indices[0]] if len(indices) == 1 else _mask_all_layer_numbers(names[indices[0]])
        callers = {next((one.source for one in trace.list_callers(index)[-1:]), NONE) for index in indices}
        result.append(
            LiveTensor(
                num_bytes=storage.num_bytes,
                count=len(indices),
                allocated_bytes=len(indices)
                * (round_request(storage.num_bytes, storage.device) if run.rounds else storage.num_bytes),
                shape=storage.shape,
                dtype=storage.dtype,
                category=categories[indices[0]],
                module=module,
                op=trace.op(storage),
                source=trace.source_line(storage),
                name=name,
                phase=trace.phases[storage.phase].kind,
                storages=tuple(indices),
                caller=trace.source_at(callers.pop()) if len(callers) == 1 else None,
            )
        )
    return sorted(result, key=lambda tensor: (-tensor.num_bytes, -tensor.count))


def _mask_all_layer_numbers(names: list[str | None]) -> list[str | None]:
    return [None if name is None else without_numbers(name) for name in names]
