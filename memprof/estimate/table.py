"""The table of an estimate: a cell per method and dtype, with its band and the GPUs that it fits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import islice
from typing import Any

from memprof.device.catalog import Gpu
from memprof.device.context import CONTEXT_BYTES, LARGEST_CONTEXT_BYTES
from memprof.errors import UsageError, unknown_name
from memprof.estimate.geometry import EstimatedModel
from memprof.estimate.methods import CHECKPOINT_FORMATS, METHODS, WEIGHT_DTYPES, Method, MethodPlan
from memprof.estimate.options import EstimateOptions
from memprof.estimate.peaks import list_moments
from memprof.estimate.ranks import SINGLE_GPU, Rank, list_ranks
from memprof.estimate.state import (
    CUBLAS_WORKSPACE,
    CUBLAS_WORKSPACE_HOPPER,
    QUANTIZED_STATES,
    PeakMoment,
)
from memprof.spec import MANY_STEPS
from memprof.workload.lengths import parse_lengths
from memprof.workload.optimizer_states import OPTIMIZER_STATES

FITS, BORDERLINE, NO = "fits", "borderline", "no"
# What measurements are of: torch.cuda.max_memory_allocated, max_memory_reserved, and nvidia-smi.
MEMORY_KINDS = ALLOCATED, RESERVED, DEVICE_USED = "allocated", "reserved", "device used"
DEFAULT_CONTEXT = 2048
_DEFAULT_OPTIONS = EstimateOptions()
# The columns for bitsandbytes' formats; both formats of 4 bits take the same memory.
_COLUMN_BY_FORMAT = {"nf4": "int4", "fp4": "int4"}

_OPTIMIZER_NAMES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}

VARYING = "varying lengths"


@dataclass(frozen=True, slots=True)
class Band:
    """The range of published measurements of one type of memory around their estimates, as fractions of these."""

    low: float
    high: float
    figures: int = 0  # Number of published measurements; 0: the band is that of simulated runs.
    sources: int = 0  # Number of their sources.
    inside: float = 0.0  # Fraction of the measurements within the band.
    held_out: float = 0.0  # The same fraction, cross-validated: each source with a band from the other sources.


@dataclass(frozen=True, slots=True)
class Cell:
    """The estimate for one method and one dtype of weights: a cell of the table."""

    plan: MethodPlan
    moments: tuple[PeakMoment, ...]
    is_derived: bool  # Whether the cell depends on a shape derived from the number of parameters.
    strategy: str = ""  # The parallel strategy; bytes are those of one GPU.
    rank: Rank = SINGLE_GPU  # The rank of the bytes.

    @property
    def method(self) -> Method:
        """Return the method of the cell's row."""
        return self.plan.method

    @property
    def title(self) -> str:
        """Return the title of the cell's row, which names the requested optimizer."""
        return self.method.title.replace(
            ", AdamW", f", {_OPTIMIZER_NAMES.get(self.plan.optimizer, self.plan.optimizer)}"
        )

    @property
    def peak(self) -> PeakMoment:
        """Return the moment with the most live bytes."""
        return max(self.moments, key=lambda moment: moment.num_bytes)

    @property
    def allocated_bytes(self) -> int:
        """Return the allocated bytes at the peak."""
        return self.peak.num_bytes

    @property
    def reserved_bytes(self) -> int:
        """Return the reserved bytes at the peak: allocated bytes, and those of cached blocks."""
        key = self.cached_fraction_key
        base_bytes = self.token_bytes if key.startswith(VARYING) else self.allocated_bytes
        return self.allocated_bytes + round(float(_read_bands()["cached"][key]) * base_bytes)

    @property
    def token_bytes(self) -> int:
        """Return the most bytes that activations, logits and loss have together at any moment."""
        return max(moment.terms["activations"] + moment.terms["logits and loss"] for moment in self.moments)

    @property
    def cached_fraction_key(self) -> str:
        """Return the key under which bands.json has the fraction of cached memory for the cell's method and peak."""
        name = self.method.key.removesuffix("-checkpointing")
        if not self.method.trains:
            return name
        if self.plan.padded and not self.plan.empties_cache:
            name = VARYING
        elif name != "lora":
            name = f"full, {'step' if self.peak.name == 'optimizer step' else 'backward'}"
        return f"{name}, checkpointing" if self.method.checkpointing else name

    @property
    def device_bytes(self) -> int:
        """Return the device memory used: reserved bytes and the CUDA context."""
        return self.reserved_bytes + CONTEXT_BYTES

    def compute_ranges(self, gpu: Gpu | None = None) -> dict[str, tuple[int, int, int]]:
        """Return estimate, minimum and maximum in bytes for each of MEMORY_KINDS, with the CUDA context of `gpu`."""
        hopper_extra, workspace = 0, self.peak.terms.get("library workspace", 0)
        if gpu is not None and gpu.compute_capability[0] == 9:
            hopper_extra = workspace * (CUBLAS_WORKSPACE_HOPPER - CUBLAS_WORKSPACE) // CUBLAS_WORKSPACE
        allocated, reserved = self.allocated_bytes + hopper_extra, self.reserved_bytes + hopper_extra
        ranges = {}
        for kind in MEMORY_KINDS:
            size = allocated if kind == ALLOCATED else reserved
            band = read_band(kind, self.method.kind)
            if self.method.kind == "weights":  # exact, except for as much cached memory as in inference
                band = Band(0.0, 0.0 if kind == ALLOCATED else _read_bands()["cached"]["inference"])
            # With an emptied cache, as on a full GPU, only the allocated bytes are reserved.
            limits = (min(round(size * (1 + band.low)), allocated), round(size * (1 + band.high)))
            gpu_context = CONTEXT_BYTES if gpu is None else gpu.context_bytes
            context = (gpu_context, CONTEXT_BYTES, LARGEST_CONTEXT_BYTES) if kind == DEVICE_USED else (0, 0, 0)
            low, high = (limit + context_bytes for limit, context_bytes in zip(limits, context[1:], strict=True))
            ranges[kind] = (size + context[0], low, high)
        return ranges

    def judge_fit(self, gpu: Gpu) -> str:
        """Return whether the cell fits `gpu` (FITS, BORDERLINE or NO), by its range of device memory used."""
        _, low, high = self.compute_ranges(gpu)[DEVICE_USED]
        if high <= gpu.total_bytes:
            return FITS
        return NO if low > gpu.total_bytes else BORDERLINE


