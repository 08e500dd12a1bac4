"""Stretches of events through the compiled rules: when they pay, and the allocator before and after each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memprof.allocator.blocks import Block, PoolId
from memprof.allocator.caching import CachingAllocator
from memprof.allocator.compiled import rules
from memprof.allocator.compiled.loading import Compiled
from memprof.allocator.compiled.rows import MOST, MOST_IN_ALL, Rows, covers, rules_of
from memprof.allocator.compiled.rules import DONE, DRIVER, FULL, NO_BLOCK, Array, Events, Results
from memprof.trace.one_thread import np

LEAST = 1_000
LEAST_BY_BLOCK = 8
"""Events that a stretch must have, and for each block that there is: to make a row of a block and a block of a row
takes as long as four events of plain Python."""
CHUNK = 1 << 18
"""Events whose results are held at once: 32 bytes each."""


class Stretches:
    """The events of one replay.

    Args:
        allocator: what they are played on, by turns here and in plain Python.
        names: how many names the events have.
    """

    def __init__(self, compiled: Compiled, allocator: CachingAllocator, events: Events, names: int) -> None:
        self.allocator = allocator
        self.events = events
        self.names = names
        self._play = compiled.play
        self._odd = np.flatnonzero(events.kinds == rules.ODD)
        self._wait = LEAST
        self._results = Results(*np.zeros((len(Results._fields), min(CHUNK, len(events.kinds))), np.int64))

    def next_odd(self, at: int) -> int:
        """The first event from `at` on that only plain Python plays; the end, if there is none."""
        place = int(np.searchsorted(self._odd, at))
        return int(self._odd[place]) if place < len(self._odd) else len(self.events.kinds)

    def least(self, live: int) -> int:
        """Events that a stretch must have to pay."""
        pools = self.allocator.pools.values()
        owners = (owner for pool in pools for sized in (pool.small, pool.large) for owner in sized.streams.values())
        return LEAST + LEAST_BY_BLOCK * (live + sum(len(owner.keys) + len(owner.unmapped) for owner in owners))

    def play(
        self,
        begin: int,
        pool: PoolId,
        live: Mapping[int, Block],
        write: Callable[[int, int, Results], None],
        obtained: Callable[[int], None] = lambda event: None,
    ) -> tuple[int, dict[int, Block]] | None:
        """Play events from `begin` on until one is plain Python's, or all are.

        Args:
            live: the blocks that are handed out, by name.
            write: takes note of results: those of the events from its first argument to its second (exclusive).
            obtained: takes note of an event that made the driver give something, before that event has been written.

        Returns:
            The first event that was not played, and what is live then; None: the allocator's state has something that
            rows do not have.
        """
        if not covers(self.allocator):
            return None
        try:
            rows = Rows(self.allocator, live, self.names)
        except OverflowError:
            return None
        limits, number, row, at = rules_of(self.allocator), rows.pool(pool), NO_BLOCK, begin
        count = len(self.events.kinds)
        while True:
            end = min(at + CHUNK, count)
            after, why = self._play(at, end, number, row, self.events, limits, rows.state, self._results)
            write(at, after, self._results)
            if after > at:
                row = NO_BLOCK
            at = after
            if why == FULL:
                rows.more()
            elif why == DRIVER:
                row = rows.obtain(int(self.events.sizes[at]), int(self.events.streams[at]), pool)
                if row == NO_BLOCK:
                    break
                obtained(at)
            elif why != DONE or at == count:
                break
        return at, rows.put_back()

    def go_on(self, begin: int, after: int, least: int) -> int:
        """Where to come back after the stretch from `begin` to `after`, which may have ended sooner than it looked."""
        if after == self.next_odd(begin):
            return after + 1  # which plain Python plays
        self._wait = max(least, LEAST if after - begin >= least else 2 * self._wait)
        return after + self._wait


def countable(sizes: Array, requests: int) -> bool:
    """Whether counters of 64 bits hold what so many requests come to, rounded as the settings may be."""
    if not len(sizes):
        return True
    return int(sizes.max()) < MOST and 2 * float(sizes.sum(dtype=np.float64)) + requests * 2.0**21 < MOST_IN_ALL


def numbered(compiled: Compiled, addresses: Array) -> tuple[Array, Array]:
    """A number for each address, and the addresses by number."""
    names = np.zeros(len(addresses), np.int32)
    table = np.zeros((1 << 16, 2), np.int64)
    while (known := compiled.number(addresses, table, names)) < 0:
        table = np.zeros((4 * len(table), 2), np.int64)
    used = table[table[:, 0] > 0]
    by_number = np.zeros(known, np.int64)
    by_number[used[:, 1]] = used[:, 0] - 1
    return names, by_number
