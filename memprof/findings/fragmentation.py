"""Rule `fragmentation`: reserved memory that allocations cannot use, and the tensors that pin it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from memprof.allocator import GpuReplay, MemoryNeeds
from memprof.findings.effect import format_reserved
from memprof.findings.evidence import (
    ends_in_building,
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

FRAGMENTATION = "fragmentation"

MIN_BYTES = 256 * MIB
# Of the reserved peak. The reserved peak must exceed the allocated peak by this share and by MIN_BYTES, unless the run
# would fit without fragmentation. Cached blocks after a peak are no fragmentation.
MIN_SHARE = 0.05

MIN_GAIN = 0.1  # expandable segments are a fix if they save this share of the fragmentation, or if the run then fits

MAX_SHOWN = 5  # kinds of segments in the evidence


@rule(80)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is the free reserved memory at the failed allocation, if the run would
    fit without fragmentation, else the difference between the peaks of reserved and allocated memory.

    Nothing is found where memory runs out while a model is built, or with less than MIN_SHARE free, unless the whole
    run is known and fits with expandable segments; nor where the GPU has room for more than the fragmentation, and
    expandable segments do not reduce it.
    """
    ledger = context.ledger
    run, oom = ledger.run, ledger.out_of_memory
    if ends_in_building(ledger.trace):
        return []
    is_decisive = oom is not None and ledger.peak_bytes <= oom.limit_bytes and oom.reserved_bytes > oom.in_use_bytes
    is_decisive = is_decisive and oom is not None and oom.max_buffer_bytes is None
    if is_decisive and oom is not None:
        reserved, free_bytes = oom.reserved_bytes, oom.reserved_bytes - oom.in_use_bytes
    else:
        reserved = ledger.peak_reserved_bytes
        free_bytes = reserved - ledger.peak_bytes
        if free_bytes < MIN_BYTES or free_bytes < MIN_SHARE * reserved:
            return []
    expandable = None
    if not run.config.expandable_segments and run.has_expandable_segments:
        expandable = run.compute_needs(dataclasses.replace(run.config, expandable_segments=True))
    is_little = oom is not None and oom.reserved_bytes - oom.in_use_bytes < MIN_SHARE * oom.reserved_bytes
    # A run that ends there would fail soon after, of whatever takes nearly all memory. The need of one that the replay
    # goes on with is known, and expandable segments may reduce it.
    would_fit = expandable is not None and expandable.fits
    if is_little and (ledger.trace.ended_out_of_memory or (is_decisive and not would_fit)):
        return []
    segments, owners = run.layout_at_oom() if is_decisive else run.layout_at(ledger.peak_reserved_event)
    evidence = [*_make_free_evidence(segments), *_make_private_pool_evidence(ledger.trace, segments)]
    fixes: tuple[str, ...] = ()
    if expandable is not None:
        saved_bytes = run.required_reserved_bytes - expandable.required_reserved_bytes
        if saved_bytes >= MIN_GAIN * free_bytes or expandable.fits > run.fits:
            fixes = suggest_fixes(context, "fragmentation")
        is_cut = ledger.trace.ended_out_of_memory
        evidence.append(_make_expandable_evidence(run, expandable, ended_out_of_memory=is_cut))
    evidence += _make_pinned_evidence(ledger.trace, segments, owners)
    title = f"Fragmentation: {format_bytes(free_bytes)} of the {format_bytes(reserved)} reserved are "
    title += "free when the GPU is full" if is_decisive else "never in use"
    title += f" ({percent(free_bytes, reserved)})"
    # If the GPU has more room than the fragmentation takes, the fragmentation does not matter.
    has_room = context.usable_bytes is not None and run.fits and context.usable_bytes - reserved > free_bytes
    if has_room and expandable is not None and not fixes:
        return []
    # Where tensors alone are more than the GPU has, it is none of the causes either.
    is_beside = ledger.trace.ended_out_of_memory and not is_decisive
    severity = Severity.WARNING if is_decisive or (fixes and not has_room and not is_beside) else Severity.NOTE
    # Of a run that ends there, only that one allocation would succeed: expandable segments are one change among others.
    decides = is_decisive and not ledger.trace.ended_out_of_memory
    return [Finding(FRAGMENTATION, severity, title, free_bytes, tuple(evidence), fixes, is_decisive=decides)]


