"""`--csv FOLDER`: a file a table, each whole or not at all; errors are one line."""

from __future__ import annotations

import csv
import json

import pandas
import pytest

from memprof.errors import MemprofError, UsageError
from memprof.report.export.csv import check_folder, write_csv
from tests.golden import test_comparison, test_report

DOCUMENT = test_report.document(2048 * 2**20)


def test_a_file_a_table(tmp_path):
    folder = tmp_path / "runs" / "first"
    write_csv(DOCUMENT, folder)
    assert {file.name for file in folder.iterdir()} == {f"{name}.csv" for name in DOCUMENT.frames()}
    with (folder / "stages.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["peak_allocated_bytes"]) for row in rows] == [row.peak_allocated_bytes for row in DOCUMENT.stages]
    assert {row["seconds"] for row in rows} == {""}
    assert (folder / "steps.csv").read_text() == "step,peak_bytes,end_bytes,growth_bytes\n"


def test_lists_are_json_and_what_is_not_known_is_empty(tmp_path):
    write_csv(DOCUMENT, tmp_path)
    with (tmp_path / "tensors.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row, tensor in zip(rows, DOCUMENT.peak.tensors, strict=True):
        assert json.loads(row["shape"]) == list(tensor.shape)
        assert row["name"] == (tensor.name or "")
        assert int(row["bytes"]) == tensor.num_bytes


def test_whole_numbers_have_no_point_beside_those_not_known(tmp_path):
    write_csv(test_comparison.document(), tmp_path)
    text = (tmp_path / "totals.csv").read_text()
    assert ".0" not in text
    assert len(pandas.read_csv(tmp_path / "totals.csv")) == len(test_comparison.document().totals)


def test_an_earlier_run_is_replaced_and_nothing_else_is_touched(tmp_path):
    write_csv(DOCUMENT, tmp_path)
    steps = tmp_path / "steps.csv"
    header = steps.read_text().splitlines()[0]
    steps.write_text(header + "\nof an earlier run\n")
    (tmp_path / "mine.csv").write_text("mine")
    write_csv(DOCUMENT, tmp_path)
    assert "earlier" not in steps.read_text()
    assert (tmp_path / "mine.csv").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def test_a_file_of_a_tables_name_that_is_none_is_kept(tmp_path):
    steps = tmp_path / "steps.csv"
    steps.write_text("day,steps\nMonday,9000\n")
    with pytest.raises(UsageError, match="no such table of memprof") as caught:
        write_csv(DOCUMENT, tmp_path)
    assert "--force" in str(caught.value)
    assert "Monday" in steps.read_text()
    write_csv(DOCUMENT, tmp_path, force=True)
    assert "Monday" not in steps.read_text()


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_is_no_folder(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("")
    for use in (check_folder, lambda folder: write_csv(DOCUMENT, folder)):
        with pytest.raises(UsageError, match="not a folder") as caught:
            use(file / below)
        assert str(file) in str(caught.value)
        assert "--csv" in str(caught.value)


def test_a_folder_that_may_not_be_written_to_is_said_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("memprof.report.export.csv.os.access", lambda place, mode: False)  # root may write anywhere
    with pytest.raises(UsageError, match="may not be written to"):
        check_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_table_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "stages.csv").mkdir()
    with pytest.raises(MemprofError, match="this is a folder") as caught:
        write_csv(DOCUMENT, tmp_path)
    assert "stages.csv" in str(caught.value)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_made(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere" / "at all")
    with pytest.raises(UsageError):
        write_csv(DOCUMENT, link)


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r"])
def test_no_text_is_a_formula(first):
    from memprof.report.export.csv import _format_cell

    assert (_format_cell(f"{first}1+1"), _format_cell(f"a{first}1"), _format_cell(-1), _format_cell("")) == (
        f"'{first}1+1",
        f"a{first}1",
        -1,
        "",
    )


def test_a_formula_and_half_a_character_in_a_name(tmp_path):
    from memprof.flows.account import analyze
    from memprof.report.export.csv import write_csv
    from tests.golden.test_report import training_run

    trace = training_run()
    trace.sources = [f"=\ud800{source}" for source in trace.sources]
    trace.ops = [f"@{op}" for op in trace.ops]
    write_csv(analyze(trace), tmp_path)
    text = (tmp_path / "tensors.csv").read_text(encoding="utf-8")
    assert "'@" in text and ",@" not in text and ",=" not in text
