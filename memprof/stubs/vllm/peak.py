"""The tensors that a stretch of a run takes most memory for, in words."""

from __future__ import annotations

from memprof.trace.events import NONE, EventKind, Trace
from memprof.units import format_bytes

_MAX_NAMED = 2


def describe_peak(trace: Trace, begin: int, end: int) -> str:
    """Return the largest tensors at the peak of what the events from `begin` up to `end` allocate, such as "4.64 GiB
    float32 [8192, 152064] of aten._to_copy in logits_processor"; empty if they allocate nothing."""
    live: dict[int, int] = {}
    num_bytes, peak_bytes, peak_event = 0, 0, begin
    for event in range(begin, end):
        kind, ref = trace.events[event]
        if kind is EventKind.ALLOC and trace.storages[ref].device == trace.device:
            live[ref] = trace.storages[ref].num_bytes
            num_bytes += live[ref]
            if num_bytes > peak_bytes:
                peak_bytes, peak_event = num_bytes, event
        elif kind is EventKind.FREE:
            num_bytes -= live.pop(ref, 0)
    at_peak: set[int] = set()
    for kind, ref in trace.events[begin : peak_event + 1]:
        if kind is EventKind.ALLOC and trace.storages[ref].device == trace.device:
            at_peak.add(ref)
        elif kind is EventKind.FREE:
            at_peak.discard(ref)
    largest = sorted(at_peak, key=lambda ref: -trace.storages[ref].num_bytes)[:_MAX_NAMED]
    return "; ".join(_describe(trace, ref) for ref in largest if trace.storages[ref].num_bytes)


def _describe(trace: Trace, ref: int) -> str:
    storage = trace.storages[ref]
    module = None if storage.module == NONE else trace.modules[storage.module]
    place = "" if module is None else f" in {module.path or module.class_name}"
    shape = ", ".join(map(str, storage.shape))
    return f"{format_bytes(storage.num_bytes)} {storage.dtype} [{shape}] of {trace.ops[storage.op]}{place}"
