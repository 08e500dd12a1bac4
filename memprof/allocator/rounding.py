"""How the CUDA caching allocator rounds a request: the difference between requested and allocated bytes."""

from __future__ import annotations

MIN_BLOCK = 512
"""kMinBlockSize of c10/cuda/CUDACachingAllocator.h: every block is a multiple of it."""


def round_size(num_bytes: int) -> int:
    """Bytes of the block that a request of `num_bytes` is given, under the allocator's default settings.

    Requests of 0 bytes never reach the allocator and take nothing (`round_size` in CUDACachingAllocator.cpp).
    """
    return -(-num_bytes // MIN_BLOCK) * MIN_BLOCK
