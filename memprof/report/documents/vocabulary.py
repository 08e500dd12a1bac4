"""The typed document of `memprof vocab`: what a corpus holds, and what a smaller vocabulary saves.

All sizes are integer bytes, coverage is a share from 0 to 1. What is not known is None.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from memprof.corpus import CorpusCount
from memprof.corpus.frequencies import Frequencies
from memprof.trace.json_values import JsonValue

SCHEMA = 2  # 2: names (old_names.py)
SIMULATED, ARITHMETIC = "simulated", "arithmetic"
_SHOWN_POINTS = 13


@dataclass(frozen=True, slots=True)
class Point:
    """The most frequent `tokens` make up this share of the corpus."""

    tokens: int
    coverage: float


@dataclass(frozen=True, slots=True)
class Cap:
    """One cap."""

    name: str  # The coverage that was requested, such as 99.9%, or `asked` for a number of tokens.
    tokens: int  # The most frequent ones, which stay.
    covered: int  # Tokens of the corpus among them.
    coverage: float
    vocab_size: int  # Rows of embedding and head: the tokens, and those reserved.


@dataclass(frozen=True, slots=True)
class VocabularyMemory:
    """What one vocabulary takes, the most of each that is live at once."""

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


@dataclass(frozen=True, slots=True)
class Savings:
    """The run before and with each cap, the fewest rows last."""

    source: str  # simulated: by runs; arithmetic: of embedding, head and one copy of the logits alone.
    what: str  # The model and the run, in words.
    gpu: str | None
    before: VocabularyMemory
    capped: tuple[VocabularyMemory, ...]
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Vocabulary(JsonValue):
    """The whole document."""

    schema: int
    memprof_version: str
    command: str
    corpus: tuple[str, ...]  # As the user named it.
    files: int
    rows: int
    num_bytes: int
    tokenizer: str
    tokens: int
    distinct: int
    once: int  # Tokens that occur once.
    most_common: tuple[tuple[str, int], ...]
    vocab_size: int | None  # Ids that the tokenizer has.
    unseen: int | None
    highest_id: int | None
    unseen_ranges: tuple[tuple[int, int], ...]
    special_unseen: tuple[str, ...]
    reserved: int
    curve: tuple[Point, ...]
    caps: tuple[Cap, ...]
    savings: Savings | None
    notes: tuple[str, ...]


def build_vocabulary(
    corpus: tuple[str, ...], counted: CorpusCount, caps: tuple[Cap, ...], savings: Savings | None, version: str
) -> Vocabulary:
    """Return the document on what was counted."""
    frequencies = counted.frequencies
    # What both have, under the same names.
    same = {field.name: getattr(counted, field.name) for field in fields(counted) if field.name != "frequencies"}
    return Vocabulary(
        schema=SCHEMA,
        memprof_version=version,
        command="vocab",
        corpus=corpus,
        tokens=frequencies.total,
        distinct=frequencies.distinct,
        once=dict(frequencies.histogram).get(1, 0),
        curve=curve(frequencies),
        caps=caps,
        savings=savings,
        **same,
    )


def curve(frequencies: Frequencies, points: int = _SHOWN_POINTS) -> tuple[Point, ...]:
    """Return coverage at round numbers of tokens (1, 2, 5, 10, ...), the last `points` of them, and at all tokens."""
    distinct = frequencies.distinct
    if not distinct:
        return ()
    rounds = [lead * 10**power for power in range(len(str(distinct))) for lead in (1, 2, 5)]
    shown = [tokens for tokens in rounds if tokens < distinct][-(points - 1) :]
    return tuple(Point(tokens, frequencies.coverage(tokens)) for tokens in [*shown, distinct])
