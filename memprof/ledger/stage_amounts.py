"""Bytes of each stage: allocated, reserved, and measured on a real device."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from memprof.allocator.on_gpu import GpuReplay
from memprof.allocator.rounding import SMALL_BUFFER
from memprof.ledger.stages import OWN_CODE, Span
from memprof.trace.events import CPU, NONE, EventKind, PhaseKind, Trace
from memprof.trace.json_values import json_name


@dataclass(frozen=True, slots=True)
class OutOfMemoryMoment:
    """The first failed allocation of a run, and the memory in use at that moment."""

    event: int
    stage: Span
    storage: int  # the requested storage
    tried_bytes: int  # bytes of the segment that the driver refused
    limit_bytes: int  # bytes that may be reserved
    in_use_bytes: int  # bytes of allocated blocks
    reserved_bytes: int  # bytes of segments; the part not in use is free, but in pieces that are too small, or pinned
    free_bytes: int  # free bytes of the GPU, too few for the segment
    message: str  # torch's message
    max_buffer_bytes: int | None = None  # length of Metal's buffers, if the request reaches it: memory may be free


def describe_unusable(tried_bytes: int) -> str:
    """Return why cached memory is of no use to an allocation for which a segment of `tried_bytes` was requested: one of
    the small pool, whose segments have one size, takes nothing of the large pool."""
    return "for tensors above 1 MiB" if tried_bytes == SMALL_BUFFER else "in pieces too small for this allocation"


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a run and its memory, in bytes; `delta_bytes` is the change from its beginning to its end."""

    name: str
    step: int  # Training step from 1; 0 outside steps.
    micro_batch: int
    allocated_bytes: int = 0  # At the end of the stage, like all amounts that are not peaks.
    delta_bytes: int = 0  # End minus beginning.
    peak_allocated_bytes: int = 0  # Highest within the stage.
    requested_bytes: int = 0  # Before rounding.
    requested_delta_bytes: int = 0
    peak_requested_bytes: int = 0
    reserved_bytes: int = 0  # Of segments taken from the driver.
    peak_reserved_bytes: int = 0
    # Reserved memory and the CUDA context; in a measured run NVML's reading, None on a CPU.
    device_used_bytes: int | None = None
    seconds: float | None = None  # Of a measured run.
    host_allocated_bytes: int = 0  # Of tensors in host memory.
    peak_host_bytes: int = 0
    stack: str = ""  # For a layer: its stack, and `index` its number in it.
    index: int = NONE
    oom: bool = False  # Whether the allocation that fails is in this stage.
    resident_bytes: int | None = None  # Measured runs: of the process, in the stage's last sample.
    measured_allocated_bytes: int | None = None  # Measured on CUDA: torch's counter in the stage's last sample.
    # Measured on CUDA: one sample has the peak since the sample before; the value is stored in the stage in which the
    # replay has that peak.
    measured_peak_bytes: int | None = None
    measured_reserved_bytes: int | None = None
    kind: PhaseKind = field(default=PhaseKind.OTHER, metadata=json_name(None))
    source: str | None = None  # Of own code: the line that allocates most.


def build_stages(
    trace: Trace, run: GpuReplay, spans: list[Span], host: list[int], oom: OutOfMemoryMoment | None
) -> list[Stage]:
    """Return a stage with its memory for each of `spans`; `host` has the bytes in host memory after every event."""
    timeline, context = run.timeline, trace.facts.device.context_bytes
    measured_peaks = _assign_measured_peaks(trace, timeline.allocated, spans)
    allocated, requested, reserved = timeline.allocated, timeline.requested, timeline.reserved
    stages = []
    for span in spans:
        event_slice, last_event = slice(span.begin, span.end), span.end - 1
        bytes_before = (allocated[span.begin - 1], requested[span.begin - 1]) if span.begin else (0, 0)
        peak_reserved = max(reserved[event_slice])
        if span.begin <= timeline.peak_reserved.event < span.end:  # perhaps within the event, and released there
            peak_reserved = timeline.peak_reserved.num_bytes
        amounts = {
            "allocated_bytes": allocated[last_event],
            "delta_bytes": allocated[last_event] - bytes_before[0],
            "peak_allocated_bytes": max(allocated[event_slice]),
            "requested_bytes": requested[last_event],
            "requested_delta_bytes": requested[last_event] - bytes_before[1],
            "peak_requested_bytes": max(requested[event_slice]),
            "reserved_bytes": reserved[last_event],
            "peak_reserved_bytes": peak_reserved,
            "device_used_bytes": reserved[last_event] + context,
            "host_allocated_bytes": host[last_event],
            "peak_host_bytes": max(host[event_slice]),
            **_read_samples(trace, span),
            "measured_peak_bytes": measured_peaks.get(span.begin),
        }
        span_fields = {name: getattr(span, name) for name in ("name", "step", "micro_batch", "stack", "index", "kind")}
        is_own = span.plain_name in OWN_CODE and trace.facts.target is None  # else of memprof's own workload
        source = _find_line(trace, span) if is_own else None
        stages.append(Stage(**span_fields, **amounts, oom=oom is not None and oom.stage == span, source=source))
    return stages


def _find_line(trace: Trace, span: Span) -> str | None:
    """Return the line that makes the largest tensor of `span`: of a library's, the program's own line that leads to it,
    if that is known."""
    made = [ref for kind, ref in trace.events[span.begin : span.end] if kind is EventKind.ALLOC]
    if not made:
        return None
    return trace.find_own_line(max(made, key=lambda index: trace.storages[index].num_bytes))


def _assign_measured_peaks(trace: Trace, allocated: Sequence[int], spans: list[Span]) -> dict[int, int]:
    """Return measured peaks in bytes, by the first event of the span that contains each peak."""
    begins = [span.begin for span in spans]
    peaks: dict[int, int] = {}
    sample_begin = 0
    for sample in trace.samples:
        sample_curve = allocated[sample_begin : sample.event + 1]
        sample_begin = sample.event + 1
        if sample.peak_allocated_bytes is None or not sample_curve:
            continue
        peak_event = sample_begin - len(sample_curve) + sample_curve.index(max(sample_curve))
        begin = begins[max(bisect.bisect_right(begins, peak_event) - 1, 0)]
        peaks[begin] = max(peaks.get(begin, 0), sample.peak_allocated_bytes)
    return peaks


def _read_samples(trace: Trace, span: Span) -> dict[str, Any]:
    """Return the measured bytes and seconds of `span`, by attribute of `Stage`; empty for a simulated run."""
    if not trace.times:
        return {}
    samples = [sample for sample in trace.samples if span.begin <= sample.event < span.end]
    seconds: float | None = None
    if trace.device == CPU:
        seconds = (trace.times[min(span.end, len(trace.times) - 1)] - trace.times[span.begin]) / 1e9
    else:
        # On a GPU the program runs ahead of the work: only synchronized stretches have a time.
        boundary_samples = [sample for sample in trace.samples if span.begin - 1 <= sample.event <= span.end]
        if len(boundary_samples) > 1 and not span.stack:
            seconds = boundary_samples[-1].seconds - boundary_samples[0].seconds
    if not samples:
        return {"seconds": seconds, "device_used_bytes": None}
    sample = samples[-1]
    return {
        "seconds": seconds,
        "device_used_bytes": sample.device_used_bytes,
        "resident_bytes": sample.resident_bytes,
        "measured_allocated_bytes": sample.allocated_bytes,
        "measured_reserved_bytes": sample.reserved_bytes,
    }
