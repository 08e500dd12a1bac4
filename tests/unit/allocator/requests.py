"""Requests around every border of the allocator's rules, and the card of the random programs."""

from __future__ import annotations

MIB = 1 << 20
TOTAL = 400 * MIB
SIZES = [
    1,
    512,
    513,
    4097,
    300_000,
    MIB,
    MIB + 1,
    3 * MIB,
    10 * MIB - 1,
    10 * MIB,
    21 * MIB + 5,
    45 * MIB + 7,
    90 * MIB,
]
