"""Record of the call sites of forward operators, to which backward allocations are attributed."""

from __future__ import annotations

import threading
from typing import NamedTuple

from memprof.trace.events import NONE


class CallSite(NamedTuple):
    """Module, source line and forward event of an operator call, as indices in the trace; NONE if there is none."""

    module: int
    source: int
    forward_event: int


class ForwardOperators(threading.local):
    """Call sites of the forward operators of one thread, in ascending order of autograd's sequence numbers."""

    def __init__(self) -> None:
        # Sequence number of each operator's autograd node, ascending, and the operator's call site.
        self.sequence_numbers: list[int] = []
        self.call_sites: list[CallSite] = []
        # Sequence number of the running backward node, and the number of storages in the trace when it began.
        self.backward_node = NONE
        self.num_storages_before_node = 0
