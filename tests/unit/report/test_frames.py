"""The tables of documents as data frames: the rows and the names of the JSON, whole numbers, nothing lost."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pandas
import pytest

from memprof.allocator import parse_config
from memprof.ledger.steps import TrainingStep
from memprof.report.documents.ladder import Bottleneck, FixCost, LadderRow
from memprof.report.documents.report import Report
from tests.golden import test_analysis, test_comparison, test_report

MIB = 2**20
RUNG = LadderRow(
    ("chunked-loss",), "chunked-loss", 5, 6, 7, 8, 9, None, Bottleneck("backward", 1, "gradients", 5, "it dies"),
    FixCost(*[None] * 9, "exact", "nothing"),
)  # fmt: skip


def report(**changes) -> Report:
    return dataclasses.replace(test_report.document(2048 * MIB), **changes)


def of_json(rows: list[dict]) -> list[dict]:
    """Rows within a row as columns with a dot; lists of rows are other tables."""
    flat = []
    for row in rows:
        one = {}
        for name, value in row.items():
            if isinstance(value, dict):
                one |= {f"{name}.{inner}": cell for inner, cell in value.items()}
            elif name != "suggestions" and not (isinstance(value, list) and value and isinstance(value[0], dict)):
                one[name] = value
        flat.append(one)
    return flat


def same(frame: pandas.DataFrame, rows: list[dict]) -> None:
    assert len(frame) == len(rows)
    for (_, found), row in zip(frame.iterrows(), of_json(rows), strict=True):
        for name, value in row.items():
            if value is None and name not in frame:
                continue  # a row within the row that is not there
            cell = found[name]
            assert (value is None and pandas.api.types.is_scalar(cell) and pandas.isna(cell)) or cell == value, name


def test_a_report_s_tables_are_its_json():
    document = report(ladder=(RUNG,), steps=(TrainingStep(1, 5, 4, 4), TrainingStep(2, 6, 4, 0)))
    frames, written = document.frames(), document.to_json()
    assert list(frames) == [
        "stages",
        "steps",
        "batches",
        "reserved",
        "categories",
        "tensors",
        "ledger",
        "findings",
        "evidence",
        "suggestions",
        "ladder",
    ]
    for name in ("stages", "steps", "findings", "ladder"):
        same(frames[name], written[name])
    same(frames["tensors"], written["peak"]["tensors"])
    same(frames["ledger"], written["peak"]["rows"])
    assert dict(zip(*frames["categories"].to_dict("list").values(), strict=True)) == written["peak"]["categories"]
    evidence = [{"finding": one["id"], **row} for one in written["findings"] for row in one["evidence"]]
    same(frames["evidence"], evidence)
    same(
        frames["suggestions"],
        [{"finding": one["id"], **row} for one in written["findings"] for row in one["suggestions"]],
    )
    assert len(frames["evidence"])
    assert frames["ledger"]["bytes"].sum() == document.peak.allocated_bytes


def test_numbers_stay_whole_where_some_are_not_known():
    stages = report().frames()["stages"]
    assert stages["allocated_bytes"].dtype == "int64"
    assert stages["resident_bytes"].dtype == "Int64"
    assert stages["resident_bytes"].isna().all()
    assert stages["oom"].dtype == "bool"
    ladder = report(ladder=(RUNG,)).frames()["ladder"]
    assert (ladder["fits"].dtype, ladder["cost.operations"].dtype) == ("boolean", "Int64")
    assert ladder["cost.step_seconds"].dtype == "float64"


def test_a_table_without_rows_has_its_columns():
    empty = report().frames()["steps"]
    assert len(empty) == 0
    assert list(empty) == ["step", "peak_bytes", "end_bytes", "growth_bytes"]
    assert set(empty.dtypes.astype(str)) == {"int64"}
    full = report(ladder=(RUNG,)).frames()["ladder"]
    assert list(report().frames()["ladder"]) == list(full)


def test_an_analysis_says_of_which_device_each_row_is():
    document = test_analysis.document(what_if=parse_config("expandable_segments:True"), at="oom")
    frames, written = document.frames(), document.to_json()
    (device,) = written["devices"]
    assert all(next(iter(frame)) == "device" for frame in frames.values())
    for name, rows in (("groups", device["moment"]["groups"]), ("blocks", device["moment"]["blocks"])):
        same(frames[name], [{"device": 0, **row} for row in rows])
    same(frames["ooms"], device["ooms"])
    same(frames["leaks"], device["leaks"])
    assert list(frames["amounts"]["moment"]) == ["start", "peak", "end"]
    same(frames["amounts"], [device[moment] for moment in ("start", "peak", "end")])
    fragmentation = [device["fragmentation_at_peak"], device["fragmentation_at_end"]]
    same(frames["nearly_empty"], [row for one in fragmentation for row in one.pop("nearly_empty")])
    same(frames["fragmentation"], fragmentation)
    same(frames["what_if"], [device["what_if"]["before"], device["what_if"]["after"]])
    assert list(frames["timeline"]["allocated_bytes"]) == list(device["timeline"]["allocated_bytes"])
    assert len(test_analysis.document().frames()["what_if"]) == 0


@pytest.mark.parametrize("name", ["settings", "totals", "stages", "categories", "tensors", "reserved", "findings"])
def test_a_comparison_s_tables_are_its_json(name):
    document = test_comparison.document()
    same(document.frames()[name], document.to_json()[name])


def test_a_comparison_names_the_run_of_a_kernel():
    document = test_comparison.document()
    kernels = document.frames()["kernels"]
    counts = {"a": len(document.kernels_a.tensors), "b": len(document.kernels_b.tensors)}
    assert kernels["run"].value_counts().to_dict() == {run: count for run, count in counts.items() if count}
    assert len(dataclasses.replace(document, findings=None).frames()["findings"]) == 0


def test_pandas_is_imported_when_frames_are_asked_for_and_not_before():
    program = (
        "import sys; import memprof.report.frames, memprof.report.export.csv, memprof.report.documents.report; "
        "assert not {'pandas', 'numpy', 'rich'} & set(sys.modules), 'too early'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
