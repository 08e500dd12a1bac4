"""The result of `--suggest-patch`: a diff of the program, and what the program needs before and after it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PatchedNeed:
    """What a run of the program, or of its patched copy, came to."""

    fits: bool | None
    allocated_bytes: int  # Peak; of a run that runs out of memory, until then.
    reserved_bytes: int  # Peak of reserved memory.
    required_bytes: int  # Device memory with which no allocation that was seen fails, CUDA context included.
    oom_step: int | None  # The training step in which memory runs out, or will; None: it does not, or before any.
    oom_stage: str | None = None  # The stage in which it runs out, if it was seen to.
    pages: bool = False  # Whether it fits, and some of the memory that GPU and host share pages.


@dataclass(frozen=True, slots=True)
class SuggestedPatch:
    """A change of the program that was run, and helped; the program itself is unchanged."""

    diff: str  # A unified diff, for `git apply` or `patch -p1`; empty: no patch helps.
    changes: tuple[str, ...]  # What it changes, a line for each change.
    before: PatchedNeed
    after: PatchedNeed | None  # None: no patch.
    tried: tuple[str, ...]  # Changes that were not made, or did not help, and why.
