"""Samples whose lengths vary, and the batches that a data loader makes of them.

    lognormal:MEAN,SIGMA   lengths with this mean in tokens, whose natural logarithm has this standard deviation
    FILE                   those of a dataset: whole numbers in a text file, or a list of them in JSON

    after either, `,bucket=N`: N batches at a time are made of samples sorted by length, as `group_by_length` does;
    `,multiple=N`: batches are padded to a multiple of N tokens

Every sample is fed once before any is fed again, in an order that is the same in every run.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from memprof.errors import UsageError

_LOGNORMAL = "lognormal:"
_HINT = "lognormal:MEAN,SIGMA, or a file with one length per sample; both may be followed by ,bucket=N or ,multiple=N"


class Lengths(NamedTuple):
    """What `--lengths` asks for."""

    draw: Callable[[random.Random], Iterator[int]]
    """Lengths of samples, without end."""
    bucket: int = 1
    """Batches that are sorted together."""
    multiple: int = 1
    """What a batch is padded to a multiple of."""

    def batches(self, batch_size: int, longest: int) -> Iterator[tuple[list[int], int]]:
        """Batches without end: the lengths of their samples, cut at `longest`, and how long they are with padding."""
        generator = random.Random(0)
        samples = self.draw(generator)
        while True:
            drawn = [min(next(samples), longest) for _ in range(self.bucket * batch_size)]
            if self.bucket > 1:
                drawn.sort()
            starts = list(range(0, len(drawn), batch_size))
            if self.bucket > 1:
                generator.shuffle(starts)
            for start in starts:
                batch = drawn[start : start + batch_size]
                yield batch, min(-(-max(batch) // self.multiple) * self.multiple, longest)


def parse_lengths(text: str) -> Lengths:
    """What `text` asks for.

    Raises:
        UsageError: it is not written as above, or there is no such file.
    """
    text, options = _options(text)
    if text.startswith(_LOGNORMAL):
        return Lengths(_lognormal(text), **options)
    return Lengths(_of_dataset(_read(Path(text))), **options)


def _options(text: str) -> tuple[str, dict[str, int]]:
    options: dict[str, int] = {}
    while found := re.fullmatch(r"(.*),\s*(bucket|multiple)=(\d{1,6})", text, re.DOTALL):
        text, name, number = found.groups()
        if name in options or int(number) < 1:
            raise UsageError(f"--lengths takes {name} once, from 1 on", value=f"{name}={number}", hint=_HINT)
        options[name] = int(number)
    return text, options


def _lognormal(text: str) -> Callable[[random.Random], Iterator[int]]:
    try:
        mean, sigma = (float(part) for part in text.removeprefix(_LOGNORMAL).split(","))
    except ValueError:
        raise UsageError("--lengths needs a mean and a sigma", value=text, hint="such as lognormal:250,0.6") from None
    if not 1 <= mean < 1e9 or not 0 <= sigma <= 5:
        raise UsageError("--lengths has no such distribution", value=text, hint="a mean from 1, a sigma from 0 to 5")
    center = math.log(mean) - sigma**2 / 2

    def draw(generator: random.Random) -> Iterator[int]:
        while True:
            yield max(1, round(generator.lognormvariate(center, sigma)))

    return draw


def _of_dataset(lengths: list[int]) -> Callable[[random.Random], Iterator[int]]:
    def draw(generator: random.Random) -> Iterator[int]:
        while True:
            yield from generator.sample(lengths, len(lengths))

    return draw


def _read(path: Path) -> list[int]:
    """The lengths in a file.

    Raises:
        UsageError: there is no such file, or something else is in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise UsageError(f"--lengths cannot be read: {reason}", value=str(path), hint=_HINT) from None
    try:
        found = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [int(one) for one in re.split(r"[\s,]+", text) if one]
        )
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not found or not all(type(one) is int and 0 < one < 1e9 for one in found):
        raise UsageError(
            "--lengths has to hold lengths in tokens", value=str(path), hint="whole numbers, one per sample"
        )
    return found
