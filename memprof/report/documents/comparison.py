"""The result of `memprof compare`, with the names of its JSON.

Sizes are bytes; a difference is B minus A; unknown values are None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memprof.ledger.over_time import OverTime
from memprof.report.documents.base import DisplayedDocument
from memprof.report.frames import RowTable
from memprof.trace.json_values import json_name

SCHEMA = 2  # 2: names (old_names.py)

SAME, DIFFERS, ONLY_IN_A, ONLY_IN_B = "same", "differs", "only in A", "only in B"  # Status of a stage.


@dataclass(frozen=True, slots=True)
class RunDescription:
    """One of the two compared runs: file, source, device and verdict."""

    file: str
    format: str  # `memprof capture`, `memprof report` or `torch snapshot`.
    source: str  # simulated or measured.
    device: str | None
    on_gpu: bool  # False for a run on a CPU.
    fits: bool | None
    failure: str | None  # The error that ended the run early.
    notes: tuple[str, ...] = ()  # Notes on values that the file lacks, or has in another form.
    peak_at: str | None = None  # Stage, step and micro-batch of the allocated peak; None: unknown.
    pages: bool = False  # Whether it fits, and some of the memory that GPU and host share pages.
    # Categories over time, for the HTML page; None: not in the file, or read from JSON.
    over_time: OverTime | None = field(default=None, compare=False, repr=False, metadata=json_name(None))


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting with different values in the two runs."""

    name: str
    a: Any  # Value in run A.
    b: Any  # Value in run B.


@dataclass(frozen=True, slots=True)
class TotalRow:
    """A total, such as allocated bytes at the peak, in both compared runs."""

    name: str
    a_bytes: int | None
    b_bytes: int | None
    difference_bytes: int | None
    compared: bool  # Whether the total affects the exit code: both values are known and comparable.
    within: bool | None  # Whether the difference is within the tolerance; None if not compared.
    why_not: str = ""  # The reason if not compared.


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes and duration of one stage of a run."""

    allocated_bytes: int | None
    delta_bytes: int | None
    peak_allocated_bytes: int
    requested_bytes: int | None
    reserved_bytes: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage of either or both runs, matched by name, step and micro-batch."""

    order: int  # Index in the run.
    name: str
    step: int
    micro_batch: int
    stack: str
    index: int
    status: str  # same, differs, only in A, only in B.
    a: StageBytes | None
    b: StageBytes | None
    difference_bytes: int | None  # Of the peak allocated in the stage.


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """Bytes of a category at the peak of each run."""

    category: str
    a_bytes: int
    b_bytes: int
    difference_bytes: int


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """A group of equal tensors that are live at the peak of a run."""

    num_bytes: int = field(metadata=json_name("bytes"))  # Requested bytes of one tensor.
    count: int
    shape: tuple[int, ...] | None  # None: unknown; `dtype` likewise.
    dtype: str | None
    op: str
    source: str | None
    category: str = field(default="", metadata=json_name(None))  # Not in JSON, like `where`: the row has both.
    where: str | None = field(default=None, metadata=json_name(None))

    @property
    def total_bytes(self) -> int:
        """Return the requested bytes of all tensors of the group."""
        return self.num_bytes * self.count


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A difference between the tensors of two runs that have the same category and owner."""

    status: str  # The difference: only in A, only in B, count, shape, dtype or operator.
    category: str
    where: str | None  # Parameter, gradient or module, layer numbers replaced by `*`.
    a: TensorGroup | None
    b: TensorGroup | None
    difference_bytes: int


@dataclass(frozen=True, slots=True)
class KernelMemory:
    """Bytes that kernels and libraries allocate for themselves at the peak of a run."""

    kind: str  # CPU kernels or CUDA kernels.
    num_bytes: int = field(metadata=json_name("bytes"))
    tensors: tuple[TensorGroup, ...]


@dataclass(frozen=True, slots=True)
class BridgeRow:
    """A row of the bridge (from requested to device memory) at the reserved peak of each run."""

    name: str
    a_bytes: int | None
    b_bytes: int | None
    difference_bytes: int | None


@dataclass(frozen=True, slots=True)
class FindingRow:
    """A finding that only one run has, or whose bytes differ."""

    id: str
    in_a: bool
    in_b: bool
    a_bytes: int | None  # None if it is not in A, or is not about bytes.
    b_bytes: int | None


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(DisplayedDocument):
    """The result of `memprof compare`; lists are sorted by difference, largest first."""

    schema: int
    memprof_version: str
    command: str
    a: RunDescription
    b: RunDescription
    tolerance: str
    within: bool  # Every total that is compared is within the tolerance.
    settings: tuple[SettingRow, ...]
    same_settings: int
    totals: tuple[TotalRow, ...]
    stages: tuple[StageRow, ...]
    categories: tuple[CategoryRow, ...]
    tensors: tuple[TensorRow, ...]
    same_tensors: int  # Rows of tensors that are equal in both, with `same_tensors_bytes` in all.
    same_tensors_bytes: int
    tensors_matched_by: str
    kernels_a: KernelMemory
    kernels_b: KernelMemory
    reserved: tuple[BridgeRow, ...]  # The bridge of both, in its order.
    seconds_a: float | None
    seconds_b: float | None
    findings: tuple[FindingRow, ...] | None  # None: one of the files has no findings.
    assumptions_only_in_a: tuple[str, ...]
    assumptions_only_in_b: tuple[str, ...]

    @property
    def has_different_peaks(self) -> bool:
        """Return whether the peaks are known to be in different stages, steps or micro-batches."""
        return None not in (self.a.peak_at, self.b.peak_at) and self.a.peak_at != self.b.peak_at

    def tables(self) -> dict[str, RowTable]:
        """Return the tables of differences, by name."""
        kernels = ((run, t) for run, memory in (("a", self.kernels_a), ("b", self.kernels_b)) for t in memory.tensors)
        return {
            "settings": RowTable(self.settings, SettingRow),
            "totals": RowTable(self.totals, TotalRow),
            "stages": RowTable(self.stages, StageRow),
            "categories": RowTable(self.categories, CategoryRow),
            "tensors": RowTable(self.tensors, TensorRow),
            "kernels": RowTable(kernels, TensorGroup, {"run": str}),
            "reserved": RowTable(self.reserved, BridgeRow),
            "findings": RowTable(self.findings or (), FindingRow),
        }
