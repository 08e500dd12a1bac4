"""The answer of `memprof recommend`: plain data, under the names of its JSON. Sizes are bytes, times are seconds."""

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
    # `memprof profile` for this very run. A run with more than two micro-batches in a step has two; for a configuration
    # that was not chosen the run has one, on existing gradients (`--zero-grad zero`).
    command: str
    micro_batch: int  # sequences at a time.
    accumulation: int  # micro-batches in an optimizer step.
    needed_bytes: int  # of the GPU, the context included.
    host_bytes: int  # the most in host memory.
    headroom_bytes: int  # capacity minus need; negative if the need is larger.
    fits: bool  # on the GPU, and its host. If headroom_bytes is negative, with allocator retries.
    step_seconds: float | None  # the least time of a step of the whole effective batch; None if work was not counted.
    compute_seconds: float | None  # of that, without transfers.
    bus_seconds: float | None  # of that, transfers over the bus.
    given_up: str  # the loss of numerical precision; empty if none.
    pareto: bool  # no other run needs less memory and less time.
    oom_stage: str  # the stage, where it does not fit; or "host memory".
    link_seconds: float | None = None  # Of the step, communication between GPUs.
    parallel: str | None = None  # Distribution over GPUs.


@dataclass(frozen=True, slots=True)
class LargestFit:
    """The largest value that fits, and the next run, which does not fit; None if the model itself is the limit."""

    largest: int | None
    first_too_large: int | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """An alternative where nothing fits the GPU; for several GPUs, the lowest number of them."""

    what: str
    name: str
    needed_bytes: int
    estimate: bool  # An analytical estimate; else from a run.


@dataclass(frozen=True, slots=True)
class LengthRow:
    """The effect of a data set's lengths on a micro-batch size."""

    micro_batch: int  # sequences at a time.
    longest_fitting: int | None  # tokens; the longest padded batch that fits, None if the shortest does not.
    first_too_long: int | None  # tokens; the next tried length.
    too_long: int  # sequences of the data set that are longer.
    batches: int  # in an epoch, full ones.
    batch_odds: float  # probability that a random batch has one of them.
    epoch_odds: float  # probability that an epoch in random order has one of them.
    first_step_median: int | None  # the step by which it has met one with probability 50%; None if never.
    first_step_90: int | None  # and with 90%.
    step_sorted_ascending: int | None  # with sequences sorted by length, shortest first.
    step_sorted_descending: int | None  # longest first, or grouped as transformers' `group_by_length`.
    packed_fits: bool  # rows filled up to the context length.


@dataclass(frozen=True, slots=True)
class ChosenOverBatches:
    """The chosen configuration over batches in the order of a data loader."""

    batches: int  # micro-batches that were run.
    fits: bool  # over all of them.
    oom_stage: str  # where it does not.
    alloc_conf: str | None  # required settings of the allocator; None: none.
    reserved: tuple[ReservedOverSteps, ...]  # over the steps, by settings.


@dataclass(frozen=True, slots=True)
class LengthRisk:
    """The lengths of a data set, and their effect on memory."""

    file: str  # source file, and column.
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
    """The largest catalog model that fits a GPU for one task."""

    task: str  # the task and its method.
    model: str | None  # its name; None if not even the smallest fits.
    num_parameters: int  # of it.
    needed_bytes: int  # at `at_context` tokens.
    at_context: int  # tokens at which models were tried.
    context_length: int | None  # the longest that fits with this model.
    first_too_long: int | None  # the next tried length, which does not fit; None if the model allows no more.
    next_model: str | None  # the next larger catalog model, which does not fit; None if there is none.
    next_needed_bytes: int | None
    command: str  # `memprof profile` with it.


@dataclass(frozen=True, slots=True)
class Recommendation(JsonValue):
    """The answer of `memprof recommend`. Without a model `largest` is set, with one the rest."""

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
    max_positions: int | None = None  # Tokens that the model was designed for.
    alternatives: tuple[Alternative, ...] = ()
    gpus: int = 1
    snippets: dict[str, str] = field(default_factory=dict)
    launch: dict[str, str] = field(default_factory=dict)  # For snippets on several GPUs: the launch command of each.
    # For snippets that differ from the chosen configuration: the snippet's configuration.
    written_for: dict[str, str] = field(default_factory=dict)
    lengths: LengthRisk | None = None
    largest: tuple[Largest, ...] = ()
    runs: int = 0  # Number of simulated runs.
    not_applied: dict[str, str] = field(default_factory=dict)
    gpu_note: str = ""  # A note on the GPU's figures.
    assumptions: tuple[str, ...] = ()
    schema: int = SCHEMA
    memprof_version: str = __version__
    command: str = "recommend"

    @property
    def found(self) -> bool:
        """Return whether any configuration or model fits."""
        if self.largest:
            return any(row.model is not None for row in self.largest)
        return self.chosen is not None
