"""What `memprof recommend` found: plain data, with the names that its JSON has. Sizes are bytes, times are seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memprof.ledger.batches import ReservedOverSteps
from memprof.trace.facts import DeviceFacts
from memprof.trace.plain import Plain
from memprof.version import __version__

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """One configuration that was run.

    Attributes:
        name: in words.
        settings: precision, optimizer, activations, chunked_loss, attention.
        command: `memprof profile` for the very run that was made. Of more than two micro-batches in a step it has two;
            of a configuration that was not chosen one, on gradients that are there (`--zero-grad zero`).
        micro_batch: sequences at a time.
        accumulation: micro-batches in an optimizer step.
        needed_bytes: of the card, the context included.
        host_bytes: the most in host memory.
        margin_bytes: what the card has more; negative if less.
        fits: on the card, and its host. With a negative margin only because the allocator gives its cache back.
        step_seconds: the least time of a step of the whole effective batch; None if work was not counted.
        compute_seconds: of that, without transfers.
        bus_seconds: of that, transfers over the bus.
        given_up: what the numbers lose; empty if nothing.
        pareto: nothing else that was run needs less memory and less time.
        dies_in: the stage, where it does not fit; or "host memory".
    """

    name: str
    settings: dict[str, Any]
    command: str
    micro_batch: int
    accumulation: int
    needed_bytes: int
    host_bytes: int
    margin_bytes: int
    fits: bool
    step_seconds: float | None
    compute_seconds: float | None
    bus_seconds: float | None
    given_up: str
    pareto: bool
    dies_in: str
    link_seconds: float | None = None
    """Of the step, what is sent between cards."""
    parallel: str | None = None
    """How it is spread over cards."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest that fits, and the next that was run and does not; None if the model itself is the limit."""

    largest: int | None
    first_too_large: int | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """What would do where nothing fits the card; of several cards, the least number of them."""

    what: str
    name: str
    needed_bytes: int
    estimate: bool
    """By a closed form; else it was run."""


@dataclass(frozen=True, slots=True)
class LengthRow:
    """A micro-batch of a data set, and what its lengths do to it.

    Attributes:
        micro_batch: sequences at a time.
        longest_fitting: tokens; the longest padded batch that fits, None if the shortest does not.
        first_too_long: tokens; the next length that was tried.
        too_long: sequences of the data set that are longer.
        batches: in an epoch, full ones.
        batch_odds: that a random batch has one of them.
        epoch_odds: that an epoch in random order meets one.
        first_step_median: the step by which it has met one as likely as not; None if it never does.
        first_step_90: and with 90%.
        step_sorted_ascending: with sequences sorted by length, shortest first.
        step_sorted_descending: longest first, or grouped as transformers' `group_by_length`.
        packed_fits: rows filled up to the context length.
    """

    micro_batch: int
    longest_fitting: int | None
    first_too_long: int | None
    too_long: int
    batches: int
    batch_odds: float
    epoch_odds: float
    first_step_median: int | None
    first_step_90: int | None
    step_sorted_ascending: int | None
    step_sorted_descending: int | None
    packed_fits: bool


@dataclass(frozen=True, slots=True)
class Stream:
    """The chosen configuration over batches as a data loader makes them.

    Attributes:
        batches: micro-batches that were run.
        fits: over all of them.
        dies_in: where it does not.
        alloc_conf: settings of the allocator that it needs for that; None: none.
        reserved: over the steps, by settings.
    """

    batches: int
    fits: bool
    dies_in: str
    alloc_conf: str | None
    reserved: tuple[ReservedOverSteps, ...]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A data set's lengths: what was read, and what they mean for memory.

    Attributes:
        file: where they came from, and which column.
        count: sequences.
        empty: lines or rows without a value, which are left out.
        bad: lines or rows that are no length, which are left out; `bad_examples` names the first.
        bad_examples: "line 3: 'abc'".
        truncated: sequences longer than the context length, cut to it.
        shortest, median, p99, longest: tokens, after cutting.
        packed_rows: rows of the context length that all tokens fill.
        context_length: of a packed row, and what longer ones are cut to.
        rows: for some micro-batches.
        stream: of the chosen configuration, if it was asked for.
    """

    file: str
    count: int
    empty: int
    bad: int
    bad_examples: tuple[str, ...]
    truncated: int
    shortest: int
    median: int
    p99: int
    longest: int
    packed_rows: int
    context_length: int
    rows: tuple[LengthRow, ...] = ()
    stream: Stream | None = None


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest catalog model that a card can do something with.

    Attributes:
        task: what is done with it, and how.
        model: its name; None if not even the smallest fits.
        num_parameters: of it.
        needed_bytes: at `at_context` tokens.
        at_context: tokens at which models were tried.
        context_length: the longest that fits with this model.
        first_too_long: the next that was tried and does not fit; None if the model allows no more.
        next_model: the next larger of the catalog, which was run and does not fit; None if there is none.
        command: `memprof profile` with it.
    """

    task: str
    model: str | None
    num_parameters: int
    needed_bytes: int
    at_context: int
    context_length: int | None
    first_too_long: int | None
    next_model: str | None
    next_needed_bytes: int | None
    command: str


@dataclass(frozen=True, slots=True)
class Recommendation(Plain):
    """The whole answer. Without a model `largest` is filled, with one the rest."""

    device: DeviceFacts
    goal: str | None = None
    model: str | None = None
    num_parameters: int | None = None
    context_length: int | None = None
    effective_batch: int | None = None
    chosen: Choice | None = None
    reason: str = ""
    choices: tuple[Choice, ...] = ()
    batch: Bound | None = None
    context: Bound | None = None
    max_positions: int | None = None
    """Tokens that the model was made for."""
    alternatives: tuple[Alternative, ...] = ()
    gpus: int = 1
    snippets: dict[str, str] = field(default_factory=dict)
    launch: dict[str, str] = field(default_factory=dict)
    """Of snippets over several cards: the line that starts each."""
    written_for: dict[str, str] = field(default_factory=dict)
    """And of those that are not written for what was chosen: for which configuration they are."""
    lengths: Lengths | None = None
    largest: tuple[Largest, ...] = ()
    runs: int = 0
    """Simulated runs that were made."""
    not_applied: dict[str, str] = field(default_factory=dict)
    card_note: str = ""
    """What to know about the card's figures."""
    assumptions: tuple[str, ...] = ()
    schema: int = SCHEMA
    memprof_version: str = __version__
    command: str = "recommend"

    @property
    def found(self) -> bool:
        """Something fits."""
        if self.largest:
            return any(row.model is not None for row in self.largest)
        return self.chosen is not None
