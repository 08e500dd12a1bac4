"""One program's GPUs in a process, or ranks, a row each; of a plan, a row for each kind of rank."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.trace.facts import ENDINGS


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One of them; sizes are bytes."""

    device: str  # As the program says it: `cuda:1`.
    used: bool  # Whether it has a CUDA context: a GPU that nothing was asked of has none.
    total_bytes: int | None
    context_bytes: int
    peak_allocated_bytes: int
    peak_stage: str
    peak_reserved_bytes: int
    device_used_bytes: int  # Reserved and the CUDA context, at the most.
    required_bytes: int  # So that nothing is ever refused there.
    fits: bool | None  # As in the verdict.
    decides: bool  # Whether the verdict is about this GPU: the first that is full, or else the fullest.
    shown: bool  # Whether the rest of the report is about this GPU.


@dataclass(frozen=True, slots=True)
class RankRow:
    """One of them; sizes are bytes of its GPU."""

    rank: int
    # A lower rank to which it is equal to the byte: all that they allocate and free, in order. None: to none.
    like: int | None
    # The first and the last of the ranks that it was run for, alone; empty where ranks ran together.
    alike: tuple[int, ...]
    # As `program.ended`; `another rank` where it was stopped because that failed, empty where no program was run.
    ended: str
    peak_allocated_bytes: int
    peak_stage: str  # Where most is allocated; empty where nothing was on its GPU.
    peak_step: int
    peak_reserved_bytes: int
    device_used_bytes: int  # Reserved and the CUDA context, at the most.
    required_bytes: int  # So that nothing is ever refused there.
    fits: bool | None  # As in the verdict.
    categories: dict[str, int]  # At its peak.
    decides: bool  # Whether the verdict is about this rank: that which failed or is full, or else the fullest.
    shown: bool  # Whether the rest of the report is about this rank.

    def __post_init__(self) -> None:
        if self.ended and self.ended not in ENDINGS:
            raise ValueError(f"a rank does not end by {self.ended!r}")
