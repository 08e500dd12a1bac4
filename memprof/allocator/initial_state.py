"""The allocator's state at the beginning of a snapshot's recording: the final state, with all events undone.

A snapshot holds the final segments and the events before. Undoing the events from the last to the first gives the
segments and live blocks of the beginning; the ranges between live blocks were free blocks, because adjacent free blocks
always merge.

Two things are not always recorded. Where the address space of an expandable segment begins: the lowest known address of
the segment is used. And the size of a block that was live at the beginning and freed later: a block of the large pool
keeps up to 1 MiB beyond its request (from max_split_size on, its entire segment):
* the range after the block is at most 1 MiB: it belongs to the block, as no free block of the large pool is so small;
* an allocation was made in that range while the block was live: it starts where the block ends;
* otherwise the block is assumed to end where its request does (`num_ambiguous` counts these).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace

from sortedcontainers import SortedDict

from memprof.allocator.blocks import Block, StreamPool, split_right
from memprof.allocator.caching import CachingAllocator
from memprof.allocator.config import AllocatorConfig
from memprof.allocator.rounding import SMALL_BUFFER, SMALL_SIZE, round_size
from memprof.allocator.segments import Segments
from memprof.trace.columns import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    EventColumns,
)
from memprof.trace.snapshot import BlockState, PoolId, SnapshotSegment

OTHER_STREAM = -1  # the stream that a late free waited for is not recorded


def completes_at_once(events: EventColumns, index: int) -> bool:
    """Return whether the free requested by the event at `index` completes at once: the next event completes it."""
    next_index = index + 1
    if next_index == len(events) or events.actions[next_index] != FREE_COMPLETED:
        return False
    return events.addresses[next_index] == events.addresses[index]


@dataclass(slots=True)
class LiveBlock:
    """A block that was in use at the beginning of a recording."""

    address: int
    requested: int
    size: int | None  # None if the recording does not determine it
    pending: bool  # its free had been requested, and waited for other streams


@dataclass(slots=True)
class Range:
    """A range of mapped memory: a segment, or a mapped range of an expandable one."""

    address: int
    size: int
    stream: int
    is_small: bool
    pool_id: PoolId
    expandable: bool

    @property
    def end(self) -> int:
        """Return the first address after the range."""
        return self.address + self.size

    @classmethod
    def from_segment(cls, s: SnapshotSegment) -> Range:
        """Return the range of a segment of a snapshot."""
        return cls(s.address, s.size, s.stream, s.is_small, s.pool_id, s.expandable)


@dataclass(slots=True)
class State:
    """The allocator's state at the beginning of a recording."""

    ranges: list[Range] = field(default_factory=list)
    live: dict[int, LiveBlock] = field(default_factory=dict)
    num_ambiguous: int = 0  # blocks of unknown size
    # Addresses known to be in an expandable segment, by its stream and whether it is of the small pool; sorted.
    known_addresses: dict[tuple[int, bool], list[int]] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)  # if any, the trace is incomplete


def rebuild_initial_state(segments: list[SnapshotSegment], events: EventColumns, config: AllocatorConfig) -> State:
    """Return the state before `events` (of one device, oldest first), by undoing them from the final `segments`."""
    state = State()
    ranges = Ranges(segments, config)
    final_blocks: list[LiveBlock] = []
    for segment in segments:
        for block in segment.blocks:
            if block.state is not BlockState.INACTIVE:
                pending = block.state is BlockState.PENDING_FREE
                requested = block.size if block.requested is None else block.requested
                final_blocks.append(LiveBlock(block.address, requested, block.size, pending))
    # By address: the event that ended the block's life, or a negative index in `final_blocks`.
    live = {block.address: source_index for source_index, block in enumerate(final_blocks, -len(final_blocks))}
    # Addresses of blocks whose free completes later, but is not requested yet.
    delayed_addresses = {block.address for block in final_blocks if block.pending}
    actions, addresses = events.actions, events.addresses
    for index in range(len(events) - 1, -1, -1):
        action, address = actions[index], addresses[index]
        if action == ALLOC:
            if live.pop(address, None) is None:
                state.contradictions.append(f"event {index} allocates {address:#x}, which nothing frees")
        elif action == FREE_COMPLETED:
            if address in live:
                state.contradictions.append(f"event {index} frees {address:#x}, which is live after it")
            live[address] = index
            delayed_addresses.add(address)
        elif action == FREE_REQUESTED:
            if address not in live:
                state.contradictions.append(f"event {index} frees {address:#x}, but its free never completes")
                live[address] = index
            delayed_addresses.discard(address)
        else:
            problem = ranges.undo_event(events, index)
            if problem:
                state.contradictions.append(f"event {index} {problem}")
    state.ranges = ranges.sorted()
    for address, source_index in live.items():
        if source_index < 0:
            initial_block = final_blocks[source_index]
            initial_block.pending = address in delayed_addresses
        else:
            initial_block = LiveBlock(address, events.sizes[source_index], None, pending=address in delayed_addresses)
        state.live[address] = initial_block
    for index in events.find_indices(SEGMENT_MAP, SEGMENT_UNMAP):
        key = events.streams[index], ranges.is_small_mapping(events.sizes[index])
        state.known_addresses.setdefault(key, []).append(addresses[index])
    for run in state.ranges:
        if run.expandable:
            state.known_addresses.setdefault((run.stream, run.is_small), []).append(run.address)
    for segment_addresses in state.known_addresses.values():
        segment_addresses.sort()
    _set_block_sizes(state, events, config)
    return state


