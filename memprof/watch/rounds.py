"""Loops of memprof's own remedies whose rounds are alike: a simulated run may write what some do without running it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

_Chosen = Callable[[Sequence[slice]], Iterator[slice]]
_chosen: _Chosen | None = None


def rounds(parts: Sequence[slice]) -> Iterator[slice]:
    """The `parts` to loop over: all of them where a program runs, and on a virtual card those that need to be run.

    What a round does may depend on its part's length, and not on which it is or on numbers in tensors. What was there
    before it changes in place alone.
    """
    return iter(parts) if _chosen is None else _chosen(parts)


@contextlib.contextmanager
def chosen_by(choose: _Chosen) -> Iterator[None]:
    """Inside, `choose` says which parts are run."""
    global _chosen
    before, _chosen = _chosen, choose
    try:
        yield
    finally:
        _chosen = before
