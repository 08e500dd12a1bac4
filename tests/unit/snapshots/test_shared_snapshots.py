"""Published recordings of real GPUs: their peaks and states as their index gives them, and every address replayed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from memprof.flows.recordings import open_file
from memprof.report.documents.analysis_build import AnalysisRequest, build_analysis

MIB = 1 << 20
FOLDER = Path(__file__).resolve().parents[4] / "shared" / "snapshots"


def _rows() -> list:
    index = FOLDER / "INDEX.csv"
    if not index.is_file():
        skip = pytest.mark.skip(reason=f"no shared data: {FOLDER} is not there, with a case for each recording")
        return [pytest.param({}, marks=skip, id="none")]
    with index.open(newline="", encoding="utf-8") as file:
        return [pytest.param(row, id=row["file"]) for row in csv.DictReader(file)]


def _figures(text: str) -> list[float]:
    return [float(part) for part in text.split(";")] if text else []


@pytest.mark.parametrize("row", _rows())
def test_figures_of_the_index(row):
    opened = open_file(FOLDER / row["file"])
    found = opened.recordings
    assert all(one.replay.exact and one.unmatched_events == 0 for one in found)
    # One figure per device with events; the index rounds to a thousandth (requested) and a hundredth MiB (reserved).
    traced = [one for one in found if one.replay.allocations] or found
    for text, column, start, digits in (
        (row["peak_requested_MiB"], "requested", 0, 3),
        (row["peak_reserved_MiB"], "reserved", 2, 2),
        (row["requested_at_start_MiB"], None, 0, 3),
        (row["reserved_at_start_MiB"], None, 2, 2),
    ):
        figures = _figures(text)
        own = [one.peak(column)[0] if column else one.start[start] for one in traced]
        assert [round(value / MIB, digits) for value in own] == figures or not figures
    assert round(sum(one.at(one.end)[2] for one in found) / MIB, 1) == float(row["reserved_end_MiB"])
    assert round(sum(one.at(one.end)[1] for one in found) / MIB, 2) == float(row["allocated_end_MiB"])

    document = build_analysis(found, opened.origin, AnalysisRequest())
    assert document.replay.identical_addresses == document.replay.allocations == int(row["n_alloc"])
    assert document.replay.final_layout_identical
    assert document.ran_out == (int(row["n_oom"]) > 0)
    for device in document.devices:
        for state in (device.fragmentation_at_peak, device.fragmentation_at_end):
            assert state.free_bytes == state.releasable_bytes + state.pinned_bytes
            assert state.reserved_bytes == state.used_bytes + state.free_bytes
        assert device.fragmentation_at_peak.reserved_bytes == device.peak.reserved_bytes
        assert device.leaks == ()
    assert row["file"] in str(document)
