"""Rows of a report on several GPUs of one process, or on the ranks of a distributed run."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.trace.facts import ENDINGS


@dataclass(frozen=True, slots=True)
class GpuRow:
    """The peaks of one GPU of a process; sizes are bytes."""

    device: str  # The program's name for it: `cuda:1`.
    used: bool  # Whether the GPU has a CUDA context.
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
    """The peaks of one rank of a distributed run; sizes are bytes of GPU memory."""

    rank: int
    # A lower rank with exactly the same events; None: no such rank.
    like: int | None
    # First and last of the ranks that this run represents; empty if the ranks ran together.
    alike: tuple[int, ...]
    # As `program.ended`; `another rank`: stopped because another rank failed; empty: no program was run.
    ended: str
    peak_allocated_bytes: int
    peak_stage: str  # Stage of the allocated peak; empty where the GPU was not used.
    peak_step: int
    peak_reserved_bytes: int
    device_used_bytes: int  # Peak of reserved memory plus CUDA context.
    required_bytes: int  # Need without any failed allocation.
    fits: bool | None  # As in the verdict.
    categories: dict[str, int]  # Bytes by category at the rank's peak.
    decides: bool  # Whether the verdict is about this rank: failed, full, or else of the highest need.
    shown: bool  # Whether the rest of the report is about this rank.

    def __post_init__(self) -> None:
        if self.ended and self.ended not in ENDINGS:
            raise ValueError(f"a rank does not end by {self.ended!r}")
