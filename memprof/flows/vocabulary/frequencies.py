"""Token frequencies of a corpus, and the share that the most frequent tokens cover, exact in integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from memprof.errors import UsageError


@dataclass(frozen=True)
class Frequencies:
    """A histogram of token frequencies: pairs (count, number of different tokens with this count), in falling order.

    A corpus of n tokens has at most sqrt(2 n) pairs.
    """

    histogram: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, counts: Iterable[int]) -> Frequencies:
        """Return the frequencies of tokens with these `counts`; tokens with count 0 are left out."""
        histogram = Counter(counts)
        histogram.pop(0, None)
        return cls(tuple(sorted(histogram.items(), reverse=True)))

    @property
    def total(self) -> int:
        """Return the number of tokens in the corpus."""
        return sum(times * tokens for times, tokens in self.histogram)

    @property
    def distinct(self) -> int:
        """Return the number of different tokens."""
        return sum(tokens for _, tokens in self.histogram)

    def count_covered_tokens(self, cap: int) -> int:
        """Return the number of corpus tokens that are among the `cap` most frequent ones."""
        remaining, num_covered = cap, 0
        for count, num_tokens in self.histogram:
            num_taken = min(remaining, num_tokens)
            num_covered += count * num_taken
            remaining -= num_taken
            if not remaining:
                break
        return num_covered

    def compute_coverage(self, cap: int) -> float:
        """Return the share of the corpus that the `cap` most frequent tokens make up."""
        return self.count_covered_tokens(cap) / self.total if self.total else 1.0

    def find_cap(self, share: float | str | Fraction) -> int:
        """Return how many of the most frequent tokens together make up `share` (0 to 1) of the corpus.

        Raises UsageError for a share that is not from 0 to 1.
        """
        exact_share = Fraction(str(share)) if isinstance(share, float) else Fraction(share)
        if not 0 <= exact_share <= 1:
            raise UsageError("a coverage is from 0 to 1", value=share, hint="0.999 is 99.9%")
        remaining = -(-exact_share.numerator * self.total // exact_share.denominator)  # rounded up
        cap = 0
        for count, num_tokens in self.histogram:
            if count * num_tokens >= remaining:
                return cap - (-remaining // count)
            remaining -= count * num_tokens
            cap += num_tokens
        return cap
