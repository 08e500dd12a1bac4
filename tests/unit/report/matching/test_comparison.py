"""What differs between two runs is found, and what does not is not."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

from hypothesis import HealthCheck, given, settings

from memprof.report.documents.comparison import DIFFERS, ONLY_IN_A, ONLY_IN_B, SAME
from memprof.report.documents.report import Report
from memprof.report.matching.comparison_build import build_comparison
from memprof.report.matching.runs import convert_report
from memprof.report.matching.tolerance import Tolerance, parse_tolerance
from memprof.report.terminal.comparison import render
from memprof.report.terminal.console import to_text
from memprof.trace.facts import AllocatorFacts
from tests.golden.test_report import training_run
from tests.lanes import examples
from tests.unit.report.runs import MIB, facts, on_cpu, report_of, run_of, traces

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


def test_kernels_own_memory_of_one_side_stands_apart():
    gpu, host = training(), on_cpu(training())
    workspace = next(i for i, one in enumerate(host.storages) if one.hidden)
    host.storages[workspace] = host.storages[workspace]._replace(num_bytes=3 * MIB, shape=(3 * MIB,))
    found = build_comparison(run_of(gpu), run_of(host), EXACT)
    assert (found.kernels_a.num_bytes, found.kernels_b.num_bytes) == (8519680, 3 * MIB)
    assert not found.tensors
    text = to_text(render(found))
    assert "A: CUDA kernels, 8.12 MiB: cublas workspace 8.12 MiB" in text
    assert "B: CPU kernels, 3.00 MiB: cublas workspace 3.00 MiB" in text


def test_stages_are_matched_and_the_others_named():
    longer = training()
    # The second of two steps is cut off the other one.
    cut = training()
    begin = next(t for t, e in enumerate(cut.events) if e.kind.name == "PHASE" and cut.phases[e.ref].step == 2)
    del cut.events[begin:]
    del cut.storages[1 + max(event.ref for event in cut.events if event.kind.name == "ALLOC") :]
    cut.owners = {index: owner for index, owner in cut.owners.items() if index < len(cut.storages)}
    found = build_comparison(run_of(longer), run_of(cut), EXACT)
    status = {(row.name, row.step): row.status for row in found.stages}
    assert status["layer 1", 1] == SAME and status["layer 1", 2] == ONLY_IN_A
    assert {one for (_, step), one in status.items() if step < 2} == {SAME}
    text = to_text(render(found))
    assert "only in A: inputs of step 2, embedding of step 2, layers 0-2 of step 2" in text


def test_what_is_not_the_same_about_a_tensor():
    a, b = training(), training()
    for index, storage in enumerate(b.storages):
        if storage.dtype == "float32" and storage.shape == (1, 4096, 2048):  # kept by the layers, in half precision
            b.storages[index] = storage._replace(dtype="bfloat16", num_bytes=storage.num_bytes // 2)
    half = [i for i, one in enumerate(b.storages) if (one.shape, one.dtype) == ((4096, 64000), "bfloat16")]
    logits = half[-1]
    b.ops.append("aten.addmm")
    b.storages[logits] = b.storages[logits]._replace(op=len(b.ops) - 1)
    ids = next(i for i in reversed(range(len(b.storages))) if b.storages[i].dtype == "int64")
    b.storages[ids] = b.storages[ids]._replace(shape=(2, 4096), num_bytes=65536)
    found = build_comparison(run_of(a), run_of(b), EXACT)
    by_status = {row.status: row for row in found.tensors}
    assert set(by_status) == {"dtype", "operator", "shape"}
    kept = by_status["dtype"]
    assert (kept.a.count, kept.a.dtype, kept.b.dtype) == (3, "float32", "bfloat16")
    assert kept.difference_bytes == -3 * 4096 * 2048 * 2
    assert (by_status["operator"].a.op, by_status["operator"].b.op) == ("aten.mm", "aten.addmm")
    assert by_status["operator"].difference_bytes == 0
    assert by_status["shape"].difference_bytes == 32768
    assert {row.status for row in found.stages} == {SAME, DIFFERS}


def test_how_many_there_are():
    a, b = training(), training()
    layers = [i for i, one in enumerate(b.storages) if one.shape == (1, 4096, 2048)]
    begin = next(t for t, e in enumerate(b.events) if e.kind.name == "ALLOC" and e.ref == layers[-1])
    free = next(t for t, e in enumerate(b.events) if e.kind.name == "FREE" and e.ref == layers[-1])
    del b.events[free]
    b.events.insert(begin + 1, type(b.events[0])(b.events[free].kind.FREE, layers[-1]))
    found = build_comparison(run_of(a), run_of(b), EXACT)
    rows = {row.status: row for row in found.tensors}
    assert (rows["count"].a.count, rows["count"].b.count) == (3, 2)


def test_settings_come_first_and_unset_is_like_unknown():
    a = run_of(training(fixes=(), amp=None, steps=2))
    b = run_of(training(fixes=("chunked-loss",), steps=2, evaluate=False, gradient_accumulation=1))
    found = build_comparison(a, b, EXACT)
    assert [(row.name, row.a, row.b) for row in found.settings] == [("fixes", [], ["chunked-loss"])]
    assert found.within
    assert "fixes    -  chunked-loss" in to_text(render(found))


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


def test_findings_come_and_go_and_some_have_no_bytes():
    a, b = run_of(training()), run_of(training())
    a.findings = {"logits-explosion": 5 * MIB, "beyond-positions": None, "fragmentation": MIB, "kept": None}
    b.findings = {"logits-explosion": 2 * MIB, "kept": None, "device-mismatch": None}
    found = build_comparison(a, b, EXACT)
    assert [row.id for row in found.findings] == [
        "logits-explosion", "fragmentation", "beyond-positions", "device-mismatch",
    ]  # fmt: skip
    text = to_text(render(found))
    for line in (
        "logits-explosion: 5.00 MiB -> 2.00 MiB", "beyond-positions: only in A\n", "fragmentation: only in A, 1.00 MiB",
        "device-mismatch: only in B\n",
    ):  # fmt: skip
        assert line in text
    report = report_of(training())
    rest = {"severity": "note", "title": "", "evidence": [], "fixes": []}
    report["findings"] = [{"id": name, "bytes": size, **rest} for name, size in (("x", None), ("y", 3), ("y", 4))]
    assert run_of_report(report).findings == {"x": None, "y": 7}


def test_simulated_and_measured_do_not_share_what_others_use():
    measured = training()
    measured.source = "measured"
    found = build_comparison(run_of(training()), run_of(measured), EXACT)
    assert not totals(found)["device used"].compared and totals(found)["reserved"].compared


def test_within_a_tolerance_differences_are_still_shown():
    a, b = run_of(training()), run_of(training())
    b.totals["parameters"] += 100
    found = build_comparison(a, b, parse_tolerance("1KiB"))
    row = totals(found)["parameters"]
    assert found.within and row.within and row.difference_bytes == 100
    assert "+100 bytes  within" in to_text(render(found))
    assert "All 9 totals that are compared are within 1KiB." in to_text(render(found))
    assert not build_comparison(a, b, EXACT).within


def test_peaks_of_different_moments_are_said():
    low, high = training(), training()
    run_a, run_b = run_of(low), run_of(high)
    assert not build_comparison(run_a, run_b, EXACT).has_different_peaks
    run_b.summary = replace(run_b.summary, peak_at="optimizer step of step 1")
    found = build_comparison(run_a, run_b, EXACT)
    assert found.has_different_peaks
    assert f"A's is in {run_a.summary.peak_at}, B's in optimizer step of step 1" in to_text(render(found))


def test_what_torch_chooses_is_compared_as_if_it_was_asked_for():
    asked, left, on_host = training(), training(), on_cpu(training())
    asked.facts = facts(optimizer_impl="foreach")
    left.facts = facts()
    assert run_of(asked).settings["optimizer_impl"] == run_of(left).settings["optimizer_impl"] == "foreach"
    assert run_of(on_host).settings["optimizer_impl"] == "single"
    left.facts = facts(optimizer="adafactor")
    assert run_of(left).settings["optimizer_impl"] is None
