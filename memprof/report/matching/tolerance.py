"""The tolerance of a comparison."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memprof.errors import UsageError
from memprof.units import parse_gib


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A tolerance in bytes, or as a fraction of the larger value."""

    text: str = "0"
    bytes: int = 0
    share: float = 0.0

    def allows(self, a: int, b: int) -> bool:
        """Return whether the difference of `a` and `b` is within the tolerance."""
        return abs(a - b) <= max(self.bytes, self.share * max(abs(a), abs(b)))


def parse_tolerance(text: str) -> Tolerance:
    """Return the tolerance in a string: "0.1%", "16MiB" or bytes. Raises UsageError: the string is something else."""
    if percent := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text):
        return Tolerance(text.strip(), share=float(percent[1]) / 100)
    if plain := re.fullmatch(r"\s*(\d+)\s*", text):
        return Tolerance(text.strip(), bytes=int(plain[1]))
    try:
        if not text.strip()[-1:].isalpha():
            raise UsageError("without a unit")
        return Tolerance(text.strip(), bytes=parse_gib(text))
    except UsageError:
        raise UsageError(
            "not a tolerance", value=f"--tolerance {text}", hint="a share (0.1%), a size (16MiB) or bytes (4096)"
        ) from None
