"""The answer of `memprof estimate`, as JSON and as text.

Plain text and no library: the command is to answer at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memprof.catalog import Gpu
from memprof.estimate.explain import CONSTANTS, assumptions, formula, kept
from memprof.estimate.methods import COLUMNS, METHODS
from memprof.estimate.table import CLOSE, FITS, NO, Cell, Estimate, Simulated, cards
from memprof.trace.plain import Plain
from memprof.units import format_bytes, gib
from memprof.version import __version__

_TITLE = 26
_CELL = 10


@dataclass(frozen=True, slots=True)
class EstimateTarget:
    """What was asked for."""

    model: str
    given: str
    num_parameters: int
    dtype: str
    batch_size: int
    context_length: int
    lora_rank: int
    gpus: int
    geometry: dict[str, Any] | None
    geometry_is_derived: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRow(Plain):
    """One method in one dtype; the second half of the fields is of one card, or of one of several (`strategy`)."""

    method: str
    strategy: str | None = None
    dtype: str
    moment: str
    allocated_bytes: int
    device_used_bytes: int
    at_least_bytes: int
    at_most_bytes: int
    categories: dict[str, int]
    depends_on_derived_geometry: bool | None = None
    cards: dict[str, str] | None = None
    formulas: dict[str, str] | None = None
    """With --explain, as is what a layer keeps for the backward."""
    kept_per_layer_bytes_per_token: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Without what does not apply."""
        return {name: value for name, value in super(EstimateRow, self).to_json().items() if value is not None}


@dataclass(frozen=True, slots=True)
class ExactRow:
    """A method that was also run; `error` is the closed form's, as a share."""

    method: str
    dtype: str
    allocated_bytes: int
    required_bytes: int
    stage: str
    categories: dict[str, int]
    error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateDocument(Plain):
    """Everything, with stable names; sizes are bytes."""

    schema: int = 1
    memprof_version: str = __version__
    command: str = "estimate"
    source: str = "closed form"
    target: EstimateTarget
    estimates: tuple[EstimateRow, ...]
    sharded: tuple[EstimateRow, ...]
    exact: tuple[ExactRow, ...] | None
    assumptions: tuple[str, ...]


_GEOMETRY = ("family", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "tied")


def estimate_document(
    estimate: Estimate, gpus: tuple[Gpu, ...], exact: Mapping[str, Simulated] | None = None, *, explain: bool = False
) -> EstimateDocument:
    """The answer on these cards; `exact` are the runs that were made, and `explain` adds the formulas."""
    subject, g = estimate.subject, estimate.subject.geometry
    rows = []
    for cell in estimate.cells.values():
        formulas = {name: formula(estimate, cell, name) for name in cell.peak.terms}
        rows.append(
            EstimateRow(
                method=cell.method.key,
                dtype=cell.plan.column,
                depends_on_derived_geometry=cell.derived,
                cards=cards(cell, gpus),
                formulas=formulas if explain else None,
                kept_per_layer_bytes_per_token=dict(kept(estimate, cell)) if explain else None,
                **_sizes(cell),
            )
        )
    return EstimateDocument(
        target=EstimateTarget(
            subject.name,
            subject.given,
            subject.num_parameters,
            estimate.dtype,
            estimate.batch_size,
            estimate.context_length,
            estimate.lora_rank,
            estimate.gpus,
            geometry=None if g is None else {name: getattr(g, name) for name in _GEOMETRY},
            geometry_is_derived=subject.derived,
        ),
        estimates=tuple(rows),
        sharded=tuple(
            EstimateRow(method=row.method.key, strategy=row.strategy, dtype=estimate.dtype, **_sizes(row.cell))
            for row in estimate.sharded
        ),
        exact=None if exact is None else tuple(_exact_row(estimate, key, run) for key, run in exact.items()),
        assumptions=(*assumptions(estimate), *filter(None, (subject.why_no_geometry,))),
    )


