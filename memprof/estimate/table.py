"""The table of an estimate: a cell for every method and dtype, its band, and the GPUs that it fits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import islice
from typing import Any

from memprof.device.catalog import Gpu
from memprof.device.context import CONTEXT_BYTES, LARGEST_CONTEXT_BYTES
from memprof.errors import UsageError, unknown_name
from memprof.estimate.geometry import Subject
from memprof.estimate.methods import COLUMNS, FORMATS, METHODS, Method, MethodPlan
from memprof.estimate.options import EstimateOptions
from memprof.estimate.peaks import moments
from memprof.estimate.ranks import ALONE, Rank, ranks_in
from memprof.estimate.state import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_HOPPER, QUANTIZED_STATES, STATES, PeakMoment
from memprof.spec import MANY_STEPS
from memprof.workload.lengths import parse_lengths

FITS, BORDERLINE, NO = "fits", "borderline", "no"
# Kinds of figures that are published: torch.cuda.max_memory_allocated, max_memory_reserved, and nvidia-smi's.
KINDS = ALLOCATED, RESERVED, DEVICE_USED = "allocated", "reserved", "device used"
DEFAULT_CONTEXT = 2048
_DEFAULT_OPTIONS = EstimateOptions()
# The columns for bitsandbytes' formats; both formats of 4 bits take the same memory.
_COLUMN_BY_FORMAT = {"nf4": "int4", "fp4": "int4"}

_NAMES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}

VARYING = "varying lengths"


@dataclass(frozen=True, slots=True)
class Band:
    """The deviation of published figures of one kind from the closed form, as fractions, without the CUDA context."""

    low: float
    high: float
    figures: int = 0  # The number of published figures.
    sources: int = 0
    inside: float = 0.0  # The fraction of published figures within the band.
    held_out: float = 0.0  # The same fraction by leave-one-out: for figures of a source, a band without this source.


@dataclass(frozen=True, slots=True)
class Cell:
    """The estimate of one method in one dtype."""

    plan: MethodPlan
    moments: tuple[PeakMoment, ...]
    derived: bool  # The shape was derived from the number of parameters.
    strategy: str = ""  # The parallel strategy; amounts are those of one GPU.
    rank: Rank = ALONE  # The rank that the amounts belong to.

    @property
    def method(self) -> Method:
        """Return the method of the cell's row."""
        return self.plan.method

    @property
    def title(self) -> str:
        """Return the title of the cell's row, with the requested optimizer."""
        return self.method.title.replace(", AdamW", f", {_NAMES.get(self.plan.optimizer, self.plan.optimizer)}")

    @property
    def peak(self) -> PeakMoment:
        """Return the moment with the largest sum."""
        return max(self.moments, key=lambda moment: moment.num_bytes)

    @property
    def allocated_bytes(self) -> int:
        """Return the allocated bytes at the peak."""
        return self.peak.num_bytes

    @property
    def reserved_bytes(self) -> int:
        """Return the reserved bytes at the peak: allocated bytes and cached blocks."""
        key = self.cached_key
        whole = self.of_tokens_bytes if key.startswith(VARYING) else self.allocated_bytes
        return self.allocated_bytes + round(float(_read_bands()["cached"][key]) * whole)

    @property
    def of_tokens_bytes(self) -> int:
        """Return the maximum sum of activations, logits and loss over all moments."""
        return max(moment.terms["activations"] + moment.terms["logits and loss"] for moment in self.moments)

    @property
    def cached_key(self) -> str:
        """Return the key in bands.json of the measured fraction of cached memory: the method, and the peak's moment."""
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

    def figures(self, gpu: Gpu | None = None) -> dict[str, tuple[int, int, int]]:
        """Return the estimate, and its minimum and maximum by the band, for each kind of figure."""
        extra, workspace = 0, self.peak.terms.get("library workspace", 0)
        if gpu is not None and gpu.compute_capability[0] == 9:
            extra = workspace * (CUBLAS_WORKSPACE_HOPPER - CUBLAS_WORKSPACE) // CUBLAS_WORKSPACE
        allocated, reserved = self.allocated_bytes + extra, self.reserved_bytes + extra
        found = {}
        for kind in KINDS:
            size = allocated if kind == ALLOCATED else reserved
            band = band_of(kind)
            if self.method.kind == "weights":  # exact, except for as much cached memory as in inference
                band = Band(0.0, 0.0 if kind == ALLOCATED else _read_bands()["cached"]["inference"])
            # A program that empties its cache, as the allocator does on a full GPU, reserves only its allocated bytes.
            limits = (min(round(size * (1 + band.low)), allocated), round(size * (1 + band.high)))
            likely = CONTEXT_BYTES if gpu is None else gpu.context_bytes
            context = (likely, CONTEXT_BYTES, LARGEST_CONTEXT_BYTES) if kind == DEVICE_USED else (0, 0, 0)
            low, high = (limit + outside for limit, outside in zip(limits, context[1:], strict=True))
            found[kind] = (size + context[0], low, high)
        return found

    def on(self, gpu: Gpu) -> str:
        """Return the verdict for a GPU (fits, borderline or no), by the band of the device memory used."""
        _, low, high = self.figures(gpu)[DEVICE_USED]
        if high <= gpu.total_bytes:
            return FITS
        return NO if low > gpu.total_bytes else BORDERLINE


