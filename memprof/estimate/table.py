"""The answer: a cell for every method and dtype, its band, and the cards that it fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from memprof.catalog import Gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.errors import UsageError, unknown_name
from memprof.estimate.geometry import Subject
from memprof.estimate.methods import COLUMNS, METHODS, Method, Plan
from memprof.estimate.peaks import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_HOPPER, Moment, Shards, moments
from memprof.spec import DEFAULT_LORA_RANK

FITS, CLOSE, NO = "fits", "close", "no"
DEFAULT_CONTEXT = 2048
ENOUGH_RUNS = 20
_ALIASES = {
    "fp32": "float32", "f32": "float32", "float": "float32", "fp16": "float16", "f16": "float16", "half": "float16",
    "bf16": "bfloat16", "nf4": "int4", "4bit": "int4", "8bit": "int8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Band:
    """How far the closed form was from the virtual GPU, over the models of the benchmark.

    Both are relative to the estimate with the CUDA context: `low` to the least card that can hold the run (what is
    allocated), `high` to what the run reserves on a card that is large enough never to give a cached block back.
    """

    low: float
    high: float
    runs: int
    """Simulated runs behind it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One method in one dtype."""

    plan: Plan
    moments: tuple[Moment, ...]
    band: Band
    derived: bool
    """It depends on a shape that was derived from the number of parameters."""
    strategy: str = ""
    """How the training is spread over cards; the amounts are of each."""

    @property
    def method(self) -> Method:
        """Its row."""
        return self.plan.method

    @property
    def peak(self) -> Moment:
        """The moment with the largest sum."""
        return max(self.moments, key=lambda moment: moment.num_bytes)

    @property
    def allocated_bytes(self) -> int:
        """What the allocator hands out at the peak."""
        return self.peak.num_bytes

    @property
    def device_bytes(self) -> int:
        """The same with the CUDA context."""
        return self.allocated_bytes + CONTEXT_BYTES

    def on(self, gpu: Gpu) -> str:
        """fits, close or no: by the band."""
        need = self.device_bytes
        if "library workspace" in self.peak.terms and gpu.compute_capability[0] == 9:
            need += (
                self.peak.terms["library workspace"] * (CUBLAS_WORKSPACE_HOPPER - CUBLAS_WORKSPACE) // CUBLAS_WORKSPACE
            )
        if need * (1 + self.band.high) <= gpu.total_bytes:
            return FITS
        return NO if need * (1 + self.band.low) > gpu.total_bytes else CLOSE


@dataclass(frozen=True, slots=True)
class Estimate:
    """The whole answer."""

    subject: Subject
    dtype: str
    """The column that is looked at."""
    batch_size: int
    context_length: int
    lora_rank: int
    gpus: int
    cells: dict[tuple[str, str], Cell]
    """By method and dtype; absent where the method is not done in that dtype or cannot be answered."""
    sharded: tuple[Cell, ...]
    """The same column on several cards, by each strategy."""

    def column(self) -> list[Cell]:
        """The cells of the dtype that is looked at."""
        found = [self.cells.get((method.key, self.dtype)) for method in METHODS]
        return [cell for cell in found if cell is not None]


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a run on the virtual GPU came to."""

    stage: str
    """In which the peak is."""
    allocated_bytes: int
    required_bytes: int
    """Reserved at the most, with the CUDA context."""
    categories: Mapping[str, int]


STRATEGIES: tuple[tuple[str, Callable[[int], Shards]], ...] = (
    ("DDP", lambda n: Shards(replicas=n)),
    ("ZeRO-1", lambda n: Shards(optimizer=n, replicas=n)),
    ("ZeRO-2", lambda n: Shards(optimizer=n, gradients=n, replicas=n)),
    ("FSDP, ZeRO-3", lambda n: Shards(parameters=n, optimizer=n, gradients=n, replicas=n)),
)


def parse_dtype(text: str) -> str:
    """The column that a dtype names.

    Raises:
        UsageError: there is none.
    """
    name = _ALIASES.get(text.lower(), text.lower())
    if name not in COLUMNS:
        raise unknown_name("--dtype", text, COLUMNS)
    return name


def build_estimate(
    subject: Subject,
    *,
    dtype: str | None = None,
    context_length: int | None = None,
    batch_size: int = 1,
    lora_rank: int = DEFAULT_LORA_RANK,
    gpus: int = 1,
) -> Estimate:
    """Every method in every dtype.

    Args:
        dtype: the column to look at; None: bfloat16.
        context_length: tokens per sequence; None: 2,048, or what the model has positions for if that is less.
        batch_size: sequences per micro-batch and card.
        gpus: cards to spread training over.

    Raises:
        UsageError: a value is out of range.
    """
    for flag, value in (("--batch-size", batch_size), ("--lora-rank", lora_rank), ("--gpus", gpus)):
        if value < 1:
            raise UsageError(f"{flag} must be at least 1", value=value, hint="give a positive whole number")
    context = _context(subject, context_length)
    column = "bfloat16" if dtype is None else parse_dtype(dtype)

    def cell(method: Method, column: str, shards: Shards, strategy: str = "") -> Cell | None:
        plan = Plan(method, column, lora_rank)
        if not method.applies(column) or (subject.geometry is None and (method.kind != "weights" or plan.quantized)):
            return None
        found = moments(subject, plan, batch_size, context, shards)
        derived = subject.derived and (method.kind != "weights" or bool(plan.quantized))
        return Cell(plan, found, band_of(method.key), derived, strategy)

    cells = {
        (method.key, name): made
        for method in METHODS
        for name in COLUMNS
        if (made := cell(method, name, Shards())) is not None
    }
    divided = [method for method in METHODS if gpus > 1 and method.trains and method.kind != "lora"]
    sharded = tuple(
        made
        for method in divided
        for strategy, shards in STRATEGIES
        if (made := cell(method, column, shards(gpus), strategy)) is not None
    )
    return Estimate(subject, column, batch_size, context, lora_rank, gpus, cells, sharded)


def _context(subject: Subject, asked: int | None) -> int:
    geometry = subject.geometry
    limit = geometry.max_positions if geometry is not None else None
    if asked is None:
        return DEFAULT_CONTEXT if limit is None else min(DEFAULT_CONTEXT, limit)
    if asked < 1:
        raise UsageError("--context-length must be at least 1", value=asked, hint="give a positive whole number")
    if geometry is not None and geometry.positions and limit is not None and asked > limit:
        raise UsageError(
            f"{subject.name} has positions for {limit:,} tokens", value=f"--context-length {asked}", hint="give less"
        )
    return asked


def cards(cell: Cell, gpus: Sequence[Gpu]) -> dict[str, str]:
    """The verdict of every card, by its key."""
    return {gpu.key: cell.on(gpu) for gpu in gpus}


@cache
def _bands() -> dict[str, Band]:
    text = files("memprof.estimate").joinpath("bands.json").read_text(encoding="utf-8")
    return {key: Band(**band) for key, band in json.loads(text).items()}


def band_of(key: str) -> Band:
    """The measured band of a method (`python -m tests.benchmarks.estimate --write`).

    One that was simulated fewer than ENOUGH_RUNS times has the widest of all methods. The weights alone are counted.
    """
    bands = _bands()
    if key == "weights":
        return Band(0.0, 0.0, 0)
    found = bands.get(key)
    if found is not None and found.runs >= ENOUGH_RUNS:
        return found
    low = min((band.low for band in bands.values()), default=0.0)
    high = max((band.high for band in bands.values()), default=0.0)
    return Band(low, high, 0 if found is None else found.runs)