class Ranges:
    """The mapped ranges at one moment of a recording; events are undone one by one, from the last."""

    def __init__(self, segments: list[SnapshotSegment], config: AllocatorConfig) -> None:
        self.large_segment = config.large_segment_size
        self.by_address: SortedDict[int, Range] = SortedDict()
        for segment in segments:
            self._add(Range.from_segment(segment))

    def sorted(self) -> list[Range]:
        """Return all ranges by address."""
        return list(self.by_address.values())

    def is_small_mapping(self, num_bytes: int) -> bool:
        """Return whether a mapping of `num_bytes` is of the small pool (2 MiB each), not the large one (20 MiB)."""
        return num_bytes % self.large_segment != 0

    def undo_event(self, events: EventColumns, index: int) -> str | None:
        """Undo the event at `index`. Return how it contradicts the ranges, or None."""
        action, address, size = events.actions[index], events.addresses[index], events.sizes[index]
        if action == SEGMENT_ALLOC:
            mapped_range = self.by_address.get(address)
            if mapped_range is None or mapped_range.size != size or mapped_range.expandable:
                return f"takes a segment at {address:#x} that is not there afterwards"
            self._remove(mapped_range)
        elif action == SEGMENT_MAP:
            mapped_range = self._find_range(address)
            if mapped_range is None or not mapped_range.expandable or mapped_range.end < address + size:
                return f"maps memory at {address:#x} that is not there afterwards"
            self._remove(mapped_range)
            if address > mapped_range.address:
                self._add(replace(mapped_range, size=address - mapped_range.address))
            if address + size < mapped_range.end:
                self._add(replace(mapped_range, address=address + size, size=mapped_range.end - address - size))
        elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
            overlapping = self.by_address.irange(address, address + size, inclusive=(True, False))
            if self._find_range(address) is not None or any(True for _ in overlapping) or not size:
                return f"gives memory at {address:#x} back that is still there afterwards"
            expandable = action == SEGMENT_UNMAP
            # Every segment of the small pool has this size, and none of the large pool.
            is_small = self.is_small_mapping(size) if expandable else size == SMALL_BUFFER
            pool_id = events.pool_ids[events.pools[index]]
            run = Range(address, size, events.streams[index], is_small, pool_id, expandable)
            if expandable:
                run = self._merge_adjacent(run)
            self._add(run)
        return None

    def _merge_adjacent(self, run: Range) -> Range:
        """Return the range `run` of an expandable segment merged with adjacent ranges, which are removed."""
        index = self.by_address.bisect_left(run.address)
        for neighbour in self.by_address.values()[max(index - 1, 0) : index + 1]:
            if neighbour.expandable and (neighbour.end == run.address or run.end == neighbour.address):
                begin = min(run.address, neighbour.address)
                run = replace(neighbour, address=begin, size=max(run.end, neighbour.end) - begin)
                self._remove(neighbour)
        return run

    def _find_range(self, address: int) -> Range | None:
        """Return the range that contains `address`, or None."""
        index = self.by_address.bisect_right(address) - 1
        mapped_range: Range | None = self.by_address.peekitem(index)[1] if index >= 0 else None
        return mapped_range if mapped_range is not None and address < mapped_range.end else None

    def _add(self, run: Range) -> None:
        self.by_address[run.address] = run

    def _remove(self, run: Range) -> None:
        del self.by_address[run.address]