@dataclass(frozen=True, slots=True)
class Estimate:
    """The table of an estimate, with its inputs."""

    subject: Subject
    dtype: str  # The requested column.
    batch_size: int
    context_length: int
    lora_rank: int
    lengths: str | None  # The requested lengths; `context_length` is then the longest batch's.
    gpus: int
    # By method and dtype; methods that are not supported in a dtype, or not known, are absent.
    cells: dict[tuple[str, str], Cell]
    sharded: tuple[Cell, ...]  # The same column on several GPUs, by each strategy.

    def plans(self) -> list[MethodPlan]:
        """Return the plans of the requested column that a run can have: all methods but "weights"."""
        shared = next(iter(self.cells.values())).plan
        made = (dataclasses.replace(shared, method=method, column=self.dtype) for method in METHODS)
        return [plan for plan in made if plan.method.kind != "weights" and plan.method.applies(self.dtype)]

    def column(self) -> list[Cell]:
        """Return the cells of the requested column."""
        found = [self.cells.get((method.key, self.dtype)) for method in METHODS]
        return [cell for cell in found if cell is not None]


@dataclass(frozen=True, slots=True)
class Simulated:
    """The outcome of a run on the virtual GPU."""

    stage: str  # The stage with the peak.
    allocated_bytes: int
    required_bytes: int  # The maximum of reserved memory, and the CUDA context.
    categories: Mapping[str, int]


STRATEGIES: tuple[tuple[str, Callable[[int], Rank]], ...] = (
    ("DDP", lambda n: Rank(replicas=n)),
    ("ZeRO-1", lambda n: Rank(optimizer=n, replicas=n)),
    ("ZeRO-2", lambda n: Rank(optimizer=n, gradients=n, replicas=n)),
    ("FSDP, ZeRO-3", lambda n: Rank(parameters=n, optimizer=n, gradients=n, replicas=n, gathers=True)),
)


def column_of(dtype: str) -> str:
    """Return the column of a dtype or quantized format. Raises UsageError: the table has no such column."""
    name = _COLUMN_BY_FORMAT.get(dtype, dtype)
    if name not in COLUMNS + FORMATS:
        raise unknown_name("dtype", dtype, COLUMNS + FORMATS)
    return name


def highest_cell(
    subject: Subject, plan: MethodPlan, batch_size: int, context_length: int, parallel: str, gpus: int
) -> Cell:
    """Return the cell of the rank with the highest peak, for training over `gpus` GPUs with the plan `parallel`.

    An empty `parallel` is one GPU. Batch size and context length are a rank's before its sequences are divided. Raises
    UsageError: as `ranks_in`.
    """
    found = (
        Cell(plan, moments(subject, plan, batch_size, context_length, rank), subject.derived, parallel, rank)
        for rank in ranks_in(subject, plan, parallel, gpus)
    )
    return max(found, key=lambda cell: cell.allocated_bytes)


