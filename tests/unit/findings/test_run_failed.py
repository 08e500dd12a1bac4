"""The finding of a run that ended before its time."""

import pytest

from memprof.findings import Context, Severity
from memprof.findings.run_failed import find
from memprof.trace.events import Failure, FailureKind, PhaseKind
from tests.unit.traces import TraceBuilder


def context(failure: Failure | None) -> Context:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(128)
    b.trace.failure = failure
    return b.context()


def test_a_run_that_ends_well_has_none() -> None:
    assert find(context(None)) == []


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_says_where_and_what_to_do(kind: FailureKind) -> None:
    failure = Failure(
        kind, "forward of step 1", "OSError", "it broke", "lib.op", "layers.3", "/a/m.py:7 f", "/a/m.py:6 f"
    )
    (finding,) = find(context(failure))
    assert finding.severity is Severity.ERROR and finding.id == "run-failed" and finding.num_bytes is None
    text = "\n".join(evidence.text for evidence in finding.evidence)
    if kind is FailureKind.REFUSED:  # by memprof: it is no error of the program, and its message says all
        assert finding.title == "Not simulated: it broke" and "OSError" not in text
    elif kind is FailureKind.OTHER_RANK:  # nor of this rank
        assert finding.title == "The ranks stop in forward of step 1: it broke" and "OSError" not in text
    else:
        assert "forward of step 1, at a/m.py:7 in layers.3" in finding.title and "OSError: it broke" in text
    assert "raised at /a/m.py:7 f in module layers.3" in text and "read at /a/m.py:6 f" in text and "fix: " in text
    if kind in (FailureKind.NO_META_KERNEL, FailureKind.CUSTOM_KERNEL):
        assert "lib.op" in finding.title and "register_fake" in text


def test_what_is_not_known_is_left_out() -> None:
    (finding,) = find(context(Failure(FailureKind.CUSTOM_KERNEL, "backward", "E", "m", None, None, None, None)))
    assert "a custom kernel" in finding.title and "None" not in finding.title
    assert not any("None" in evidence.text for evidence in finding.evidence)
