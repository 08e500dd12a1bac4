"""Simulated beside measured, for every recorded case: peaks, stages, and the stream of allocations."""

from __future__ import annotations

import collections
import importlib.metadata
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.flows import profile as flow
from memprof.flows.account import analyze
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.trace.events import HOST, EventKind, Trace
from memprof.trace.io import load_trace
from memprof.units import MIB
from tests.accuracy.truth.record import INDEX, read_index

HERE = Path(__file__).resolve().parent
NONE_YET = (
    "There are no truth captures yet: no GPU has been recorded. `make truth` on a machine with a CUDA GPU records the "
    "cases of `tests/accuracy/cases/__init__.py`, and this section then shows them beside their simulation."
)
_LIBRARIES = ("torch", "transformers")  # their releases decide what a run allocates


@dataclass(frozen=True)
class Compared:
    """One case; sizes are bytes, differences simulated - measured."""

    name: str
    allocated: tuple[int, int]  # Measured and simulated, as the next.
    reserved: tuple[int, int]
    worst_stage: tuple[str, int]  # The stage whose peak of allocated memory differs most, and by how much.
    only_measured: str  # Stages of one side alone; empty if both have the same.
    stream: str


def folders(root: Path = HERE) -> list[Path]:
    return sorted(path.parent for path in root.glob(f"*/{INDEX}"))


def compare(folder: Path, name: str, spec: TargetSpec, index: Mapping[str, Any]) -> Compared:
    """Simulate a recorded case on the GPU that recorded it; MemprofError where that cannot be done."""
    measured = load_trace(folder / f"{name}.capture")
    simulated, document = flow.profile(on_gpu(spec, index))
    theirs = analyze(measured)
    case = index["cases"][name]
    stage, alone = _stages(theirs, document)
    return Compared(
        name,
        (case["allocated"] or theirs.peak.allocated_bytes, document.peak.allocated_bytes),
        (case["reserved"] or theirs.peak.reserved_bytes, document.peak.reserved_bytes),
        stage,
        alone,
        streams(measured, simulated),
    )


def other_releases(index: Mapping[str, Any]) -> list[str]:
    """Return the libraries that have another release here than where the cases were recorded, with both releases."""
    recorded = {name: str(index[name]).partition("+")[0] for name in _LIBRARIES}
    here = {name: importlib.metadata.version(name).partition("+")[0] for name in _LIBRARIES}
    return [f"{name} {recorded[name]}, and here {here[name]}" for name in _LIBRARIES if recorded[name] != here[name]]


def on_gpu(spec: TargetSpec, index: Mapping[str, Any]) -> TargetSpec:
    """`spec` on the catalog's GPU of that name, or on one of the same capacity."""
    try:
        return spec.edit(gpu=find_gpu(index["gpu"].removeprefix("NVIDIA ")).key)
    except MemprofError:
        return spec.edit(gpu_vram_bytes=index["total_bytes"])


def _stages(measured: Report, simulated: Report) -> tuple[tuple[str, int], str]:
    sides = [
        {(row.step, row.micro_batch, row.stack, row.index, row.name): row.peak_allocated_bytes for row in side.stages}
        for side in (measured, simulated)
    ]
    ours, theirs = sides[1], sides[0]
    differences = {key: ours[key] - theirs[key] for key in theirs if key in ours}
    worst = max(differences, key=lambda key: abs(differences[key]), default=None)
    alone = sorted({key[-1] for key in theirs.keys() ^ ours.keys()} - {"context"})
    named = ("none in common", 0) if worst is None else (f"{worst[-1]} of step {worst[0]}", differences[worst])
    return named, ", ".join(alone)


def allocations(trace: Trace) -> list[tuple[int, str]]:
    """Bytes and operator of every allocation on the GPU, in order."""
    born = [trace.storages[event.ref] for event in trace.events if event.kind is EventKind.ALLOC]
    return [(one.num_bytes, trace.op(one)) for one in born if one.device != HOST and one.num_bytes]


