"""Sweeps by a formula of their tokens, for the tests of what is made of them."""

from __future__ import annotations

import dataclasses

from memprof.flows.sweep.axes import build_spec_grid
from memprof.flows.sweep.bounds import find_frontier
from memprof.report.documents.sweep import CellAnswer, Sweep, SweepRow
from memprof.units import GIB


def make_sweep(**options) -> Sweep:
    """The sweep of the grid of `options`, in which a cell needs 1 GiB and a MiB for each token."""
    grid = build_spec_grid({"model": "pythia-70m", "gpu_vram_bytes": "2,4", **options})
    answers = []
    for cell in grid.cells:
        total, needed = cell.question.spec.gpu_vram_bytes, GIB
        for size in cell.sizes:
            needed *= size
        needed = needed // 1024 + GIB
        fits = needed <= total
        answers.append(
            CellAnswer(
                "run", fits, needed, "", total - needed, 0.25, (), "fits well" if fits else "<script>OOM</script>"
            )
        )
    frontier = find_frontier(grid, answers)
    rows = [
        SweepRow(cell.values, answer, cell.question.command, index in frontier)
        for index, (cell, answer) in enumerate(zip(grid.cells, answers, strict=True))
    ]
    return Sweep(grid.axes, tuple(rows), seconds=1.5, store="answers")


def change_answer(document: Sweep, index: int, **changes) -> Sweep:
    """`document` with another answer to one cell."""
    rows = list(document.rows)
    rows[index] = dataclasses.replace(rows[index], answer=dataclasses.replace(rows[index].answer, **changes))
    return dataclasses.replace(document, rows=tuple(rows))
