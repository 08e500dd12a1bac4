"""The result of `memprof vocab`, with the names of its JSON.

Sizes are bytes, coverage is a fraction from 0 to 1, unknown values are None.
"""

from __future__ import annotations

from dataclasses import dataclass

from memprof.trace.json_values import JsonValue

SCHEMA = 2  # 2: names (old_names.py)
SIMULATED, ARITHMETIC = "simulated", "arithmetic"


@dataclass(frozen=True, slots=True)
class CoveragePoint:
    """The fraction of a corpus that the most frequent `tokens` tokens cover."""

    tokens: int
    coverage: float


@dataclass(frozen=True, slots=True)
class TokenCap:
    """A limit of the vocabulary size: how many tokens are kept, and the share of the corpus that they cover."""

    name: str  # The coverage that was requested, such as 99.9%, or `asked` for a number of tokens.
    tokens: int  # The most frequent ones, which stay.
    covered: int  # Tokens of the corpus among them.
    coverage: float
    vocab_size: int  # Rows of embedding and head: the tokens, and those reserved.


@dataclass(frozen=True, slots=True)
class VocabularyMemory:
    """Device memory of a training step with one vocabulary size: the peak of each category."""

    name: str  # `before`, or the name of a cap.
    vocab_size: int
    num_parameters: int | None
    parameters_bytes: int | None
    gradients_bytes: int | None
    optimizer_state_bytes: int | None
    logits_bytes: int  # Simulated: of all that the head and the loss make; by arithmetic: one copy of the logits.
    peak_bytes: int | None  # Most allocated at once.
    required_bytes: int | None  # Of the GPU, with the CUDA context.
    fits: bool | None
    pages: bool = False  # Whether it fits, and some of the memory that GPU and host share pages.


@dataclass(frozen=True, slots=True)
class CapSavings:
    """Device memory with the original vocabulary and with each smaller one, smallest last."""

    source: str  # simulated: by runs; arithmetic: of embedding, head and one copy of the logits alone.
    what: str  # The model and the run, in words.
    gpu: str | None
    before: VocabularyMemory
    capped: tuple[VocabularyMemory, ...]
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Vocabulary(JsonValue):
    """The result of `memprof vocab`."""

    schema: int
    memprof_version: str
    command: str
    corpus: tuple[str, ...]  # As given by the user.
    files: int
    rows: int
    num_bytes: int
    tokenizer: str
    tokens: int
    distinct: int  # Different tokens.
    once: int  # Tokens that occur once.
    most_common: tuple[tuple[str, int], ...]
    vocab_size: int | None  # Ids that the tokenizer has.
    unseen: int | None  # Ids that do not occur in the corpus.
    highest_id: int | None  # The highest id that occurs.
    unseen_ranges: tuple[tuple[int, int], ...]
    special_unseen: tuple[str, ...]
    reserved: int  # Tokens added to each cap: unknown and special ones.
    curve: tuple[CoveragePoint, ...]  # Coverage by number of tokens.
    caps: tuple[TokenCap, ...]
    savings: CapSavings | None
    notes: tuple[str, ...]
