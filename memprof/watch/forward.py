"""Where in the program operators ran forward, by which what a backward pass makes is attributed."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from memprof.trace.events import NONE


@dataclass(slots=True, eq=False)
class Place:
    """Where in the program an operator runs: indices as in `Storage`."""

    module: int
    source: int
    forward_event: int


class Forward(threading.local):
    """Where the operators of one thread ran forward, by the numbers that autograd gives in it."""

    def __init__(self) -> None:
        self.sequence: list[int] = []
        self.places: list[Place] = []
        self.node = NONE
        self.node_start = 0
        self.aside = False
        """Whether what this thread takes belongs to no phase of the others."""
