"""Copies of weights that autocast keeps from call to call: what the peak would be with one copy at a time."""

from __future__ import annotations

import pytest

from memprof.findings import Severity
from memprof.findings.weight_cache import find
from memprof.trace.events import AUTOCAST_KIND, Forward, Holder, PhaseKind
from memprof.units import MIB
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
