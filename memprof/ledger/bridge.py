"""The bridge: from what tensors requested to what `nvidia-smi` shows, step by step, in bytes.

    requested + rounding = allocated;  + free in segments = reserved;  + context, libraries, others = device used

torch's own figures stop at reserved, NVML's begin at device used; each step between is named here. A measured run says
in its trace's facts what NVML saw (`NvmlFacts`). Where it does not, its samples tell what is on the GPU beside torch's
segments and the context: libraries and other processes together. A simulated run has neither. The context is this
process's alone, so that what others use is in one step only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memprof.allocator.pools import pool_name
from memprof.allocator.rounding import SMALL_BUFFER
from memprof.ledger.ledger import Ledger
from memprof.ledger.stages import Span
from memprof.trace.events import CPU, Trace
from memprof.trace.facts import NvmlFacts, OtherProcess
from memprof.trace.snapshot import SnapshotSegment
from memprof.units import MIB

# What NCCL takes of the GPU for a group of processes that communicates: the least and the most that others measured.
# 544 MB for two A100 and 688 MB for more (github.com/NVIDIA/nccl/issues/964), about 1.6 GB (.../issues/864). It grows
# with channels, algorithms and peers; send and receive take more.
NCCL_GROUP_BYTES = (544 * MIB, 1_600_000_000)

MOST_SEGMENTS = 5  # kinds of segments that are listed, those with most free memory


@dataclass(frozen=True, slots=True)
class PoolUse:
    """The segments of one pool: small ones serve requests of up to 1 MiB."""

    pool: str  # `small` or `large`; of a private pool (CUDA graphs) with its number.
    segments: int  # Of expandable segments, contiguous mapped runs.
    reserved_bytes: int
    allocated_bytes: int
    free_bytes: int
    pinned_bytes: int  # Free, and kept by tensors in the same segments.
    releasable_bytes: int  # Free, and released by `torch.cuda.empty_cache()` or when the GPU is full.
    empty_segments: int  # Segments without a tensor.


@dataclass(frozen=True, slots=True)
class FreeSegments:
    """Segments that are alike, with free memory in them."""

    pool: str
    count: int
    size_bytes: int  # Of one; `free_bytes` likewise.
    free_bytes: int
    tensors: bool  # Whether tensors live in them, and keep what is free.
    expandable: bool


@dataclass(frozen=True, slots=True)
class BridgeMoment:
    """The steps at one moment: each is a difference, in bytes, between the amounts before and after it.

    Its attributes are names of the JSON, one for each step and amount.
    """

    stage: str
    step: int
    micro_batch: int
    requested_bytes: int
    # Requests are rounded to 512 bytes, and a rest of up to 1 MiB of a large block is not split off.
    rounding_bytes: int
    allocated_bytes: int
    # Free in segments: the sum of `pools`, of which some may be cached (`Bridge.cached_bytes`).
    fragmentation_bytes: int
    released_bytes: int  # Reserved at the moment's height and released before the request was served; 0 as a rule.
    reserved_bytes: int
    context_bytes: int
    # Of this process outside the allocator and beyond the context (cuBLAS and cuDNN handles, NCCL); None: unknown.
    libraries_bytes: int | None
    other_processes_bytes: int | None  # Of the GPU, by others and by the driver; None: unknown.
    # Libraries and other processes together, where they are not told apart; None: they are, or nothing is known.
    unattributed_bytes: int | None
    device_used_bytes: int  # The sum of what is known.
    pools: tuple[PoolUse, ...]
    free_segments: tuple[FreeSegments, ...]  # Those with most free memory.


@dataclass(frozen=True, slots=True)
class Bridge:
    """The steps where most is reserved, and where most is allocated."""

    peak_reserved: BridgeMoment
    peak_allocated: BridgeMoment
    same_moment: bool  # Both peaks are after the same event.
    # The other processes on the GPU; None: not known, as in a simulated run.
    processes: tuple[OtherProcess, ...] | None
    # Of a rank of several, what NCCL takes beside all that: not known here, and no part of device used. The least and
    # the most that others measured for a group; None: one process, or it was measured.
    nccl_group_bytes: tuple[int, int] | None = None

    def cached_bytes(self, moment: BridgeMoment) -> int:
        """Return the bytes free at `moment` that are in use where most is allocated: cached, not fragmentation."""
        return min(moment.fragmentation_bytes, self.peak_allocated.allocated_bytes - moment.allocated_bytes)

    @property
    def outside_is_unknown(self) -> bool:
        """Return whether nothing is known of what is on the GPU beside torch's segments and the context."""
        return self.peak_reserved.libraries_bytes is None and self.peak_reserved.unattributed_bytes is None


