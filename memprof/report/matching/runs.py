"""A report, or a recording of torch, in the one form that can be compared with another."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from memprof.ledger.categories import Category
from memprof.recording.occupancy import fragmentation, group
from memprof.recording.recording import Recording
from memprof.report.documents.comparison import Side, StageAmounts
from memprof.trace.events import NONE
from memprof.trace.snapshot import Action
from memprof.units import format_bytes

KERNELS = Category.LIBRARY_WORKSPACE.value
"""The category of what kernels and libraries take for themselves: hidden storages."""

ALL_TENSORS = "all tensors"
STATE = {
    "parameters": "parameters_bytes",
    "gradients": "gradients_bytes",
    "optimizer state": "optimizer_state_bytes",
    "buffers": "buffers_bytes",
    ALL_TENSORS: "tensors_bytes",
}
"""Totals that no allocator has a part in, and their names in a report's `model_state`."""
ALLOCATED, RESERVED, DEVICE_USED, HOST = "allocated", "reserved", "device used", "host memory"
TOTALS = (*STATE, ALLOCATED, RESERVED, DEVICE_USED, HOST)

BRIDGE = {
    "requested by tensors": "requested_bytes",
    "rounding": "rounding_bytes",
    "allocated": "allocated_bytes",
    "free in segments": "fragmentation_bytes",
    "given back at once": "given_back_bytes",
    "reserved": "reserved_bytes",
    "CUDA context": "context_bytes",
    "libraries outside": "libraries_bytes",
    "other processes": "other_processes_bytes",
    "libraries, others": "unnamed_bytes",
    "device used": "device_used_bytes",
}

