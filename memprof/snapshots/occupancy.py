"""One moment of a recording: the live blocks, their origins, and the use of segments."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, fields

from memprof.allocator.initial_state import Range, Ranges
from memprof.allocator.rounding import SMALL_BUFFER
from memprof.ledger.categories import Category
from memprof.snapshots.recording import BlockLife, Recording
from memprof.trace.columns import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP
from memprof.trace.events import without_numbers
from memprof.units import KIB, MIB

NEARLY_EMPTY = 0.25  # A segment with a smaller share in use is listed together with its live blocks

BY = ("frame", "module", "category", "size")  # keys for grouping blocks

_SIZE_CLASSES = (
    (512, "512 bytes"), (64 * KIB, "to 64 KiB"), (MIB, "to 1 MiB"), (10 * MIB, "1 to 10 MiB"),
    (100 * MIB, "10 to 100 MiB"), (1024 * MIB, "100 MiB to 1 GiB"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    """Live blocks of one category at a moment that have the same line, module or size class."""

    key: str
    allocated_bytes: int  # Of the group's blocks.
    requested_bytes: int
    count: int
    category: Category
    op: str  # The operator with most of the group's bytes; `module` likewise.
    module: str


@dataclass(slots=True)
class SegmentUse(Range):
    """A segment at a moment."""

    used: int
    largest_free: int
    # Free bytes that torch.cuda.empty_cache() releases: the whole segment if no block in it is live; in an expandable
    # segment, every free mapping unit.
    releasable: int
    live: tuple[BlockLife, ...]  # its blocks in use, by address

    @property
    def free(self) -> int:
        """Return the bytes of the segment's free blocks."""
        return self.size - self.used

    @property
    def pinned(self) -> int:
        """Return the free bytes that live blocks keep from being released."""
        return self.free - self.releasable

    @property
    def is_nearly_empty(self) -> bool:
        """Return whether a few live blocks keep the segment from being released."""
        return 0 < self.used < NEARLY_EMPTY * (self.size - self.releasable)


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Reserved memory that is not in use after an event, by reason."""

    event: int
    reserved_bytes: int
    used_bytes: int  # Blocks in use, including blocks that wait for other streams.
    free_bytes: int  # Cached: `releasable_bytes` and `pinned_bytes`.
    rounding_bytes: int  # In use and not requested: rounding to 512 bytes, and remainders that are not split off.
    releasable_bytes: int  # Released by torch.cuda.empty_cache(), and by torch before an allocation fails.
    pinned_bytes: int  # Free, but kept by live blocks in the same segments.
    largest_free_bytes: int
    segments: int
    nearly_empty_segments: int


def group(lives: list[BlockLife], by: str) -> list[Group]:
    """Group `lives` by `by`, one of BY, and by category, largest first."""
    members: dict[tuple[str, Category], list[BlockLife]] = defaultdict(list)
    for life in lives:
        members[_make_group_key(life, by), life.category].append(life)
    found = []
    for (key, category), own in members.items():
        weights: list[Counter[str]] = [Counter(), Counter()]
        for life in own:
            for counter, value in zip(weights, (life.origin.op, without_numbers(life.origin.module)), strict=True):
                counter[value] += life.size
        op, module = (counter.most_common(1)[0][0] for counter in weights)
        found.append(
            Group(
                key=key,
                allocated_bytes=sum(life.size for life in own),
                requested_bytes=sum(life.requested for life in own),
                count=len(own),
                category=category,
                op=op,
                module=module,
            )
        )
    return sorted(found, key=lambda one: (-one.allocated_bytes, one.key, one.category))


def _make_group_key(life: BlockLife, by: str) -> str:
    if by == "frame":
        source = life.origin.source
        return source if ":" in source else without_numbers(source)
    if by == "module":
        return without_numbers(life.origin.module)
    if by == "category":
        return life.category.value
    return next((name for limit, name in _SIZE_CLASSES if life.size <= limit), "1 GiB and more")


def segments_at(recording: Recording, event: int, alive: list[BlockLife]) -> list[SegmentUse]:
    """Return the segments after `event`, by address, with the blocks `alive`."""
    ranges = Ranges(recording.final, recording.replay.config)
    for later in reversed(recording.events.find_indices(SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP)):
        if later <= event:
            break
        ranges.undo_event(recording.events, later)
    by_address = sorted(alive, key=lambda life: life.address)
    addresses = [life.address for life in by_address]
    found = []
    for run in ranges.sorted():
        end = run.address + run.size
        live = by_address[bisect_left(addresses, run.address) : bisect_left(addresses, end)]
        at, free, largest, releasable = run.address, 0, 0, 0
        unit = SMALL_BUFFER if run.is_small else recording.replay.config.large_segment_size
        for begin, stop in [*((life.address, min(life.address + life.size, end)) for life in live), (end, end)]:
            gap = max(begin - at, 0)  # blocks of an incomplete trace may overlap
            free += gap
            largest = max(largest, gap)
            if run.expandable:  # mapped runs begin at whole units
                releasable += max((begin - run.address) // unit + (run.address - at) // unit, 0) * unit
            elif gap == run.size:
                releasable = gap
            at = max(at, stop)
        found.append(
            SegmentUse(
                **{part.name: getattr(run, part.name) for part in fields(run)},
                used=run.size - free,
                largest_free=largest,
                releasable=releasable,
                live=tuple(live),
            )
        )
    return found


def fragmentation(recording: Recording, event: int) -> tuple[Fragmentation, list[SegmentUse]]:
    """Return the reserved memory not in use after `event`; and the segments, those with the most pinned bytes first."""
    alive = recording.alive(event)
    segments = sorted(segments_at(recording, event, alive), key=lambda one: (-one.pinned, one.address))
    reserved, used = sum(segment.size for segment in segments), sum(segment.used for segment in segments)
    found = Fragmentation(
        event=event,
        reserved_bytes=reserved,
        used_bytes=used,
        free_bytes=reserved - used,
        rounding_bytes=used - sum(life.requested for life in alive),
        releasable_bytes=sum(segment.releasable for segment in segments),
        pinned_bytes=sum(segment.pinned for segment in segments),
        largest_free_bytes=max((segment.largest_free for segment in segments), default=0),
        segments=len(segments),
        nearly_empty_segments=sum(segment.is_nearly_empty for segment in segments),
    )
    return found, segments