def streams(measured: Trace, simulated: Trace) -> str:
    """Whether both allocate the same bytes in the same order; else the first difference, and how many there are."""
    theirs, ours = allocations(measured), allocations(simulated)
    if [size for size, _ in theirs] == [size for size, _ in ours]:
        return f"equal, {len(theirs):,}"
    both = zip(theirs, ours, strict=False)
    first = next((n for n, (a, b) in enumerate(both) if a[0] != b[0]), min(len(theirs), len(ours)))
    sizes = [collections.Counter(size for size, _ in side) for side in (theirs, ours)]
    common = (sizes[0] & sizes[1]).total()
    at = [f"{side[first][0]:,} `{side[first][1]}`" if first < len(side) else "the end" for side in (theirs, ours)]
    return (
        f"{common:,} of {len(theirs):,} measured are among {len(ours):,} simulated; the first difference is number "
        f"{first:,}, {at[0]} measured, {at[1]} simulated"
    )


def section(cases: Mapping[str, TargetSpec], root: Path = HERE) -> str:
    """Return what docs/accuracy-tables.md says about the truth captures."""
    recorded = folders(root)
    if not recorded:
        return NONE_YET
    return "\n\n".join(table(folder, cases) for folder in recorded)


def table(folder: Path, cases: Mapping[str, TargetSpec]) -> str:
    """One GPU's cases; those that were skipped or cannot be compared have the reason."""
    index = read_index(folder)
    lines = [
        f"**{index['gpu']}, torch {index['torch']}**, driver {index['driver']}, transformers {index['transformers']}. "
        "MiB, measured and simulated; streams are compared in bytes and order.",
        "",
    ]
    others = other_releases(index)
    if others:
        lines += [
            f"Recorded with {'; '.join(others)}: where the simulation differs, the releases may be the reason, and it "
            "is not counted as an error.",
            "",
        ]
    lines += [
        "| case | allocated | | | reserved | | | largest difference of a stage | allocations |",
        "|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    done: list[Compared] = []
    notes = []
    for name, case in index["cases"].items():
        if "skipped" in case:
            notes.append(f"* {name} was not recorded: {case['skipped']}")
        elif name not in cases:
            notes.append(f"* {name} is no case any more")
        else:
            try:
                done.append(compare(folder, name, cases[name], index))
            except MemprofError as error:
                notes.append(f"* {name} cannot be compared: {error.problem}")
            if "incomplete" in case:
                notes.append(f"* {name} was not recorded completely: {case['incomplete']}")
    lines += [_line(one, same_release=not others) for one in done]
    if done:
        lines += ["", summary(done, same_release=not others)]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def summary(done: Sequence[Compared], *, same_release: bool) -> str:
    """Median and worst, over all cases; of other releases, how many agree."""
    parts = []
    for what in ("allocated", "reserved"):
        pairs = [getattr(one, what) for one in done]
        if same_release:
            errors = [abs(_error(pair)) for pair in pairs]
            parts.append(f"{what}: median {statistics.median(errors):.3%}, worst {max(errors):.3%}")
        else:
            parts.append(f"{what}: {sum(measured == simulated for measured, simulated in pairs)} are equal")
    equal = sum(one.stream.startswith("equal") for one in done)
    return f"{len(done)} cases; {'; '.join(parts)}; the streams of {equal} are equal."


def _error(pair: tuple[int, int]) -> float:
    return pair[1] / pair[0] - 1


def _line(one: Compared, *, same_release: bool) -> str:
    stage, difference = one.worst_stage
    cells = [one.name]
    for pair in (one.allocated, one.reserved):
        measured, simulated = pair
        agreement = f"{_error(pair):+.3%}" if same_release else "equal" if measured == simulated else "other release"
        cells += [f"{measured / MIB:,.1f}", f"{simulated / MIB:,.1f}", agreement]
    stages = f"{stage}, {difference:+,} bytes" + (
        f"; on one side alone: {one.only_measured}" if one.only_measured else ""
    )
    return "| " + " | ".join([*cells, stages, one.stream]) + " |"
