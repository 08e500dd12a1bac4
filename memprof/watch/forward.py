"""Places in the program where operators ran forward, to which allocations of a backward pass are attributed."""

from __future__ import annotations

import threading
from typing import NamedTuple

from memprof.trace.events import NONE


class CallSite(NamedTuple):
    """Place in the program where an operator runs; the fields are indices as in `Storage`."""

    module: int
    source: int
    forward_event: int


class ForwardOperators(threading.local):
    """Places where one thread's operators ran forward, by autograd's sequence numbers in that thread."""

    def __init__(self) -> None:
        # Number of an operator's node, ascending, and where the operator ran.
        self.sequence: list[int] = []
        self.places: list[CallSite] = []
        # The node that runs backward, and the number of storages there were when it began.
        self.node = NONE
        self.node_start = 0
