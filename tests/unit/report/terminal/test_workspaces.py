"""What a report says of workspaces whose size is a rule's, where the peak depends on it."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.flows.account import analyze
from memprof.ledger.workspaces import Workspaces
from memprof.report.documents.report import Report
from memprof.report.terminal.console import to_text
from memprof.report.terminal.report import render
from memprof.trace.events import GPU, PhaseKind, Workspace
from memprof.trace.facts import DeviceFacts, Facts
from tests.unit.traces import TraceBuilder

MIB = 1 << 20
ELEMENTS = MIB // 4


def document(most_bytes: int, device: str = GPU) -> Report:
    """4 MiB of parameters, 8 of a temporary, and then a call that takes 8 MiB by the rule, beside an output of 4."""
    b = TraceBuilder()
    b.parameter("weight", 4 * ELEMENTS)
    b.phase(PhaseKind.FORWARD)
    b.free(b.new(8 * ELEMENTS))
    b.new(4 * ELEMENTS)
    event = len(b.trace.events)
    b.free(b.new(8 * ELEMENTS))
    b.trace.workspaces.append(Workspace(event, device, 8 * MIB, most_bytes))
    b.trace.facts = Facts(device=DeviceFacts("A", 64 * MIB, usable_bytes=64 * MIB))
    return analyze(b.trace)


def test_the_peak_without_any_and_by_the_bound() -> None:
    found = document(20 * MIB)
    assert found.peak.allocated_bytes == 16 * MIB
    assert found.peak.workspaces == Workspaces(8 * MIB, 12 * MIB, 28 * MIB)
    text = " ".join(to_text(render(found)).split())
    assert "is an estimate" in text
    assert "between 12.00 MiB and 28.00 MiB" in text
    assert Report.from_json(found.to_json()).peak.workspaces == found.peak.workspaces


@pytest.mark.parametrize(("most_mib", "is_certain"), [(56, True), (57, False)])
def test_a_run_that_fits_by_the_rule_may_not(most_mib: int, is_certain: bool) -> None:
    """The GPU has 64 MiB, of which 8 are live where the workspace is taken."""
    found = document(most_mib * MIB)
    assert found.verdict.fits
    text = " ".join(to_text(render(found, quiet=True)).split())
    assert text.startswith("Fits: needs" if is_certain else "Fits by an estimate: needs")
    rest = "; it may not fit: if cuDNN takes the most for convolutions, it needs at least 65.00 MiB."
    assert text.endswith(rest) is not is_certain
    retried = dataclasses.replace(found, verdict=dataclasses.replace(found.verdict, retries=1))
    text = " ".join(to_text(render(retried, quiet=True)).split())
    assert text.startswith("Fits, with allocator retries: ")
    assert ("; it may not fit: if cuDNN takes the most for convolutions, " in text) is not is_certain


def test_nothing_is_said_of_another_gpu() -> None:
    found = document(20 * MIB, "cuda:1")
    assert found.peak.workspaces is None
    assert "by the rule" not in to_text(render(found))


@pytest.mark.parametrize(("more_bytes", "is_said"), [(16 * MIB // 100, False), (16 * MIB // 100 + 1, True)])
def test_it_is_said_where_it_is_at_least_a_hundredth_of_the_peak(more_bytes: int, is_said: bool) -> None:
    found = document(20 * MIB)
    bounds = Workspaces(0, 16 * MIB, 16 * MIB + more_bytes)
    found = dataclasses.replace(found, peak=dataclasses.replace(found.peak, workspaces=bounds))
    assert ("is an estimate" in to_text(render(found))) == is_said


@pytest.mark.parametrize(("usable", "refused"), [(34, 0), (33, 1)])
def test_one_without_room_ends_no_run(usable: int, refused: int) -> None:
    """24 MiB in a segment of their own, and 10 more for the workspace: one MiB less has no room for it."""
    b = TraceBuilder()
    b.new(24 * ELEMENTS)
    event = len(b.trace.events)
    b.free(b.new(10 * ELEMENTS))
    b.trace.workspaces.append(Workspace(event, GPU, 10 * MIB, 10 * MIB))
    b.trace.facts = Facts(device=DeviceFacts("A", usable * MIB, usable_bytes=usable * MIB))
    found = analyze(b.trace)
    assert found.verdict.fits and found.peak.workspaces is not None
    assert found.peak.workspaces.refused == refused
    assert found.peak.allocated_bytes == (34 - 10 * refused) * MIB
    assert ("Convolutions without room for cuDNN's workspace: 1" in " ".join(to_text(render(found)).split())) is (
        refused == 1
    )
