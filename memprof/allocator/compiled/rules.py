"""The allocator's usual case over rows of numbers: a free block serves the request, and what is freed merges.

The rules are those of `CachingAllocator.malloc` and `.free`, which are the reference. Whatever else there is (the
driver is asked, blocks wait for streams, the cache is given back) ends a stretch of events here, and is done there.
These are plain functions over numpy arrays, for numba to compile (loading.py); without it they give the same, slowly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from memprof.allocator.rounding import DIVISION_ENTRIES, MIN_BLOCK, SMALL_SIZE
from memprof.trace.one_thread import np

Array = np.ndarray[Any, Any]

ADDRESS, SIZE, OWNER, PREVIOUS, FOLLOWING, REQUESTED, STATE, BORN, ROW = range(9)
"""Columns of a block's row, and how many there are. `BORN` is the event that it was handed out at."""
FREE, UNMAPPED, EXPANDABLE, LENT = 1, 2, 4, 8
"""Bits of STATE, as in Block; LENT: other streams use it, or it waits for them."""
STREAM, POOL, IS_SMALL, COUNT, OWNER_ROW = range(5)
"""Columns of an owner (a StreamPool). `COUNT` is of its free blocks."""
SMALL, LARGE, ALL = 0, 1, 2
"""Rows of the counters."""
COUNTED = (
    "allocation", "allocation_peak", "allocated_bytes", "allocated_bytes_peak", "requested_bytes",
    "requested_bytes_peak", "mallocs", "mallocs_bytes", "mallocs_requested", "inactive_split", "inactive_split_peak",
    "inactive_split_added", "inactive_split_bytes", "inactive_split_bytes_peak", "inactive_split_bytes_added",
)  # fmt: skip
"""What the counters have: attributes of Counters. What is reserved changes only where the driver is asked."""
(
    ALLOCATION, ALLOCATION_PEAK, ALLOCATED, ALLOCATED_PEAK, REQUESTS, REQUESTS_PEAK, MALLOCS, MALLOCS_BYTES,
    MALLOCS_REQUESTED, SPLIT, SPLIT_PEAK, SPLIT_ADDED, SPLIT_BYTES, SPLIT_BYTES_PEAK, SPLIT_BYTES_ADDED,
) = range(len(COUNTED))  # fmt: skip
OVERSIZE, OVERSIZE_PEAK, OVERSIZE_ADDED, SPARES, NUMBERS = range(5)
"""Numbers of the state: the tally of oversize allocations, and how many rows are not in use."""

NOTHING, TAKE, GIVE, ODD = 0, 1, 2, 3
"""Kinds of events: a request, a free, and what is none of the allocator's usual case."""
DONE, STOPPED, DRIVER, FULL = 0, 1, 2, 3
"""Why a stretch ended: no more events; an event for the reference; no free block serves; no row is left."""
NO_BLOCK = -1


class Rules(NamedTuple):
    """Settings, in bytes."""

    max_split_size: int
    non_split_rounding: int
    split_slack: int
    expandable: bool
    divisions: Array
    """`roundup_power2_divisions`; empty: off."""


class State(NamedTuple):
    """All blocks, and who owns the free ones."""

    rows: Array
    free: Array
    """Of each owner, the rows of its free blocks, by size and address."""
    owners: Array
    counters: Array
    numbers: Array
    spare: Array
    """Rows that are not in use."""
    live: Array
    """By name, the row that was handed out, or NO_BLOCK."""


class Events(NamedTuple):
    """Columns."""

    kinds: Array
    names: Array
    """What an event takes or gives back: places in State.live."""
    sizes: Array
    """Bytes asked for."""
    streams: Array
    wanted: Array
    """Where a request must be served, or the stretch ends before it; empty: anywhere."""


class Results(NamedTuple):
    """After each event of a stretch."""

    addresses: Array
    """Of the block that a request was given, as `sizes`."""
    sizes: Array
    requested: Array
    """In all."""
    allocated: Array


