"""Samples of varying lengths, and the batches that a data loader makes of these samples.

    lognormal:MEAN,SIGMA   lengths with this mean in tokens, whose natural logarithm has this standard deviation
    alpaca                 lengths of Stanford Alpaca's 52,002 prompts with their answers
    FILE                   lengths of a dataset: whole numbers in a text file, or a JSON list of whole numbers
    [N, N, ...]            the lengths themselves

    Any of these may be followed by `,bucket=N` (each group of N batches is sorted by length, longest first, as by the
    Trainer's `group_by_length`) and `,multiple=N` (batches are padded to a multiple of N tokens).

Every sample is used once before any is used again, in an order that is the same in every run.
"""

from __future__ import annotations

import json
import math
import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from memprof.errors import UsageError

_LOGNORMAL = "lognormal:"
_HINT = "lognormal:MEAN,SIGMA, alpaca, or a file of lengths; each may be followed by ,bucket=N or ,multiple=N"
_ALPACA_NAME = "alpaca"
# Tokens, and how many of the samples have no more, with LLaMA's tokenizer, its end token and alpaca-lora's template.
# Read from the plots of lengths.ipynb in tloen/alpaca-lora (1310547, 2023): the histogram up to 257 tokens, the curve
# of covered examples up to 401; beyond that the counts of the notebook's first version (13d55f4), whose template is
# longer. Their mean is 127; that of the notebook's curve of tokens is 128.
_ALPACA = (
    (42, 0), (55, 920), (67, 5159), (80, 11239), (92, 18774), (105, 24275), (118, 28235), (130, 32174), (143, 35664),
    (156, 39046), (168, 41872), (181, 44034), (193, 45832), (206, 47159), (219, 48101), (231, 48914), (244, 49450),
    (257, 49878), (289, 50743), (323, 51207), (358, 51517), (401, 51749), (558, 51940), (682, 51975), (807, 51991),
    (931, 52000), (1180, 52001), (1304, 52002),
)  # fmt: skip


class Lengths(NamedTuple):
    """Sample lengths and batching that `--lengths` describes."""

    draw: Callable[[random.Random], Iterator[int]]  # lengths of samples, without end
    bucket: int = 1  # batches that are sorted together
    multiple: int = 1  # batch lengths are padded to a multiple of this

    def batches(self, batch_size: int, longest: int) -> Iterator[tuple[list[int], int]]:
        """Yield batches without end: lengths of samples, cut at `longest`, and the batch's length with padding."""
        generator = random.Random(0)
        samples = self.draw(generator)
        while True:
            drawn = [min(next(samples), longest) for _ in range(self.bucket * batch_size)]
            if self.bucket > 1:
                drawn.sort(reverse=True)
            for start in range(0, len(drawn), batch_size):
                batch = drawn[start : start + batch_size]
                yield batch, min(-(-max(batch) // self.multiple) * self.multiple, longest)


def parse_lengths(text: str) -> Lengths:
    """Return the lengths that `text` describes; raise UsageError if `text` is invalid, or names no readable file."""
    text, options = _split_options(text)
    if text == _ALPACA_NAME:
        return Lengths(_draw_alpaca, **options)
    if text.startswith(_LOGNORMAL):
        return Lengths(_make_lognormal(text), **options)
    return Lengths(
        _make_dataset_draw(_parse_length_list(text, text[:40]) if text.startswith("[") else _read_lengths(Path(text))),
        **options,
    )


def is_distribution(text: str) -> bool:
    """Return whether `text` describes a distribution, from which any number of lengths can be drawn."""
    return text.startswith(_LOGNORMAL) or text.partition(",")[0] == _ALPACA_NAME


def _split_options(text: str) -> tuple[str, dict[str, int]]:
    options: dict[str, int] = {}
    while found := re.fullmatch(r"(.*),\s*(bucket|multiple)=(\d{1,6})", text, re.DOTALL):
        text, name, number = found.groups()
        if name in options or int(number) < 1:
            raise UsageError(f"--lengths takes {name} once, from 1 on", value=f"{name}={number}", hint=_HINT)
        options[name] = int(number)
    return text, options


def _make_lognormal(text: str) -> Callable[[random.Random], Iterator[int]]:
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


def _draw_alpaca(generator: random.Random) -> Iterator[int]:
    while True:
        sample = generator.uniform(1, _ALPACA[-1][1])
        place = bisect_left(_ALPACA, sample, key=lambda point: point[1])
        (shorter, below), (longer, above) = _ALPACA[place - 1 : place + 1]
        yield round(shorter + (longer - shorter) * (sample - below) / (above - below))


def _make_dataset_draw(lengths: list[int]) -> Callable[[random.Random], Iterator[int]]:
    def draw(generator: random.Random) -> Iterator[int]:
        while True:
            yield from generator.sample(lengths, len(lengths))

    return draw


def _read_lengths(path: Path) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise UsageError(f"--lengths cannot be read: {reason}", value=str(path), hint=_HINT) from None
    return _parse_length_list(text, str(path))


def _parse_length_list(text: str, source: str) -> list[int]:
    try:
        found = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [int(one) for one in re.split(r"[\s,]+", text) if one]
        )
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not found or not all(type(one) is int and 0 < one < 1e9 for one in found):
        raise UsageError("--lengths has to hold lengths in tokens", value=source, hint="whole numbers, one per sample")
    return found
