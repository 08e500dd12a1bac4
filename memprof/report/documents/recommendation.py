"""The answer of `memprof recommend`: plain data, named as in its JSON. Sizes are bytes, times are seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memprof.ledger.batches import ReservedOverSteps
from memprof.trace.facts import DeviceFacts
from memprof.trace.json_values import JsonValue
from memprof.version import __version__

SCHEMA = 2  # 2: names (old_names.py)


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration that was run."""

    name: str  # in words.
    settings: dict[str, Any]  # precision, optimizer, activations, chunked_loss, attention.
    # `memprof profile` for the very run that was made. Of more than two micro-batches in a step it has two; of a
    # configuration that was not chosen one, on gradients that are there (`--zero-grad zero`).
    command: str
    micro_batch: int  # sequences at a time.
    accumulation: int  # micro-batches in an optimizer step.
    needed_bytes: int  # of the GPU, the context included.
    host_bytes: int  # the most in host memory.
    headroom_bytes: int  # what the GPU has more; negative if less.
    fits: bool  # on the GPU, and its host. With a negative margin only because the allocator gives its cache back.
    step_seconds: float | None  # the least time of a step of the whole effective batch; None if work was not counted.
    compute_seconds: float | None  # of that, without transfers.
    bus_seconds: float | None  # of that, transfers over the bus.
    given_up: str  # what the numbers lose; empty if nothing.
    pareto: bool  # nothing else that was run needs less memory and less time.
    oom_stage: str  # the stage, where it does not fit; or "host memory".
    link_seconds: float | None = None  # Of the step, what is sent between GPUs.
    parallel: str | None = None  # How it is spread over GPUs.


@dataclass(frozen=True, slots=True)
class LargestFit:
    """The largest that fits, and the next that was run and does not; None if the model itself is the limit."""

    largest: int | None
    first_too_large: int | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """A way out where nothing fits the GPU; of several GPUs, the least number of them."""

    what: str
    name: str
    needed_bytes: int
    estimate: bool  # By a closed form; else it was run.


@dataclass(frozen=True, slots=True)
class LengthRow:
    """A micro-batch of a data set, and what its lengths do to it."""

    micro_batch: int  # sequences at a time.
    longest_fitting: int | None  # tokens; the longest padded batch that fits, None if the shortest does not.
    first_too_long: int | None  # tokens; the next length that was tried.
    too_long: int  # sequences of the data set that are longer.
    batches: int  # in an epoch, full ones.
    batch_odds: float  # that a random batch has one of them.
    epoch_odds: float  # that an epoch in random order meets one.
    first_step_median: int | None  # the step by which it has met one as likely as not; None if it never does.
    first_step_90: int | None  # and with 90%.
    step_sorted_ascending: int | None  # with sequences sorted by length, shortest first.
    step_sorted_descending: int | None  # longest first, or grouped as transformers' `group_by_length`.
    packed_fits: bool  # rows filled up to the context length.


@dataclass(frozen=True, slots=True)
class ChosenOverBatches:
    """The chosen configuration over batches as a data loader makes them."""

    batches: int  # micro-batches that were run.
    fits: bool  # over all of them.
    oom_stage: str  # where it does not.
    alloc_conf: str | None  # settings of the allocator that it needs for that; None: none.
    reserved: tuple[ReservedOverSteps, ...]  # over the steps, by settings.


@dataclass(frozen=True, slots=True)
class LengthRisk:
    """A data set's lengths: what was read, and what they mean for memory."""

    file: str  # where they came from, and which column.
    count: int  # sequences.
    empty: int  # lines or rows without a value, which are left out.
    bad: int  # lines or rows that are no length, which are left out; `bad_examples` names the first.
    bad_examples: tuple[str, ...]  # "line 3: 'abc'".
    truncated: int  # sequences longer than the context length, cut to it.
    shortest: int  # tokens, after cutting.
    median: int  # tokens, after cutting.
    p99: int  # tokens, after cutting.
    longest: int  # tokens, after cutting.
    packed_rows: int  # rows of the context length that all tokens fill.
    context_length: int  # of a packed row, and what longer ones are cut to.
    rows: tuple[LengthRow, ...] = ()  # for some micro-batches.
    stream: ChosenOverBatches | None = None  # of the chosen configuration, if it was requested.


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest catalog model that a GPU can do something with."""

    task: str  # what is done with it, and how.
    model: str | None  # its name; None if not even the smallest fits.
    num_parameters: int  # of it.
    needed_bytes: int  # at `at_context` tokens.
    at_context: int  # tokens at which models were tried.
    context_length: int | None  # the longest that fits with this model.
    first_too_long: int | None  # the next that was tried and does not fit; None if the model allows no more.
    next_model: str | None  # the next larger of the catalog, which was run and does not fit; None if there is none.
    next_needed_bytes: int | None
    command: str  # `memprof profile` with it.


@dataclass(frozen=True, slots=True)
class Recommendation(JsonValue):
    """The whole answer. Without a model `largest` is filled, with one the rest."""

    device: DeviceFacts
    goal: str | None = None
    model: str | None = None
    num_parameters: int | None = None
    context_length: int | None = None
    effective_batch: int | None = None
    chosen: Configuration | None = None
    reason: str = ""
    choices: tuple[Configuration, ...] = ()
    batch: LargestFit | None = None
    context: LargestFit | None = None
    max_positions: int | None = None  # Tokens that the model was made for.
    alternatives: tuple[Alternative, ...] = ()
    gpus: int = 1
    snippets: dict[str, str] = field(default_factory=dict)
    launch: dict[str, str] = field(default_factory=dict)  # Of snippets over several GPUs: the line that starts each.
    # And of those that are not written for what was chosen: for which configuration they are.
    written_for: dict[str, str] = field(default_factory=dict)
    lengths: LengthRisk | None = None
    largest: tuple[Largest, ...] = ()
    runs: int = 0  # Simulated runs that were made.
    not_applied: dict[str, str] = field(default_factory=dict)
    gpu_note: str = ""  # What to know about the GPU's figures.
    assumptions: tuple[str, ...] = ()
    schema: int = SCHEMA
    memprof_version: str = __version__
    command: str = "recommend"

    @property
    def found(self) -> bool:
        """Return whether something fits."""
        if self.largest:
            return any(row.model is not None for row in self.largest)
        return self.chosen is not None