def _sizes(cell: Cell) -> dict[str, Any]:
    low, high = (round(cell.device_bytes * (1 + share)) for share in (cell.band.low, cell.band.high))
    return {
        "moment": cell.peak.name,
        "allocated_bytes": cell.allocated_bytes,
        "device_used_bytes": cell.device_bytes,
        "at_least_bytes": low,
        "at_most_bytes": high,
        "categories": {name: size for name, size in cell.peak.terms.items() if size},
    }


def _exact_row(estimate: Estimate, key: str, run: Simulated) -> ExactRow:
    cell = estimate.cells.get((key, estimate.dtype))
    error = None if cell is None else cell.allocated_bytes / run.allocated_bytes - 1
    categories = dict(run.categories)
    return ExactRow(key, estimate.dtype, run.allocated_bytes, run.required_bytes, run.stage, categories, error)


# -- text --------------------------------------------------------------------------------------------------------------


def text(
    estimate: Estimate, gpus: tuple[Gpu, ...], exact: Mapping[str, Simulated] | None = None, *, explain: bool = False
) -> Iterator[str]:
    """The report, line by line."""
    yield from _heading(estimate)
    yield from _table(estimate)
    yield ""
    yield from _cards(estimate, gpus)
    if estimate.sharded:
        yield ""
        yield from _sharded(estimate)
    if exact is not None:
        yield ""
        yield from _exact(estimate, exact)
    if explain:
        yield ""
        yield from _explained(estimate)


def _heading(estimate: Estimate) -> Iterator[str]:
    subject = estimate.subject
    weights = estimate.cells.get(("weights", estimate.dtype))
    name = subject.name if subject.derived else f"{subject.name}: {subject.num_parameters:,} parameters"
    if weights is not None:
        size = weights.allocated_bytes
        yield f"{name} in {estimate.dtype}: {format_bytes(size)} of weights ({size / 1e9:,.1f} GB)"
    else:
        yield name
    tokens = f"context {estimate.context_length:,} tokens, batch size {estimate.batch_size}"
    yield f"{tokens}. Closed form, in GiB; but for the weights, with the CUDA context."
    if subject.derived:
        yield "~ depends on a shape that was derived from the number of parameters: a Llama of this size (--explain)"
    if subject.why_no_geometry:
        yield f"Weights alone: {subject.why_no_geometry}; --exact runs the model on the virtual GPU."


