"""All blocks of an allocator as rows of numbers, and back."""

from __future__ import annotations

from collections.abc import Mapping

from memprof.allocator import caching
from memprof.allocator.blocks import ADDRESS_BITS, Block, PoolId, Segment, StreamPool
from memprof.allocator.caching import CachingAllocator
from memprof.allocator.compiled.rules import (
    ADDRESS,
    ALL,
    BORN,
    COUNT,
    COUNTED,
    EXPANDABLE,
    FREE,
    LARGE,
    LENT,
    NO_BLOCK,
    NUMBERS,
    OVERSIZE,
    OVERSIZE_ADDED,
    OVERSIZE_PEAK,
    OWNER_ROW,
    ROW,
    SIZE,
    SMALL,
    SPARES,
    UNMAPPED,
    Array,
    Rules,
    State,
    rounded,
)
from memprof.allocator.driver import SimulatedDriver
from memprof.allocator.rounding import segment_size
from memprof.trace.one_thread import np

MOST = 1 << ADDRESS_BITS
"""Addresses and sizes are below it, also in plain Python, where a key has both."""
MOST_IN_ALL = 1 << 61
"""What counters may come to."""


def covers(allocator: CachingAllocator) -> bool:
    """Whether the usual case is all that requests and frees are in the allocator's present state."""
    counted = allocator.statistics.all
    waits = allocator.pending.waiting or counted.waiting
    return not waits and not allocator.gc_enabled and max(counted.mallocs_bytes, counted.allocated_bytes) < MOST_IN_ALL


def rules_of(allocator: CachingAllocator) -> Rules:
    """The allocator's settings."""
    return Rules(
        max_split_size=min(allocator.max_split_size, MOST),
        non_split_rounding=min(allocator.config.max_non_split_rounding, MOST),
        split_slack=caching.SPLIT_SLACK,
        expandable=bool(allocator.expandable),
        divisions=np.array(allocator.divisions, np.int64),
    )


