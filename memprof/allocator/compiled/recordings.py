"""The events of a recording for the compiled rules."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from memprof.allocator.blocks import DEFAULT_POOL, Block
from memprof.allocator.caching import CachingAllocator
from memprof.allocator.compiled import rules
from memprof.allocator.compiled.loading import Compiled
from memprof.allocator.compiled.rows import MOST
from memprof.allocator.compiled.rules import Events, Results
from memprof.allocator.compiled.stretches import Stretches, countable, numbered
from memprof.trace.columns import ALLOC, FREE_COMPLETED, FREE_REQUESTED, EventColumns
from memprof.trace.one_thread import np


class RecordedStretches:
    """The events of one device: requests of the default pool and frees that complete at once.

    Args:
        live: the blocks that are handed out before them, by address.

    Raises:
        OverflowError: numbers that no allocator has.
    """

    def __init__(
        self, compiled: Compiled, allocator: CachingAllocator, recorded: EventColumns, live: Mapping[int, Block]
    ) -> None:
        actions, addresses = np.frombuffer(recorded.actions, np.uint8), np.frombuffer(recorded.addresses, np.uint64)
        sizes, streams = np.frombuffer(recorded.sizes, np.uint64), np.frombuffer(recorded.streams, np.uint64)
        if int(addresses.max(initial=0)) >= MOST or int(streams.max(initial=0)) >= 1 << 63:
            raise OverflowError
        kinds = np.full(len(actions), rules.ODD, np.uint8)
        kinds[actions == ALLOC] = rules.TAKE
        asked = np.flatnonzero(actions[:-1] == FREE_REQUESTED)
        asked = asked[(actions[asked + 1] == FREE_COMPLETED) & (addresses[asked + 1] == addresses[asked])]
        kinds[asked], kinds[asked + 1] = rules.GIVE, rules.NOTHING
        requests = sizes[kinds == rules.TAKE]
        if not countable(requests, len(requests)):
            raise OverflowError
        by_event = addresses.view(np.int64)
        names, known = numbered(compiled, by_event)
        older = np.setdiff1d(np.fromiter(live, np.int64, len(live)), known)  # no event names these
        self._addresses = np.concatenate((known, older))
        self._order = np.argsort(self._addresses)
        self._kinds = kinds
        events = Events(kinds, names, sizes.view(np.int64), streams.view(np.int64), by_event)
        self._stretches = Stretches(compiled, allocator, events, len(self._addresses))
        self._again = 0

    def play(self, begin: int, live: Mapping[int, Block], sizes: array[int]) -> tuple[int, dict[int, Block]] | None:
        """Play events from `begin` on, if so many follow that it pays.

        Args:
            live: the blocks that are handed out, by address.
            sizes: takes the bytes of the block of each request.

        Returns:
            The first event that was not played, and what is live then; None: nothing was played.
        """
        stretches = self._stretches
        least = stretches.least(len(live))
        if begin < self._again or stretches.next_odd(begin) - begin < least:
            return None

        def write(first: int, end: int, results: Results) -> None:
            taken = self._kinds[first:end] == rules.TAKE
            sizes.frombytes(results.sizes[: end - first][taken].tobytes())

        held = np.fromiter(live, np.int64, len(live))
        names = self._order[np.searchsorted(self._addresses, held, sorter=self._order)].tolist()
        found = stretches.play(begin, DEFAULT_POOL, dict(zip(names, live.values(), strict=True)), write)
        if found is None:
            self._again = begin + least
            return None
        after, blocks = found
        self._again = stretches.go_on(begin, after, least)
        return after, dict(zip(self._addresses[list(blocks)].tolist(), blocks.values(), strict=True))
