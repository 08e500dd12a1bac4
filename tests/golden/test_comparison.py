"""Golden render of `memprof compare`: a small run before and after a change, as text and as JSON.

`MEMPROF_BLESS=1 pytest tests/golden` writes them anew; read the difference before you commit it.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memprof.flows.account import analyze
from memprof.report.documents.comparison import Comparison
from memprof.report.matching.comparison_build import build_comparison
from memprof.report.matching.runs import convert_report
from memprof.report.matching.tolerance import parse_tolerance
from memprof.report.terminal import comparison_brief
from memprof.report.terminal.comparison import render
from memprof.report.terminal.console import to_text
from memprof.trace.facts import AllocatorFacts
from tests.golden.test_report import check, training_run
from tests.unit.report.runs import facts


def document(tolerance="1%") -> Comparison:
    """The float32 copies that the layers keep are in half precision in B, under expandable segments."""
    before, after = training_run(), training_run()
    before.facts = facts()
    expandable = AllocatorFacts("2.11.0", "expandable_segments:True", "--alloc-conf")
    after.facts = replace(facts(fixes=("norms-in-bfloat16",), steps=2), allocator=expandable)
    after.assumptions.append("The norms compute in bfloat16.")
    for index, storage in enumerate(after.storages):
        if storage.shape == (1, 4096, 2048):
            after.storages[index] = storage._replace(dtype="bfloat16", num_bytes=storage.num_bytes // 2)
    runs = [
        convert_report(analyze(trace), name, "memprof capture")
        for trace, name in ((before, "before.memprof"), (after, "after.memprof"))
    ]
    return build_comparison(runs[0], runs[1], parse_tolerance(tolerance))


def test_text():
    check("comparison.txt", to_text(render(document(), explain=True), 100))


def test_first_screen():
    files = (Path("before.memprof"), Path("after.memprof"))
    text = to_text(comparison_brief.render(document(), files=files), 100)
    assert len(text.splitlines()) <= 40
    check("comparison_brief.txt", text)


def test_json():
    check("comparison.json", json.dumps(document().to_json(), indent=1) + "\n")


@pytest.mark.parametrize("width", [80, 110, 160])
def test_no_line_is_wider_than_the_terminal(width):
    assert max(map(len, to_text(render(document(), explain=True), width).splitlines())) <= width


def test_json_names():
    found = document().to_json()
    assert set(found) == {
        "schema", "memprof_version", "command", "a", "b", "tolerance", "within", "settings", "same_settings", "totals",
        "stages", "categories", "tensors", "same_tensors", "same_tensors_bytes", "tensors_matched_by", "kernels_a",
        "kernels_b", "reserved", "seconds_a", "seconds_b", "findings", "assumptions_only_in_a",
        "assumptions_only_in_b",
    }  # fmt: skip
    assert set(found["totals"][0]) == {
        "name", "a_bytes", "b_bytes", "difference_bytes", "compared", "within", "why_not",
    }  # fmt: skip
    assert set(found["stages"][0]) == {
        "order", "name", "step", "micro_batch", "stack", "index", "status", "a", "b", "difference_bytes",
    }  # fmt: skip
    assert set(found["tensors"][0]) == {"status", "category", "where", "a", "b", "difference_bytes"}
