"""The CUDA caching allocator, replayed in plain Python: what a run reserves, block by block (docs/allocator.md).

    timeline = replay_on_card(trace, CardMemory(total_bytes=80 << 30, context_bytes=426 << 20)).timeline
    timeline.peak_reserved.num_bytes, timeline.reserved[event], timeline.first_oom

    for device in replay_snapshot(read_snapshot(path)):  # memprof.trace.snapshot_file; a recording of torch
        device.exact, device.first_difference

A run that does not fit is gone on with on a card without limit, so `peak_reserved` is then its whole need.
"""

from memprof.allocator.blocks import Block
from memprof.allocator.caching import CachingAllocator
from memprof.allocator.config import AllocatorConfig, config_from_environment, parse_config
from memprof.allocator.driver import SimulatedDriver
from memprof.allocator.live import LiveAllocator
from memprof.allocator.messages import OomReport, OutOfMemory, format_size
from memprof.allocator.on_card import Needs, OnCard, needs_of, replay_on_card, without_allocator
from memprof.allocator.recorded import Recorded, replay_snapshot
from memprof.allocator.releases import release_for
from memprof.allocator.replay import CardMemory, Timeline, TraceReplay
from memprof.allocator.settings import Settings, SettingsInForce
from memprof.allocator.streams import Completion

__all__ = [
    "AllocatorConfig", "Block", "CachingAllocator", "CardMemory", "Completion", "LiveAllocator", "Needs", "OnCard",
    "OomReport", "OutOfMemory", "Recorded", "Settings", "SettingsInForce", "SimulatedDriver",
    "Timeline", "TraceReplay", "config_from_environment", "format_size", "needs_of", "parse_config",
    "release_for", "replay_on_card", "replay_snapshot", "without_allocator",
]  # fmt: skip
