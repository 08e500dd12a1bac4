"""Equal layers simulated once: the events of some are repeated for the others."""

import os

from memprof.virtual.repeat.backward import RunAgain
from memprof.virtual.repeat.stacks import Repeats

VARIABLE = "MEMPROF_REPEAT"
"""`off`: every layer is run. The answer is the same."""


def is_on() -> bool:
    """Whether layers may be repeated."""
    return os.environ.get(VARIABLE, "on").strip().lower() not in ("", "off", "0", "no")


__all__ = ["VARIABLE", "Repeats", "RunAgain", "is_on"]
