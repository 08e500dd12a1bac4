"""Bounds of the allocated peak, where what a library's call takes is estimated."""

from __future__ import annotations

from memprof.allocator import GpuMemory, replay_on_gpu
from memprof.ledger.ledger import build_ledger
from memprof.ledger.workspaces import Workspaces
from memprof.trace.events import GPU, Workspace
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


def calls(*sizes: tuple[int, int, int]) -> TraceBuilder:
    """Beside 16 MiB, calls that take MiB for an output, a workspace, and by its bound at most."""
    b = TraceBuilder()
    b.alloc(16 * MIB)
    for output, taken, most in sizes:
        event = len(b.trace.events)
        if taken:
            b.free(b.alloc(taken * MIB))
        b.free(b.alloc(output * MIB))
        b.trace.workspaces.append(Workspace(event, GPU, taken * MIB, most * MIB))
    return b


def workspaces_of(b: TraceBuilder) -> Workspaces | None:
    allocated = replay_on_gpu(b.trace, None).timeline.allocated
    return Workspaces.from_trace(b.trace, allocated, list(allocated).index(max(allocated)))


def test_the_peak_with_and_without_workspaces() -> None:
    assert workspaces_of(calls((10, 12, 14))) == Workspaces(12 * MIB, 26 * MIB, 30 * MIB)
    assert workspaces_of(calls((10, 12, 14), (20, 14, 40))) == Workspaces(0, 36 * MIB, 56 * MIB)
    assert workspaces_of(calls((20, 12, 14))) == Workspaces(0, 36 * MIB, 36 * MIB)  # their bound is below the peak
    assert workspaces_of(calls((10, 0, 14))) == Workspaces(0, 26 * MIB, 30 * MIB)  # one that takes nothing by the rule


def test_the_bound_is_rounded_as_a_block_is() -> None:
    b = calls((10, 12, 14))
    b.trace.workspaces[0] = b.trace.workspaces[0]._replace(most_bytes=14 * MIB + 1)
    found = workspaces_of(b)
    assert found is not None and found.max_peak_bytes == 30 * MIB + 512


def test_the_bound_is_beside_what_is_there_before_the_call() -> None:
    b = TraceBuilder()
    kept, event = b.alloc(16 * MIB), len(b.trace.events)
    taken = b.alloc(12 * MIB)
    b.free(kept, taken)
    b.trace.workspaces.append(Workspace(event, GPU, 12 * MIB, 14 * MIB))
    assert workspaces_of(b) == Workspaces(12 * MIB, 16 * MIB, 30 * MIB)


def test_calls_of_another_gpu_are_none() -> None:
    b = calls((10, 12, 14))
    b.trace.workspaces[0] = b.trace.workspaces[0]._replace(device="cuda:1")
    assert workspaces_of(b) is None


def test_calls_without_room_for_a_workspace() -> None:
    """Of two failed allocations, one is the program's."""
    b = calls((10, 60, 60))
    failed = b.alloc(70 * MIB)
    b.free(failed)
    b.trace.refused.append(failed)
    ledger = build_ledger(b.trace, replay_on_gpu(b.trace, GpuMemory(64 * MIB, 0)))
    assert ledger.run.refused == {1, failed}
    found = Workspaces.from_trace(b.trace, ledger.allocated, ledger.peak_event, ledger.run.refused)
    assert found is not None and found.refused == 1