def play(
    begin: int, end: int, pool: int, obtained: int, events: Events, rules: Rules, state: State, results: Results
) -> tuple[int, int]:
    """Play events from `begin` on, with the current pool `pool`.

    Args:
        begin: results are written from 0 on for it.
        obtained: the row of a block that the driver has given for the first event, or NO_BLOCK.

    Returns:
        The event that was not played any more, and why.
    """
    kinds, names, live, counters, rows = events.kinds, events.names, state.live, state.counters, state.rows
    for event in range(begin, end):
        kind = kinds[event]
        at = event - begin
        if kind == TAKE:
            name = names[event]
            owner = owner_of(events, event, pool, rules, state)
            if owner < 0:
                return event, STOPPED
            block, why = found(events, event, owner, obtained, rules, state)
            if why != DONE:
                return event, why
            obtained = NO_BLOCK
            cut(block, owner, events.sizes[event], rules, state)
            count_taken(block, events.sizes[event], rules, state)
            rows[block, BORN] = event
            live[name] = block
            results.addresses[at] = rows[block, ADDRESS]
            results.sizes[at] = rows[block, SIZE]
        elif kind == GIVE:
            block = live[names[event]]
            if block < 0 or rows[block, STATE] & LENT:
                return event, STOPPED
            live[names[event]] = NO_BLOCK
            give_back(block, rules, state)
        elif kind == ODD:
            return event, STOPPED
        results.requested[at] = counters[ALL, REQUESTS]
        results.allocated[at] = counters[ALL, ALLOCATED]
    return end, DONE


