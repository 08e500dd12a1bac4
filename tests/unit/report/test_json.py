"""Documents come back from JSON as they were, and JSON from documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from memprof.errors import UsageError
from memprof.findings import Finding, Severity, Suggestion
from memprof.flows.account import analyze
from memprof.report.documents.ranks import RankRow
from memprof.report.documents.recommendation import Configuration, LargestFit, LengthRisk, Recommendation
from memprof.report.documents.report import Report
from memprof.report.documents.verification import Deviation, FixPeak, OptimizerRow, Precision, Verification
from memprof.spec import TargetSpec
from memprof.trace.events import PhaseKind
from memprof.trace.facts import DeviceFacts, Facts, ProgramFacts, Target
from memprof.trace.json_values import JsonValue, from_plain, to_plain
from tests.golden import test_analysis, test_comparison, test_report, test_vocabulary
from tests.lanes import examples
from tests.schemas import checked
from tests.unit.report.runs import traces
from tests.unit.traces import TraceBuilder


def does_not_fit() -> Report:
    return test_report.document(2 << 30)


def through_json(document: JsonValue) -> JsonValue:
    return type(document).from_json(json.loads(json.dumps(document.to_json())))


@pytest.mark.parametrize(
    "make", [does_not_fit, test_analysis.document, test_comparison.document, test_vocabulary.by_ids]
)
def test_documents_come_back_and_are_as_their_schemas_say(make: Callable[[], JsonValue]) -> None:
    text = json.dumps(make().to_json())
    document = type(make()).from_json(checked(json.loads(text)))
    assert json.dumps(document.to_json()) == text  # in this order
    assert through_json(document) == document


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(traces())
def test_reports_come_back(trace) -> None:
    document = analyze(trace)
    again = through_json(document)
    assert again.to_json() == document.to_json()
    assert str(again) == str(document)


def test_a_cause_and_the_line_of_a_suggestion_come_back() -> None:
    suggestion = Suggestion("smaller batches", None, 1, True, 2, "train.py:3 step")
    finding = Finding("toy", Severity.WARNING, "Toy", 5, (), (), is_decisive=True, suggestions=(suggestion,))
    values = to_plain(finding)
    assert values["is_cause"] is True
    assert from_plain(Finding, values) == finding


def test_recommendations_come_back() -> None:
    choice = Configuration("plain", {"amp": None}, "memprof profile", 1, 2, 3, 4, 5, True, 0.5, None, 1, "", True, "")
    found = Recommendation(
        device=DeviceFacts("GPU", 10, 9, 1),
        goal="speed",
        model="net",
        num_parameters=7,
        context_length=8,
        effective_batch=2,
        chosen=choice,
        reason="it fits",
        choices=(choice,),
        batch=LargestFit(4, None),
        lengths=LengthRisk("a.txt", 1, 0, 0, ("line 3",), 0, 1, 1, 1, 1, 1, 8),
        snippets={"torch": "x"},
    )
    assert through_json(found) == found


def test_verifications_come_back() -> None:
    found = Verification(
        seeds=2,
        deviations=[Deviation("chunked-loss", "net", "loss", "a", "", 1e-7, 2e-7, 1e-6)],
        precisions=[Precision("float16", "net", 0.1, 0.1, 0.9, (0.1, 0.2), 0.05)],
        optimizers=[OptimizerRow("bfloat16 AdamW", "net", 3, 0.1, 0.2, 0.3, 64, None)],
        narrow={"net": ("aten.mm",)},
        peaks=[FixPeak("chunked-loss", "net", 10, 5)],
        skipped={("lora", "net"): "it has none"},
    )
    assert through_json(found) == found
    values = found.to_json()
    assert values["passed"] is False and [row["passed"] for row in values["deviations"]] == [True]


@pytest.mark.parametrize(
    "target", [None, Target(TargetSpec(model="./net.json", model_is_size=True), "net", dtype="float16")]
)
def test_facts_come_back_with_what_was_asked(target: Target | None) -> None:
    facts = Facts(
        command="profile",
        target=target,
        program=ProgramFacts(("a.py", "--b"), "exit", None, 3, ("chunked-loss",)),
        device=DeviceFacts("GPU", 10, 9, 1),
    )
    again = through_json(facts)
    assert again == facts
    assert target is None or (again.target.asked.dtype, again.target.spec.dtype) == (None, "float16")


def test_facts_of_earlier_releases() -> None:
    values = {"command": "profile", "target": {"model": "net", "mode": "train", "dtype": "bfloat16", "gone": 1}}
    facts = Facts.from_json({**values, "device": {"name": "GPU", "total_bytes": 5}})
    assert facts.target.asked == facts.target.spec == TargetSpec(model="net", dtype="bfloat16")
    assert facts.allocator is None and facts.device == DeviceFacts("GPU", 5)
    assert Facts.from_json({}) == Facts()


@pytest.mark.parametrize(
    "changes",
    [{"peak": {}}, {"stages": [1]}, {"device": None}, {"findings": {}}, {"host_peak_bytes": True}, {"schema": "2"}],
)
def test_what_is_none(changes: dict[str, object]) -> None:
    values = does_not_fit().to_json()
    with pytest.raises(ValueError, match=r"."):
        Report.from_json({**values, **changes})
    with pytest.raises(UsageError):
        Report.from_json({**values, "target": {**values["target"], "optimizer": "adamv"}})


def test_a_dtype_that_no_option_asks_for_comes_back() -> None:
    """A model of the user's own may have any."""
    values = {"command": "profile", "target": {"model": "./net.py:net", "dtype": "float64"}}
    target = Facts.from_json(values).target
    assert (target.asked.dtype, target.dtype) == (None, "float64")


def test_a_rank_ends_in_a_way_that_there_is() -> None:
    row = RankRow(1, None, (), "exit", 0, "", 0, 0, 0, 0, True, {}, False, False)
    assert from_plain(RankRow, to_plain(row)) == row
    with pytest.raises(ValueError, match="a rank does not end by 'sideways'"):
        from_plain(RankRow, to_plain(row) | {"ended": "sideways"})


def test_what_a_run_has_none_of_is_left_out() -> None:
    report = does_not_fit()
    values = report.to_json()
    assert not values.keys() & {"gpu", "gpus", "limit", "patch", "rank", "ranks", "streams", "engine"}
    assert "nccl_group_bytes" not in values["bridge"]
    of_a_rank = replace(report, bridge=replace(report.bridge, nccl_group_bytes=5))
    assert of_a_rank.to_json()["bridge"]["nccl_group_bytes"] == 5


@pytest.mark.parametrize(("limit", "over"), [(None, 0), (5000, 0), (4999, 1)])
def test_host_memory_that_is_short(limit: int | None, over: int) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.alloc(512)
    b.alloc(5000, device="cpu")
    b.trace.facts = Facts(command="profile", device=DeviceFacts("GPU", 1 << 33, host_memory_bytes=limit))
    verdict = analyze(b.trace).verdict
    assert (verdict.host_over_bytes, verdict.fits) == (over, not over)
