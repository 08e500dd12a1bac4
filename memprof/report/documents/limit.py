"""The largest batch, or the longest context, with which a run fits: the tried values, and their commands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LimitRun:
    """One run of the search."""

    number: int  # of sequences, images or tokens.
    needed_bytes: int | None  # of the GPU, the context included, without any failed allocation; None: the run failed.
    fits: bool  # on the GPU and its host.
    oom_stage: str  # the stage in which it runs out of memory, or how it failed.
    command: str  # this run alone.


@dataclass(frozen=True, slots=True)
class Limit:
    """The result of `--largest`; every number in it is from a run."""

    what: str  # batch-size or context-length.
    largest: int | None  # the largest that fits; None if the smallest does not.
    first_too_large: int | None  # the next number, which does not fit; None if there is none, or the search ends.
    runs: tuple[LimitRun, ...]  # all that were made, by number.
