"""Copies of weights that autocast keeps from call to call: what the peak would be with one copy at a time."""

from __future__ import annotations

import pytest

from memprof.findings import Severity
from memprof.findings.weight_cache import find
from memprof.trace.events import AUTOCAST_KIND, Forward, Holder, PhaseKind
from memprof.units import MIB
from tests.unit.findings.figures import figures
from tests.unit.traces import TraceBuilder


def block(copy_mib: int = 100, num_calls: int = 2, nodes: int = 0) -> TraceBuilder:
    """Calls in an autocast block, the first of which makes three copies; a tensor of 500 MiB lies beside them."""
    b = TraceBuilder()
    b.alloc(500 * MIB)
    b.enter("", "Net")
    b.leave()
    copies: list[int] = []
    for _ in range(num_calls):
        b.phase(PhaseKind.FORWARD)
        begin = len(b.trace.events)
        copies = copies or [b.new(copy_mib * MIB // 2, dtype="float16", op="aten._to_copy") for _ in range(3)]
        b.free(b.alloc(2 * MIB))
        b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, -1, False, nodes, ()))
    end = len(b.trace.events)
    b.free(*copies)
    b.trace.idle_holders.append(
        Holder(end, AUTOCAST_KIND, "", "/x/infer.py:9 main", True, None, tuple(copies), 0, 0, None)
    )
    return b


def test_the_copies_are_told_with_the_line_of_the_block() -> None:
    (finding,) = find(block().context())
    assert (finding.id, finding.severity, finding.num_bytes) == ("weight-cache", Severity.WARNING, 200 * MIB)
    assert finding.title == (
        "Autocast keeps 300.00 MiB of half-precision copies of weights through 2 calls, until its block at "
        "x/infer.py:9 ends; with one copy at a time the peak is about 200.00 MiB (25%) lower"
    )
    assert "cache_enabled=False" in finding.evidence[0].text and finding.evidence[0].source == "/x/infer.py:9 main"


@pytest.mark.parametrize(
    "other", [{"copy_mib": 30}, {"num_calls": 1}, {"nodes": 5}], ids=["small", "a block for each call", "training"]
)
def test_silent_on_copies_that_serve_one_call_or_a_backward_or_are_small(other: dict[str, int]) -> None:
    assert not find(block(**other).context())


def test_copies_and_what_is_no_block() -> None:
    """Another variable has the copies, or they are in host memory."""
    b = block()
    (finding,) = find(b.context())
    assert figures(finding.evidence[2].text) == [
        "[52428800]", "float16", "100.00 MiB", "aten._to_copy", "model.py:1", "3",
    ]  # fmt: skip
    own = b.trace.idle_holders[0]
    b.trace.idle_holders[0] = own._replace(kind="list")
    assert not find(b.context())
    b.trace.idle_holders[0] = own
    b.trace.storages = [one._replace(device="cpu") if one.dtype == "float16" else one for one in b.trace.storages]
    assert not find(b.context())


def test_the_largest_copy_may_stay_and_three_kinds_are_shown() -> None:
    b = block()
    sizes = (40, 100, 80, 60)
    copies = [b.new(mib * MIB // 2, dtype="float16", op="aten._to_copy") for mib in sizes]
    b.phase(PhaseKind.FORWARD)
    b.trace.idle_holders[0] = b.trace.idle_holders[0]._replace(storages=tuple(copies), event=len(b.trace.events) + 9)
    begin = len(b.trace.events)
    b.trace.forwards += [
        Forward(begin, begin + 2, 0, -1, False, 0, ()),
        Forward(begin + 3, begin + 4, 0, -1, False, 0, ()),
    ]
    b.alloc(400 * MIB)
    (finding,) = find(b.context())
    assert finding.num_bytes == 180 * MIB and "280.00 MiB" in finding.title
    assert [line.num_bytes for line in finding.evidence[2:]] == [100 * MIB, 80 * MIB, 60 * MIB]


@pytest.mark.parametrize(("begin", "end", "counts"), [(1, 3, False), (1, 4, True), (5, 6, True), (7, 8, False)])
def test_calls_are_of_the_block_if_they_end_after_the_first_copy_and_begin_before_the_block_ends(
    begin: int, end: int, counts: bool
) -> None:
    """The first copy is made by event 3, and the block ends at event 7. One other call is in it."""
    b = TraceBuilder()
    b.enter("", "Net")
    b.leave()
    copies = [b.new(100 * MIB // 2, dtype="float16", op="aten._to_copy") for _ in range(2)]
    b.alloc(MIB)
    b.alloc(MIB)
    b.free(*copies)
    b.trace.forwards = [Forward(0, 4, 0, -1, False, 0, ()), Forward(begin, end, 0, -1, False, 0, ())]
    b.trace.idle_holders.append(Holder(7, AUTOCAST_KIND, "", "a.py:1 f", True, None, tuple(copies), 0, 0, None))
    assert bool(find(b.context())) == counts


def test_of_two_blocks_that_which_costs_more_is_told() -> None:
    b = TraceBuilder()
    b.enter("", "Net")
    b.leave()
    for number, mib in enumerate((70, 100), 1):
        copies = [b.new(mib * MIB // 2, dtype="float16", op="aten._to_copy") for _ in range(2)]
        begin = len(b.trace.events)
        b.trace.forwards += [Forward(begin + n, begin + n + 1, 0, -1, False, 0, ()) for n in (0, 1)]
        holder = Holder(begin + 9, AUTOCAST_KIND, "", f"a.py:{number} f", True, None, tuple(copies), 0, 0, None)
        b.trace.idle_holders.append(holder)
    (finding,) = find(b.context())
    assert finding.num_bytes == 100 * MIB and "a.py:2" in finding.title