def _set_block_sizes(state: State, events: EventColumns, config: AllocatorConfig) -> None:
    """Set the size of each live block whose size is not recorded."""
    addresses = sorted(state.live)
    starts = [run.address for run in state.ranges]
    open_ends: list[tuple[int, int, LiveBlock]] = []  # (first possible end, last possible end, block)
    for index, address in enumerate(addresses):
        block = state.live[address]
        run_index = bisect_right(starts, address) - 1
        run = state.ranges[run_index] if run_index >= 0 else None
        if run is None or run.end <= address:
            state.contradictions.append(f"the block at {address:#x} is in no segment")
            del state.live[address]
            continue
        max_end = run.end
        if index + 1 < len(addresses):
            max_end = min(max_end, addresses[index + 1])
        has_size = block.size is not None
        if block.size is None:
            block.size = round_size(block.requested, config.roundup_power2_divisions)
        gap = max_end - address - block.size
        if gap < 0:
            state.contradictions.append(f"the block at {address:#x} does not fit in its place")
            block.size += gap
        elif not (has_size or run.is_small or run.expandable):
            if gap <= SMALL_SIZE or block.size >= config.max_split_size:
                block.size += gap
            else:
                open_ends.append((address + block.size, max_end, block))
    _set_sizes_by_neighbours(state, events, open_ends)


def _set_sizes_by_neighbours(state: State, events: EventColumns, open_ends: list[tuple[int, int, LiveBlock]]) -> None:
    """Set the sizes of the blocks in `open_ends`: the first later allocation after a block shows where it ends."""
    first_ends = [first_end for first_end, _, _ in open_ends]
    open_blocks = {block.address: block for _, _, block in open_ends}
    for action, address in zip(events.actions, events.addresses, strict=True):
        if not open_blocks:
            break
        if action == ALLOC:
            index = bisect_right(first_ends, address) - 1
            if index < 0:
                continue
            first_end, last_end, block = open_ends[index]
            if address < last_end and block.address in open_blocks:
                del open_blocks[block.address]
                if address - first_end <= SMALL_SIZE:
                    assert block.size is not None
                    block.size += address - first_end
        elif action == FREE_REQUESTED and address in open_blocks:
            del open_blocks[address]
            state.num_ambiguous += 1
    state.num_ambiguous += len(open_blocks)


def restore(allocator: CachingAllocator, state: State) -> dict[int, Block]:
    """Set a new `allocator` to `state`; return its live blocks by address. Counters are not set."""
    addresses = sorted(state.live)
    blocks: dict[int, Block] = {}
    previous: tuple[Range, Block] | None = None
    for run in state.ranges:
        pool_pair = allocator.create_pool(run.pool_id)
        owner = (pool_pair.small if run.is_small else pool_pair.large).get_stream_pool(run.stream)
        store = allocator.segment_store
        block: Block
        if run.expandable:
            block, tail = _restore_run(store, owner, run, state, previous)
            previous = (run, tail)
        else:
            block = store.add_segment(owner, run.address, run.size)
        store.total_bytes += run.size
        for address in addresses[bisect_left(addresses, run.address) : bisect_left(addresses, run.end)]:
            live_block = state.live[address]
            assert live_block.size is not None
            if address > block.address:
                following = split_right(block, address - block.address)
                owner.insert(block)
                block = following
            rest = split_right(block, live_block.size) if live_block.size < block.size else None
            block.requested = live_block.requested
            blocks[address] = block
            if live_block.pending:
                block.uses = {OTHER_STREAM}
                allocator.pending.add(block)
            if rest is None:
                break
            block = rest
        else:
            owner.insert(block)
    return blocks


def _restore_run(
    store: Segments, owner: StreamPool, run: Range, state: State, previous: tuple[Range, Block] | None
) -> tuple[Block, Block]:
    """Return a new block for the mapped range `run`, in no list, and the unmapped block after it.

    Successive ranges of one pool and stream are assumed to be in one expandable segment; `previous` is the last one.
    """
    if previous is not None and _is_same_space(previous[0], run):
        unmapped_block = previous[1]
        owner.remove_unmapped(unmapped_block)
    else:
        base_address = _find_base(run, state)
        unit = store.get_mapping_unit(owner)
        unmapped_block = store.add_segment(owner, base_address, -(-store.address_space // unit) * unit, expandable=True)
    block = unmapped_block
    if run.address > unmapped_block.address:
        block = split_right(unmapped_block, run.address - unmapped_block.address)
        owner.insert_unmapped(unmapped_block)
    tail = split_right(block, run.size)
    owner.insert_unmapped(tail)
    return block, tail


def _find_base(run: Range, state: State) -> int:
    """Return the lowest known address of the expandable segment of `run`, above all other segments before it."""
    others = [other.address for other in state.ranges]  # `run` is the first of its segment
    for key, segment_addresses in state.known_addresses.items():
        if key != (run.stream, run.is_small):
            others += segment_addresses
    bound = max((address for address in others if address < run.address), default=-1)
    return min(address for address in state.known_addresses[run.stream, run.is_small] if bound < address <= run.address)


def _is_same_space(before: Range, run: Range) -> bool:
    return (before.stream, before.is_small, before.pool_id) == (run.stream, run.is_small, run.pool_id)