def _mark(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    size = cell.allocated_bytes if cell.method.kind == "weights" else cell.device_bytes
    return f"{'~' if cell.derived else ''}{gib(size)}"


def _table(estimate: Estimate) -> Iterator[str]:
    yield ""
    names = (f"{name}*" if name == estimate.dtype else name for name in COLUMNS)
    yield f"{'':{_TITLE}}" + "".join(f"{name:>{_CELL}}" for name in names)
    for method in METHODS:
        cells = [estimate.cells.get((method.key, name)) for name in COLUMNS]
        if any(cells):
            yield f"{method.title:{_TITLE}}" + "".join(f"{_mark(cell):>{_CELL}}" for cell in cells)


def _cards(estimate: Estimate, gpus: tuple[Gpu, ...]) -> Iterator[str]:
    yield f"* {estimate.dtype} on the {len(gpus)} card{'s' * (len(gpus) != 1)} looked at:"
    if len(gpus) == 1:
        for cell in estimate.column():
            yield f"{cell.method.title:{_TITLE}}{gib(cell.device_bytes):>{_CELL}}  {cell.on(gpus[0]):6}{_band(cell)}"
        yield f"{gpus[0].name}: {gib(gpus[0].total_bytes)} GiB"
        return
    yield f"{'':{_TITLE}}{'needs':>{_CELL}}  {'band':<16}{FITS:>5}{CLOSE:>7}{NO:>5}  smallest that fits"
    by_size = sorted(gpus, key=lambda gpu: gpu.total_bytes)
    for cell in estimate.column():
        verdicts = cards(cell, gpus)
        counts = [list(verdicts.values()).count(verdict) for verdict in (FITS, CLOSE, NO)]
        smallest = next((f"{gpu.key} ({gib(gpu.total_bytes)})" for gpu in by_size if verdicts[gpu.key] == FITS), "none")
        yield (
            f"{cell.method.title:{_TITLE}}{gib(cell.device_bytes):>{_CELL}}  {_band(cell):<16}"
            f"{counts[0]:>5}{counts[1]:>7}{counts[2]:>5}  {smallest}"
        )
    yield "band: how far simulated runs were from this, from what they allocate to what they reserve; within it: close"


def _band(cell: Cell) -> str:
    if cell.method.kind == "weights":
        return "counted"
    return f"{cell.band.low:+.1%} to {cell.band.high:+.1%}"


def _sharded(estimate: Estimate) -> Iterator[str]:
    strategies = list(dict.fromkeys(row.strategy for row in estimate.sharded))
    yield f"{estimate.dtype} on each of {estimate.gpus} cards, each with a micro-batch of its own:"
    yield f"{'':{_TITLE}}" + "".join(f"{name:>14}" for name in strategies)
    for method in dict.fromkeys(row.method for row in estimate.sharded):
        sizes = [gib(row.cell.device_bytes) for row in estimate.sharded if row.method == method]
        yield f"{method.title:{_TITLE}}" + "".join(f"{size:>14}" for size in sizes)


def _exact(estimate: Estimate, exact: Mapping[str, Simulated]) -> Iterator[str]:
    yield "Beside the virtual GPU, which ran the model (MiB allocated at the peak):"
    for key, run in exact.items():
        cell = estimate.cells.get((key, estimate.dtype))
        title = next(method.title.strip() for method in METHODS if method.key == key)
        if key.endswith("checkpointing"):
            title = f"{key.removesuffix('-checkpointing')} with checkpointing"
        if cell is None:
            yield f"{title}: simulated {run.allocated_bytes / (1 << 20):,.1f}, peak in {run.stage}"
            continue
        error = cell.allocated_bytes / run.allocated_bytes - 1
        yield f"{title}: {error:+.2%} ({cell.peak.name}; simulated: {run.stage})"
        yield f"  {'':20}{'closed form':>14}{'simulated':>14}{'difference':>14}"
        for name, (mine, theirs) in merged(cell.peak.terms, run.categories).items():
            yield "  " + f"{name:20}" + "".join(f"{size / (1 << 20):>14,.1f}" for size in (mine, theirs, mine - theirs))


def merged(mine: Mapping[str, int], theirs: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """The terms of both under common names; those of less than 0.05 MiB in both are left out.

    A layer's own temporaries are activations in the closed form, and inputs and buffers are too small to tell.
    """
    common = {
        "temporaries": "activations",
        "inputs": "activations",
        "buffers": "activations",
        "fragmentation": "rounding",
    }
    common_if_step = {} if not mine.get("temporaries") else {"temporaries": "temporaries"}
    sums: dict[str, list[int]] = {}
    for index, terms in enumerate((mine, theirs)):
        for name, size in terms.items():
            sums.setdefault(common_if_step.get(name) or common.get(name, name), [0, 0])[index] += size
    total = (sum(mine.values()), sum(theirs.values()))
    rows = {name: (a, b) for name, (a, b) in sums.items() if max(a, b) >= 50_000}
    return {**rows, "together": total}


def _explained(estimate: Estimate) -> Iterator[str]:
    yield f"{estimate.dtype}, term by term (MiB):"
    for cell in estimate.column():
        yield f"{cell.method.key}: the peak is at: {cell.peak.name}"
        for name, size in cell.peak.terms.items():
            if size:
                yield f"  {name:18}{size / (1 << 20):>12,.1f}  {formula(estimate, cell, name)}"
    training = estimate.cells.get(("full", estimate.dtype)) or estimate.cells.get(("lora", estimate.dtype))
    if training is not None:
        yield ""
        yield f"What a layer keeps for the backward ({training.method.key}), in bytes per token:"
        for name, per_token in kept(estimate, training):
            yield f"  {per_token:>12,.0f}  {name}"
    yield ""
    yield "Constants:"
    for constant in CONSTANTS:
        yield f"  {constant.name}: {constant.value}"
        yield f"      {constant.source}"
    yield ""
    yield "Assumptions:"
    for sentence in assumptions(estimate):
        yield f"  - {sentence}"
