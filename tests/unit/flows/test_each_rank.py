"""Ranks that ran together: one capture, one report, whose verdict is that of the worst."""

from __future__ import annotations

import pytest

import memprof
from memprof.errors import UsageError
from memprof.flows.account import analyze
from memprof.flows.rank_reports import PEER_END_REASON, merge_traces
from memprof.ledger.ledger import EmptyTraceError
from memprof.report.documents.report import Report
from memprof.trace.events import Failure, FailureKind, PhaseKind, Trace
from memprof.trace.facts import DeviceFacts, Facts, ProgramFacts, RankFacts
from memprof.trace.io import load_trace, save_trace
from tests.unit.traces import TraceBuilder

MIB = 1 << 20
GPU = DeviceFacts("a GPU", 1000 * MIB, 900 * MIB, 100 * MIB)


def rank(number: int, *sizes: int, ended: str = "exit", failure: Failure | None = None) -> Trace:
    """One of four, which allocates so many MiB."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.trace.device, b.trace.failure = f"cuda:{number}", failure
    for size in sizes:
        b.alloc(size * MIB, device=b.trace.device)
    program = ProgramFacts(("train.py",), ended, 0, 1, ())
    b.trace.facts = Facts(command="run", program=program, device=GPU, rank=RankFacts(number, 4))
    return b.trace


def test_a_row_for_each_rank_and_the_worst_in_full(tmp_path):
    trace = merge_traces([rank(3, 10, 300), rank(0, 10, 200), rank(2, 10, 200), rank(1, 10, 200)])
    document = analyze(trace)
    assert [(row.rank, row.like, row.peak_allocated_bytes // MIB) for row in document.ranks] == [
        (0, None, 210), (1, 0, 210), (2, 0, 210), (3, None, 310),
    ]  # fmt: skip
    assert [row.rank for row in document.ranks if row.decides and row.shown] == [3]
    assert document.rank == RankFacts(3, 4) and document.peak.allocated_bytes == 310 * MIB
    text = str(document)
    assert "ranks 0-3 of 4, together; shown in full: rank 3" in text
    assert "Ranks 0-2 are equal to the byte." in text and "on rank 3" in text
    assert sum(line.startswith(" 0-2 ") for line in text.splitlines()) == 1

    save_trace(trace, tmp_path / "run.memprof")
    again = load_trace(tmp_path / "run.memprof")
    assert again == trace and again.others[0].events is again.events
    assert memprof.load(tmp_path / "run.memprof") == document
    document.save(tmp_path / "run.json")
    written = memprof.load(tmp_path / "run.json")
    assert isinstance(written, Report) and written.ranks == document.ranks and str(written) == text
    shown = memprof.load(tmp_path / "run.memprof", rank=1)
    assert isinstance(shown, Report) and shown.rank == RankFacts(1, 4)
    assert [row.decides for row in shown.ranks] == [False, False, False, True]
    assert shown.verdict == document.verdict and shown.peak.allocated_bytes == 210 * MIB
    assert document.frames()["ranks"]["like"].isna().sum() == 2
    for call in (lambda: memprof.load(tmp_path / "run.memprof", rank=9), lambda: analyze(rank(2, 1), rank=1)):
        with pytest.raises(UsageError, match="no such rank was run"):
            call()
    conf = "roundup_power2_divisions:4"
    everywhere = memprof.load(tmp_path / "run.memprof", alloc_conf=conf)
    assert isinstance(everywhere, Report)
    alone = [analyze(rank(0, 10, 200), conf)] * 3 + [analyze(rank(3, 10, 300), conf)]
    assert [row.peak_allocated_bytes for row in everywhere.ranks] == [one.peak.allocated_bytes for one in alone]
    assert alone[0].peak.allocated_bytes > 210 * MIB


def test_a_rank_that_is_full_or_failed_decides():
    full = analyze(merge_traces([rank(0, 10), rank(1, 2000), rank(2, 10), rank(3, 10)]))
    assert full.rank == RankFacts(1, 4) and full.verdict.fits is False
    assert [row.fits for row in full.ranks] == [True, False, True, True]
    assert "Ranks 0, 2-3 are equal" in str(full)
    why = Failure(FailureKind.ERROR, "forward", "ValueError", "no", None, None, None, None)
    stopped = Failure(FailureKind.REFUSED, "forward", "", "rank 1 raised", None, None, None, None)
    failed = analyze(
        merge_traces([rank(0, 900, ended=PEER_END_REASON, failure=stopped), rank(1, 10, ended="error", failure=why)])
    )
    assert failed.rank == RankFacts(1, 4) and failed.verdict.fits is None
    assert "stopped with others" in str(failed) and "failed" in str(failed)


def test_a_rank_without_anything_on_its_gpu_has_a_row():
    document = analyze(merge_traces([rank(0), rank(1, 10)]))
    assert [(row.rank, row.peak_allocated_bytes, row.fits) for row in document.ranks] == [
        (0, 0, True),
        (1, 10 * MIB, True),
    ]
    assert any("Of the 4 ranks 2 ran together" in one for one in document.assumptions)
    with pytest.raises(UsageError, match="nothing was allocated on the GPU of this rank"):
        analyze(merge_traces([rank(0), rank(1, 10)]), rank=0)
    with pytest.raises(EmptyTraceError):
        analyze(merge_traces([rank(0), rank(1)]))
