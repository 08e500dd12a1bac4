"""The largest batch, or the longest context, with which a run fits: what was tried, and the commands that show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LimitRun:
    """One run of the search."""

    number: int  # of sequences, images or tokens.
    needed_bytes: int | None  # of the GPU, the context included, so that nothing is ever refused; None: it failed.
    fits: bool  # on the GPU and its host.
    oom_stage: str  # the stage, where it does not; or how it failed.
    command: str  # this run alone.


@dataclass(frozen=True, slots=True)
class Limit:
    """The result of `--largest`; every number in it was run."""

    what: str  # batch-size or context-length.
    largest: int | None  # the largest that fits; None if the least does not.
    first_too_large: int | None  # the next number, which does not; None if there is no next, or the search ends there.
    runs: tuple[LimitRun, ...]  # all that were made, by number.
