"""Fragmentation: reserved memory that allocations cannot use, the tensors that pin it, and expandable segments."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from memprof.allocator import GpuReplay, MemoryNeeds
from memprof.findings.does_not_fit import stage_text
from memprof.findings.evidence import (
    file_and_line,
    format_shape,
    module_pattern,
    percent,
    plural,
    suggest_fixes,
    tensor_evidence,
)
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.fixes.catalog import EXPANDABLE_SEGMENTS
from memprof.trace.events import Trace
from memprof.trace.snapshot import DEFAULT_POOL, SnapshotSegment
from memprof.units import MIB, format_bytes

MIN_BYTES = 256 * MIB
# Found when the most that is reserved is more than the most that tensors take by at least both, and always when the run
# would fit without. Blocks that are kept for the next step when a peak is over are no fragmentation.
MIN_SHARE = 0.05

MIN_GAIN = 0.1  # expandable segments are no fix if they save less than this share of it, unless the run then fits

MOST_SHOWN = 5  # kinds of segments in the evidence


@rule(80)
def find(context: Context) -> list[Finding]:
    """Return a finding for fragmentation; `num_bytes` is the free reserved memory at a failed allocation, if the run
    would fit without it; else the difference between the peaks of reserved and allocated memory.
    """
    ledger = context.ledger
    run, out = ledger.run, ledger.out_of_memory
    decides = out is not None and ledger.peak_bytes <= out.limit_bytes and out.reserved_bytes > out.in_use_bytes
    if decides and out is not None:
        stage, reserved, gap = out.stage, out.reserved_bytes, out.reserved_bytes - out.in_use_bytes
        segments, owners = run.layout_at_oom()
    else:
        event, stage, reserved = ledger.peak_reserved_event, ledger.peak_reserved_stage, ledger.peak_reserved_bytes
        gap = reserved - ledger.peak_bytes
        if gap < MIN_BYTES or gap < MIN_SHARE * reserved:
            return []
        segments, owners = run.layout_at(event)
    evidence = [*_make_release_evidence(segments), *_make_private_pool_evidence(ledger.trace, segments)]
    fixes: tuple[str, ...] = ()
    if not run.config.expandable_segments and run.release.has_expandable_segments:
        other = run.compute_needs(dataclasses.replace(run.config, expandable_segments=True))
        saved = run.required_reserved_bytes - other.required_reserved_bytes
        if saved >= MIN_GAIN * gap or other.fits > run.fits:
            fixes = suggest_fixes(context, "fragmentation")
        evidence.append(_make_expandable_evidence(run, other, ended_out_of_memory=ledger.trace.ended_out_of_memory))
    evidence += _make_pinned_evidence(ledger.trace, segments, owners)
    title = f"Fragmentation: {format_bytes(gap)} of the {format_bytes(reserved)} reserved in {stage_text(stage)} are "
    share, most = percent(gap, reserved), format_bytes(ledger.peak_bytes)
    if decides:
        title += f"free ({share}) when the GPU is full; allocated memory alone, at most {most}, would fit"
    else:
        title += f"never in use ({share}): tensors take at most {most}"
    # With more room left than it takes, it decides nothing.
    has_room = context.usable_bytes is not None and run.fits and context.usable_bytes - reserved > gap
    severity = Severity.WARNING if decides or (fixes and not has_room) else Severity.NOTE
    return [Finding("fragmentation", severity, title, gap, tuple(evidence), fixes)]


def _make_release_evidence(segments: list[SnapshotSegment]) -> list[Evidence]:
    """Return evidence of the reserved bytes that cannot be released, and of the bytes that can."""
    segments = [segment for segment in segments if segment.pool_id == DEFAULT_POOL]
    whole = [segment.size for segment in segments if not segment.allocated]
    free = [segment.size - segment.allocated for segment in segments if 0 < segment.allocated < segment.size]
    lines = [
        Evidence(
            f"{format_bytes(sum(free))} in {plural(len(free), 'segment')} that live tensors keep from being released",
            sum(free),
        )
    ]
    if whole:
        lines.append(
            Evidence(
                f"{format_bytes(sum(whole))} in {plural(len(whole), 'segment')} without a tensor: released when the "
                "GPU is full, or by torch.cuda.empty_cache()",
                sum(whole),
            )
        )
    return lines


def _make_private_pool_evidence(trace: Trace, segments: list[SnapshotSegment]) -> list[Evidence]:
    """Return evidence of free memory in private pools, and of the functions with CUDA graphs for the most sizes."""
    free = [segment.size - segment.allocated for segment in segments if segment.pool_id != DEFAULT_POOL]
    if not sum(free):
        return []
    text = (
        f"{format_bytes(sum(free))} in {plural(sum(map(bool, free)), 'segment')} of private pools (CUDA graphs, "
        "torch.cuda.MemPool), which serve nothing else"
    )
    lines = [Evidence(text, sum(free))]
    for one in sorted(trace.graphed, key=lambda one: -one.sizes)[:MOST_SHOWN]:
        if one.sizes > 1:
            what = f"{one.sizes} sizes of its inputs: the fewer sizes (padding), the fewer graphs"
            text = f"compiled code at {file_and_line(one.source)} has CUDA graphs for {what}"
            lines.append(Evidence(text, source=one.source))
    return lines


def _make_pinned_evidence(trace: Trace, segments: list[SnapshotSegment], owners: Mapping[int, int]) -> list[Evidence]:
    """Return evidence of the segments with the most bytes that cannot be released; equal segments are one line."""
    kinds: dict[tuple[object, ...], list[SnapshotSegment]] = defaultdict(list)
    held: dict[SnapshotSegment, list[int]] = {}
    for segment in segments:
        if 0 < segment.allocated < segment.size:
            own = held[segment] = [owners[block.address] for block in segment.blocks if block.address in owners]
            what = sorted({_describe_storage(trace, index) for index in own})
            kinds[segment.size, segment.allocated, len(own), *what].append(segment)
    most = sorted(kinds.values(), key=lambda alike: -sum(segment.size - segment.allocated for segment in alike))
    return [_make_segment_evidence(trace, alike, held[alike[0]]) for alike in most[:MOST_SHOWN]]


def _make_segment_evidence(trace: Trace, alike: list[SnapshotSegment], storages: list[int]) -> Evidence:
    """Return evidence of a group of equal segments, with the largest tensor that pins one of them."""
    first = alike[0]
    free = first.size - first.allocated
    largest = max(storages, key=lambda index: trace.storages[index].num_bytes)
    each = " each" if len(alike) > 1 else ""
    others = f" and {len(storages) - 1} more" if len(storages) > 1 else ""
    pieces = "" if first.largest_free == free else f", at most {format_bytes(first.largest_free)} in one piece"
    text = (
        f"{plural(len(alike), 'segment')} of {format_bytes(first.size)}: {format_bytes(free)} free{each}{pieces}"
        f"; pinned by {_describe_storage(trace, largest)}{others}"
    )
    return tensor_evidence(trace, largest, text, num_bytes=free * len(alike))


def _describe_storage(trace: Trace, index: int) -> str:
    storage = trace.storages[index]
    module = module_pattern(trace, storage)
    owner = trace.owners.get(index)
    inside = f" in {module}" if module else ""
    if owner is not None:
        return f"{owner.role} {format_shape(storage.shape)} {storage.dtype}{inside}"
    line = file_and_line(trace.source_line(storage))
    return f"{format_shape(storage.shape)} {storage.dtype} of {trace.op(storage)}{inside} at {line}"


def _make_expandable_evidence(run: GpuReplay, other: MemoryNeeds, *, ended_out_of_memory: bool) -> Evidence:
    """Return the result of the replay with expandable segments."""
    before, after = run.required_reserved_bytes, other.required_reserved_bytes
    text = f"with {EXPANDABLE_SEGMENTS} the run reserves {format_bytes(after)} instead of {format_bytes(before)}"
    if run.gpu is not None:
        words = {False: "does not fit", True: "fits"}
        was, now = words[run.fits], words[other.fits]
        if ended_out_of_memory and other.fits:
            text += ", and what was refused is served; what the script would ask for after that is not known"
            return Evidence(text, before - after)
        text += f", and {'still ' if was == now else ''}{now}" + ("" if was == now else f" where it {was} now")
    return Evidence(text, before - after)
