"""Rounding of requests to blocks, and of blocks to segments, by the CUDA caching allocator.

Source: `round_size`, `roundup_power2_next_division` and `get_allocation_size` of c10/cuda/CUDACachingAllocator.cpp,
constants of c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.h.
"""

from __future__ import annotations

from collections.abc import Sequence

from memprof.units import MIB, round_up

MIN_BLOCK = 512  # kMinBlockSize: the size of every block is a multiple

MPS_ALIGNMENT = 256  # of the MPS allocator's buffers, see mps.py

SMALL_SIZE = MIB  # kSmallSize: blocks up to this size (inclusive) come from the small pool

SMALL_BUFFER = 2 * MIB  # kSmallBuffer: segment of the small pool, and mapping unit of its expandable segments

LARGE_SEGMENT = 20 * MIB  # kLargeBuffer, default of `large_segment_size_mb`: segment for blocks below MIN_LARGE_ALLOC

MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc: a block of at least this size gets a segment of its own size

ROUND_LARGE = 2 * MIB  # kRoundLarge: the size of such a segment is rounded up to a multiple

DIVISION_ENTRIES = 16  # kRoundUpPowerOfTwoIntervals: octaves of `roundup_power2_divisions`, from 1 MiB up

# Share of reserved memory that is unused: from here on a failed allocation counts as fragmentation, if unused and free
# device memory together would suffice. Capacities of 16 simulated runs were lowered step by step: where they did not
# suffice, expandable segments let none of 57 failing runs complete; where they did, 7 of 61 runs with less than this
# share, 28 of 122 with more.
FRAGMENTED_SHARE = 0.1


def round_size(num_bytes: int, divisions: Sequence[int] = ()) -> int:
    """Return the bytes of the block for a request of `num_bytes`.

    `num_bytes` is positive. `divisions` is the setting roundup_power2_divisions: one entry per octave from 1 MiB up;
    empty if it is off.
    """
    if divisions:
        octave = num_bytes.bit_length() - 1
        num_divisions = divisions[min(max(octave - 20, 0), DIVISION_ENTRIES - 1)]
        if num_divisions > 1 and num_bytes > MIN_BLOCK * num_divisions:
            step = (1 << octave) >> (num_divisions.bit_length() - 1)
            return -(-num_bytes // step) * step
    return -(-num_bytes // MIN_BLOCK) * MIN_BLOCK


def round_request(num_bytes: int, device: str) -> int:
    """Return the bytes of the block for a request of `num_bytes` on `device`, such as "cuda:0" or "mps:0", with default
    settings."""
    return round_up(num_bytes, MPS_ALIGNMENT) if device.startswith("mps") else round_size(num_bytes)


def segment_size(block_bytes: int, large_segment: int = LARGE_SEGMENT) -> int:
    """Return the bytes of the segment that the allocator requests for a block of `block_bytes` (already rounded)."""
    if block_bytes <= SMALL_SIZE:
        return SMALL_BUFFER
    if block_bytes < MIN_LARGE_ALLOC:
        return large_segment
    return -(-block_bytes // ROUND_LARGE) * ROUND_LARGE
