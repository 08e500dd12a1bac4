"""What streams cost: free blocks of one are of no use to another."""

from __future__ import annotations

import dataclasses

from memprof.allocator import GpuMemory, replay_on_gpu
from memprof.findings import Context, Severity
from memprof.findings.streams import find
from memprof.ledger.ledger import build_ledger
from memprof.ledger.streams import StreamMemory, StreamShare
from memprof.report.terminal.bridge import render_streams
from memprof.report.terminal.cells import choose_unit
from memprof.report.terminal.console import to_text
from tests.unit.allocator.traces import MIB, StreamScript
from tests.unit.findings.figures import all_figures, figures
from tests.unit.traces import TraceBuilder


def script(first: int = 600, second: int = 500) -> StreamScript:
    """Memory of a side stream is freed, then as much is taken on the default one."""
    made = StreamScript()
    made.trace.sources.append("train.py:7 step")
    made.free(made.alloc(first * MIB, stream=3))
    made.alloc(second * MIB)
    return made


def context(made: StreamScript, usable_bytes: int | None = None) -> Context:
    gpu = None if usable_bytes is None else GpuMemory(usable_bytes, 0)
    ledger = build_ledger(made.trace, replay_on_gpu(made.trace, gpu))
    return Context(ledger=ledger, usable_bytes=usable_bytes, streams=StreamMemory.from_ledger(ledger))


def test_what_several_streams_cost() -> None:
    (finding,) = find(context(script()))
    assert (finding.id, finding.severity, finding.num_bytes) == ("streams", Severity.NOTE, 500 * MIB)
    assert finding.title.startswith("Streams: 500.00 MiB of the 1.07 GiB reserved (45%) would not be on one stream")
    evaluated, side, default = finding.evidence
    assert (
        "fits" not in evaluated.text
        and evaluated.num_bytes == 500 * MIB
        and "the run reserves 600.00 MiB" in evaluated.text
    )
    assert side.text.startswith("stream 3: 600.00 MiB reserved, 600.00 MiB of it free; its largest tensor is")
    assert default.text.startswith("the default stream: 500.00 MiB reserved, 0 bytes of it free")


def test_little_is_not_told_unless_it_decides() -> None:
    assert find(context(script(60, 50))) == []
    made = StreamScript()
    taken = [made.alloc(9 * MIB, stream=3) for _ in range(8)]
    made.free(*taken[::2])  # half of each segment, which the other half keeps from being released
    for _ in range(4):
        made.alloc(9 * MIB)
    (finding,) = find(context(made, 100 * MIB))
    assert finding.severity is Severity.WARNING and ", and fits: take memory before" in finding.evidence[0].text
    assert find(context(made, 120 * MIB)) == []
    made.trace.ended_out_of_memory = True  # only one more allocation would succeed
    assert find(context(made, 100 * MIB)) == []


def test_nothing_of_a_run_on_one_stream() -> None:
    made = TraceBuilder()
    made.free(made.alloc(600 * MIB))
    made.alloc(650 * MIB)
    assert StreamMemory.from_ledger(build_ledger(made.trace)) is None


def test_the_table_has_both_bounds() -> None:
    made = StreamScript()
    lent = made.alloc(600 * MIB, stream=3)
    made.use(lent, 0)
    made.free(lent)
    made.wait(0, by_host=False)
    made.alloc(600 * MIB, stream=3)
    memory = context(made).streams
    assert memory is not None and (memory.lower_bound_bytes, memory.upper_bound_bytes) == (600 * MIB, 1200 * MIB)
    made.use(1, 0)
    made.free(1)
    made.alloc(MIB)
    memory = context(made).streams
    assert memory is not None and [share.waiting_bytes for share in memory.streams] == [0, 600 * MIB]
    text = to_text(render_streams(memory, choose_unit(MIB)))
    assert "602.00 MiB by memprof's rule, 602.00 MiB if it is free at once, 1.17 GiB if only once" in " ".join(
        text.split()
    )


def test_the_streams_with_the_most_and_the_largest_tensor_of_each() -> None:
    """Of five, four are shown; stream 1 has two tensors, the smaller of which comes last."""
    made = StreamScript()
    made.trace.sources.append("train.py:7 step")
    made.free(made.alloc(1000 * MIB, stream=5))
    for number in range(1, 5):
        made.alloc(number * 40 * MIB, stream=number)
    made.alloc(2 * MIB, stream=4)
    made.alloc(600 * MIB)
    (finding,) = find(context(made))
    assert [line.num_bytes for line in finding.evidence[1:]] == [1000 * MIB, 600 * MIB, 180 * MIB, 120 * MIB]
    assert f"[{160 * MIB}]" in finding.evidence[3].text and finding.evidence[3].text.startswith("stream 4: 180.00 MiB")


def test_what_waits_for_other_streams_is_told_and_a_stream_may_have_no_tensor() -> None:
    made = script()
    shares = (
        StreamShare(0, 500 * MIB, 300 * MIB, 0, 200 * MIB),
        StreamShare(9, 600 * MIB, 100 * MIB, 70 * MIB, 430 * MIB),
    )
    memory = StreamMemory(shares, 1100 * MIB, 700 * MIB, None, None)
    ledger = build_ledger(made.trace, replay_on_gpu(made.trace, None))
    (finding,) = find(Context(ledger=ledger, usable_bytes=None, streams=memory))
    assert all_figures(finding)[0] == ["400.00 MiB", "1.07 GiB", "36%"]
    waiting, default = finding.evidence[1:]
    assert figures(waiting.text) == ["9", "600.00 MiB", "430.00 MiB", "70.00 MiB"]
    assert figures(default.text) == ["500.00 MiB", "200.00 MiB", "[524288000]", "uint8", "aten.empty", "train.py:1"]
    assert (waiting.num_bytes, waiting.source) == (600 * MIB, None)
    assert (default.num_bytes, default.source) == (500 * MIB, "train.py:1 main")
    assert not find(Context(ledger=ledger, usable_bytes=None, streams=dataclasses.replace(memory, streams=shares[:1])))
