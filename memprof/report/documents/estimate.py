"""The result of `memprof estimate`, with the names of its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memprof.device.catalog import Gpu
from memprof.estimate.explain import format_formula, list_assumptions, list_saved_tensors
from memprof.estimate.methods import BANDED_KINDS
from memprof.estimate.table import (
    DEVICE_USED,
    MEMORY_KINDS,
    RESERVED,
    Band,
    Cell,
    Estimate,
    SimulatedRun,
    read_band,
)
from memprof.trace.json_values import JsonValue
from memprof.version import __version__


@dataclass(frozen=True, slots=True)
class EstimateTarget:
    """The model of an estimate, and the options of the run that is estimated."""

    model: str
    given: str  # What names the model: its name, its configuration or a number of parameters.
    num_parameters: int
    dtype: str
    batch_size: int
    context_length: int
    lora_rank: int
    lengths: str | None
    gpus: int
    geometry: dict[str, Any] | None
    geometry_is_derived: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRow(JsonValue):
    """The estimated memory of one training or inference method in one dtype: on one GPU, or on each of several."""

    method: str
    strategy: str | None = None
    dtype: str
    moment: str  # Name of the moment of the peak.
    allocated_bytes: int
    reserved_bytes: int
    device_used_bytes: int
    at_least_bytes: int  # Lower bound of the memory in use on the GPU; `at_most_bytes` is the upper bound.
    at_most_bytes: int
    ranges: dict[str, tuple[int, int]]  # By kind of figure: lower and upper bound.
    categories: dict[str, int]
    depends_on_derived_geometry: bool | None = None
    gpus: dict[str, str] | None = None
    formulas: dict[str, str] | None = None  # With --explain, like the next field.
    kept_per_layer_bytes_per_token: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values, without fields that are None."""
        return {name: value for name, value in super(EstimateRow, self).to_json().items() if value is not None}


@dataclass(frozen=True, slots=True)
class SimulatedRow:
    """The simulated run of a training or inference method; `error` is the relative error of the estimate."""

    method: str
    dtype: str
    allocated_bytes: int
    required_bytes: int
    stage: str
    categories: dict[str, int]
    error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateDocument(JsonValue):
    """The result of `memprof estimate`; sizes are bytes."""

    schema: int = 2
    memprof_version: str = __version__
    command: str = "estimate"
    source: str = "closed form"
    target: EstimateTarget
    bands: dict[str, Band]  # By kind of method and of figure, such as "lora, reserved".
    estimates: tuple[EstimateRow, ...]
    sharded: tuple[EstimateRow, ...]
    exact: tuple[SimulatedRow, ...] | None
    assumptions: tuple[str, ...]


_TARGET_FIELDS = ("dtype", "batch_size", "context_length", "lora_rank", "lengths", "gpus")
_GEOMETRY_FIELDS = ("family", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "tied")


def build_estimate_document(
    estimate: Estimate, gpus: tuple[Gpu, ...], runs: Mapping[str, SimulatedRun] | None = None, *, explain: bool = False
) -> EstimateDocument:
    """Return an estimate as a JSON document; `runs` has simulated runs by method key, `explain` adds formulas."""
    subject, geometry = estimate.subject, estimate.subject.geometry
    rows = (
        EstimateRow(
            method=cell.method.key,
            dtype=cell.plan.column,
            depends_on_derived_geometry=cell.is_derived,
            gpus={gpu.key: cell.judge_fit(gpu) for gpu in gpus},
            formulas={name: format_formula(estimate, cell, name) for name in cell.peak.terms} if explain else None,
            kept_per_layer_bytes_per_token=dict(list_saved_tensors(estimate, cell)) if explain else None,
            **_build_size_fields(cell),
        )
        for cell in estimate.cells.values()
    )
    return EstimateDocument(
        target=EstimateTarget(
            subject.name,
            subject.origin,
            subject.num_parameters,
            **{name: getattr(estimate, name) for name in _TARGET_FIELDS},
            geometry=None if geometry is None else {name: getattr(geometry, name) for name in _GEOMETRY_FIELDS},
            geometry_is_derived=subject.is_derived,
        ),
        bands={f"{method}, {kind}": read_band(kind, method) for method in BANDED_KINDS for kind in MEMORY_KINDS},
        estimates=tuple(rows),
        sharded=tuple(
            EstimateRow(
                method=cell.method.key, strategy=cell.strategy, dtype=estimate.dtype, **_build_size_fields(cell)
            )
            for cell in estimate.sharded
        ),
        exact=None if runs is None else tuple(_build_simulated_row(estimate, key, r) for key, r in runs.items()),
        assumptions=(*list_assumptions(estimate), *filter(None, (subject.geometry_error,))),
    )


def _build_size_fields(cell: Cell) -> dict[str, Any]:
    ranges = cell.compute_ranges()
    device_bytes, lower_bound, upper_bound = ranges[DEVICE_USED]
    return {
        "moment": cell.peak.name,
        "allocated_bytes": cell.allocated_bytes,
        "reserved_bytes": ranges[RESERVED][0],
        "device_used_bytes": device_bytes,
        "at_least_bytes": lower_bound,
        "at_most_bytes": upper_bound,
        "ranges": {kind: bounds for kind, (_, *bounds) in ranges.items()},
        "categories": {name: num_bytes for name, num_bytes in cell.peak.terms.items() if num_bytes},
    }


def _build_simulated_row(estimate: Estimate, key: str, run: SimulatedRun) -> SimulatedRow:
    cell = estimate.cells.get((key, estimate.dtype))
    error = None if cell is None else cell.allocated_bytes / run.allocated_bytes - 1
    categories = dict(run.categories)
    return SimulatedRow(key, estimate.dtype, run.allocated_bytes, run.required_bytes, run.stage, categories, error)
