"""The allocations of a measured run, from first to last byte: what merge.py puts into a trace.

Those on the CPU are the profiler's. It is told of nothing in threads that the program starts, so that a free may be
missing: a life ends at the latest when its address is handed out again, or when a storage that was watched is gone.
Those on a GPU are the allocator's own history, which misses nothing, with the profiler's operators laid over it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memprof.measured.history import DEFAULT_POOL, History
from memprof.measured.marks import Gone
from memprof.measured.operators import OUTSIDE, Place, Profile, Seen, Use

DEFAULT_STREAM = 0


@dataclass(slots=True)
class Allocation:
    """One allocation, and its free if there was one."""

    time_ns: int
    address: int
    num_bytes: int
    device: str
    place: Place = OUTSIDE
    freed_ns: int | None = None
    released_ns: int | None = None
    """When the allocator could hand it out again, where that was later: other streams were still using it."""
    stream: int = DEFAULT_STREAM
    """As the driver calls it."""
    pool: tuple[int, int] = DEFAULT_POOL
    """As the allocator calls it."""
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    @property
    def is_temporary(self) -> bool:
        """Whether its own operator freed it again: a kernel's scratch memory, which no tensor shows."""
        return self.freed_ns is not None and 0 < self.freed_ns <= self.place.op_end_ns


@dataclass(slots=True)
class Recorded:
    """All of one run, in order of time."""

    allocations: list[Allocation] = field(default_factory=list)
    forward: list[tuple[int, int]] = field(default_factory=list)
    """As `Profile.forward`."""
    retired: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    """Private pools, with the time from which the allocator could give back their segments."""


def put_together(profile: Profile, history: History | None = None, gone: Iterable[Gone] = ()) -> Recorded:
    """Make the allocations of a run.

    Args:
        profile: what the profiler saw.
        history: of the GPU's allocator; None: there is none.
        gone: storages in host memory that were watched.
    """
    allocations = _of_profile(profile, gone, without=None if history is None else "cuda")
    retired = []
    if history is not None:
        allocations += _of_history(history)
        retired = history.retired
    allocations.sort(key=lambda allocation: allocation.time_ns)
    for allocation in allocations:
        _describe(allocation, profile.uses.get(allocation.address, ()), profile.end_ns)
    return Recorded(allocations, profile.forward, retired)


def _of_profile(profile: Profile, gone: Iterable[Gone], without: str | None) -> list[Allocation]:
    found: list[Allocation] = []
    alive: dict[tuple[str, int], Allocation] = {}
    # At one time, what is gone comes before what takes its address.
    steps: list[tuple[int, int, Seen | Gone]] = [(one.gone_ns, 0, one) for one in gone]
    steps += [(one.time_ns, 1, one) for one in profile.memory if without is None or not one.device.startswith(without)]
    for time_ns, _, one in sorted(steps, key=lambda step: step[:2]):
        key = ("cpu", one.address) if isinstance(one, Gone) else (one.device, one.address)
        before = alive.get(key)
        if before is not None and not (isinstance(one, Gone) and before.time_ns > one.seen_ns):
            before.freed_ns = time_ns
            del alive[key]
        if isinstance(one, Seen) and one.num_bytes >= 0:
            alive[key] = Allocation(time_ns, one.address, one.num_bytes, one.device, one.place)
            found.append(alive[key])
    return found


def _of_history(history: History) -> list[Allocation]:
    return [
        Allocation(
            life.time_ns, life.address, life.num_bytes, history.device, life.place, life.freed_ns, life.released_ns,
            life.stream, life.pool,
        )
        for life in history.lives
    ]  # fmt: skip


def _describe(allocation: Allocation, uses: Iterable[Use], end_ns: int) -> None:
    """Shape and dtype, from the first use of the memory that covers it, or else from the first."""
    end = end_ns if allocation.freed_ns is None else allocation.freed_ns
    first = None
    for use in uses:
        if allocation.time_ns <= use.time_ns <= end:
            if use.num_bytes == allocation.num_bytes:
                allocation.shape, allocation.dtype = use.shape, use.dtype
                return
            first = first or use
    if first is not None:
        allocation.dtype = first.dtype
