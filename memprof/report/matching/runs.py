"""Conversion of reports and torch snapshots to `ComparedRun`, the form in which two runs are compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from memprof.findings import Finding
from memprof.ledger.categories import Category
from memprof.ledger.ledger import LiveTensor
from memprof.ledger.stage_amounts import Stage
from memprof.ledger.stages import format_stage
from memprof.report.documents.comparison import RunDescription, TensorGroup
from memprof.report.documents.report import Report
from memprof.snapshots.occupancy import group_blocks, measure_fragmentation
from memprof.snapshots.recording import Recording
from memprof.trace.events import without_numbers
from memprof.trace.facts import Target, target_to_json
from memprof.trace.snapshot import Action
from memprof.units import format_bytes

# The category of memory that kernels and libraries allocate for themselves: hidden storages.
KERNELS = Category.LIBRARY_WORKSPACE.value

ALL_TENSORS = "all tensors"
# Totals that do not depend on an allocator, and their names in a report's `model_state`.
STATE_TOTALS = {
    "parameters": "parameters_bytes",
    "gradients": "gradients_bytes",
    "optimizer state": "optimizer_state_bytes",
    "buffers": "buffers_bytes",
    ALL_TENSORS: "tensors_bytes",
}
ALLOCATED, RESERVED, DEVICE_USED, HOST = "allocated", "reserved", "device used", "host memory"
TOTALS = (*STATE_TOTALS, ALLOCATED, RESERVED, DEVICE_USED, HOST)

BRIDGE_STEPS = {
    "requested by tensors": "requested_bytes",
    "rounding": "rounding_bytes",
    "allocated": "allocated_bytes",
    "free in segments": "fragmentation_bytes",
    "released at once": "released_bytes",
    "reserved": "reserved_bytes",
    "CUDA context": "context_bytes",
    "libraries outside": "libraries_bytes",
    "other processes": "other_processes_bytes",
    "libraries, others": "unattributed_bytes",
    "device used": "device_used_bytes",
}

# Maximum driver events of one allocation: a new segment, or mappings of an expandable segment.
MAX_DRIVER_EVENTS = 8

# Adafactor steps parameter by parameter on any device; other libraries have one implementation each.
_FOREACH_OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum", "adagrad", "rmsprop")

_EXCLUDED_FIELDS = ("asked", "alloc_conf", "sequence_lengths")  # part of the allocator's facts, or results

_STEP_TITLE = re.compile(r"(.*) \(step (\d+)\)")

StageKey = tuple[str, int, int]  # Name (a layer's has its number), step, and index among equal names and steps.


@dataclass(slots=True)
class ComparedRun:
    """A report or torch snapshot, converted for the comparison with another run."""

    summary: RunDescription
    settings: dict[str, Any]
    has_all_settings: bool  # Whether a missing setting has no value; else it is unknown.
    totals: dict[str, int | None]
    stages: dict[StageKey, Stage]
    categories: dict[str, int]
    tensors: list[TensorGroup]
    has_shapes: bool
    bridge: dict[str, int | None]
    findings: dict[str, int | None] | None = None  # Bytes by finding; None: the file has none.
    assumptions: tuple[str, ...] = ()
    ranks: dict[int, int] = field(default_factory=dict)  # For ranks that ran together: the allocated peak of each.


def convert_report(document: Report, file: str, format: str) -> ComparedRun:
    """Return a report of `memprof profile` or `memprof run` as a `ComparedRun`."""
    device, target, allocator, peak = document.device, document.target, document.allocator, document.peak
    state, bridge, failure = document.model_state, document.bridge, document.failure
    old_report_notes = ("written by an earlier memprof: the totals of parameters, gradients and state are not in it",)
    on_gpu = not document.on_cpu
    totals = {name: None if state is None else getattr(state, attribute) for name, attribute in STATE_TOTALS.items()}
    totals |= {
        ALLOCATED: peak.allocated_bytes,
        RESERVED: peak.reserved_bytes if on_gpu else None,
        DEVICE_USED: peak.device_used_bytes if on_gpu else None,
        HOST: document.host_peak_bytes,
    }
    settings = {
        "source": document.source,
        "memprof": document.memprof_version,
        "device name": device.name,
        "device memory": None if device.total_bytes is None else format_bytes(device.total_bytes),
        "torch": allocator.torch,
        "alloc_conf": allocator.alloc_conf,
        **{name: value for name, value in target_to_json(target).items() if name not in _EXCLUDED_FIELDS},
        **_list_effective_defaults(target, on_gpu=on_gpu),
    }
    return ComparedRun(
        summary=RunDescription(
            file=file,
            format=format,
            source=document.source,
            device=device.name,
            on_gpu=on_gpu,
            fits=document.verdict.fits,
            failure=None if failure is None else f"{failure.error} in {failure.phase}",
            notes=old_report_notes if state is None else (),
            peak_at=format_stage(peak.stage, peak.step, peak.micro_batch),
            pages=document.pages,
            over_time=document.over_time,
        ),
        settings=settings,
        has_all_settings=True,
        totals=totals,
        stages=_index_stages(document.stages),
        categories={name: num_bytes for name, num_bytes in peak.categories.items() if name != KERNELS},
        tensors=[
            TensorGroup(t.num_bytes, t.count, t.shape, t.dtype, t.op, t.source, t.category, _get_owner_name(t))
            for t in peak.tensors
        ],
        has_shapes=True,
        bridge={
            name: None if bridge is None else getattr(bridge.peak_reserved, attribute)
            for name, attribute in BRIDGE_STEPS.items()
        },
        findings=_sum_finding_bytes(document.findings),
        assumptions=document.assumptions,
        ranks={row.rank: row.peak_allocated_bytes for row in document.ranks},
    )


def _list_effective_defaults(target: Target | None, *, on_gpu: bool) -> dict[str, Any]:
    """Return what torch chooses for unset options (torch/optim/optimizer.py, _default_to_fused_or_foreach)."""
    if target is None or target.asked.optimizer_impl is not None or target.asked.optimizer not in _FOREACH_OPTIMIZERS:
        return {}
    return {"optimizer_impl": "foreach" if on_gpu else "single"}


def _index_stages(stage_list: Iterable[Stage]) -> dict[StageKey, Stage]:
    stages: dict[StageKey, Stage] = {}
    counts: Counter[tuple[str, int]] = Counter()
    for stage in stage_list:
        key = stage.name, stage.step
        stages[*key, counts[key]] = stage
        counts[key] += 1
    return stages


def _get_owner_name(tensor: LiveTensor) -> str | None:
    owner_name = tensor.name or tensor.module
    return None if owner_name is None else without_numbers(owner_name)


def _sum_finding_bytes(findings: tuple[Finding, ...]) -> dict[str, int | None]:
    """Return the total bytes of findings by finding id; None for findings without bytes."""
    sums: dict[str, int | None] = {}
    for finding in findings:
        previous = sums.get(finding.id)
        sums[finding.id] = previous if finding.num_bytes is None else (previous or 0) + finding.num_bytes
    return sums


def convert_recording(
    recording: Recording, file: str, settings: str, notes: tuple[str, ...], source: str = "measured"
) -> ComparedRun:
    """Return one device of a torch snapshot as a `ComparedRun`; categories and modules are inferred."""
    allocated, event = recording.peak()
    peak_at = next(
        (format_stage(*_split_title(title)) for title, begin, end in recording.stages if begin <= event < end), None
    )
    reserved, reserved_event = recording.peak("reserved")
    if reserved in recording.reserved:  # as in a report: at the allocation that reserved the memory
        reserved_event = recording.reserved.index(reserved)
        next_events = recording.events[reserved_event : reserved_event + 1 + MAX_DRIVER_EVENTS]
        allocation = next((i for i, item in enumerate(next_events) if item.action is Action.ALLOC), 0)
        if recording.reserved[reserved_event + allocation] == reserved:
            reserved_event += allocation
    live_blocks = recording.alive(event)
    tensor_counts: Counter[tuple[str, str | None, str, int, str | None]] = Counter()
    for block in live_blocks:
        origin = block.origin
        module = without_numbers(origin.module) if origin.in_module else None
        tensor_counts[block.category.value, module, origin.op, block.requested, origin.source] += 1
    amounts = recording.at(reserved_event)
    segment_use, _ = measure_fragmentation(recording, reserved_event)
    bridge: dict[str, int | None] = dict.fromkeys(BRIDGE_STEPS)
    bridge |= {
        "requested by tensors": amounts[0],
        "rounding": segment_use.rounding_bytes,
        "allocated": amounts[1],
        "free in segments": segment_use.free_bytes,
        "reserved": reserved,
    }
    totals: dict[str, int | None] = dict.fromkeys(TOTALS)
    totals |= {ALLOCATED: allocated, RESERVED: reserved}
    return ComparedRun(
        summary=RunDescription(file, "torch snapshot", source, None, True, None, None, notes, peak_at),
        settings={"source": source, "alloc_conf": settings or None},
        has_all_settings=False,
        totals=totals,
        stages=_index_stages(_build_stages(recording)),
        categories={
            one.category.value: one.allocated_bytes
            for one in group_blocks(live_blocks, "category")
            if one.category.value != KERNELS
        },
        tensors=[
            TensorGroup(requested, count, None, None, op, source, category, module)
            for (category, module, op, requested, source), count in tensor_counts.items()
        ],
        has_shapes=False,
        bridge=bridge,
    )


def _split_title(title: str) -> tuple[str, int]:
    """Return stage name and step number of a stage title such as `loss (step 2)`; step 0 if the title has none."""
    match = _STEP_TITLE.fullmatch(title)
    return (match[1], int(match[2])) if match else (title, 0)


def _build_stages(recording: Recording) -> Iterator[Stage]:
    for title, begin, end in recording.stages:
        if allocated_curve := recording.allocated[begin:end]:
            requested, allocated, reserved = recording.at(begin + len(allocated_curve) - 1)
            bytes_before = recording.at(begin - 1)[1]
            yield Stage(
                *_split_title(title),
                micro_batch=0,
                allocated_bytes=allocated,
                delta_bytes=allocated - bytes_before,
                peak_allocated_bytes=max(bytes_before, *allocated_curve),
                requested_bytes=requested,
                reserved_bytes=reserved,
            )
