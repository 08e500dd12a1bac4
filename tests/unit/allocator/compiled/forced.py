"""The compiled rules for a few events, where they would not pay; or plain Python for all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from memprof.allocator.compiled import loading, rules, stretches
from memprof.allocator.compiled.loading import Compiled

UNCOMPILED = Compiled(rules.play, rules.number)
"""The same functions as Python runs them."""


@contextlib.contextmanager
def played_by(functions: Compiled | None, least: int = 1) -> Iterator[list[int]]:
    """Inside, replays of any length ask these; None: as where there is no numba. The stretches that they play.

    Args:
        least: events that a stretch must have.
    """
    lengths: list[int] = []
    play = stretches.Stretches.play

    def noting(self, begin, *arguments, **more):
        found = play(self, begin, *arguments, **more)
        lengths.append(0 if found is None else found[0] - begin)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_loaded", [functions])
        patch.setattr(loading, "FEWEST_EVENTS", 0)
        patch.setattr(stretches, "LEAST", least)
        patch.setattr(stretches, "LEAST_BY_BLOCK", 0)
        patch.setattr(stretches.Stretches, "play", noting)
        yield lengths
