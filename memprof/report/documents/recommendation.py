"""The result of `memprof recommend`, with the names of its JSON; sizes are bytes, times are seconds."""

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
    """A simulated configuration, with its memory and the time of a step."""

    name: str  # Description of the settings.
    settings: dict[str, Any]  # Precision, optimizer, activations, chunked_loss, attention.
    # The `profile` command of the run. The chosen configuration runs at most two micro-batches of a step, others
    # one, on existing gradients (`--zero-grad zero`).
    command: str
    micro_batch: int  # Sequences in a micro-batch.
    accumulation: int  # Micro-batches in an optimizer step.
    needed_bytes: int  # Device memory, CUDA context included.
    host_bytes: int  # Peak of host memory.
    headroom_bytes: int  # Capacity minus `needed_bytes`; may be negative.
    fits: bool  # In device and host memory; with negative headroom, after allocator retries.
    step_seconds: float | None  # Minimum time of an optimizer step; None: operations were not counted.
    compute_seconds: float | None  # Part of `step_seconds` for computing.
    bus_seconds: float | None  # Part of `step_seconds` for transfers over the bus.
    given_up: str  # The loss of numerical precision; empty: none.
    pareto: bool  # Whether no other run needs less memory and less time.
    oom_stage: str  # The stage that runs out of memory, or "host memory" or "paging"; empty if it fits.
    link_seconds: float | None = None  # Part of `step_seconds` for communication between GPUs.
    parallel: str | None = None  # Distribution over GPUs.


@dataclass(frozen=True, slots=True)
class LargestFit:
    """The largest batch or context that fits, and the next larger one that was tried."""

    largest: int | None  # None: not even the smallest fits.
    first_too_large: int | None  # None: no larger one was tried.


@dataclass(frozen=True, slots=True)
class Alternative:
    """Something that fits if nothing fits the GPU; with several GPUs, the smallest number of GPUs that suffices."""

    what: str  # The kind of alternative, in words.
    name: str
    needed_bytes: int
    estimate: bool  # An analytical estimate; else from a run.


@dataclass(frozen=True, slots=True)
class LengthRow:
    """The effect of a data set's sequence lengths on memory, for one micro-batch size."""

    micro_batch: int  # Sequences at a time.
    longest_fitting: int | None  # Tokens; the longest padded batch that fits, None if the shortest does not.
    first_too_long: int | None  # Tokens; the next tried length.
    too_long: int  # Sequences of the data set that are longer.
    batches: int  # In an epoch, full ones.
    batch_odds: float  # Probability that a random batch has one of them.
    epoch_odds: float  # Probability that an epoch in random order has one of them.
    first_step_median: int | None  # The step by which it has met one with probability 50%; None if never.
    first_step_90: int | None  # And with 90%.
    step_sorted_ascending: int | None  # The first such step with sequences sorted by length, shortest first.
    step_sorted_descending: int | None  # Longest first, or grouped as transformers' `group_by_length`.
    packed_fits: bool  # Rows filled up to the context length.


@dataclass(frozen=True, slots=True)
class DataLoaderRun:
    """The result of running the chosen configuration over batches in the order of a data loader."""

    batches: int  # Micro-batches that were run.
    fits: bool  # Over all of them.
    oom_stage: str  # Where it does not.
    alloc_conf: str | None  # Required settings of the allocator; None: none.
    reserved: tuple[ReservedOverSteps, ...]  # Over the steps, by settings.


@dataclass(frozen=True, slots=True)
class LengthRisk:
    """The sequence lengths of a data set, and their effect on memory."""

    file: str  # Source file, and column.
    count: int  # Sequences.
    empty: int  # Lines or rows without a value, which are left out.
    bad: int  # Lines or rows that are no length, which are left out; `bad_examples` names the first.
    bad_examples: tuple[str, ...]  # "line 3: 'abc'".
    truncated: int  # Sequences longer than the context length, cut to it.
    shortest: int  # Tokens, after cutting.
    median: int  # Tokens, after cutting.
    p99: int  # Tokens, after cutting.
    longest: int  # Tokens, after cutting.
    packed_rows: int  # Rows of the context length that all tokens fill.
    context_length: int  # Of a packed row, and what longer ones are cut to.
    rows: tuple[LengthRow, ...] = ()  # For some micro-batches.
    stream: DataLoaderRun | None = None  # Of the chosen configuration, if it was requested.


@dataclass(frozen=True, slots=True)
class LargestModel:
    """The largest model of the catalog that fits a GPU for one task."""

    task: str  # The task and its method.
    model: str | None  # Its name; None if not even the smallest fits.
    num_parameters: int  # Of it.
    needed_bytes: int  # At `at_context` tokens.
    at_context: int  # Tokens at which models were tried.
    context_length: int | None  # The longest that fits with this model.
    first_too_long: int | None  # The next tried length, which does not fit; None if the model allows no more.
    next_model: str | None  # The next larger catalog model, which does not fit; None if there is none.
    next_needed_bytes: int | None  # Device memory that `next_model` needs; None: unknown.
    command: str  # `memprof profile` with it.


@dataclass(frozen=True, slots=True)
class Recommendation(JsonValue):
    """The result of `memprof recommend`: without a model `largest`, with one a configuration."""

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
    largest: tuple[LargestModel, ...] = ()
    runs: int = 0  # Number of simulated runs.
    not_applied: dict[str, str] = field(default_factory=dict)
    gpu_note: str = ""  # A note on the GPU's figures.
    assumptions: tuple[str, ...] = ()
    schema: int = SCHEMA
    memprof_version: str = __version__
    command: str = "recommend"

    def list_commands(self) -> list[str]:
        """Return the command of each row of the table, in order; "" where no model fits."""
        if self.largest:
            return [row.command if row.model is not None else "" for row in self.largest]
        return [row.command for row in self.choices]

    @property
    def has_result(self) -> bool:
        """Return whether any configuration or model fits."""
        if self.largest:
            return any(row.model is not None for row in self.largest)
        return self.chosen is not None
