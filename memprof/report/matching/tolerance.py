"""The tolerance of a comparison."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memprof.errors import UsageError
from memprof.units import parse_gib


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed difference of two values: in bytes, or as a fraction of the larger value."""

    text: str = "0"
    bytes: int = 0
    share: float = 0.0

    def allows(self, a: int, b: int) -> bool:
        """Return whether the difference of `a` and `b` is within the tolerance."""
        return abs(a - b) <= max(self.bytes, self.share * max(abs(a), abs(b)))


def parse_tolerance(value: str) -> Tolerance:
    """Parse a tolerance: "0.1%", "16MiB" or a number of bytes. Raises UsageError: `value` has none of these forms."""
    if percent_match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value):
        return Tolerance(value.strip(), share=float(percent_match[1]) / 100)
    if bytes_match := re.fullmatch(r"\s*(\d+)\s*", value):
        return Tolerance(value.strip(), bytes=int(bytes_match[1]))
    try:
        if not value.strip()[-1:].isalpha():
            raise UsageError("without a unit")
        return Tolerance(value.strip(), bytes=parse_gib(value))
    except UsageError:
        raise UsageError(
            "not a tolerance", value=f"--tolerance {value}", hint="a share (0.1%), a size (16MiB) or bytes (4096)"
        ) from None