def rounded(num_bytes: int, divisions: Array) -> int:
    """`round_size`, and at least the least block."""
    if len(divisions) and num_bytes >= MIN_BLOCK:
        octave = 9
        while num_bytes >> (octave + 1):
            octave += 1
        parts = divisions[min(max(octave - 20, 0), DIVISION_ENTRIES - 1)]
        if parts > 1 and num_bytes > MIN_BLOCK * parts:
            if num_bytes & (num_bytes - 1) == 0:
                return int(num_bytes)
            step = (1 << octave) // parts
            return int((num_bytes + step - 1) // step * step)
    return max((num_bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK, MIN_BLOCK)


def owner_of(events: Events, event: int, pool: int, rules: Rules, state: State) -> int:
    """Whose free blocks may serve a request; NO_BLOCK: nobody's yet."""
    small = rounded(events.sizes[event], rules.divisions) <= SMALL_SIZE
    owners, stream = state.owners, events.streams[event]
    for owner in range(len(owners)):
        if owners[owner, STREAM] == stream and owners[owner, POOL] == pool and owners[owner, IS_SMALL] == small:
            return owner
    return NO_BLOCK


def found(events: Events, event: int, owner: int, obtained: int, rules: Rules, state: State) -> tuple[int, int]:
    """The block for a request, in no list any more, and DONE; or why there is none. Then nothing has changed."""
    if not state.numbers[SPARES]:  # what is left of the block takes one
        return NO_BLOCK, FULL
    if obtained >= 0:
        return obtained, DONE
    at = search(owner, rounded(events.sizes[event], rules.divisions), rules, state)
    if at < 0:
        return NO_BLOCK, DRIVER
    block = state.free[owner, at]
    if len(events.wanted) and state.rows[block, ADDRESS] != events.wanted[event]:
        return NO_BLOCK, STOPPED
    drop(owner, at, state)
    return block, DONE


def search(owner: int, size: int, rules: Rules, state: State) -> int:
    """`get_free_block`: the place of the smallest sufficient block, then the lowest; NO_BLOCK: there is none."""
    rows, free, count = state.rows, state.free, state.owners[owner, COUNT]
    at = place(owner, size, 0, state)
    if at == count:
        return NO_BLOCK
    if rules.expandable:
        while rows[free[owner, at], STATE] & EXPANDABLE and at + 1 < count:
            if growing(free[owner, at + 1], rows) >= growing(free[owner, at], rows):
                break
            at += 1
    else:
        while rows[free[owner, at], STATE] & EXPANDABLE:
            at += 1
            if at == count:
                return NO_BLOCK
    there = rows[free[owner, at], SIZE]
    if size < rules.max_split_size <= there:
        return NO_BLOCK
    if size >= rules.max_split_size and there >= size + rules.non_split_rounding:
        return NO_BLOCK
    return at


def growing(block: int, rows: Array) -> int:
    """The size of a block with the address space behind it."""
    following = rows[block, FOLLOWING]
    if following >= 0 and rows[following, STATE] & UNMAPPED:
        return rows[block, SIZE] + rows[following, SIZE]  # type: ignore[no-any-return]
    return rows[block, SIZE]  # type: ignore[no-any-return]


def place(owner: int, size: int, address: int, state: State) -> int:
    """The first place of the owner's free blocks that is not below this size and address."""
    rows, free = state.rows, state.free
    low, high = 0, state.owners[owner, COUNT]
    while low < high:
        middle = (low + high) >> 1
        other = free[owner, middle]
        there = rows[other, SIZE]
        if there < size or (there == size and rows[other, ADDRESS] < address):
            low = middle + 1
        else:
            high = middle
    return low


def drop(owner: int, at: int, state: State) -> None:
    """Take the free block at a place of its owner out of its list."""
    state.rows[state.free[owner, at], STATE] &= ~FREE
    last = state.owners[owner, COUNT] - 1
    for other in range(at, last):
        state.free[owner, other] = state.free[owner, other + 1]
    state.owners[owner, COUNT] = last


def insert(owner: int, block: int, state: State) -> None:
    """Make `block` free."""
    at = place(owner, state.rows[block, SIZE], state.rows[block, ADDRESS], state)
    count = state.owners[owner, COUNT]
    for other in range(count, at, -1):
        state.free[owner, other] = state.free[owner, other - 1]
    state.free[owner, at] = block
    state.owners[owner, COUNT] = count + 1
    state.rows[block, STATE] |= FREE


def is_split(block: int, rows: Array) -> bool:
    """Whether the block is not all of its segment."""
    return rows[block, PREVIOUS] >= 0 or rows[block, FOLLOWING] >= 0  # type: ignore[no-any-return]


def cut(block: int, owner: int, num_bytes: int, rules: Rules, state: State) -> None:
    """`should_split` and `alloc_found_block`: what is left of `block` becomes a free one, if it is enough."""
    rows = state.rows
    size = rounded(num_bytes, rules.divisions)
    left = rows[block, SIZE] - size
    counted = not rows[block, STATE] & EXPANDABLE
    was_split = is_split(block, rows)
    rows[block, REQUESTED] = num_bytes
    if state.owners[owner, IS_SMALL] or rules.expandable:
        splits = left >= MIN_BLOCK
    else:
        splits = size < rules.max_split_size and left > rules.split_slack
    if not splits:
        if was_split and counted:
            count_split(owner, -1, -rows[block, SIZE], state)
        return
    state.numbers[SPARES] -= 1
    rest = state.spare[state.numbers[SPARES]]
    following = rows[block, FOLLOWING]
    rows[rest, ADDRESS] = rows[block, ADDRESS] + size
    rows[rest, SIZE] = left
    rows[rest, OWNER] = owner
    rows[rest, PREVIOUS] = block
    rows[rest, FOLLOWING] = following
    rows[rest, REQUESTED] = 0
    rows[rest, STATE] = rows[block, STATE] & EXPANDABLE
    if following >= 0:
        rows[following, PREVIOUS] = rest
    rows[block, FOLLOWING] = rest
    rows[block, SIZE] = size
    insert(owner, rest, state)
    if counted:
        if was_split:
            count_split(owner, 0, -size, state)
        else:
            count_split(owner, 1, left, state)


def give_back(block: int, rules: Rules, state: State) -> None:
    """`free_block`: merge with free neighbours, and be found."""
    rows = state.rows
    owner = rows[block, OWNER]
    counted = not rows[block, STATE] & EXPANDABLE
    count_given(block, rules, state)
    pieces = num_bytes = 0
    following = rows[block, FOLLOWING]
    if following >= 0 and rows[following, STATE] & (FREE | UNMAPPED) == FREE:
        pieces -= 1
        num_bytes -= rows[following, SIZE]
        drop(owner, place(owner, rows[following, SIZE], rows[following, ADDRESS], state), state)
        absorb(block, following, state)
    previous = rows[block, PREVIOUS]
    if previous >= 0 and rows[previous, STATE] & (FREE | UNMAPPED) == FREE:
        pieces -= 1
        num_bytes -= rows[previous, SIZE]
        drop(owner, place(owner, rows[previous, SIZE], rows[previous, ADDRESS], state), state)
        absorb(previous, block, state)
        block = previous
    insert(owner, block, state)
    if counted:
        if is_split(block, rows):
            pieces += 1
            num_bytes += rows[block, SIZE]
        count_split(owner, pieces, num_bytes, state)


def absorb(block: int, following: int, state: State) -> None:
    """Let `block` swallow its right neighbour, which is in no list any more."""
    rows = state.rows
    rows[block, SIZE] += rows[following, SIZE]
    rows[block, FOLLOWING] = rows[following, FOLLOWING]
    if rows[following, FOLLOWING] >= 0:
        rows[rows[following, FOLLOWING], PREVIOUS] = block
    state.spare[state.numbers[SPARES]] = following
    state.numbers[SPARES] += 1


def count_split(owner: int, pieces: int, num_bytes: int, state: State) -> None:
    """`Counters.change_inactive_split` of both."""
    counters = state.counters
    for which in (SMALL if state.owners[owner, IS_SMALL] else LARGE, ALL):
        counters[which, SPLIT] += pieces
        counters[which, SPLIT_BYTES] += num_bytes
        if pieces > 0:
            counters[which, SPLIT_ADDED] += pieces
            counters[which, SPLIT_PEAK] = max(counters[which, SPLIT_PEAK], counters[which, SPLIT])
        if num_bytes > 0:
            counters[which, SPLIT_BYTES_ADDED] += num_bytes
            counters[which, SPLIT_BYTES_PEAK] = max(counters[which, SPLIT_BYTES_PEAK], counters[which, SPLIT_BYTES])


def count_taken(block: int, num_bytes: int, rules: Rules, state: State) -> None:
    """What malloc counts."""
    counters, numbers, size = state.counters, state.numbers, state.rows[block, SIZE]
    if size >= rules.max_split_size:
        numbers[OVERSIZE] += 1
        numbers[OVERSIZE_ADDED] += 1
        numbers[OVERSIZE_PEAK] = max(numbers[OVERSIZE_PEAK], numbers[OVERSIZE])
    which = SMALL if state.owners[state.rows[block, OWNER], IS_SMALL] else LARGE
    counters[which, MALLOCS] += 1
    counters[which, MALLOCS_BYTES] += size
    counters[which, MALLOCS_REQUESTED] += num_bytes
    for own in (which, ALL):
        counters[own, ALLOCATION] += 1
        counters[own, ALLOCATED] += size
        counters[own, REQUESTS] += num_bytes
        counters[own, ALLOCATION_PEAK] = max(counters[own, ALLOCATION_PEAK], counters[own, ALLOCATION])
        counters[own, ALLOCATED_PEAK] = max(counters[own, ALLOCATED_PEAK], counters[own, ALLOCATED])
        counters[own, REQUESTS_PEAK] = max(counters[own, REQUESTS_PEAK], counters[own, REQUESTS])


def count_given(block: int, rules: Rules, state: State) -> None:
    """What free counts."""
    counters, size, num_bytes = state.counters, state.rows[block, SIZE], state.rows[block, REQUESTED]
    if size >= rules.max_split_size:
        state.numbers[OVERSIZE] -= 1
    for own in (SMALL if state.owners[state.rows[block, OWNER], IS_SMALL] else LARGE, ALL):
        counters[own, ALLOCATION] -= 1
        counters[own, ALLOCATED] -= size
        counters[own, REQUESTS] -= num_bytes


def number(addresses: Array, table: Array, names: Array) -> int:
    """Give each address a number, in the order of their first places.

    Args:
        addresses: below 2 ** 57.
        table: a power of two of pairs of zeros, which become an address + 1 and its number.
        names: the numbers, by place.

    Returns:
        How many numbers there are; NO_BLOCK: the table is half full, and a larger one is needed.
    """
    slots, known = len(table), 0
    for at in range(len(addresses)):
        address = addresses[at] + 1
        slot = ((address >> 9) ^ (address >> 20)) & (slots - 1)
        while table[slot, 0] and table[slot, 0] != address:
            slot = (slot + 1) & (slots - 1)
        if not table[slot, 0]:
            if 2 * known >= slots:
                return NO_BLOCK
            table[slot, 0] = address
            table[slot, 1] = known
            known += 1
        names[at] = table[slot, 1]
    return known
