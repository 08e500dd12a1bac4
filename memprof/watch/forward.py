"""Call sites of operators that ran forward, to which allocations of a backward pass are attributed."""

from __future__ import annotations

import threading
from typing import NamedTuple

from memprof.trace.events import NONE


class CallSite(NamedTuple):
    """Module, source line and forward operator of an operator call; the fields are indices as in `Storage`."""

    module: int
    source: int
    forward_event: int


class ForwardOperators(threading.local):
    """Call sites of the operators that one thread ran forward, by autograd's sequence numbers in that thread."""

    def __init__(self) -> None:
        # Number of an operator's node, ascending, and where the operator ran.
        self.sequence_numbers: list[int] = []
        self.call_sites: list[CallSite] = []
        # The node that runs backward, and the number of storages there were when it began.
        self.backward_node = NONE
        self.num_storages_before_node = 0
