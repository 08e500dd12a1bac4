"""The breakdown of the peak: its rows, and where it says the peak is."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.flows.account import analyze
from memprof.report.documents.report import Report
from memprof.report.terminal.console import to_text
from memprof.report.terminal.peak import render_categories
from memprof.trace.events import PhaseKind
from memprof.trace.facts import DeviceFacts, Facts
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


@pytest.fixture
def document() -> Report:
    """A run with 10 MiB at its peak, in the forward of step 1."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.trace.facts = Facts(device=DeviceFacts("A", 99 * MIB, usable_bytes=99 * MIB))
    b.alloc(10 * MIB)
    return analyze(b.trace)


def list_rows(document: Report, note: str | None = "") -> list[list[str]]:
    """The rows, each with its name and size, largest first; `note`: None in the whole report."""
    lines = to_text(render_categories(document, note=note), 100).splitlines()
    return [[word.strip() for word in line.split("  ") if word.strip()][:2] for line in lines if "%" in line]


def test_what_is_not_told_apart_is_one_row_with_the_sum(document: Report) -> None:
    categories = {"parameters": 5 * MIB, "inputs": 4 * MIB, "unattributed": 3 * MIB}
    shown = dataclasses.replace(document, peak=dataclasses.replace(document.peak, categories=categories))
    assert list_rows(shown) == [["inputs and other tensors", "7.00"], ["parameters", "5.00"]]
    measured = dataclasses.replace(shown, source="measured")  # whose tensors may have no line
    assert list_rows(measured) == [
        ["parameters", "5.00"],
        ["inputs and other tensors", "4.00"],
        ["unattributed", "3.00"],
    ]
    assert list_rows(shown, note=None) == [["parameters", "5.00"], ["inputs", "4.00"], ["unattributed", "3.00"]]


def test_a_row_of_what_a_cause_keeps_is_no_part_of_the_sum(document: Report) -> None:
    peak = dataclasses.replace(
        document.peak,
        categories={"inputs": 4 * MIB, "unattributed": 3 * MIB},
        culprits={"list `kept`": {"unattributed": 2 * MIB}},
    )
    rows = list_rows(dataclasses.replace(document, peak=peak))
    assert rows == [["inputs and other tensors", "5.00"], ["list `kept`", "2.00"]]


@pytest.mark.parametrize(
    ("stage", "name"), [("backward", "temporaries of the backward"), ("optimizer step", "temporaries")]
)
def test_temporaries_are_of_the_stage_with_the_peak(document: Report, stage: str, name: str) -> None:
    peak = dataclasses.replace(document.peak, stage=stage, categories={"temporaries": 4 * MIB})
    assert list_rows(dataclasses.replace(document, peak=peak)) == [[name, "4.00"]]


@pytest.mark.parametrize(
    ("others", "place"),
    [
        ([], "at x/train.py:4"),
        ([{"source": "/x/train.py:5 main", "peak_allocated_bytes": 11 * MIB}], "at x/train.py:5"),
        ([{"source": "/x/train.py:5 main", "peak_allocated_bytes": 9 * MIB}], "at x/train.py:4"),
        ([{"source": "/x/train.py:5 main", "peak_allocated_bytes": 11 * MIB, "step": 2}], "at x/train.py:4"),
        ([{"source": "/x/train.py:5 main", "peak_allocated_bytes": 11 * MIB, "name": "loss"}], "at x/train.py:4"),
        ([{"source": None, "peak_allocated_bytes": 11 * MIB}], "in code outside modules of step 1"),
    ],
)
def test_the_peak_is_at_the_line_of_the_programs_own_code(
    document: Report, others: list[dict[str, object]], place: str
) -> None:
    """That of the stage with the peak; of several with its name the highest."""
    own = {"name": "own code", "step": 1, "source": "/x/train.py:4 main"}
    first = dataclasses.replace(document.stages[-1], **own)
    rows = (first, *(dataclasses.replace(first, **change) for change in others))
    peak = dataclasses.replace(document.peak, stage="own code", step=1)
    text = to_text(render_categories(dataclasses.replace(document, stages=rows, peak=peak)), 100)
    assert f"At the peak, 10.00 MiB of tensors {place}\n" in text
