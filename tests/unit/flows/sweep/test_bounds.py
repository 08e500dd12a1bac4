"""Which cells need no run, and which of those that fit are the frontier."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.flows.sweep.axes import build_spec_grid
from memprof.flows.sweep.bounds import Line, estimate_cell, find_frontier
from memprof.report.documents.sweep import CellAnswer
from memprof.units import GIB
from tests.lanes import examples

SIZE = {"model": "pythia-70m", "gpu_vram_bytes": "100", "context_length": "8,16,32", "batch_size": "1,2"}


def _decide(share, fits, how="run"):
    """The cells that the run of (16, 1) decides, by their values."""
    grid = build_spec_grid(SIZE)
    line = Line(grid, range(6))
    answer = CellAnswer(how, fits, needed_bytes=round(share * 100 * GIB))
    return {grid.cells[index].sizes: found for index, found in line.list_decided(2, answer)}


@pytest.mark.parametrize(("share", "decides"), [(0.5, True), (0.97, True), (0.9701, False), (1.2, False)])
def test_what_fits_with_room_decides_smaller_cells(share, decides):
    found = _decide(share, True)
    assert found.keys() == ({(8, 1)} if decides else set())
    assert all(answer.fits and answer.bound == "at most" for answer in found.values())


@pytest.mark.parametrize(("share", "decides"), [(0.99, False), (1.0299, False), (1.03, True), (9, True)])
def test_what_is_far_too_large_decides_larger_cells(share, decides):
    found = _decide(share, False)
    assert found.keys() == ({(16, 2), (32, 1), (32, 2)} if decides else set())
    assert all(answer.fits is False and answer.bound == "at least" for answer in found.values())


def test_what_was_not_run_or_has_no_verdict_decides_nothing():
    assert not _decide(0.5, True, how="monotony") and not _decide(0.5, None)


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"context_length": 512, "gpu": "h100-80gb"}, True),
        ({"context_length": 2048, "batch_size": 4096, "gpu": "rtx-4090"}, False),
        ({"context_length": 512, "gpu": "h100-80gb", "fix": "auto"}, True),
        ({"context_length": 2048, "batch_size": 4096, "gpu": "rtx-4090", "fix": "auto"}, None),
        ({"context_length": 512, "gpu": "h100-80gb", "fix": "fused-optimizer"}, None),
        ({"context_length": 512, "gpu": "h100-80gb", "freeze": "*.bias"}, None),
    ],
)
def test_the_estimate_answers_where_it_leaves_no_doubt(options, fits):
    answer = estimate_cell(build_spec_grid({"model": "pythia-410m", **options}).cells[0].question)
    assert (None if answer is None else answer.fits) == fits


@given(st.lists(st.booleans(), min_size=24, max_size=24))
@settings(max_examples=examples(100), deadline=None)
def test_the_frontier_is_what_no_larger_cell_beats(fits):
    axes = {"gpu": "t4,rtx-4090", "context_length": "8,16,32,64", "batch_size": "1,2,3"}
    grid = build_spec_grid({"model": "pythia-70m", **axes})
    found = find_frontier(grid, [CellAnswer("run", one) for one in fits])
    for index, cell in enumerate(grid.cells):
        larger = [
            other
            for other, one in enumerate(grid.cells)
            if other != index and one.values[1] == cell.values[1] and fits[other]
            and all(a >= b for a, b in zip(one.sizes, cell.sizes, strict=True))
        ]  # fmt: skip
        assert (index in found) == (fits[index] and not larger)
