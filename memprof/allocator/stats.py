"""The counters behind `torch.cuda.memory_stats()`, under torch's own names.

Source: `DeviceStats` of c10/core/CachingDeviceAllocator.h, and the code in c10/cuda/CUDACachingAllocator.cpp that
updates it. Every counter has a current value, a peak, and the totals of all additions and all removals.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Counters:
    """The counters of one pool (small or large), or of both together."""

    allocation: int = 0
    allocation_peak: int = 0
    allocated_bytes: int = 0
    allocated_bytes_peak: int = 0
    mallocs: int = 0  # all allocations so far: only per size class, as are the next two
    mallocs_bytes: int = 0
    mallocs_requested: int = 0
    waiting: int = 0  # blocks freed by the program and in use by other streams: active, but not allocated
    waiting_bytes: int = 0
    waiting_active_peak: int = 0  # most active blocks while some waited; else the peak is `allocation_peak`
    waiting_active_bytes_peak: int = 0
    requested_bytes: int = 0
    requested_bytes_peak: int = 0
    segment: int = 0
    segment_peak: int = 0
    segment_added: int = 0
    reserved_bytes: int = 0
    reserved_bytes_peak: int = 0
    reserved_bytes_added: int = 0
    inactive_split: int = 0
    inactive_split_peak: int = 0
    inactive_split_added: int = 0
    inactive_split_bytes: int = 0
    inactive_split_bytes_peak: int = 0
    inactive_split_bytes_added: int = 0

    @property
    def active(self) -> int:
        """Return the number of active blocks: allocated, or freed and still in use by another stream."""
        return self.allocation + self.waiting

    @property
    def active_bytes(self) -> int:
        """Return the bytes of active blocks."""
        return self.allocated_bytes + self.waiting_bytes

    @property
    def active_peak(self) -> int:
        """Return the peak number of active blocks."""
        return max(self.allocation_peak, self.waiting_active_peak)

    @property
    def active_bytes_peak(self) -> int:
        """Return the peak bytes of active blocks."""
        return max(self.allocated_bytes_peak, self.waiting_active_bytes_peak)

    def count_waiting(self, num_blocks: int, num_bytes: int) -> None:
        """Add `num_blocks` of `num_bytes` in all to the blocks that wait for other streams; negative: remove them."""
        self.waiting += num_blocks
        self.waiting_bytes += num_bytes

    def update_active_peak(self) -> None:
        """Update the peak of active blocks, after an allocation while freed blocks wait for other streams."""
        self.waiting_active_peak = max(self.waiting_active_peak, self.active)
        self.waiting_active_bytes_peak = max(self.waiting_active_bytes_peak, self.active_bytes)

    def count_reserved(self, num_bytes: int, num_segments: int) -> None:
        """Add reserved bytes and segments (0: bytes mapped into an existing segment); negative: released."""
        self.reserved_bytes += num_bytes
        self.reserved_bytes_added += max(num_bytes, 0)
        self.reserved_bytes_peak = max(self.reserved_bytes_peak, self.reserved_bytes)
        self.segment += num_segments
        self.segment_added += max(num_segments, 0)
        self.segment_peak = max(self.segment_peak, self.segment)

    def change_inactive_split(self, num_blocks: int, num_bytes: int) -> None:
        """Add `num_blocks` free blocks to those in segments that are partly in use; negative: remove them."""
        self.inactive_split += num_blocks
        if num_blocks > 0:
            self.inactive_split_added += num_blocks
            self.inactive_split_peak = max(self.inactive_split_peak, self.inactive_split)
        self.inactive_split_bytes += num_bytes
        if num_bytes > 0:
            self.inactive_split_bytes_added += num_bytes
            self.inactive_split_bytes_peak = max(self.inactive_split_bytes_peak, self.inactive_split_bytes)

    def reset_peak(self) -> None:
        """Reset every peak to the current value."""
        for name in _ADDITIONS:
            if not name.startswith("active"):
                setattr(self, f"{name}_peak", getattr(self, name))
        self.waiting_active_peak, self.waiting_active_bytes_peak = self.active, self.active_bytes


# torch's counters, and the counter of all additions to each.
_ADDITIONS = {
    "allocation": "mallocs",
    "segment": "segment_added",
    "active": "mallocs",
    "inactive_split": "inactive_split_added",
    "allocated_bytes": "mallocs_bytes",
    "reserved_bytes": "reserved_bytes_added",
    "active_bytes": "mallocs_bytes",
    "inactive_split_bytes": "inactive_split_bytes_added",
    "requested_bytes": "mallocs_requested",
}


@dataclass(slots=True, eq=False)
class Gauge:
    """A counter with a current value, a peak, and the total of all additions."""

    current: int = 0
    peak: int = 0
    added: int = 0

    def add(self) -> None:
        """Add one."""
        self.current += 1
        self.added += 1
        self.peak = max(self.peak, self.current)


@dataclass(slots=True, eq=False)
class Statistics:
    """All counters of one device."""

    all: Counters = field(default_factory=Counters)
    large_pool: Counters = field(default_factory=Counters)
    small_pool: Counters = field(default_factory=Counters)
    num_alloc_retries: int = 0
    num_device_alloc: int = 0
    num_device_free: int = 0
    num_oom_rejections: int = 0
    num_ooms: int = 0
    num_sync_all_streams: int = 0
    oversize_allocations: Gauge = field(default_factory=Gauge)  # allocated blocks of at least max_split_size
    oversize_segments: Gauge = field(default_factory=Gauge)  # segments of that size, from the driver

    def reset_peak(self) -> None:
        """Reset every peak to the current value (`resetPeakStats`)."""
        for counters in (self.all, self.large_pool, self.small_pool):
            counters.reset_peak()
        for gauge in (self.oversize_allocations, self.oversize_segments):
            gauge.peak = gauge.current

    def as_dict(self, max_split_size: int) -> dict[str, int]:
        """Return the values of `torch.cuda.memory_stats()`, sorted by name; `max_split_size` is in bytes, -1 if
        unlimited."""
        stats: dict[str, int] = {}
        for added in ("mallocs", "mallocs_bytes", "mallocs_requested"):
            setattr(self.all, added, getattr(self.large_pool, added) + getattr(self.small_pool, added))
        for pool, counters in (("all", self.all), ("large_pool", self.large_pool), ("small_pool", self.small_pool)):
            for name, added in _ADDITIONS.items():
                values = (getattr(counters, attribute) for attribute in (name, f"{name}_peak", added))
                stats.update(_make_stat_fields(f"{name}.{pool}", *values))
        for name in ("oversize_allocations", "oversize_segments"):
            gauge: Gauge = getattr(self, name)
            stats.update(_make_stat_fields(name, gauge.current, gauge.peak, gauge.added))
        stats |= {name: getattr(self, name) for name in self.__slots__ if name.startswith("num_")}
        stats["max_split_size"] = max_split_size
        return dict(sorted(stats.items()))


def _make_stat_fields(name: str, current: int, peak: int, added: int) -> dict[str, int]:
    return {
        f"{name}.current": current,
        f"{name}.peak": peak,
        f"{name}.allocated": added,
        f"{name}.freed": added - current,
    }
