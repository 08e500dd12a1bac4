"""What a process that the program starts anew (spawn, forkserver) runs first: no card is there, and saying so is ours.

The child knows nothing of the virtual GPU. On a machine without a card it would choose the CPU and do for real, unseen,
what the program does on the card; on a machine with one it would use that. Nothing heavy is imported here: a child that
needs no torch loads none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


class Elsewhere:
    """A process's target, run without a card."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            MemprofError: it uses CUDA.
        """
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if "torch" in sys.modules:
            from memprof.virtual.edges.processes import refuse_cuda

            refuse_cuda()
        return self._target(*args, **kwargs)
