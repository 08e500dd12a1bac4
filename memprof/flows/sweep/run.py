"""Drives the cells of a sweep through an executor: stores each answer as it comes, and runs lost cells again."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from pathlib import Path

from memprof.errors import MemprofError, UsageError, first_line
from memprof.flows.cache.objects import ObjectStore, open_address
from memprof.flows.cache.store import CLAIM_SECONDS, Store, get_cache_folder
from memprof.flows.sweep.axes import Grid
from memprof.flows.sweep.bounds import MARGIN, Line, estimate_cell, find_frontier
from memprof.flows.sweep.cells import answer_cell
from memprof.flows.sweep.executors import Workers, check_executor, open_workers
from memprof.flows.sweep.questions import NO_FIX, SEARCH, Question, read_versions, to_payload
from memprof.report.documents.sweep import CellAnswer, Sweep, SweepRow

MAX_LOSSES = 2  # times that a cell is run again after its worker was lost
_LEFT = CellAnswer("left", None)
_WAIT_SECONDS = 5.0  # between two looks at claims and at the time
_FOREIGN_WAIT_SECONDS = 0.5  # between two looks at cells that another sweep has claimed
_FINAL_ERRORS = ("KilledWorker",)  # of dask, which has run the cell again itself
_ASSUMPTIONS = (
    "estimate: the band around the analytical estimate lies on one side of the capacity; its bytes are about right",
    "monotony: more tokens never need less memory; only runs that are at least "
    f"{MARGIN:.0%} of the GPU away from its capacity decide other cells",
)


def run_sweep(
    grid: Grid,
    executor: Executor | str | None = None,
    *,
    exact: bool = False,
    store: str | Path | None = None,
    cache: bool = True,
    workers: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Sweep:
    """Return the answers to the cells of `grid`.

    `exact` runs every cell. Answers are stored in `store`, a folder or an address of fsspec (None: the folder of the
    cache, if it is on); without `cache` none is taken from there. See `open_workers` for `executor` and `workers`. On
    Ctrl-C, and if the executor or the store fails for good, the cells that are not answered are left. Raises
    UsageError: no such executor or store; a worker has other versions than this process.
    """
    check_executor(executor)
    begin = time.monotonic()
    opened_store = _open_store(store)
    sweep = _Sweep(grid, opened_store, exact=exact, reads=cache, progress=progress)
    ended, note = "complete", ""
    try:
        sweep.answer_without_runs()
        questions = sweep.list_open_questions()
        if questions:
            with open_workers(executor, questions, progress, workers) as opened:
                note = sweep.run(opened)
                ended = "stopped" if note else ended
    except KeyboardInterrupt:
        ended = "interrupted"
    finally:
        sweep.end()
    note = "; ".join(filter(None, (note, sweep.describe_unstored())))
    return Sweep(
        axes=grid.axes,
        rows=sweep.build_rows(),
        ended=ended,
        note=note,
        seconds=round(time.monotonic() - begin, 3),
        store=None if opened_store is None else str(opened_store.folder),
        assumptions=() if exact else _ASSUMPTIONS,
    )


def _open_store(store: str | Path | None) -> Store | ObjectStore | None:
    if store is None:
        cache_folder = get_cache_folder()
        return None if cache_folder is None else Store(cache_folder / "sweep", None)
    opened = open_address(str(store)) if "://" in str(store) else Store(Path(store).expanduser().absolute(), None)
    if isinstance(opened, Store):
        opened.make_folder()
    return opened


class _Sweep:
    """The state of one sweep: answers so far, cells that are open by line, and cells that an executor has."""

    def __init__(
        self,
        grid: Grid,
        store: Store | ObjectStore | None,
        *,
        exact: bool,
        reads: bool,
        progress: Callable[[str], None],
    ) -> None:
        self._grid, self._store, self._exact, self._reads, self._progress = grid, store, exact, reads, progress
        self._shared = store if isinstance(store, Store) else None  # in which cells are claimed
        self._versions = read_versions()
        self._answers: list[CellAnswer | None] = [None] * len(grid.cells)
        keys = [grid.make_line_key(cell) for cell in grid.cells]
        indices: dict[tuple[str, ...], list[int]] = {}
        for index, key in enumerate(keys):
            indices.setdefault(key, []).append(index)
        self._lines = {key: Line(grid, members) for key, members in indices.items()}
        self._line_of = [self._lines[key] for key in keys]
        self._baselines = _find_baselines(grid)
        self._dependents: dict[int, list[int]] = {}
        for index, baseline in self._baselines.items():
            self._dependents.setdefault(baseline, []).append(index)
        self._queue: deque[list[int]] = deque()  # open cells of each line
        self._lost: deque[int] = deque()  # to be run again, one at a time
        self._losses: dict[int, int] = {}
        self._loss_errors: dict[int, str] = {}
        self._foreign: deque[int] = deque()  # claimed by another sweep
        self._futures: dict[Future[dict[str, object]], int] = {}
        self._claims: dict[int, str] = {}
        self._num_done = self._num_failed = self._num_unstored = 0
        self._start, self._start_done = time.monotonic(), 0

    # -- answers ------------------------------------------------------------------------------------------------------

    def answer_without_runs(self) -> None:
        """Answer the cells that are cached, cannot be asked, or that the analytical estimate decides."""
        for index, cell in enumerate(self._grid.cells):
            if cell.question is None:
                self._set(index, CellAnswer("failed", None, reason=cell.error))
        for index, cached in self._find_cached(range(len(self._grid.cells))):
            self._conclude(index, cached)
        if not self._exact:
            for index, cell in enumerate(self._grid.cells):
                if index % 1000 == 0:
                    self._progress(f"estimating cell {index:,} of {len(self._answers):,}")
                if self._answers[index] is None and cell.question is not None:
                    answer = estimate_cell(cell.question)
                    if answer is not None:
                        self._set(index, answer)
        self._start_done = self._num_done

    def _find_cached(self, indices: Iterable[int]) -> Iterator[tuple[int, CellAnswer]]:
        """Yield those of the cells that the store has, with their answers."""
        if self._store is None or not self._reads:
            return
        keys = {self._make_key(index): index for index in indices if self._grid.cells[index].question is not None}
        for key, values in self._store.find_all(keys).items():
            with contextlib.suppress(ValueError):
                yield keys[key], dataclasses.replace(CellAnswer.from_json(values), cached=True)

    def _make_key(self, index: int) -> str:
        question = self._grid.cells[index].question
        assert question is not None
        return question.make_key(self._versions)

    def _set(self, index: int, answer: CellAnswer) -> None:
        """Set an answer; a cell that fits without fixes says the same of the search for them."""
        if self._answers[index] is None:
            self._num_done += answer.how != "failed"
            self._num_failed += answer.how == "failed"
        self._answers[index] = answer
        if answer.fits and not self._exact:
            for dependent in self._dependents.get(index, ()):
                current = self._answers[dependent]
                if current is None or current.how == "monotony":
                    self._set(dependent, answer)

    def _conclude(self, index: int, answer: CellAnswer) -> None:
        """Set the answer of a run, and those of the cells that it decides."""
        self._set(index, answer)
        if self._exact:
            return
        for other in (index, *(self._dependents.get(index, ()) if answer.fits else ())):
            for decided, conclusion in self._line_of[other].list_decided(other, answer):
                if self._answers[decided] is None:
                    self._set(decided, conclusion)

    def build_rows(self) -> tuple[SweepRow, ...]:
        """Return a row for each cell."""
        answers = [_LEFT if answer is None else answer for answer in self._answers]
        frontier = find_frontier(self._grid, answers)
        return tuple(
            SweepRow(cell.values, answer, "" if cell.question is None else cell.question.command, index in frontier)
            for index, (cell, answer) in enumerate(zip(self._grid.cells, answers, strict=True))
        )

    # -- runs ---------------------------------------------------------------------------------------------------------

    def list_open_questions(self) -> list[Question]:
        """Return the questions of the cells that are not answered."""
        cells = zip(self._grid.cells, self._answers, strict=True)
        return [cell.question for cell, answer in cells if answer is None and cell.question is not None]

    def run(self, workers: Workers) -> str:
        """Run the open cells; return why the executor cannot go on, or "" once all cells are answered."""
        for line in self._lines.values():
            open_indices = [index for index in line.indices if self._answers[index] is None]
            if open_indices:
                self._queue.append(open_indices)
        self._start = renewed = time.monotonic()
        while True:
            try:
                self._submit(workers)
            except _ExecutorError as error:
                if workers.restart is None:
                    return f"the executor takes no more cells: {error}"
                self._lost.extend(self._restart(workers))
                continue
            if not self._futures and not self._foreign:
                return ""
            seconds = _FOREIGN_WAIT_SECONDS if self._foreign else _WAIT_SECONDS
            done = wait(self._futures, seconds, FIRST_COMPLETED).done if self._futures else set()
            if not self._futures:
                time.sleep(seconds)
            lost = [index for future in done if (index := self._take(future)) is not None]
            if any(isinstance(_get_error(future), BrokenExecutor | CancelledError) for future in done):
                if workers.restart is None:
                    return "the executor has lost its workers"
                lost += self._restart(workers)
            for index in lost:
                self._note_loss(index)
            self._cancel_decided()
            try:
                self._flush()
            except MemprofError as error:
                return error.line
            if time.monotonic() - renewed > CLAIM_SECONDS / 6:
                renewed = time.monotonic()
                for key in self._claims.values():
                    self._shared.renew(key) if self._shared is not None else None
            self._report()

    def _submit(self, workers: Workers) -> None:
        """Give cells to the executor until it has as many as it answers at once."""
        if self._foreign and len(self._futures) < workers.width:
            for _ in range(len(self._foreign)):
                self._start_cell(workers, self._foreign.popleft())
        while len(self._futures) < (1 if self._runs_alone(workers) else workers.width):
            index = self._lost.popleft() if self._lost else self._pick()
            if index is None:
                return
            self._start_cell(workers, index)

    def _runs_alone(self, workers: Workers) -> bool:
        """Return whether cells are run one at a time: where one worker's end is that of all, lost cells are, so that
        it is known whose fault it was."""
        return workers.restart is not None and bool(self._lost or self._losses.keys() & {*self._futures.values()})

    def _start_cell(self, workers: Workers, index: int) -> None:
        question = self._grid.cells[index].question
        if self._answers[index] is not None or question is None:
            return
        if self._shared is not None and index not in self._claims:
            key = self._make_key(index)
            if not self._shared.claim(key):
                self._foreign.append(index)
                return
            self._claims[index] = key
            for _, cached in self._find_cached([index]):  # another sweep has answered it
                self._release(index)
                self._conclude(index, cached)
                return
        try:
            losses = self._losses.get(index, 0)
            future = workers.executor.submit(answer_cell, to_payload(question), self._versions, losses)
        except Exception as error:  # of an executor that is broken or shut down: any
            self._lost.appendleft(index)
            raise _ExecutorError(first_line(error)) from error
        self._futures[future] = index

    def _pick(self) -> int | None:
        """Return the open cell to run next; None: there is none now. It is the middle one of a line, which decides
        most of the others, and lines take turns."""
        for _ in range(len(self._queue)):
            indices = self._queue.popleft()
            indices[:] = [index for index in indices if self._answers[index] is None]
            # Whether a search is needed is known once the cell without fixes is answered.
            ready = [index for index in indices if self._exact or not self._awaits_baseline(index)]
            if indices:
                self._queue.append(indices)
            if ready:
                index = ready[len(ready) // 2]
                indices.remove(index)
                return index
        return None

    def _awaits_baseline(self, index: int) -> bool:
        baseline = self._baselines.get(index)
        return baseline is not None and self._answers[baseline] is None

    def _take(self, future: Future[dict[str, object]]) -> int | None:
        """Set the answer of a future that is done; return its cell if the worker was lost."""
        index = self._futures.pop(future)
        error = _get_error(future)
        if self._answers[index] is not None:
            self._release(index)
            return None
        if error is not None:
            self._loss_errors[index] = first_line(error) or type(error).__name__
            if type(error).__name__ in _FINAL_ERRORS:
                self._losses[index] = MAX_LOSSES
            return index
        values = future.result()
        if "refused" in values:
            hint = "install the versions of this process there, or leave the worker out; answers so far are stored"
            raise UsageError("a worker has other versions than this process", value=values["refused"], hint=hint)
        answer = CellAnswer.from_json(values)
        if answer.how == "run" and self._store is not None:
            self._num_unstored += self._store.save(self._make_key(index), answer.to_json()) is False
        self._release(index)
        self._conclude(index, answer)
        return None

    def _note_loss(self, index: int) -> None:
        """Have a cell run again whose worker was lost, or give it up."""
        self._losses[index] = losses = self._losses.get(index, 0) + 1
        if losses <= MAX_LOSSES:
            self._lost.append(index)
            return
        self._release(index)
        reason = f"its worker was lost {losses} times: {self._loss_errors.get(index, 'it was killed')}"
        self._set(index, CellAnswer("failed", None, reason=reason))

    def _restart(self, workers: Workers) -> list[int]:
        """Replace a broken executor; return the cells that it had."""
        assert workers.restart is not None
        lost = [index for index in self._futures.values() if self._answers[index] is None]
        self._futures.clear()
        workers.executor = workers.restart()
        return lost

    def _cancel_decided(self) -> None:
        """Withdraw cells from the executor that another run has decided, unless they run already."""
        for future, index in [*self._futures.items()]:
            if self._answers[index] is not None and future.cancel():
                self._futures.pop(future, None)
                self._release(index)

    def _release(self, index: int) -> None:
        key = self._claims.pop(index, None)
        if key is not None and self._shared is not None:
            self._shared.release(key)

    def end(self) -> None:
        """Take the answers that have come, and withdraw all other cells, with the claims on them."""
        with contextlib.suppress(MemprofError):
            for future in [*self._futures]:
                if future.done():
                    self._take(future)
                else:
                    future.cancel()
            self._flush()
        for index in [*self._claims]:
            self._release(index)

    def describe_unstored(self) -> str:
        """Return how many answers could not be stored, and why; "" if all were."""
        if not self._num_unstored or self._shared is None:
            return ""
        noun = "answer" if self._num_unstored == 1 else "answers"
        return f"{self._num_unstored:,} {noun} could not be stored ({self._shared.error})"

    def _flush(self) -> None:
        """Write the answers that the store has not yet written."""
        if self._store is not None:
            self._store.flush()

    def _report(self) -> None:
        """Report how many cells are answered, and the time that the others will take if they go as these went."""
        total, done = len(self._answers), self._num_done + self._num_failed
        text = f"cells: {self._num_done:,} of {total:,} done, {self._num_failed:,} failed, {total - done:,} left"
        new, seconds = done - self._start_done, time.monotonic() - self._start
        if new > 0 and total > done:
            text += f", about {_format_duration(seconds / new * (total - done))} to go"
        self._progress(text)


class _ExecutorError(Exception):
    """An executor takes no more cells."""


def _get_error(future: Future[dict[str, object]]) -> BaseException | None:
    try:
        return future.exception(0)
    except CancelledError as error:
        return error


def _find_baselines(grid: Grid) -> dict[int, int]:
    """Return for each cell that searches fixes the cell without fixes that is equal otherwise, if the grid has it."""
    places = [place for place, axis in enumerate(grid.axes) if axis.name == "fix"]
    if not places or NO_FIX not in grid.axes[places[0]].values:
        return {}
    place = places[0]
    by_values = {cell.values: index for index, cell in enumerate(grid.cells)}
    return {
        index: by_values[(*cell.values[:place], NO_FIX, *cell.values[place + 1 :])]
        for index, cell in enumerate(grid.cells)
        if cell.values[place] == SEARCH
    }


def _format_duration(seconds: float) -> str:
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
