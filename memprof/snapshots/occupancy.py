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

NEARLY_EMPTY_SHARE = 0.25  # A segment with a smaller share in use is listed together with its live blocks

GROUP_KEYS = ("frame", "module", "category", "size")  # keys for grouping blocks

_SIZE_CLASSES = (
    (512, "512 bytes"), (64 * KIB, "to 64 KiB"), (MIB, "to 1 MiB"), (10 * MIB, "1 to 10 MiB"),
    (100 * MIB, "10 to 100 MiB"), (1024 * MIB, "100 MiB to 1 GiB"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    """Live blocks of one category and one source line, module or size class."""

    key: str
    allocated_bytes: int  # Of the group's blocks.
    requested_bytes: int
    count: int
    category: Category
    op: str  # The operator with most of the group's bytes; `module` likewise.
    module: str


@dataclass(slots=True)
class SegmentUse(Range):
    """A segment of the allocator after an event, with its used and free bytes and live blocks."""

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
        return 0 < self.used < NEARLY_EMPTY_SHARE * (self.size - self.releasable)


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


def group_blocks(lives: list[BlockLife], grouping: str) -> list[Group]:
    """Group `lives` by the key `grouping` (one of GROUP_KEYS) and by category; the largest group comes first."""
    members: dict[tuple[str, Category], list[BlockLife]] = defaultdict(list)
    for life in lives:
        members[_make_group_key(life, grouping), life.category].append(life)
    groups = []
    for (key, category), group_lives in members.items():
        weights: list[Counter[str]] = [Counter(), Counter()]
        for life in group_lives:
            for counter, value in zip(weights, (life.origin.op, without_numbers(life.origin.module)), strict=True):
                counter[value] += life.size
        op, module = (counter.most_common(1)[0][0] for counter in weights)
        groups.append(
            Group(
                key=key,
                allocated_bytes=sum(life.size for life in group_lives),
                requested_bytes=sum(life.requested for life in group_lives),
                count=len(group_lives),
                category=category,
                op=op,
                module=module,
            )
        )
    return sorted(groups, key=lambda group: (-group.allocated_bytes, group.key, group.category))


def _make_group_key(life: BlockLife, grouping: str) -> str:
    if grouping == "frame":
        source = life.origin.source
        return source if ":" in source else without_numbers(source)
    if grouping == "module":
        return without_numbers(life.origin.module)
    if grouping == "category":
        return life.category.value
    return next((name for limit, name in _SIZE_CLASSES if life.size <= limit), "1 GiB and more")


def list_segments(recording: Recording, event: int, blocks: list[BlockLife]) -> list[SegmentUse]:
    """Return the segments after `event`, by address, each with its live blocks from `blocks`."""
    ranges = Ranges(recording.final, recording.replay.config)
    for later in reversed(recording.events.find_indices(SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP)):
        if later <= event:
            break
        ranges.undo_event(recording.events, later)
    by_address = sorted(blocks, key=lambda life: life.address)
    addresses = [life.address for life in by_address]
    segments = []
    for segment in ranges.sorted():
        end = segment.address + segment.size
        live = by_address[bisect_left(addresses, segment.address) : bisect_left(addresses, end)]
        position, free, largest_gap, releasable = segment.address, 0, 0, 0
        unit = SMALL_BUFFER if segment.is_small else recording.replay.config.large_segment_size
        for begin, stop in [*((life.address, min(life.address + life.size, end)) for life in live), (end, end)]:
            gap = max(begin - position, 0)  # blocks of an incomplete trace may overlap
            free += gap
            largest_gap = max(largest_gap, gap)
            if segment.expandable:  # mapped runs begin at whole units
                releasable += max((begin - segment.address) // unit + (segment.address - position) // unit, 0) * unit
            elif gap == segment.size:
                releasable = gap
            position = max(position, stop)
        segments.append(
            SegmentUse(
                **{item.name: getattr(segment, item.name) for item in fields(segment)},
                used=segment.size - free,
                largest_free=largest_gap,
                releasable=releasable,
                live=tuple(live),
            )
        )
    return segments


def measure_fragmentation(recording: Recording, event: int) -> tuple[Fragmentation, list[SegmentUse]]:
    """Return the unused reserved memory after `event` by reason, and the segments, most pinned bytes first."""
    blocks = recording.alive(event)
    segments = sorted(list_segments(recording, event, blocks), key=lambda segment: (-segment.pinned, segment.address))
    reserved, used = sum(segment.size for segment in segments), sum(segment.used for segment in segments)
    result = Fragmentation(
        event=event,
        reserved_bytes=reserved,
        used_bytes=used,
        free_bytes=reserved - used,
        rounding_bytes=used - sum(life.requested for life in blocks),
        releasable_bytes=sum(segment.releasable for segment in segments),
        pinned_bytes=sum(segment.pinned for segment in segments),
        largest_free_bytes=max((segment.largest_free for segment in segments), default=0),
        segments=len(segments),
        nearly_empty_segments=sum(segment.is_nearly_empty for segment in segments),
    )
    return result, segments