MOST_MAPPED = 8
"""Events of the driver for one request, at most, as a rule one: a segment, or stretches mapped into one."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_NOT_SETTINGS = ("alloc_conf",)  # the allocator's own says more

_STEP = re.compile(r"(.*) \(step (\d+)\)")

StageKey = tuple[str, int, int]
"""Name (a layer's has its number), step, and which of those that have both in common."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, and what else tells where it is in the run."""

    amounts: StageAmounts
    micro_batch: int = 0
    stack: str = ""
    index: int = NONE


@dataclass(frozen=True, slots=True)
class Tensors:
    """Equal tensors alive at the peak."""

    category: str
    where: str | None
    op: str
    shape: tuple[int, ...] | None
    dtype: str | None
    bytes: int
    source: str | None
    count: int


@dataclass(slots=True)
class Run:
    """One of the two runs."""

    side: Side
    settings: dict[str, Any]
    all_settings: bool
    """Whether a setting that is missing has no value; else nothing is known of it."""
    totals: dict[str, int | None]
    stages: dict[StageKey, Stage]
    categories: dict[str, int]
    tensors: list[Tensors]
    knows_shapes: bool
    bridge: dict[str, int | None]
    findings: dict[str, int | None] | None = None
    """Bytes by finding; None: the file has none."""
    assumptions: tuple[str, ...] = ()


def run_of_report(report: dict[str, Any], file: str, kind: str) -> Run:
    """From the JSON of `memprof profile`.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is none.
    """
    device, target, allocator, peak = (report[name] for name in ("device", "target", "allocator", "peak"))
    on_cpu = report["bridge"] is None if "bridge" in report else (target or {}).get("device") == "cpu"
    on_card = not (report["source"] == "measured" and on_cpu)
    notes = []
    state = report.get("model_state")
    if state is None:
        notes.append("written by an earlier memprof: the totals of parameters, gradients and state are not in it")
    failure = report.get("failure")
    totals: dict[str, int | None] = {
        name: None if state is None else _whole(state[attribute]) for name, attribute in STATE.items()
    }
    totals |= {
        ALLOCATED: _whole(peak["allocated_bytes"]),
        RESERVED: _whole(peak["reserved_bytes"]) if on_card else None,
        DEVICE_USED: _whole(peak["device_used_bytes"]) if on_card else None,
        HOST: _whole(report["host_peak_bytes"]),
    }
    bridge = report.get("bridge")
    settings = {
        "source": report["source"],
        "memprof": report["memprof_version"],
        "device name": device["name"],
        "device memory": None if device.get("total_bytes") is None else format_bytes(_whole(device["total_bytes"])),
        "torch": allocator.get("torch"),
        "alloc_conf": allocator.get("alloc_conf"),
        **{name: value for name, value in (target or {}).items() if name not in _NOT_SETTINGS},
    }
    return Run(
        side=Side(
            file=file,
            format=kind,
            source=str(report["source"]),
            device=device["name"],
            on_card=on_card,
            fits=report["verdict"]["fits"],
            failure=None if failure is None else f"{failure['error']} in {failure['phase']}",
            notes=tuple(notes),
        ),
        settings=settings,
        all_settings=True,
        totals=totals,
        stages=_stages(report["stages"]),
        categories={str(name): _whole(num_bytes) for name, num_bytes in peak["categories"].items() if name != KERNELS},
        tensors=_tensors(peak["tensors"]),
        knows_shapes=True,
        bridge={
            name: None if bridge is None else _whole_or_none(bridge["peak_reserved"][attribute])
            for name, attribute in BRIDGE.items()
        },
        findings=_findings(report["findings"]),
        assumptions=tuple(map(str, report["assumptions"])),
    )


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a number of bytes")
    return value


def _whole_or_none(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _stages(rows: list[dict[str, Any]]) -> dict[StageKey, Stage]:
    found: dict[StageKey, Stage] = {}
    seen: Counter[tuple[str, int]] = Counter()
    for row in rows:
        key = row["name"], row["step"]
        amounts = StageAmounts(
            allocated_bytes=_whole(row["allocated_bytes"]),
            delta_bytes=_whole(row["delta_bytes"]),
            peak_allocated_bytes=_whole(row["peak_allocated_bytes"]),
            requested_bytes=_whole(row["requested_bytes"]),
            reserved_bytes=_whole_or_none(row["reserved_bytes"]),
            seconds=row.get("seconds"),
        )
        found[*key, seen[key]] = Stage(amounts, row["micro_batch"], row.get("stack", ""), row.get("index", NONE))
        seen[key] += 1
    return found


def _tensors(rows: list[dict[str, Any]]) -> list[Tensors]:
    found = []
    for row in rows:
        where = row["name"] or row["module"]
        found.append(
            Tensors(
                category=row["category"],
                where=None if where is None else _NUMBER.sub("*", where),
                op=row["op"],
                shape=tuple(row["shape"]),
                dtype=row["dtype"],
                bytes=_whole(row["bytes"]),
                source=row["source"],
                count=_whole(row["count"]),
            )
        )
    return found


def _findings(rows: list[dict[str, Any]]) -> dict[str, int | None]:
    """Bytes by finding; None of one that is not about bytes."""
    found: dict[str, int | None] = {}
    for row in rows:
        known, more = found.get(row["id"]), _whole_or_none(row["bytes"])
        found[row["id"]] = known if more is None else (known or 0) + more
    return found


def run_of_recording(recording: Recording, file: str, settings: str, notes: tuple[str, ...]) -> Run:
    """From one device of a snapshot of torch; categories and modules are guesses."""
    allocated, event = recording.peak()
    reserved, reserved_event = recording.peak("reserved")
    if reserved in recording.reserved:  # as in a report: when the block is handed out that it was first reserved for
        reserved_event = recording.reserved.index(reserved)
        following = recording.events[reserved_event : reserved_event + 1 + MOST_MAPPED]
        allocation = next((number for number, one in enumerate(following) if one.action is Action.ALLOC), 0)
        if recording.reserved[reserved_event + allocation] == reserved:
            reserved_event += allocation
    alive = recording.alive(event)
    kinds: Counter[tuple[str, str | None, str, int, str | None]] = Counter()
    for life in alive:
        origin = life.origin
        module = _NUMBER.sub("*", origin.module) if origin.in_module else None
        kinds[life.category.value, module, origin.op, life.requested, origin.source] += 1
    stages: dict[StageKey, Stage] = {}
    seen: Counter[tuple[str, int]] = Counter()
    for title, begin, end in recording.stages:
        within = recording.allocated[begin:end]
        if not within:
            continue
        named = _STEP.fullmatch(title)
        key = (named[1], int(named[2])) if named else (title, 0)
        requested_end, allocated_end, reserved_end = recording.at(begin + len(within) - 1)
        before = recording.at(begin - 1)[1]
        amounts = StageAmounts(
            allocated_bytes=allocated_end,
            delta_bytes=allocated_end - before,
            peak_allocated_bytes=max(before, *within),
            requested_bytes=requested_end,
            reserved_bytes=reserved_end,
            seconds=None,
        )
        stages[*key, seen[key]] = Stage(amounts)
        seen[key] += 1
    at_reserved = recording.at(reserved_event)
    free = fragmentation(recording, reserved_event)
    bridge: dict[str, int | None] = dict.fromkeys(BRIDGE)
    bridge |= {
        "requested by tensors": at_reserved[0],
        "rounding": free.rounding,
        "allocated": at_reserved[1],
        "free in segments": free.free,
        "reserved": reserved,
    }
    totals: dict[str, int | None] = dict.fromkeys(TOTALS)
    totals |= {ALLOCATED: allocated, RESERVED: reserved}
    return Run(
        side=Side(file, "torch snapshot", "measured", None, on_card=True, fits=None, failure=None, notes=notes),
        settings={"source": "measured", "alloc_conf": settings or None},
        all_settings=False,
        totals=totals,
        stages=stages,
        categories={
            one.category.value: one.num_bytes for one in group(alive, "category") if one.category.value != KERNELS
        },
        tensors=[
            Tensors(category, module, op, None, None, requested, source, count)
            for (category, module, op, requested, source), count in kinds.items()
        ],
        knows_shapes=False,
        bridge=bridge,
    )
