"""The result of `--largest`: the largest batch or longest context with which a run fits."""

from __future__ import annotations

from dataclasses import dataclass

PAGING = "paging"  # in place of a stage: the run fits, and does not stay in the memory that GPU and host share


@dataclass(frozen=True, slots=True)
class LargestSearchRun:
    """One run of a search for the largest batch or context: the value, and whether the run fits."""

    number: int  # Sequences or images of a batch, or tokens of the context.
    needed_bytes: int | None  # Device memory without failed allocations, CUDA context included; None: the run failed.
    fits: bool  # In device memory and host memory, without paging.
    oom_stage: str  # The stage that runs out of memory, "paging", or the error of a failed run.
    command: str  # The command that repeats this run.


@dataclass(frozen=True, slots=True)
class LargestSearch:
    """The result of `--largest`: the largest value that fits, and all runs of the search."""

    what: str  # Batch-size or context-length.
    largest: int | None  # The largest that fits; None if the smallest does not.
    first_too_large: int | None  # The next larger value, which does not fit; None: none was tried.
    runs: tuple[LargestSearchRun, ...]  # All runs, by number.
