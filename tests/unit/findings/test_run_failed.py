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


FAILURE = Failure(
    FailureKind.ERROR, "forward of step 1", "OSError", "it broke", "lib.op", "layers.3", "/a/m.py:7 f", None
)


@pytest.mark.parametrize(
    ("change", "source", "fix"),
    [
        ({}, "simulated", "mend this line if the program is at fault"),
        ({}, "measured", "mend this line: it was a real device"),
        ({"error": "ModuleNotFoundError", "message": "No module named 'polars'"}, "measured", "install the package"),
        ({"hint": "do this"}, "measured", "do this"),
        ({"kind": FailureKind.GAP}, "measured", "leave the operation out here"),
        ({"message": "Trying to backward through the graph a second time (or ...)"}, "measured", "detach what an "),
    ],
)
def test_the_fix_is_the_hint_or_that_of_the_kind(change: dict[str, object], source: str, fix: str) -> None:
    failed = context(FAILURE._replace(**change))
    failed.ledger.trace.source = source
    (finding,) = find(failed)
    assert finding.evidence[-2].text.startswith(f"fix: {fix}")
    for line in finding.evidence[:-1]:
        assert (line.module, line.op, line.source) == ("layers.3", "lib.op", "/a/m.py:7 f")


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (FailureKind.REFUSED, "what the program does on a real GPU from there on"),
        (FailureKind.ERROR, "everything above the findings is the run up to here"),
    ],
)
def test_what_is_not_counted(kind: FailureKind, what: str) -> None:
    (finding,) = find(context(FAILURE._replace(kind=kind)))
    assert finding.evidence[-1].text.startswith(what)


def test_a_failure_in_the_model_itself_has_no_name_in_the_title() -> None:
    (finding,) = find(context(FAILURE._replace(module="")))
    assert finding.title == "The run stops in forward of step 1, at a/m.py:7: OSError"
    assert finding.evidence[1].text == "raised at /a/m.py:7 f in module the model itself"
    (finding,) = find(context(FAILURE._replace(module=None)))
    assert finding.evidence[1].text == "raised at /a/m.py:7 f"


def test_what_is_to_be_changed_is_the_line_of_the_program_and_not_that_of_a_library() -> None:
    failure = FAILURE._replace(source="/lib/site-packages/torchvision/utils.py:9 f", caller="train.py:3 main")
    (finding,) = find(context(failure))
    assert finding.title == (
        "The run stops in forward of step 1, at torchvision/utils.py:9 in layers.3, called at train.py:3: OSError"
    )
    (fix,) = (one for one in finding.evidence if one.text.startswith("fix: "))
    assert fix.source == "train.py:3 main"
