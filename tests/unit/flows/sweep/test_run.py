"""A sweep drives an executor: few runs, none lost, none twice, and a valid table whatever happens."""

import errno
import os
import threading
from collections import Counter
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from memprof.errors import UsageError
from memprof.flows.sweep.axes import build_spec_grid
from memprof.flows.sweep.run import run_sweep
from memprof.report.documents.sweep import Sweep
from memprof.report.terminal.console import to_text
from memprof.report.terminal.sweep import render

GRID = {
    "model": "pythia-70m", "gpu_vram_bytes": "1,2,3", "context_length": "32,64,128,256,512", "batch_size": "1,2,4,8,16",
    "freeze": "*.bias",  # which the analytical estimate does not know
}  # fmt: skip


class Formula(Executor):
    """Answers a cell by a formula of its tokens at once; `break_at` is called before with the number of the call."""

    def __init__(self, break_at=lambda number, sizes: None):
        self.calls, self._break_at, self._lock = Counter(), break_at, threading.Lock()

    def submit(self, fn, question, versions, attempt=0):
        spec = question["spec"]
        sizes = spec["context_length"], spec["batch_size"]
        future = Future()
        with self._lock:
            self.calls[(*sizes, spec["gpu_vram_bytes"], question.get("fix", "none"))] += 1
            number = self.calls.total()
        try:
            instead = self._break_at(number, sizes)
        except BrokenExecutor:
            raise
        except Exception as error:
            future.set_exception(error)
            return future
        needed, total = sizes[0] * sizes[1] * (1 << 20) + (1 << 29), spec["gpu_vram_bytes"]
        answer = {"how": "run", "fits": needed <= total, "needed_bytes": needed, "headroom_bytes": total - needed}
        future.set_result(instead or answer)
        return future


def _sweep(executor, tmp_path=None, options=GRID, **more):
    return run_sweep(build_spec_grid(options), executor, store=tmp_path, workers=3, **more)


def _table(document):
    return [(row.values, row.answer.fits, row.on_frontier) for row in document.rows]


def test_few_runs_give_the_frontier_of_all(tmp_path):
    few, every = Formula(), Formula()
    document, exact = _sweep(few, tmp_path / "a"), _sweep(every, tmp_path / "b", exact=True)
    assert _table(document) == _table(exact)
    assert every.calls.total() == 75 and few.calls.total() <= 30
    assert document.count("run") == few.calls.total() and document.count("run") + document.count("monotony") == 75
    assert Sweep.from_json(document.to_json()) == document


def test_what_was_answered_before_is_not_run_again(tmp_path):
    first = _sweep(Formula(), tmp_path, exact=True)
    again = Formula()
    document = _sweep(again, tmp_path, exact=True)
    assert not again.calls and _table(document) == _table(first)
    assert all(row.answer.cached for row in document.rows)
    _sweep(again, tmp_path, exact=True, cache=False)
    assert again.calls.total() == 75


def test_what_ctrl_c_leaves_is_valid_and_gone_on_from(tmp_path):
    def interrupt(number, sizes):
        if number == 20:
            raise KeyboardInterrupt

    begun = Formula(interrupt)
    document = _sweep(begun, tmp_path, exact=True)
    assert document.ended == "interrupted"
    assert document.count("left") == 75 - document.count("run") and document.count("run") >= 15
    assert Sweep.from_json(document.to_json()) == document
    rest = Formula()
    assert _sweep(rest, tmp_path, exact=True).count("run") == 75
    assert rest.calls.total() == document.count("left")
    assert not [path for path in tmp_path.iterdir() if "claim" in path.name]


@pytest.mark.parametrize(("losses", "how"), [(2, "run"), (3, "failed")])
def test_a_lost_worker_costs_a_cell_two_more_runs_at_most(tmp_path, losses, how):
    lost = []

    def lose(number, sizes):
        if sizes == (64, 4) and len(lost) < losses:
            lost.append(number)
            raise OSError("connection closed")

    executor = Formula(lose)
    document = _sweep(executor, tmp_path, {**GRID, "gpu_vram_bytes": "1"}, exact=True)
    (row,) = [row for row in document.rows if row.values[2:] == ("64", "4")]
    assert row.answer.how == how and len(lost) == losses
    assert ("lost 3 times: connection closed" in row.answer.reason) == (how == "failed")
    assert document.count("run") == 25 - (how == "failed") and max(executor.calls.values()) == 3


