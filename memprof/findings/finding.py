"""What a rule finds, and what it may look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from memprof.findings.lives import Lives
from memprof.ledger.ledger import Ledger
from memprof.spec import TargetSpec
from memprof.trace.plain import json_name


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"  # a real run dies
    WARNING = "warning"  # memory that a remedy would give back
    NOTE = "note"  # worth knowing


@dataclass(frozen=True, slots=True)
class Evidence:
    """One tensor or operator that shows the finding; what does not apply is None."""

    text: str
    """One line for people."""
    num_bytes: int | None = field(default=None, metadata=json_name("bytes", last=True))
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    module: str | None = None
    op: str | None = None
    source: str | None = None
    """`file:line function`."""
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that costs memory or stops the run, with proof and what would help."""

    id: str
    severity: Severity
    title: str
    num_bytes: int | None = field(metadata=json_name("bytes", last=True))
    evidence: tuple[Evidence, ...]
    remedies: tuple[str, ...]
    """Names of remedies, most helpful first."""


@dataclass(frozen=True, slots=True)
class Context:
    """What rules look at; they change nothing."""

    ledger: Ledger
    usable_bytes: int | None
    """What the card offers to the allocator: capacity minus CUDA context; None if there is no card to judge by."""
    card: str = ""
    spec: TargetSpec | None = None
    """None when the trace is not of `memprof profile` (a script, a snapshot)."""
    vocab_size: int | None = None
    asked_vocab_size: int | None = None
    num_parameters: int | None = None
    context_length: int | None = None
    max_positions: int | None = None
    lives: Lives = field(init=False, repr=False, compare=False)
    """Births and deaths of the ledger's storages, for all rules to share."""

    def __post_init__(self) -> None:
        """Follow the storages' lives; by the base class's way, for the dataclass is frozen."""
        object.__setattr__(self, "lives", Lives(self.ledger))

    @property
    def tokens(self) -> int | None:
        """Tokens in one micro-batch."""
        if self.spec is None or self.context_length is None:
            return None
        return self.spec.batch_size * self.context_length
