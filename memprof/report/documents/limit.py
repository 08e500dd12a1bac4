"""The largest batch, or the longest context, with which a run fits: what was tried, and the commands that show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LimitRun:
    """One run of the search.

    Attributes:
        number: of sequences, images or tokens.
        needed_bytes: of the card, the context included, so that nothing is ever refused; None: it failed.
        fits: on the card and its host.
        dies_in: the stage, where it does not; or how it failed.
        command: this run alone.
    """

    number: int
    needed_bytes: int | None
    fits: bool
    dies_in: str
    command: str


@dataclass(frozen=True, slots=True)
class Limit:
    """What `--largest` found; every number in it was run.

    Attributes:
        what: batch-size or context-length.
        largest: the largest that fits; None if the least does not.
        first_too_large: the next number, which does not; None if there is no next, or the search ends there.
        runs: all that were made, by number.
    """

    what: str
    largest: int | None
    first_too_large: int | None
    runs: tuple[LimitRun, ...]