def test_an_executor_that_breaks_leaves_the_rest(tmp_path):
    def break_at(number, sizes):
        if number > 10:
            raise BrokenExecutor("a process was killed")

    document = _sweep(Formula(break_at), tmp_path, exact=True)
    assert document.ended == "stopped" and "a process was killed" in document.note
    assert document.count("run") == 10 and document.count("left") == 65


def test_a_worker_with_other_versions_is_refused_by_name(tmp_path):
    refusal = {"refused": "worker node7, process 12: torch 2.11.0, here 2.13.0"}
    with pytest.raises(UsageError, match="other versions") as raised:
        _sweep(Formula(lambda number, sizes: refusal if number == 5 else None), tmp_path, exact=True)
    assert "node7" in raised.value.value
    assert _sweep(Formula(), tmp_path, exact=True).count("run") == 75


def test_a_search_for_fixes_is_needed_only_where_the_cell_does_not_fit(tmp_path):
    executor = Formula()
    document = _sweep(executor, tmp_path, {**GRID, "gpu_vram_bytes": "1", "fix": "none,auto"})
    fits = {row.values[3:]: row.answer.fits for row in document.rows if row.values[2] == "none"}
    searched = [call[:2] for call in executor.calls if call[3] == "auto"]
    assert searched and not any(fits[str(context), str(batch)] for context, batch in searched)


def test_two_sweeps_share_a_store_and_run_nothing_twice(tmp_path):
    both = Formula(lambda number, sizes: threading.Event().wait(0.002) and None)
    documents = []
    threads = [threading.Thread(target=lambda: documents.append(_sweep(both, tmp_path, exact=True))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(documents) == 2 and _table(documents[0]) == _table(documents[1])
    assert all(document.count("run") == 75 for document in documents)
    assert both.calls.total() == 75
    assert sum(row.answer.cached for document in documents for row in document.rows) == 75


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_sweeps_go_on_from_answers_at_an_address(tmp_path, protocol):
    """Two at once may both run a cell of an object store; the next one runs none."""
    address = f"{protocol}://{tmp_path}/answers"
    executors = [Formula(), Formula(), Formula()]
    with ThreadPoolExecutor(2) as threads:
        documents = [*threads.map(lambda one: _sweep(one, address, exact=True), executors[:2])]
    again = _sweep(executors[2], address, exact=True)
    assert [_table(one) for one in documents] == [_table(again)] * 2
    assert not executors[2].calls and all(row.answer.cached for row in again.rows)
    assert again.store.endswith("/answers") and again.store.startswith("memory://") is (protocol == "memory")


def test_answers_that_cannot_be_stored_end_the_sweep_with_its_table(tmp_path, monkeypatch):
    def refuse(self, *arguments, **more):
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(MemoryFileSystem, "pipe", refuse)
    document = _sweep(Formula(), f"memory://{tmp_path}", exact=True)
    assert document.ended == "stopped" and document.note.startswith("answers cannot be stored")
    assert "403 Forbidden" in document.note and document.count("run") > 0


def test_a_full_disk_costs_the_answers_of_the_next_sweep_alone(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        document = _sweep(Formula(), tmp_path, exact=True)
    assert document.ended == "complete" and document.count("run") == 75 and not [*tmp_path.iterdir()]
    assert document.note == "75 answers could not be stored (No space left on device)"
    assert "75 answers could not be stored (No space left on device)." in to_text(render(document), width=100)
    assert _table(_sweep(Formula(), tmp_path, exact=True)) == _table(document)


def test_progress_counts_cells_and_the_time_to_go(tmp_path):
    said = []
    _sweep(Formula(), tmp_path, exact=True, progress=said.append)
    assert any("3 of 75 done, 0 failed, 72 left" in text and "to go" in text for text in said), said
