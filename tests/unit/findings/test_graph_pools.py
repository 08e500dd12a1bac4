"""What private pools of CUDA graphs cost: free memory of one serves no other graph."""

from __future__ import annotations

import pytest

from memprof.findings import Severity
from memprof.findings.graph_pools import find
from memprof.trace.events import EventKind, GraphPool
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

LINE = "serve.py:8 capture"


def captured(*sizes: int, kept: int = MIB, lines: tuple[str, ...] = (LINE,)) -> TraceBuilder:
    """Graphs take `sizes` and free it, each in a pool of its own; `kept` is taken after these."""
    b = TraceBuilder()
    for number, size in enumerate(sizes, 1):
        b.trace.graph_pools.append(GraphPool(number, lines[number % len(lines)]))
        b.add(EventKind.POOL, number)
        b.free(b.alloc(size))
        b.add(EventKind.POOL, 0)
    b.alloc(kept)
    return b


def test_one_pool_has_room_for_the_largest_graph() -> None:
    (finding,) = find(captured(200 * MIB, 300 * MIB, 100 * MIB).context())
    assert (finding.id, finding.severity, finding.num_bytes) == ("graph-pools", Severity.NOTE, 300 * MIB)
    assert finding.title.startswith("CUDA graphs captured at serve.py:8 have 3 private pools: 300.00 MiB of the 602")
    fix, effect = finding.evidence
    assert fix.source == LINE and "torch.cuda.graph_pool_handle()" in fix.text
    assert effect.text == "with one pool the run reserves at least 302.00 MiB"


@pytest.mark.parametrize(("mib", "is_told"), [(254, False), (256, True), (258, True)])
def test_least_bytes(mib: int, is_told: bool) -> None:
    assert bool(find(captured(300 * MIB, mib * MIB).context())) == is_told


@pytest.mark.parametrize(("kept", "is_told"), [(5402, False), (5400, True), (5398, True)])
def test_least_share_of_what_is_reserved(kept: int, is_told: bool) -> None:
    """300 MiB of 6000, which is a twentieth."""
    assert bool(find(captured(300 * MIB, 300 * MIB, kept=kept * MIB).context())) == is_told


@pytest.mark.parametrize(("kept", "is_told"), [(4802, False), (4800, True), (4798, True)])
def test_what_decides_is_told_from_a_fiftieth_on(kept: int, is_told: bool) -> None:
    """100 MiB of 5000; graphs and what is kept are 100 MiB more than the GPU has."""
    (finding,) = find(captured(100 * MIB, 100 * MIB, kept=kept * MIB).context((kept + 100) * MIB)) or (None,)
    assert (finding is not None and finding.is_decisive) == is_told


def test_one_pool_of_each_line_is_no_choice() -> None:
    assert not find(captured(600 * MIB, 600 * MIB, lines=(LINE, "serve.py:9 capture")).context())
