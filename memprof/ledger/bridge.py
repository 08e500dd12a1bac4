"""The bridge: from requested bytes of tensors to the bytes in `nvidia-smi`, in steps.

    requested + rounding = allocated;  + free in segments = reserved;  + context, libraries, others = device used

torch reports values up to reserved, NVML only device used; here each step in between has a name. A measured run has
NVML's values (`NvmlFacts`). If values are missing there, samples give the memory outside segments and context, which is
that of libraries and other processes together. A simulated run has neither. The step for the context counts only this
process, so that memory of other processes is counted once.
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

# GPU memory of NCCL for a group of processes: the lowest and the highest published measurement. 544 MB for two A100 and
# 688 MB for more (github.com/NVIDIA/nccl/issues/964), about 1.6 GB (.../issues/864). The memory grows with channels,
# algorithms and peers; send and receive take more.
NCCL_GROUP_BYTES = (544 * MIB, 1_600_000_000)

MOST_SEGMENTS = 5  # kinds of segments that are listed, those with the most free memory


@dataclass(frozen=True, slots=True)
class PoolUse:
    """The segments of one pool: the small pool serves requests of up to 1 MiB."""

    pool: str  # `small` or `large`; for a private pool (CUDA graphs) with the pool's number.
    segments: int  # Segments, or contiguous mapped runs of expandable ones.
    reserved_bytes: int
    allocated_bytes: int
    free_bytes: int
    pinned_bytes: int  # Free, but kept by tensors in the same segments.
    releasable_bytes: int  # Free, and released by `torch.cuda.empty_cache()` or when the GPU is full.
    empty_segments: int  # Segments without a tensor.


@dataclass(frozen=True, slots=True)
class FreeSegments:
    """Equal segments with free memory."""

    pool: str
    count: int
    size_bytes: int  # Bytes of one segment; `free_bytes` likewise.
    free_bytes: int
    tensors: bool  # Whether the segments also hold tensors, which keep the free memory from being released.
    expandable: bool


@dataclass(frozen=True, slots=True)
class BridgeMoment:
    """The steps at one moment: each is a difference, in bytes, between the amounts before and after it.

    Its attributes have the names of the JSON, one for each step and amount.
    """

    stage: str
    step: int
    micro_batch: int
    requested_bytes: int
    # Requests are rounded to 512 bytes, and a rest of up to 1 MiB of a large block is not split off.
    rounding_bytes: int
    allocated_bytes: int
    # Free in segments: the sum over `pools`; some of it may be cached (`Bridge.cached_bytes`).
    fragmentation_bytes: int
    released_bytes: int  # Reserved at the peak within the event and released before the request was served; usually 0.
    reserved_bytes: int
    context_bytes: int
    # This process outside the allocator and the context (cuBLAS and cuDNN handles, NCCL); None: unknown.
    libraries_bytes: int | None
    other_processes_bytes: int | None  # Other processes and the driver on the GPU; None: unknown.
    # Libraries and other processes together, where they cannot be separated; None: they can, or both are unknown.
    unattributed_bytes: int | None
    device_used_bytes: int  # The sum of the known amounts.
    pools: tuple[PoolUse, ...]
    free_segments: tuple[FreeSegments, ...]  # Those with the most free memory.


@dataclass(frozen=True, slots=True)
class Bridge:
    """The steps at the reserved peak, and at the allocated peak."""

    peak_reserved: BridgeMoment
    peak_allocated: BridgeMoment
    same_moment: bool  # Whether both peaks are after the same event.
    # The other processes on the GPU; None: unknown, as in a simulated run.
    processes: tuple[OtherProcess, ...] | None
    # For a rank of several, the additional memory of NCCL: unknown here, and not in device used. The lowest and the
    # highest published measurement for a group; None: one process, or a measured run.
    nccl_group_bytes: tuple[int, int] | None = None

    def cached_bytes(self, moment: BridgeMoment) -> int:
        """Return the bytes free at `moment` that are in use at the allocated peak: cached memory, not fragmentation."""
        return min(moment.fragmentation_bytes, self.peak_allocated.allocated_bytes - moment.allocated_bytes)

    @property
    def outside_is_unknown(self) -> bool:
        """Return whether all GPU memory outside torch's segments and the context is unknown."""
        return self.peak_reserved.libraries_bytes is None and self.peak_reserved.unattributed_bytes is None


def build_bridge(ledger: Ledger) -> Bridge | None:
    """Return the bridge of a run; None if the run was on a CPU, which has neither context nor driver."""
    if ledger.trace.device == CPU:
        return None
    reserved, allocated = ledger.peak_reserved_event, ledger.peak_event
    ledger.run.prepare_layouts((reserved, allocated))
    outside, nvml = _measure_outside(ledger.trace), ledger.trace.facts.nvml
    return Bridge(
        peak_reserved=_build_moment(ledger, reserved, ledger.peak_reserved_stage, ledger.peak_reserved_bytes, outside),
        peak_allocated=_build_moment(
            ledger, allocated, ledger.peak_stage, ledger.run.timeline.reserved[allocated], outside
        ),
        same_moment=reserved == allocated,
        processes=None if nvml is None else nvml.processes,
        nccl_group_bytes=NCCL_GROUP_BYTES if _has_unseen_nccl(ledger.trace) else None,
    )


def _has_unseen_nccl(trace: Trace) -> bool:
    """Return whether NCCL takes an unknown amount of memory; a measured run has it among its libraries."""
    rank = trace.facts.rank
    return trace.source == "simulated" and rank is not None and rank.world_size > 1 and not rank.without_nccl


def libraries_bytes(trace: Trace) -> int | None:
    """Return a measured run's GPU memory outside torch's segments and the initial context; None: unknown."""
    nvml = trace.facts.nvml or NvmlFacts()
    if nvml.process_bytes is None or nvml.reserved_bytes is None:
        return None
    return max(nvml.process_bytes - nvml.reserved_bytes - trace.facts.device.context_bytes, 0)


def _measure_outside(trace: Trace) -> dict[str, int | None]:
    """Return the GPU memory outside torch's segments: the steps that are equal at every moment."""
    nvml, context = trace.facts.nvml or NvmlFacts(), trace.facts.device.context_bytes
    used, process, libraries = nvml.used_bytes, nvml.process_bytes, libraries_bytes(trace)
    return {
        "libraries_bytes": libraries,
        "other_processes_bytes": None if used is None or process is None else max(used - process, 0),
        "unattributed_bytes": _measure_outside_sample(trace, context) if libraries is None else None,
    }


def _measure_outside_sample(trace: Trace, context: int) -> int | None:
    """Return the device memory outside reserved memory and context, in the sample with the most reserved memory."""
    pairs = [
        (sample.reserved_bytes, sample.device_used_bytes)
        for sample in trace.samples
        if sample.reserved_bytes is not None and sample.device_used_bytes is not None
    ]
    if not pairs:
        return None
    reserved, used = max(pairs)
    return max(used - reserved - context, 0)


def _build_moment(
    ledger: Ledger, event: int, span: Span, reserved: int, outside: dict[str, int | None]
) -> BridgeMoment:
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
        pools=_summarize_pools(segments, large_unit),
        free_segments=_group_free_segments(segments),
    )


def _summarize_pools(segments: list[SnapshotSegment], large_unit: int) -> tuple[PoolUse, ...]:
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


def _group_free_segments(segments: list[SnapshotSegment]) -> tuple[FreeSegments, ...]:
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
