"""Words of a corpus, counted as they stream by, and a vocabulary of the most frequent of them. No torch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate

UNKNOWN = "<unk>"
WIKITEXT_2_WORDS = 33_278
"""Different words of WikiText-2, its own <unk> among them (Merity et al., 2016, arXiv:1609.07843, table 1)."""
WIKITEXT_2_TOKENS = 2_088_628
"""Of its training part (the same table)."""
WIKITEXT_103_TOKENS = 103_227_021


def synthetic_corpus(tokens: int = WIKITEXT_2_TOKENS, words: int = WIKITEXT_2_WORDS, seed: int = 0) -> Iterator[str]:
    """Words with frequencies by Zipf's law as Mandelbrot has it, 1 / (rank + 2.7); each occurs at least once.

    It stands for a text of that size where none is at hand: of its words nothing is true but how many there are.
    """
    yield from (f"word{rank}" for rank in range(min(words, tokens)))
    weights = list(accumulate(1 / (rank + 2.7) for rank in range(1, words + 1)))
    draw = random.Random(seed)
    left = tokens - words
    while left > 0:
        for rank in draw.choices(range(words), cum_weights=weights, k=min(left, 8192)):
            yield f"word{rank}"
        left -= 8192


def every_word(words: Iterable[str]) -> dict[str, int]:
    """As the report's code had it: an id for each word, however rare."""
    ids: dict[str, int] = {}
    for word in words:
        ids.setdefault(word, len(ids))
    return ids


def most_frequent(counts: Counter[str], size: int) -> dict[str, int]:
    """The report's mend: at most `size` ids, the first of them for all that is rare."""
    kept = [word for word, _ in counts.most_common(size) if word != UNKNOWN][: size - 1]
    return {word: number for number, word in enumerate((UNKNOWN, *kept))}
