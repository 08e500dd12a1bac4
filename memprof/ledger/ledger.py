"""The ledger: bytes by stage, and at the peak by category, module and tensor. Its rows sum to the peak, exactly."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from memprof.allocator.rounding import round_size
from memprof.errors import MemprofError
from memprof.ledger.categories import Category, categorize
from memprof.ledger.stages import Span, spans
from memprof.trace.events import HOST, EventKind, Trace


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage and what memory did in it; all in bytes of blocks handed out."""

    span: Span
    allocated_bytes: int
    """At the end of the stage."""
    delta_bytes: int
    """End minus beginning."""
    peak_allocated_bytes: int
    """Highest within the stage."""
    requested_bytes: int
    """At the end, before rounding."""
    host_allocated_bytes: int = 0
    """Of tensors in host memory, at the end of the stage."""
    peak_host_bytes: int = 0
    """Of tensors in host memory, the highest within the stage."""


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """Equal storages alive at the peak: same layout, category, operator and line, in one module of each layer."""

    num_bytes: int
    """Of one storage, as requested."""
    count: int
    allocated_bytes: int
    """Of all of them, rounded."""
    shape: tuple[int, ...]
    dtype: str
    category: Category
    module: str | None
    """Path of the module, layer numbers replaced by `*` where `count` storages differ in them."""
    op: str
    source: str | None
    name: str | None
    """The parameter, gradient or optimizer state that it is."""
    phase: str
    storages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the ledger at the peak."""

    category: Category
    module: str
    phase: str
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Where a card of the given size is full: the first allocation that does not fit."""

    event: int
    stage: Span
    storage: int
    tried_bytes: int
    in_use_bytes: int


@dataclass(slots=True)
class Ledger:
    """Everything that the report says about memory, as integers."""

    trace: Trace
    spans: list[Span]
    stages: list[Stage]
    categories: list[Category]
    """Of every storage, by index."""
    allocated: list[int] = field(repr=False)
    """Allocated bytes after every event."""
    peak_event: int
    peak_bytes: int
    peak_stage: Span
    live: list[LiveTensor]
    """What was alive at the peak, largest first."""
    rows: list[Row]
    host: list[int] = field(repr=False)
    """Bytes of tensors in host memory after every event."""

    @property
    def host_peak_bytes(self) -> int:
        """The most that tensors take in host memory."""
        return max(self.host, default=0)

    def by_category(self) -> dict[Category, int]:
        """Allocated bytes at the peak by category, largest first."""
        sums: dict[Category, int] = defaultdict(int)
        for row in self.rows:
            sums[row.category] += row.allocated_bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def out_of_memory(self, usable_bytes: int) -> OutOfMemory | None:
        """The first allocation after which more than `usable_bytes` would be allocated; None if there is none."""
        for time, total in enumerate(self.allocated):
            if total > usable_bytes:
                storage = self.trace.events[time].ref
                tried = round_size(self.trace.storages[storage].num_bytes)
                return OutOfMemory(time, self.span_at(time), storage, tried, total - tried)
        return None

    def span_at(self, time: int) -> Span:
        """The stage that the event at `time` belongs to."""
        return next(span for span in self.spans if span.begin <= time < span.end)


class EmptyTraceError(MemprofError, ValueError):
    """Nothing was allocated on the GPU: there is nothing to account for."""