def build_bridge(ledger: Ledger) -> Bridge | None:
    """Return the bridge of a run; None if it was on no GPU (a CPU), where there is neither context nor driver."""
    if ledger.trace.device == CPU:
        return None
    reserved, allocated = ledger.peak_reserved_event, ledger.peak_event
    ledger.run.prepare_layouts((reserved, allocated))
    outside, seen = _outside(ledger.trace), ledger.trace.facts.nvml
    return Bridge(
        peak_reserved=_moment(ledger, reserved, ledger.peak_reserved_stage, ledger.peak_reserved_bytes, outside),
        peak_allocated=_moment(ledger, allocated, ledger.peak_stage, ledger.run.timeline.reserved[allocated], outside),
        same_moment=reserved == allocated,
        processes=None if seen is None else seen.processes,
        nccl_group_bytes=NCCL_GROUP_BYTES if _has_unseen_nccl(ledger.trace) else None,
    )


def _has_unseen_nccl(trace: Trace) -> bool:
    """Return whether NCCL takes memory that is not known; a measured run has it among its libraries."""
    rank = trace.facts.rank
    return trace.source == "simulated" and rank is not None and rank.world_size > 1 and not rank.without_nccl


def libraries_bytes(trace: Trace) -> int | None:
    """Return what a measured run has on the GPU beyond torch's segments and the context of its start; None: unknown."""
    seen = trace.facts.nvml or NvmlFacts()
    if seen.process_bytes is None or seen.reserved_bytes is None:
        return None
    return max(seen.process_bytes - seen.reserved_bytes - trace.facts.device.context_bytes, 0)


def _outside(trace: Trace) -> dict[str, int | None]:
    """Return what is on the GPU beside torch's segments: the steps of every moment."""
    seen, context = trace.facts.nvml or NvmlFacts(), trace.facts.device.context_bytes
    used, process, libraries = seen.used_bytes, seen.process_bytes, libraries_bytes(trace)
    return {
        "libraries_bytes": libraries,
        "other_processes_bytes": None if used is None or process is None else max(used - process, 0),
        "unattributed_bytes": _used_beside_torch(trace, context) if libraries is None else None,
    }


def _used_beside_torch(trace: Trace, context: int) -> int | None:
    """Return what the samples of a measured run have beside reserved memory and the context, where most is reserved."""
    seen = [
        (sample.reserved_bytes, sample.device_used_bytes)
        for sample in trace.samples
        if sample.reserved_bytes is not None and sample.device_used_bytes is not None
    ]
    if not seen:
        return None
    reserved, used = max(seen)
    return max(used - reserved - context, 0)


def _moment(ledger: Ledger, event: int, span: Span, reserved: int, outside: dict[str, int | None]) -> BridgeMoment:
    timeline = ledger.run.timeline
    requested, allocated = timeline.requested[event], timeline.allocated[event]
    segments, _ = ledger.run.layout_at(event)
    large_unit, context = ledger.run.config.large_segment_size, ledger.trace.facts.device.context_bytes
    return BridgeMoment(
        stage=span.name,
        step=span.step,
        micro_batch=span.micro_batch,
        requested_bytes=requested,
        rounding_bytes=allocated - requested,
        allocated_bytes=allocated,
        fragmentation_bytes=timeline.reserved[event] - allocated,
        released_bytes=reserved - timeline.reserved[event],
        reserved_bytes=reserved,
        context_bytes=context,
        **outside,
        device_used_bytes=reserved + context + sum(part or 0 for part in outside.values()),
        pools=_pools(segments, large_unit),
        free_segments=_free_segments(segments),
    )


def _pools(segments: list[SnapshotSegment], large_unit: int) -> tuple[PoolUse, ...]:
    names = sorted({(segment.pool_id, not segment.is_small) for segment in segments})
    found = []
    for pool_id, is_large in names:
        own = [one for one in segments if one.pool_id == pool_id and one.is_small is not is_large]
        reserved, allocated = sum(one.size for one in own), sum(one.allocated for one in own)
        releasable = sum(one.releasable(large_unit if is_large else SMALL_BUFFER) for one in own)
        found.append(
            PoolUse(
                pool=pool_name(not is_large, pool_id),
                segments=len(own),
                reserved_bytes=reserved,
                allocated_bytes=allocated,
                free_bytes=reserved - allocated,
                pinned_bytes=reserved - allocated - releasable,
                releasable_bytes=releasable,
                empty_segments=sum(not one.allocated for one in own),
            )
        )
    return tuple(found)


def _free_segments(segments: list[SnapshotSegment]) -> tuple[FreeSegments, ...]:
    alike: Counter[tuple[str, int, int, bool, bool]] = Counter()
    for one in segments:
        free = one.size - one.allocated
        if free:
            alike[pool_name(one.is_small, one.pool_id), one.size, free, one.allocated > 0, one.expandable] += 1
    most = sorted(alike.items(), key=lambda item: (-item[0][2] * item[1], item[0]))
    return tuple(
        FreeSegments(pool, count, size, free, tensors, expandable)
        for (pool, size, free, tensors, expandable), count in most[:MOST_SEGMENTS]
    )