@dataclass(frozen=True, slots=True)
class Estimate:
    """The table of an estimate, with its inputs."""

    subject: EstimatedModel
    dtype: str  # The requested column.
    batch_size: int
    context_length: int
    lora_rank: int
    lengths: str | None  # The requested lengths; `context_length` is then the longest batch's.
    gpus: int
    # By method and dtype; methods that are not supported in a dtype, or not known, are absent.
    cells: dict[tuple[str, str], Cell]
    sharded: tuple[Cell, ...]  # The same column on several GPUs, by each strategy.

    def list_plans(self) -> list[MethodPlan]:
        """Return the plans in the requested dtype that can be run: those of all methods except "weights"."""
        template = next(iter(self.cells.values())).plan
        plans = (dataclasses.replace(template, method=method, column=self.dtype) for method in METHODS)
        return [plan for plan in plans if plan.method.kind != "weights" and plan.method.supports(self.dtype)]

    def list_column(self) -> list[Cell]:
        """Return the cells of the requested dtype."""
        cells = [self.cells.get((method.key, self.dtype)) for method in METHODS]
        return [cell for cell in cells if cell is not None]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The peak of a run on the virtual GPU, to compare with an estimate."""

    stage: str  # The stage with the peak.
    allocated_bytes: int
    required_bytes: int  # The maximum of reserved memory, and the CUDA context.
    categories: Mapping[str, int]


STRATEGIES: tuple[tuple[str, Callable[[int], Rank]], ...] = (
    ("DDP", lambda n: Rank(replicas=n)),
    ("ZeRO-1", lambda n: Rank(state_shards=n, replicas=n)),
    ("ZeRO-2", lambda n: Rank(state_shards=n, grad_shards=n, replicas=n)),
    ("FSDP, ZeRO-3", lambda n: Rank(param_shards=n, state_shards=n, grad_shards=n, replicas=n, gathers=True)),
)


def find_column(dtype: str) -> str:
    """Return the table's column for a dtype or quantization. Raises UsageError: the table has no such column."""
    name = _COLUMN_BY_FORMAT.get(dtype, dtype)
    if name not in WEIGHT_DTYPES + CHECKPOINT_FORMATS:
        raise unknown_name("dtype", dtype, WEIGHT_DTYPES + CHECKPOINT_FORMATS)
    return name


def find_highest_cell(
    subject: EstimatedModel, plan: MethodPlan, batch_size: int, context_length: int, parallel: str, gpus: int
) -> Cell:
    """Return the cell of the rank with the highest peak, for training with the plan `parallel` over `gpus` GPUs.

    An empty `parallel` is one GPU. A sequence of `context_length` tokens may be divided among ranks.
    Raises UsageError: `parallel` is not a plan, or the model does not support it.
    """
    cells = (
        Cell(plan, list_moments(subject, plan, batch_size, context_length, rank), subject.is_derived, parallel, rank)
        for rank in list_ranks(subject, plan, parallel, gpus)
    )
    return max(cells, key=lambda cell: cell.allocated_bytes)


