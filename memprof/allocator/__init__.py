"""The CUDA caching allocator, replayed in plain Python: reserved memory, block by block (docs/allocator.md).

    timeline = replay_on_gpu(trace, GpuMemory(total_bytes=80 << 30, context_bytes=426 << 20)).timeline
    timeline.peak_reserved.num_bytes, timeline.reserved[event], timeline.first_oom

    for device in replay_snapshot(read_snapshot(path)):  # memprof.trace.snapshot_file; a recording of torch
        device.exact, device.first_difference

A run that does not fit continues on a GPU of unlimited size, so that `peak_reserved` covers the complete run.
"""

from memprof.allocator.blocks import Block
from memprof.allocator.caching import CachingAllocator
from memprof.allocator.config import AllocatorConfig, config_from_environment, parse_config
from memprof.allocator.driver import SimulatedDriver
from memprof.allocator.live import LiveAllocator
from memprof.allocator.messages import OomReport, OutOfMemory, format_size
from memprof.allocator.on_gpu import GpuReplay, MemoryNeeds, compute_memory_needs, replay_in_host_memory, replay_on_gpu
from memprof.allocator.releases import parse_release
from memprof.allocator.replay import GpuMemory, Timeline, TraceReplay
from memprof.allocator.settings import CurrentSettings, Settings
from memprof.allocator.snapshot_replay import SnapshotReplay, replay_snapshot
from memprof.allocator.streams import Completion

__all__ = [
    "AllocatorConfig",
    "Block",
    "CachingAllocator",
    "Completion",
    "CurrentSettings",
    "GpuMemory",
    "GpuReplay",
    "LiveAllocator",
    "MemoryNeeds",
    "OomReport",
    "OutOfMemory",
    "Settings",
    "SimulatedDriver",
    "SnapshotReplay",
    "Timeline",
    "TraceReplay",
    "compute_memory_needs",
    "config_from_environment",
    "format_size",
    "parse_config",
    "parse_release",
    "replay_in_host_memory",
    "replay_on_gpu",
    "replay_snapshot",
]  # fmt: skip
