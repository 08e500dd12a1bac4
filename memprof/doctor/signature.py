"""A type of error message that `memprof doctor` recognizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memprof.doctor.diagnosis import Cause, MessageSizes


@dataclass(frozen=True, slots=True)
class Signature:
    """A type of error message: how to recognize it, what prints it, its cause, and how to read its sizes."""

    name: str
    words: tuple[str, ...]  # Every such error has at least one of these substrings.
    pattern: str  # Regular expression for the text without log prefixes and line breaks.
    source: str  # The program or library that prints the error.
    cause: Cause | None = None  # None: the sizes in the message decide (causes.py).
    get_sizes: Callable[[str], MessageSizes] = lambda text: MessageSizes(tried_is_segment=False)  # Reads the sizes.
    priority: int = 1  # The error with the lowest number explains the others in a log.
    is_one_line: bool = False  # The pattern matches within the line of the words.


def make_signature(name: str, words: str, pattern: str = "", **fields: Any) -> Signature:
    """Return a signature of which `words` has the substrings, separated by |; by default each is a pattern too."""
    phrases = tuple(words.split("|"))
    return Signature(name, phrases, pattern or "|".join(map(re.escape, phrases)), **fields)