def build_ledger(trace: Trace) -> Ledger:
    """Account for a whole trace.

    Raises:
        EmptyTraceError: the trace holds no allocation.
    """
    allocated, requested, host = _curves(trace)
    if not any(allocated):
        raise EmptyTraceError(
            "the trace holds no allocation on the GPU", hint='move the model and its inputs to "cuda" inside the run'
        )
    stage_spans = spans(trace)
    categories = categorize(trace, stage_spans)
    stages = []
    for span in stage_spans:
        before = allocated[span.begin - 1] if span.begin else 0
        end = allocated[span.end - 1]
        within = slice(span.begin, span.end)
        stages.append(
            Stage(
                span=span,
                allocated_bytes=end,
                delta_bytes=end - before,
                peak_allocated_bytes=max(allocated[within]),
                requested_bytes=requested[span.end - 1],
                host_allocated_bytes=host[span.end - 1],
                peak_host_bytes=max(host[within]),
            )
        )
    peak_bytes = max(allocated)
    # The last time that it is reached: in the steady state rather than in the first step.
    peak_event = max(
        time
        for time, event in enumerate(trace.events)
        if event.kind is EventKind.ALLOC and allocated[time] == peak_bytes and trace.storages[event.ref].device != HOST
    )
    peak_stage = next(span for span in stage_spans if span.begin <= peak_event < span.end)
    live = _live_tensors(trace, categories, peak_event)
    rows: dict[tuple[Category, str, str], int] = defaultdict(int)
    for tensor in live:
        rows[tensor.category, tensor.module or "", tensor.phase] += tensor.allocated_bytes
    ledger = Ledger(
        trace=trace,
        spans=stage_spans,
        stages=stages,
        categories=categories,
        allocated=allocated,
        peak_event=peak_event,
        peak_bytes=peak_bytes,
        peak_stage=peak_stage,
        live=live,
        rows=[Row(*key, num_bytes) for key, num_bytes in sorted(rows.items(), key=lambda item: -item[1])],
        host=host,
    )
    if sum(row.allocated_bytes for row in ledger.rows) != peak_bytes:
        raise AssertionError("the ledger's rows do not sum to the peak")
    return ledger


def _curves(trace: Trace) -> tuple[list[int], list[int], list[int]]:
    """After every event: allocated and requested bytes on the GPU, and bytes in host memory."""
    allocated: list[int] = []
    requested: list[int] = []
    host: list[int] = []
    now = asked = on_host = 0
    for event in trace.events:
        if event.kind <= EventKind.FREE:
            storage = trace.storages[event.ref]
            sign = 1 if event.kind is EventKind.ALLOC else -1
            if storage.device == HOST:
                on_host += sign * storage.num_bytes
            else:
                now += sign * round_size(storage.num_bytes)
                asked += sign * storage.num_bytes
        allocated.append(now)
        requested.append(asked)
        host.append(on_host)
    return allocated, requested, host


def alive_at(trace: Trace, time: int) -> list[int]:
    """Indices of the GPU storages alive after the event at `time`."""
    alive: dict[int, None] = {}
    for event in trace.events[: time + 1]:
        if event.kind is EventKind.ALLOC and trace.storages[event.ref].device != HOST:
            alive[event.ref] = None
        elif event.kind is EventKind.FREE:
            alive.pop(event.ref, None)
    return list(alive)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _live_tensors(trace: Trace, categories: list[Category], time: int) -> list[LiveTensor]:
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in alive_at(trace, time):
        storage = trace.storages[index]
        owner = trace.owners.get(index)
        name = owner.name if owner else None
        module = trace.module_path(storage)
        key = (
            storage.num_bytes,
            storage.shape,
            storage.dtype,
            categories[index],
            storage.op,
            storage.source,
            None if module is None else _NUMBER.sub("*", module),
            None if name is None else _NUMBER.sub("*", name),
            trace.phases[storage.phase].kind,
        )
        groups[key].append(index)
    result = []
    for indices in groups.values():
        storage = trace.storages[indices[0]]
        owner = trace.owners.get(indices[0])
        module = trace.module_path(storage)
        name = owner.name if owner else None
        if len(indices) > 1:
            module = None if module is None else _NUMBER.sub("*", module)
            name = None if name is None else _NUMBER.sub("*", name)
        result.append(
            LiveTensor(
                num_bytes=storage.num_bytes,
                count=len(indices),
                allocated_bytes=len(indices) * round_size(storage.num_bytes),
                shape=storage.shape,
                dtype=storage.dtype,
                category=categories[indices[0]],
                module=module,
                op=trace.op(storage),
                source=trace.source_line(storage),
                name=name,
                phase=trace.phases[storage.phase].kind,
                storages=tuple(indices),
            )
        )
    return sorted(result, key=lambda tensor: (-tensor.num_bytes, -tensor.count))
