"""Requests around every border of the allocator's rules; the GPU and the settings of the random programs."""

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
SETTINGS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "max-split": "max_split_size_mb:40",
    "max-split-rounding": "max_split_size_mb:20,max_non_split_rounding_mb:60",
    "divisions": "roundup_power2_divisions:[1:2,16:8,>:4]",
    "gc": "garbage_collection_threshold:0.4,per_process_memory_fraction:0.9",
    "fraction": "per_process_memory_fraction:0.5",
    "large-segment": "large_segment_size_mb:34",
    "expandable-max-split": "expandable_segments:True,max_split_size_mb:40,large_segment_size_mb:12",
}
