"""How large the numbers of options may be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memprof.errors import UsageError

_MOST = 10**12
"""Every number of an option is up to this: bytes, seconds, rows; of some less."""
_MOST_OF = {
    # These are gone through one by one, and a model numbers its rows and tokens in host memory.
    **dict.fromkeys(("steps", "gradient_accumulation", "new_tokens", "dataset_batches", "batches", "gpus"), 10**6),
    "seeds": 10**3,
    "batch_size": 1 << 24,
    "effective_batch": 1 << 24,
    "context_length": 1 << 27,
    "timeout": 10**8,
    "interval": 86_400,
}
_MANY_DIGITS = re.compile(r"\d{400}")


def check_numbers(asked: Mapping[str, Any]) -> None:
    """Look at the values of options, by name, before the command does.

    Raises:
        UsageError: a number is out of range, or has hundreds of digits.
    """
    for name, value in asked.items():
        most = _MOST_OF.get(name, _MOST)
        beyond = isinstance(value, int | float) and not abs(value) <= most  # nor is what is no number
        if beyond or (isinstance(value, str) and _MANY_DIGITS.search(value)):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is out of range", value=str(value)[:40], hint=f"give a number, at most {most:,}")
