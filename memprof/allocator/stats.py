"""The counters behind `torch.cuda.memory_stats()`, under torch's own names.

Source: `DeviceStats` of c10/core/CachingDeviceAllocator.h and the places that update it in
c10/cuda/CUDACachingAllocator.cpp. Every counter has a current value, a peak (the largest value seen when it rose) and
what was ever added and taken away.
"""

from __future__ import annotations


class Counters:
    """The counters of one size class, or of both together. Plain attributes, because malloc updates them inline."""

    __slots__ = (
        "active",
        "active_bytes",
        "active_bytes_peak",
        "active_peak",
        "allocated_bytes",
        "allocated_bytes_peak",
        "allocation",
        "allocation_peak",
        "inactive_split",
        "inactive_split_added",
        "inactive_split_bytes",
        "inactive_split_bytes_added",
        "inactive_split_bytes_peak",
        "inactive_split_peak",
        "mallocs",
        "mallocs_bytes",
        "mallocs_requested",
        "requested_bytes",
        "requested_bytes_peak",
        "reserved_bytes",
        "reserved_bytes_added",
        "reserved_bytes_peak",
        "segment",
        "segment_added",
        "segment_peak",
    )

    def __init__(self) -> None:
        self.allocation = self.allocation_peak = self.mallocs = 0
        self.allocated_bytes = self.allocated_bytes_peak = self.mallocs_bytes = 0
        self.active = self.active_peak = 0
        self.active_bytes = self.active_bytes_peak = 0
        self.requested_bytes = self.requested_bytes_peak = self.mallocs_requested = 0
        self.segment = self.segment_peak = self.segment_added = 0
        self.reserved_bytes = self.reserved_bytes_peak = self.reserved_bytes_added = 0
        self.inactive_split = self.inactive_split_peak = self.inactive_split_added = 0
        self.inactive_split_bytes = self.inactive_split_bytes_peak = self.inactive_split_bytes_added = 0

    def reserve(self, num_bytes: int, segments: int) -> None:
        """A segment came from the driver (segments=1), or memory was mapped into an expandable one (0)."""
        self.reserved_bytes += num_bytes
        self.reserved_bytes_added += num_bytes
        self.reserved_bytes_peak = max(self.reserved_bytes_peak, self.reserved_bytes)
        self.segment += segments
        self.segment_added += segments
        self.segment_peak = max(self.segment_peak, self.segment)

    def unreserve(self, num_bytes: int, segments: int) -> None:
        """The reverse of `reserve`."""
        self.reserved_bytes -= num_bytes
        self.segment -= segments

    def change_inactive_split(self, count: int, num_bytes: int) -> None:
        """Free pieces of segments that are partly in use: more (positive) or fewer."""
        self.inactive_split += count
        if count > 0:
            self.inactive_split_added += count
            self.inactive_split_peak = max(self.inactive_split_peak, self.inactive_split)
        self.inactive_split_bytes += num_bytes
        if num_bytes > 0:
            self.inactive_split_bytes_added += num_bytes
            self.inactive_split_bytes_peak = max(self.inactive_split_bytes_peak, self.inactive_split_bytes)

    def reset_peak(self) -> None:
        """Every peak is what there is now."""
        for name in _PEAKS:
            setattr(self, name, getattr(self, name.removesuffix("_peak")))

    def as_dict(self) -> dict[str, tuple[int, int, int]]:
        """(current, peak, ever added) by the name that torch gives."""
        return {
            name: (getattr(self, name), getattr(self, f"{name}_peak"), getattr(self, added))
            for name, added in _ADDED.items()
        }


_ADDED = {
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
"""torch's counters, and what counts all that was ever added to each."""
_PEAKS = tuple(name for name in Counters.__slots__ if name.endswith("_peak"))


class Statistics:
    """All counters of one device."""

    __slots__ = (
        "all",
        "large_pool",
        "num_alloc_retries",
        "num_device_alloc",
        "num_device_free",
        "num_oom_rejections",
        "num_ooms",
        "num_sync_all_streams",
        "oversize_allocations",
        "oversize_allocations_added",
        "oversize_allocations_peak",
        "oversize_segments",
        "oversize_segments_added",
        "oversize_segments_peak",
        "small_pool",
    )

    def __init__(self) -> None:
        self.all = Counters()
        self.large_pool = Counters()
        self.small_pool = Counters()
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = 0
        self.num_device_free = 0
        self.num_oom_rejections = 0
        self.oversize_allocations = self.oversize_allocations_peak = self.oversize_allocations_added = 0
        self.oversize_segments = self.oversize_segments_peak = self.oversize_segments_added = 0

    def add_oversize_allocation(self) -> None:
        """A block of at least max_split_size was handed out."""
        self.oversize_allocations += 1
        self.oversize_allocations_added += 1
        self.oversize_allocations_peak = max(self.oversize_allocations_peak, self.oversize_allocations)

    def add_oversize_segment(self) -> None:
        """A segment of at least max_split_size came from the driver."""
        self.oversize_segments += 1
        self.oversize_segments_added += 1
        self.oversize_segments_peak = max(self.oversize_segments_peak, self.oversize_segments)

    def reset_peak(self) -> None:
        """`resetPeakStats`: every peak is what there is now."""
        for counters in (self.all, self.large_pool, self.small_pool):
            counters.reset_peak()
        self.oversize_allocations_peak = self.oversize_allocations
        self.oversize_segments_peak = self.oversize_segments

    def as_dict(self, max_split_size: int) -> dict[str, int]:
        """The flat dictionary of `torch.cuda.memory_stats()`, its keys sorted.

        Args:
            max_split_size: bytes; -1 when unlimited, as torch reports it.
        """
        found: dict[str, int] = {}
        for pool, counters in (("all", self.all), ("large_pool", self.large_pool), ("small_pool", self.small_pool)):
            for name, values in counters.as_dict().items():
                found.update(_four(f"{name}.{pool}", *values))
        for name in ("oversize_allocations", "oversize_segments"):
            found.update(_four(name, *(getattr(self, name + part) for part in ("", "_peak", "_added"))))
        found |= {name: getattr(self, name) for name in self.__slots__ if name.startswith("num_")}
        found["max_split_size"] = max_split_size
        return dict(sorted(found.items()))


def _four(name: str, current: int, peak: int, added: int) -> dict[str, int]:
    return {
        f"{name}.current": current,
        f"{name}.peak": peak,
        f"{name}.allocated": added,
        f"{name}.freed": added - current,
    }