class Rows:
    """An allocator's blocks, while they are rows: its objects mean nothing until `put_back`.

    Args:
        live: the blocks that are handed out, by name.
        names: how many names there are.

    Raises:
        OverflowError: numbers that no allocator has; or a name for a block that is not handed out.
    """

    def __init__(self, allocator: CachingAllocator, live: Mapping[int, Block], names: int) -> None:
        self.allocator = allocator
        self.pools = list(allocator.pools)
        self.owners: list[StreamPool] = []
        owners: list[tuple[int, int, bool, int]] = []
        for number, pool in enumerate(allocator.pools.values()):
            for owner in (*pool.small.streams.values(), *pool.large.streams.values()):
                self.owners.append(owner)
                owners.append((owner.stream, number, owner.is_small, len(owner.keys)))
        self.firsts: list[tuple[Segment, int]] = []
        """Segments, and the row of the first block of each, which stays."""
        self.uses: dict[int, tuple[set[int] | None, int]] = {}
        """By row, of blocks that are lent."""
        self._places: dict[int, int] = {}
        table = self._table()
        if len(table) and max(table[:, ADDRESS].max(), table[:, SIZE].max()) >= MOST:
            raise OverflowError
        rows = np.zeros((2 * len(table) + 1024, ROW), np.int64)
        rows[: len(table)] = table
        slots = np.full(names, NO_BLOCK, np.int32)
        for order, (name, block) in enumerate(live.items()):
            row = self._places.get(id(block), NO_BLOCK)
            if row < 0 or block.free:
                raise OverflowError
            slots[name] = row
            rows[row, BORN] = order - len(live)
        free = np.zeros((len(owners), len(rows)), np.int32)
        for number, owner in enumerate(self.owners):
            free[number, : len(owner.keys)] = [self._places[id(owner.blocks[key])] for key in owner.keys]
        self._places.clear()
        numbers, spare = np.zeros(NUMBERS, np.int64), np.zeros(len(rows), np.int32)
        numbers[SPARES] = len(rows) - len(table)
        spare[: numbers[SPARES]] = np.arange(len(table), len(rows))
        owner_rows = np.array(owners, np.int64).reshape(len(owners), OWNER_ROW)
        self.state = State(rows, free, owner_rows, self._counters(), numbers, spare, slots)
        tally = allocator.statistics.oversize_allocations
        numbers[OVERSIZE], numbers[OVERSIZE_PEAK], numbers[OVERSIZE_ADDED] = tally.current, tally.peak, tally.added

    def _table(self) -> Array:
        """The rows of all blocks."""
        rows: list[tuple[int, ...]] = []
        number = {id(owner): place for place, owner in enumerate(self.owners)}
        for segment in self.allocator.segment_store.live.values():
            self.firsts.append((segment, len(rows)))
            expandable = EXPANDABLE if segment.expandable else 0
            block: Block | None = segment.first
            previous = NO_BLOCK
            while block is not None:
                row = self._places[id(block)] = len(rows)
                state = expandable | (FREE if block.free else 0) | (0 if block.mapped else UNMAPPED)
                if block.uses or block.events:
                    state |= LENT
                    self.uses[row] = (block.uses, block.events)
                following = NO_BLOCK if block.next is None else row + 1
                owner = number[id(block.owner)]
                rows.append((block.address, block.size, owner, previous, following, block.requested, state, 0))
                previous, block = row, block.next
        return np.array(rows, np.int64).reshape(len(rows), ROW)

    def _counters(self) -> Array:
        found = np.zeros((3, len(COUNTED)), np.int64)
        statistics = self.allocator.statistics
        for which, own in ((SMALL, statistics.small_pool), (LARGE, statistics.large_pool), (ALL, statistics.all)):
            found[which] = [getattr(own, name) for name in COUNTED]
        return found

    def pool(self, pool: PoolId) -> int:
        """What the rows call a pool."""
        return self.pools.index(pool)

    def more(self) -> None:
        """Room for as many rows again."""
        state = self.state
        before = len(state.rows)
        rows = np.concatenate((state.rows, np.zeros_like(state.rows)))
        free = np.concatenate((state.free, np.zeros_like(state.free)), axis=1)
        spare = np.zeros(len(rows), np.int32)
        left = int(state.numbers[SPARES])
        spare[:before] = np.arange(before, len(rows))
        spare[before : before + left] = state.spare[:left]
        state.numbers[SPARES] += before
        self.state = state._replace(rows=rows, free=free, spare=spare)

    def obtain(self, num_bytes: int, stream: int, pool: PoolId) -> int:
        """Ask the driver as `CachingAllocator` does, where it will not refuse: the row of the new block.

        NO_BLOCK: that is not sure, or more is to be done than to ask. Then nothing has been done.
        """
        allocator, driver, state = self.allocator, self.allocator.driver, self.state
        if allocator.expandable or allocator.allowed_bytes is not None or not isinstance(driver, SimulatedDriver):
            return NO_BLOCK
        rules = rules_of(allocator)
        size = int(rounded(num_bytes, rules.divisions))
        segment = segment_size(size, allocator.config.large_segment_size)
        if not driver.has_room(segment):
            return NO_BLOCK
        if not state.numbers[SPARES]:
            self.more()
            state = self.state
        home = allocator.pools[pool]
        owner = home.owner(size, stream)
        block = allocator.segment_store.allocate(owner, segment)
        assert block is not None
        state.numbers[SPARES] -= 1
        row = int(state.spare[state.numbers[SPARES]])
        number = self.owners.index(owner)
        state.rows[row] = (block.address, block.size, number, NO_BLOCK, NO_BLOCK, 0, 0, 0)
        self.firsts.append((block.segment, row))
        return row

    def put_back(self) -> dict[int, Block]:
        """Make the rows the allocator's blocks; those that are handed out, by name, the oldest first."""
        state, made = self.state, dict[int, Block]()
        table = state.rows.tolist()
        for segment, first in self.firsts:
            row, previous = first, None
            while row >= 0:
                address, size, number, _, following, requested, bits, _ = table[row]
                block = Block(address, size, self.owners[number], segment, previous, None, requested)
                block.free, block.mapped = bool(bits & FREE), not bits & UNMAPPED
                if bits & LENT:
                    block.uses, block.events = self.uses[row]
                if previous is None:
                    segment.first = block
                else:
                    previous.next = block
                if bits & UNMAPPED:
                    block.owner.unmapped_blocks[address] = block
                made[row] = previous = block
                row = following
        for owner, places, numbers in zip(self.owners, state.free, state.owners, strict=True):
            blocks = [made[row] for row in places[: numbers[COUNT]].tolist()]
            owner.keys = [block.size << ADDRESS_BITS | block.address for block in blocks]
            owner.blocks = dict(zip(owner.keys, blocks, strict=True))
        self._put_counters_back()
        names = np.flatnonzero(state.live >= 0)
        names = names[np.argsort(state.rows[state.live[names], BORN], kind="stable")]
        return {name: made[row] for name, row in zip(names.tolist(), state.live[names].tolist(), strict=True)}

    def _put_counters_back(self) -> None:
        statistics, numbers = self.allocator.statistics, self.state.numbers.tolist()
        for which, own in ((SMALL, statistics.small_pool), (LARGE, statistics.large_pool), (ALL, statistics.all)):
            for name, value in zip(COUNTED, self.state.counters[which].tolist(), strict=True):
                setattr(own, name, value)
        tally = statistics.oversize_allocations
        tally.current, tally.peak, tally.added = numbers[OVERSIZE], numbers[OVERSIZE_PEAK], numbers[OVERSIZE_ADDED]
