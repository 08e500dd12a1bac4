"""`requires_grad = False` on a module, in hand-written traces: each size is worked out by hand."""

from __future__ import annotations

import pytest

from memprof.findings import Finding, Severity
from memprof.findings.frozen_in_vain import find
from memprof.trace.events import FrozenInVain, PhaseKind, Role
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

SOURCE = "/x/train.py:4 main"


def frozen(
    usable_mib: int | None = None, *, gradient: bool = True, ended: bool = False, sources: tuple[str | None, ...] = ()
) -> list[Finding]:
    """Parameters of 100 and 60 MiB are trained, the first of them with a gradient, in a module that sets it."""
    b = TraceBuilder(PhaseKind.MODEL)
    b.enter("encoder", "Encoder")
    parameters = b.parameter("encoder.weight", 25 * MIB), b.parameter("encoder.other", 15 * MIB)
    b.leave()
    b.phase(PhaseKind.BACKWARD)
    if gradient:
        b.new(25 * MIB, owner=(Role.GRADIENT, "encoder.weight"))
    b.alloc(40 * MIB)
    b.trace.ended_out_of_memory = ended
    b.trace.frozen_in_vain += [FrozenInVain(0, source, parameters) for source in sources or (SOURCE,)]
    return find(b.context(None if usable_mib is None else usable_mib * MIB))


def test_it_takes_its_gradients() -> None:
    (finding,) = frozen()
    assert (finding.id, finding.severity, finding.num_bytes) == ("frozen-in-vain", Severity.WARNING, 100 * MIB)
    assert "on `encoder` (Encoder)" in finding.title and "2 parameters (160.00 MiB)" in finding.title
    assert finding.evidence[0].source == SOURCE and "encoder.weight" in finding.evidence[1].text


@pytest.mark.parametrize(("usable_mib", "is_decisive", "mib"), [(300, False, 100), (280, True, 160), (198, False, 100)])
def test_it_decides_if_the_run_fits_without_these_gradients(usable_mib: int, is_decisive: bool, mib: int) -> None:
    (finding,) = frozen(usable_mib)
    assert (finding.is_decisive, finding.num_bytes) == (is_decisive, mib * MIB)
    assert finding.is_decisive == is_decisive


def test_without_gradients_it_is_told_where_memory_runs_out_before() -> None:
    assert not frozen(gradient=False)
    (finding,) = frozen(gradient=False, ended=True)
    assert finding.num_bytes is None and not finding.is_decisive


def test_each_line_is_one_finding() -> None:
    assert [finding.evidence[0].source for finding in frozen(sources=(SOURCE, None, SOURCE))] == [SOURCE, None]
    (finding,) = frozen(sources=(SOURCE,) * 4)
    assert "`encoder`, `encoder`, `encoder` and 1 more" in finding.title