def build_estimate(subject: Subject, options: EstimateOptions = _DEFAULT_OPTIONS) -> Estimate:
    """Return the estimates of every method in every dtype, for `subject` with `options`.

    The default context length is 2,048 tokens, or the model's number of positions if smaller. With `lengths`, the
    longest batch determines the estimate. Raises UsageError: a value is out of range.
    """
    new_tokens = 1 if options.new_tokens is None else options.new_tokens
    batch_size, gpus, parallel = options.batch_size, options.gpus, options.parallel
    counts = {"--batch-size": batch_size, "--lora-rank": options.lora_rank, "--gpus": gpus, "--new-tokens": new_tokens}
    for flag, value in counts.items():
        if value < 1:
            raise UsageError(f"{flag} must be at least 1", value=value, hint="give a positive whole number")
    if options.optimizer not in STATES | QUANTIZED_STATES:
        raise unknown_name("--optimizer", options.optimizer, (*STATES, *QUANTIZED_STATES))
    context = _context_length(subject, options)
    column = column_of(options.quantize or options.dtype or "bfloat16")
    columns = tuple(dict.fromkeys((*COLUMNS, column)))

    def cell(method: Method, column: str, rank: Rank, strategy: str = "") -> Cell | None:
        plan = MethodPlan(
            method, column, options.lora_rank, options.lora_targets, options.optimizer,
            options.optimizer_impl == "fused", new_tokens, options.lengths is not None, options.empties_cache,
            options.chunked_loss and method.trains,
        )  # fmt: skip
        if parallel is not None and strategy == parallel:
            return highest_cell(subject, plan, batch_size, context, parallel, gpus)
        if not method.applies(column) or (subject.geometry is None and (method.kind != "weights" or plan.quantized)):
            return None
        found = moments(subject, plan, batch_size, context, rank)
        derived = subject.derived and (method.kind != "weights" or bool(plan.quantized))
        return Cell(plan, found, derived, strategy)

    made = {(method.key, name): cell(method, name, ALONE) for method in METHODS for name in columns}
    cells = {key: one for key, one in made.items() if one is not None}
    divided = [method for method in METHODS if gpus > 1 and method.trains and method.kind != "lora"]
    strategies = STRATEGIES if parallel is None else ((parallel, lambda n: ALONE),)
    spread = (
        cell(method, column, rank(gpus), strategy)
        for method in divided
        for strategy, rank in strategies
        if method.applies(column)
    )
    sharded = tuple(one for one in spread if one is not None)
    return Estimate(subject, column, batch_size, context, options.lora_rank, options.lengths, gpus, cells, sharded)


def _context_length(subject: Subject, options: EstimateOptions) -> int:
    """Return the context length in tokens; with varying lengths, the length of a profile's longest batch."""
    geometry, requested = subject.geometry, options.context_length
    limit = None if geometry is None else geometry.max_positions
    if options.lengths is not None:
        batches = parse_lengths(options.lengths).batches(options.batch_size, requested or limit or 1 << 30)
        return max(longest for _, longest in islice(batches, MANY_STEPS))
    if requested is None:
        return DEFAULT_CONTEXT if limit is None else min(DEFAULT_CONTEXT, limit)
    if requested < 1:
        raise UsageError("--context-length must be at least 1", value=requested, hint="give a positive whole number")
    if geometry is not None and geometry.positions and limit is not None and requested > limit:
        problem = f"{subject.name} has positions for {limit:,} tokens"
        raise UsageError(problem, value=f"--context-length {requested}", hint="give less")
    return requested


def verdicts_by_gpu(cell: Cell, gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the verdict of a cell for every GPU, by the GPU's key."""
    return {gpu.key: cell.on(gpu) for gpu in gpus}


@cache
def _read_bands() -> dict[str, Any]:
    """Return bands.json, as `python -m tests.benchmarks.estimate --write` and `...estimate_published` measured it."""
    text = files("memprof.estimate").joinpath("bands.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def band_of(kind: str) -> Band:
    """Return the measured band of a kind of figure (one of KINDS)."""
    return Band(**_read_bands()["published"][kind])