def _make_free_evidence(segments: list[SnapshotSegment]) -> list[Evidence]:
    """Return evidence of free bytes in `segments`: in segments that live tensors pin, and in empty segments."""
    segments = [segment for segment in segments if segment.pool_id == DEFAULT_POOL]
    empty = [segment.size for segment in segments if not segment.allocated]
    held = [segment.size - segment.allocated for segment in segments if 0 < segment.allocated < segment.size]
    lines = [
        Evidence(
            f"{format_bytes(sum(held))} in {plural(len(held), 'segment')} that live tensors keep from being released",
            sum(held),
        )
    ]
    if empty:
        lines.append(
            Evidence(
                f"{format_bytes(sum(empty))} in {plural(len(empty), 'segment')} without a tensor: released when the "
                "GPU is full, or by torch.cuda.empty_cache()",
                sum(empty),
            )
        )
    return lines


def _make_private_pool_evidence(trace: Trace, segments: list[SnapshotSegment]) -> list[Evidence]:
    """Return evidence of free memory in private pools, and of functions with CUDA graphs for several input sizes."""
    free_sizes = [segment.size - segment.allocated for segment in segments if segment.pool_id != DEFAULT_POOL]
    if not sum(free_sizes):
        return []
    text = (
        f"{format_bytes(sum(free_sizes))} in {plural(sum(map(bool, free_sizes)), 'segment')} of private pools "
        "(CUDA graphs, torch.cuda.MemPool), which serve nothing else"
    )
    lines = [Evidence(text, sum(free_sizes))]
    for graphed in sorted(trace.graphed, key=lambda graphed: -graphed.sizes)[:MAX_SHOWN]:
        if graphed.sizes > 1:
            sizes_text = f"{graphed.sizes} sizes of its inputs: the fewer sizes (padding), the fewer graphs"
            text = f"compiled code at {file_and_line(graphed.source)} has CUDA graphs for {sizes_text}"
            lines.append(Evidence(text, source=graphed.source))
    return lines


def _make_pinned_evidence(trace: Trace, segments: list[SnapshotSegment], owners: Mapping[int, int]) -> list[Evidence]:
    """Return one evidence per group of equal pinned segments, most free bytes first; `owners`: address -> storage."""
    groups: dict[tuple[object, ...], list[SnapshotSegment]] = defaultdict(list)
    held: dict[SnapshotSegment, list[int]] = {}
    for segment in segments:
        if 0 < segment.allocated < segment.size:
            indices = held[segment] = [owners[block.address] for block in segment.blocks if block.address in owners]
            descriptions = sorted({_describe_storage(trace, index) for index in indices})
            groups[segment.size, segment.allocated, len(indices), *descriptions].append(segment)
    ordered = sorted(groups.values(), key=lambda alike: -sum(segment.size - segment.allocated for segment in alike))
    return [_make_segment_evidence(trace, alike, held[alike[0]]) for alike in ordered[:MAX_SHOWN]]


def _make_segment_evidence(trace: Trace, segments: list[SnapshotSegment], storages: list[int]) -> Evidence:
    """Return evidence of equal `segments`, which names the largest of the `storages` that pin the first segment."""
    first = segments[0]
    free = first.size - first.allocated
    largest = max(storages, key=lambda index: trace.storages[index].num_bytes)
    each = " each" if len(segments) > 1 else ""
    others_text = f" and {len(storages) - 1} more" if len(storages) > 1 else ""
    pieces = "" if first.largest_free == free else f", at most {format_bytes(first.largest_free)} in one piece"
    text = (
        f"{plural(len(segments), 'segment')} of {format_bytes(first.size)}: {format_bytes(free)} free{each}{pieces}"
        f"; pinned by {_describe_storage(trace, largest)}{others_text}"
    )
    return tensor_evidence(trace, largest, text, num_bytes=free * len(segments))


def _describe_storage(trace: Trace, index: int) -> str:
    storage = trace.storages[index]
    module = module_pattern(trace, storage)
    owner = trace.owners.get(index)
    in_module = f" in {module}" if module else ""
    if owner is not None:
        return f"{owner.role} {format_shape(storage.shape)} {storage.dtype}{in_module}"
    line = file_and_line(trace.source_line(storage))
    return f"{format_shape(storage.shape)} {storage.dtype} of {trace.op(storage)}{in_module} at {line}"


def _make_expandable_evidence(run: GpuReplay, other: MemoryNeeds, *, ended_out_of_memory: bool) -> Evidence:
    """Return evidence that compares the replay `run` with `other`, the replay with expandable segments."""
    before, after = run.required_reserved_bytes, other.required_reserved_bytes
    text = f"with {EXPANDABLE_SEGMENTS} the run {format_reserved(other, before)}"
    if run.gpu is not None:
        fit_texts = {False: "does not fit", True: "fits"}
        was, now = fit_texts[run.fits], fit_texts[other.fits]
        if ended_out_of_memory and other.fits:
            text += ", and what was refused is served; what the script would ask for after that is not known"
            return Evidence(text, before - after)
        text += f", and {'still ' if was == now else ''}{now}" + ("" if was == now else f" where it {was} now")
    return Evidence(text, before - after)
