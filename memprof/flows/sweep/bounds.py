"""Answers to cells without a run: the analytical estimate where it leaves no doubt, and runs of other cells.

More tokens never need less memory: a run that fits says that cells with fewer sequences and shorter ones fit, and one
that does not, that larger ones do not. The allocator's rounding and its segments are not monotone, so a run within
`MARGIN` of the capacity decides no other cell, and cells near the limit are run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from memprof.estimate.table import BORDERLINE, FITS
from memprof.flows.first_estimate import estimate_spec
from memprof.flows.gpus import find_spec_gpu
from memprof.flows.sweep.axes import Cell, Grid
from memprof.flows.sweep.questions import NO_FIX, SEARCH, Question
from memprof.report.documents.sweep import SIZE_AXES, CellAnswer

MARGIN = 0.03  # share of the GPU


def estimate_cell(question: Question) -> CellAnswer | None:
    """Return the answer of the analytical estimate; None if it has none, leaves a doubt, or fixes must be searched."""
    if question.spec is None or question.fix not in (NO_FIX, SEARCH):
        return None
    estimate = estimate_spec(question.spec)
    if estimate is None or estimate.verdict == BORDERLINE or (question.fix == SEARCH and estimate.verdict != FITS):
        return None
    return CellAnswer(
        how="estimate",
        fits=estimate.verdict == FITS,
        needed_bytes=estimate.num_bytes,
        bound="about",
        headroom_bytes=estimate.gpu.total_bytes - estimate.num_bytes,
        reason=f"analytical estimate: {estimate.describe()}",
    )


class Line:
    """Cells of one line of the grid, which differ along the size axes alone, and what runs of them say about others."""

    def __init__(self, grid: Grid, indices: Sequence[int]) -> None:
        self._cells = grid.cells
        self._names = [axis.name for axis in grid.axes if axis.is_size]
        self.indices = sorted(indices, key=lambda index: (math.prod(grid.cells[index].sizes), grid.cells[index].sizes))
        first = grid.cells[self.indices[0]].question
        is_monotone = first is not None and first.spec is not None and set(self._names) <= set(SIZE_AXES)
        self._total_bytes = find_spec_gpu(first.spec).total_bytes if is_monotone and first and first.spec else None

    def list_decided(self, index: int, answer: CellAnswer) -> Iterator[tuple[int, CellAnswer]]:
        """Yield each cell of the line that the run of the cell `index` decides, with its answer."""
        if self._total_bytes is None or answer.how != "run" or answer.needed_bytes is None or answer.fits is None:
            return
        share = answer.needed_bytes / self._total_bytes
        if (answer.fits and share > 1 - MARGIN) or (not answer.fits and share < 1 + MARGIN):
            return
        cell = self._cells[index]
        for other in self.indices:
            small, large = (other, index) if answer.fits else (index, other)
            if other != index and _is_at_most(self._cells[small], self._cells[large]):
                yield other, self._conclude(cell, answer)

    def _conclude(self, cell: Cell, answer: CellAnswer) -> CellAnswer:
        sizes = " and ".join(
            f"{name.replace('_', ' ')} {size:,}" for name, size in zip(self._names, cell.sizes, strict=True)
        )
        return CellAnswer(
            how="monotony",
            fits=answer.fits,
            needed_bytes=answer.needed_bytes,
            bound="at most" if answer.fits else "at least",
            headroom_bytes=answer.headroom_bytes,
            fixes=answer.fixes,
            reason=f"the run with {sizes} {'fits' if answer.fits else 'pages' if answer.pages else 'does not fit'}",
            pages=answer.pages,
        )


def _is_at_most(small: Cell, large: Cell) -> bool:
    return all(one <= other for one, other in zip(small.sizes, large.sizes, strict=True))


def find_frontier(grid: Grid, answers: Sequence[CellAnswer]) -> set[int]:
    """Return the cells that fit while no other one of their line that is at least as large along all size axes does."""
    lines: dict[tuple[str, ...], list[int]] = {}
    for index, answer in enumerate(answers):
        if answer.fits:
            lines.setdefault(grid.make_line_key(grid.cells[index]), []).append(index)
    frontier: set[int] = set()
    for indices in lines.values():
        found: list[int] = []
        for index in sorted(indices, key=lambda index: grid.cells[index].sizes, reverse=True):
            if not any(_is_at_most(grid.cells[index], grid.cells[larger]) for larger in found):
                found.append(index)
        frontier.update(found)
    return frontier
