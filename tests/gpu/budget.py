"""How long the day has, and what of that a program may take."""

from __future__ import annotations

import time
from collections.abc import Callable

# Kept back from every program, so that what was measured is packed before the time is up.
PACKING_S = 12.0


class Budget:
    """Seconds that are counted down from now on; `clock` gives seconds that only go up."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds = seconds

    def elapsed(self) -> float:
        return self._clock() - self._began

    def left(self) -> float:
        """Return the seconds that a program may still take; negative where only time for packing is left, or none."""
        return self._seconds - PACKING_S - self.elapsed()

    def limit(self, needs: float, wants: float) -> float | None:
        """Cut what a program wants to what is left, in seconds; None if it needs more to give any result."""
        left = self.left()
        return None if left < needs else min(wants, left)