def build_estimate(subject: EstimatedModel, options: EstimateOptions = _DEFAULT_OPTIONS) -> Estimate:
    """Return the estimate's table: all methods in all dtypes.

    The default context length is 2,048 tokens, or the model's maximum if smaller. With `options.lengths`, the longest
    batch determines the estimate. Raises UsageError: an option is out of range.
    """
    new_tokens = 1 if options.new_tokens is None else options.new_tokens
    batch_size, gpus, parallel = options.batch_size, options.gpus, options.parallel
    counts = {"--batch-size": batch_size, "--lora-rank": options.lora_rank, "--gpus": gpus, "--new-tokens": new_tokens}
    for flag, value in counts.items():
        if value < 1:
            raise UsageError(f"{flag} must be at least 1", value=value, hint="give a positive whole number")
    if options.optimizer not in OPTIMIZER_STATES | QUANTIZED_STATES:
        raise unknown_name("--optimizer", options.optimizer, (*OPTIMIZER_STATES, *QUANTIZED_STATES))
    context = resolve_context_length(subject, options.context_length, batch_size, options.lengths)
    column = find_column(options.quantize or options.dtype or "bfloat16")
    columns = tuple(dict.fromkeys((*WEIGHT_DTYPES, column)))

    def build_cell(method: Method, column: str, rank: Rank, strategy: str = "") -> Cell | None:
        plan = MethodPlan(
            method, column, options.lora_rank, options.lora_targets, options.optimizer,
            options.optimizer_impl == "fused", new_tokens, options.lengths is not None, options.empties_cache,
            options.chunked_loss and method.trains,
        )  # fmt: skip
        if parallel is not None and strategy == parallel:
            return find_highest_cell(subject, plan, batch_size, context, parallel, gpus)
        if not method.supports(column) or (subject.geometry is None and (method.kind != "weights" or plan.quantized)):
            return None
        moments = list_moments(subject, plan, batch_size, context, rank)
        is_derived = subject.is_derived and (method.kind != "weights" or bool(plan.quantized))
        return Cell(plan, moments, is_derived, strategy)

    table = {(method.key, name): build_cell(method, name, SINGLE_GPU) for method in METHODS for name in columns}
    cells = {key: cell for key, cell in table.items() if cell is not None}
    methods = [method for method in METHODS if gpus > 1 and method.trains and method.kind != "lora"]
    strategies = STRATEGIES if parallel is None else ((parallel, lambda n: SINGLE_GPU),)
    sharded_cells = (
        build_cell(method, column, build_rank(gpus), strategy)
        for method in methods
        for strategy, build_rank in strategies
        if method.supports(column)
    )
    sharded = tuple(cell for cell in sharded_cells if cell is not None)
    return Estimate(subject, column, batch_size, context, options.lora_rank, options.lengths, gpus, cells, sharded)


def resolve_context_length(subject: EstimatedModel, requested: int | None, batch_size: int, lengths: str | None) -> int:
    """Return the context length in tokens: that of the longest batch of `lengths`, the one requested, or the default.
    Raises UsageError: the lengths cannot be read, or the model has fewer positions."""
    geometry = subject.geometry
    max_tokens = None if geometry is None else geometry.max_positions
    if lengths is not None:
        batches = parse_lengths(lengths).batches(batch_size, requested or max_tokens or 1 << 30)
        return max(longest for _, longest in islice(batches, MANY_STEPS))
    if requested is None:
        return DEFAULT_CONTEXT if max_tokens is None else min(DEFAULT_CONTEXT, max_tokens)
    if requested < 1:
        raise UsageError("--context-length must be at least 1", value=requested, hint="give a positive whole number")
    if geometry is not None and geometry.num_positions and max_tokens is not None and requested > max_tokens:
        problem = f"{subject.name} has positions for {max_tokens:,} tokens"
        raise UsageError(problem, value=f"--context-length {requested}", hint="give less")
    return requested


@cache
def _read_bands() -> dict[str, Any]:
    """Return the content of bands.json, which tests/benchmarks/estimate.py and estimate_published.py write."""
    text = files("memprof.estimate").joinpath("bands.json").read_text(encoding="utf-8")
    bands: dict[str, Any] = json.loads(text)
    return bands


def read_band(kind: str, method_kind: str) -> Band:
    """Return the band around estimates of the type of memory `kind` (one of MEMORY_KINDS) of a `Method.kind`; loaded
    weights have that of inference."""
    return Band(**_read_bands()["published"]["inference" if method_kind == "weights" else method_kind][kind])
