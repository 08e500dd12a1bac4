"""What differs between two runs is found, and what does not is not."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

from hypothesis import HealthCheck, given, settings

from memprof.report.documents.comparison import ONLY_IN_A, ONLY_IN_B, SAME
from memprof.report.documents.report import Report
from memprof.report.matching.comparison_build import build_comparison
from memprof.report.matching.runs import convert_report
from memprof.report.matching.tolerance import Tolerance
from memprof.report.terminal.comparison import render
from memprof.report.terminal.console import to_text
from memprof.trace.facts import AllocatorFacts
from tests.golden.test_report import training_run
from tests.lanes import examples
from tests.unit.report.runs import facts, on_cpu, report_of, run_of, traces

RELAXED = settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
EXACT = Tolerance()


def training(**target):
    trace = training_run()
    trace.facts = facts(**target)
    return trace


def run_of_report(report):
    return convert_report(Report.from_json(report), "run.json", "memprof report")


def totals(comparison):
    return {row.name: row for row in comparison.totals}


@RELAXED
@given(traces())
def test_a_run_does_not_differ_from_itself(trace):
    report = report_of(trace)
    capture = run_of(trace)
    through_json = run_of_report(json.loads(json.dumps(report)))
    for other in (capture, through_json):
        found = build_comparison(capture, other, EXACT)
        assert found.within and not (found.settings or found.tensors or found.findings)
        assert not any(row.difference_bytes for row in (*found.totals, *found.categories, *found.reserved))
        assert found.kernels_a.num_bytes == found.kernels_b.num_bytes
        assert {row.status for row in found.stages} == {SAME}
        assert "All 9 totals that are compared are equal, to the byte." in to_text(render(found, explain=True))


@RELAXED
@given(traces(), traces())
def test_differences_balance_and_turn_with_the_sides(first, second):
    a, b = run_of(first), run_of(second)
    found, back = build_comparison(a, b, EXACT), build_comparison(b, a, EXACT)
    for name, row in totals(found).items():
        assert row.difference_bytes == -totals(back)[name].difference_bytes == b.totals[name] - a.totals[name]
    held = [sum(one.total_bytes for one in run.tensors if one.category != "library workspace") for run in (a, b)]
    assert sum(row.difference_bytes for row in found.tensors) == held[1] - held[0]
    only = [
        sum(row.num_bytes * row.count for row in rows if row)
        for rows in ([row.a for row in found.tensors], [row.b for row in found.tensors])
    ]
    assert only[0] + found.same_tensors_bytes == held[0] and only[1] + found.same_tensors_bytes == held[1]
    assert sum(row.difference_bytes for row in found.categories) == sum(b.categories.values()) - sum(
        a.categories.values()
    )
    assert {row.status for row in found.stages} == {
        {ONLY_IN_A: ONLY_IN_B, ONLY_IN_B: ONLY_IN_A}.get(row.status, row.status) for row in back.stages
    }
    # Largest differences first.
    for rows in (found.tensors, found.categories):
        sizes = [abs(row.difference_bytes) for row in rows]
        assert sizes == sorted(sizes, reverse=True)
    for width in (80, 110):
        assert max(map(len, to_text(render(found, explain=True), width).splitlines())) <= width


@RELAXED
@given(traces())
def test_a_cpu_has_the_same_state_to_the_byte(trace):
    gpu = run_of(copy.deepcopy(trace))
    host = run_of(on_cpu(trace))
    found = build_comparison(gpu, host, EXACT)
    rows = totals(found)
    for name in ("parameters", "gradients", "optimizer state", "buffers"):
        assert rows[name].compared and rows[name].difference_bytes == 0
    assert found.within and rows["all tensors"].difference_bytes == 0
    assert not rows["allocated"].compared and rows["reserved"].b_bytes is None
    assert (found.kernels_a.kind, found.kernels_b.kind) == ("CUDA kernels", "CPU kernels")
    assert "library workspace" not in {row.category for row in (*found.categories, *found.tensors)}


def test_two_releases_of_torch_with_other_settings():
    """The same requests: only what is reserved may differ."""
    a, b = training(), training()
    b.facts = replace(b.facts, allocator=AllocatorFacts("2.11.0", "expandable_segments:True", "--alloc-conf"))
    found = build_comparison(run_of(a), run_of(b), EXACT)
    assert {row.name for row in found.settings} == {"torch", "alloc_conf"}
    rows = totals(found)
    assert rows["all tensors"].difference_bytes == rows["allocated"].difference_bytes == 0
    assert rows["reserved"].difference_bytes < 0 and not found.within
    steps = {row.name: row for row in found.reserved}
    assert steps["reserved"].difference_bytes == rows["reserved"].difference_bytes
    assert steps["free in segments"].difference_bytes < 0
    assert not found.tensors


def test_reports_of_earlier_releases_lack_some_totals():
    report = report_of(training())
    del report["model_state"], report["bridge"]
    old = run_of_report(report)
    found = build_comparison(old, run_of(training()), EXACT)
    assert found.within and not totals(found)["parameters"].compared
    assert "earlier memprof" in to_text(render(found))
    assert "Reserved memory and fragmentation: only one has any." in to_text(render(found))


def test_peaks_of_different_moments_are_said():
    low, high = training(), training()
    run_a, run_b = run_of(low), run_of(high)
    assert not build_comparison(run_a, run_b, EXACT).has_different_peaks
    run_b.summary = replace(run_b.summary, peak_at="optimizer step of step 1")
    found = build_comparison(run_a, run_b, EXACT)
    assert found.has_different_peaks
    assert f"A's is in {run_a.summary.peak_at}, B's in optimizer step of step 1" in to_text(render(found))
