"""One program's GPUs in a process, or its ranks, with a row for each; for a plan, a row for each kind of rank."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.trace.facts import ENDINGS


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU; sizes are bytes."""

    device: str  # The program's name for it: `cuda:1`.
    used: bool  # Whether it has a CUDA context: an unused GPU has none.
    total_bytes: int | None
    context_bytes: int
    peak_allocated_bytes: int
    peak_stage: str
    peak_reserved_bytes: int
    device_used_bytes: int  # Peak of reserved memory plus CUDA context.
    required_bytes: int  # Need without any failed allocation.
    fits: bool | None  # As in the verdict.
    decides: bool  # Whether the verdict is about this GPU: the first that is full, else the one with the highest usage.
    shown: bool  # Whether the rest of the report is about this GPU.


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank; sizes are bytes of its GPU."""

    rank: int
    # A lower rank that allocates and frees exactly the same, in the same order. None: no such rank.
    like: int | None
    # The first and the last of the ranks that this run stands for; empty where ranks ran together.
    alike: tuple[int, ...]
    # As `program.ended`; `another rank` if stopped because that rank failed, empty where no program was run.
    ended: str
    peak_allocated_bytes: int
    peak_stage: str  # Stage of the allocated peak; empty where the GPU was not used.
    peak_step: int
    peak_reserved_bytes: int
    device_used_bytes: int  # Peak of reserved memory plus CUDA context.
    required_bytes: int  # Need without any failed allocation.
    fits: bool | None  # As in the verdict.
    categories: dict[str, int]  # At its peak.
    decides: bool  # Whether the verdict is about this rank: failed, full, or else of the highest need.
    shown: bool  # Whether the rest of the report is about this rank.

    def __post_init__(self) -> None:
        if self.ended and self.ended not in ENDINGS:
            raise ValueError(f"a rank does not end by {self.ended!r}")
