"""The tables of a document as pandas' data frames. Columns have the names of the JSON, sizes are bytes.

A row within a row gives columns named with a dot (`cost.step_seconds`). What is not known is missing (`NA`), and whole
numbers stay whole beside it. A table without rows has its columns all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args

from memprof.findings import Evidence, Finding
from memprof.ledger.batches import BatchStep, ReservedOverSteps
from memprof.ledger.ledger import LiveTensor, Row
from memprof.ledger.stage_amounts import Stage
from memprof.ledger.steps import TrainingStep
from memprof.report.documents import analysis as a
from memprof.report.documents import comparison as c
from memprof.report.documents import report as r
from memprof.report.documents.cards import CardRow
from memprof.report.documents.ladder import Rung
from memprof.report.documents.ranks import RankRow
from memprof.report.documents.shown import Shown
from memprof.snapshots.occupancy import Group
from memprof.snapshots.refusals import Refusal
from memprof.snapshots.steps import Leak
from memprof.snapshots.what_if import ReplayOutcome
from memprof.trace.plain import json_fields, to_plain

if TYPE_CHECKING:
    from pandas import DataFrame

# Type of a field -> that of its column, and that of one which may lack values.
_DTYPES = {int: ("int64", "Int64"), bool: ("bool", "boolean"), float: ("float64", "float64")}


def frames_of(document: Shown) -> dict[str, DataFrame]:
    """Every table of the document, by name."""
    if isinstance(document, r.Document):
        return _report(document)
    if isinstance(document, a.Analysis):
        return _analysis(document)
    assert isinstance(document, c.Comparison)
    return _comparison(document)


def _report(document: r.Document) -> dict[str, DataFrame]:
    peak = document.peak
    evidence = ((finding.id, one) for finding in document.findings for one in finding.evidence)
    return {
        "stages": _frame(Stage, zip(document.stages)),
        "steps": _frame(TrainingStep, zip(document.steps)),
        "batches": _frame(BatchStep, zip(document.batches.steps if document.batches else ())),
        "reserved": _frame(ReservedOverSteps, zip(document.batches.reserved if document.batches else ())),
        "categories": _frame(None, peak.categories.items(), category=str, bytes=int),
        "tensors": _frame(LiveTensor, zip(peak.tensors)),
        "ledger": _frame(Row, zip(peak.rows)),
        "findings": _frame(Finding, zip(document.findings)),
        "evidence": _frame(Evidence, evidence, finding=str),
        "ladder": _frame(Rung, zip(document.ladder)),
        **({"cards": _frame(CardRow, zip(document.cards))} if document.cards else {}),
        **({"ranks": _frame(RankRow, zip(document.ranks))} if document.ranks else {}),
    }


def _analysis(document: a.Analysis) -> dict[str, DataFrame]:
    def of(rows: Callable[[a.DeviceReport], Iterable[Any]]) -> Iterator[tuple[Any, ...]]:
        for device in document.devices:
            for row in rows(device):
                yield (device.device, *(row if isinstance(row, tuple) else (row,)))

    def at_ends(device: a.DeviceReport) -> list[tuple[str, a.FragmentationRow]]:
        return [("peak", device.fragmentation_at_peak), ("end", device.fragmentation_at_end)]

    amounts = of(lambda device: [(moment, getattr(device, moment)) for moment in ("start", "peak", "end")])
    lines = of(lambda d: zip(d.timeline.events, d.timeline.allocated_bytes, d.timeline.reserved_bytes, strict=True))
    pinned = of(lambda device: [(moment, one) for moment, row in at_ends(device) for one in row.nearly_empty])
    outcomes = of(lambda d: [("before", d.what_if.before), ("after", d.what_if.after)] if d.what_if else [])
    return {
        "amounts": _frame(a.Amounts, amounts, device=int, moment=str),
        "timeline": _frame(None, lines, device=int, event=int, allocated_bytes=int, reserved_bytes=int),
        "groups": _frame(Group, of(lambda device: device.moment.groups), device=int),
        "blocks": _frame(a.BlockRow, of(lambda device: device.moment.blocks), device=int),
        "fragmentation": _frame(a.FragmentationRow, of(at_ends), device=int, moment=str),
        "nearly_empty": _frame(a.PinnedSegment, pinned, device=int, moment=str),
        "ooms": _frame(Refusal, of(lambda device: device.ooms), device=int),
        "leaks": _frame(Leak, of(lambda device: device.leaks), device=int),
        "what_if": _frame(ReplayOutcome, outcomes, device=int, run=str),
    }


def _comparison(document: c.Comparison) -> dict[str, DataFrame]:
    kernels = (("a", document.kernels_a), ("b", document.kernels_b))
    return {
        "settings": _frame(c.SettingRow, zip(document.settings)),
        "totals": _frame(c.TotalRow, zip(document.totals)),
        "stages": _frame(c.StageRow, zip(document.stages)),
        "categories": _frame(c.CategoryRow, zip(document.categories)),
        "tensors": _frame(c.TensorRow, zip(document.tensors)),
        "kernels": _frame(c.TensorSide, ((run, one) for run, use in kernels for one in use.tensors), run=str),
        "reserved": _frame(c.StepRow, zip(document.reserved)),
        "findings": _frame(c.FindingRow, zip(document.findings or ())),
    }


def _frame(row: type | None, rows: Iterable[tuple[Any, ...]], **before: type) -> DataFrame:
    """A frame of `rows`: the values of the columns `before`, then a value of type `row`, if there is one."""
    import pandas

    known = list(rows)
    columns = {name: ([one[place] for one in known], kind) for place, (name, kind) in enumerate(before.items())}
    if row is not None:
        plain = [to_plain(one[-1]) for one in known]
        for path, kind in _fields(row):
            columns[".".join(path)] = ([reduce(_inside, path, one) for one in plain], kind)
    return pandas.DataFrame(
        {name: pandas.Series(map(_text, values), dtype=_dtype(kind)) for name, (values, kind) in columns.items()}
    )


def _text(value: Any) -> Any:
    """A value; halves of characters, which pandas refuses in a text, as escapes."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _fields(row: type, path: tuple[str, ...] = (), *, optional: bool = False) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Where the fields of a row are, those of rows within it too, and their types; rows in lists are other tables."""
    for _, name, hint in json_fields(row):
        kind = hint | None if optional else hint
        place = (*path, name)
        (known, *others), lacks = _kinds(kind)
        if dataclasses.is_dataclass(known) and isinstance(known, type) and not others:
            yield from _fields(known, place, optional=lacks)
        elif not any(dataclasses.is_dataclass(one) for one in get_args(known)):
            yield place, kind


def _kinds(kind: Any) -> tuple[list[Any], bool]:
    """The types in a union, but for None; and whether None is in it."""
    inside = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return [one for one in inside if one is not NoneType], NoneType in inside


def _inside(value: Any, name: str) -> Any:
    return None if value is None else value[name]


def _dtype(kind: Any) -> str:
    (known, *others), lacks = _kinds(kind)
    if others or not isinstance(known, type):
        return "object"
    return "string" if issubclass(known, str) else _DTYPES.get(known, ("object", "object"))[lacks]
