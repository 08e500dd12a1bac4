"""Golden render of `memprof compare`: a small run before and after a change.

`MEMPROF_BLESS=1 pytest tests/golden` writes them anew; read the difference before you commit it.
"""

from dataclasses import replace
from pathlib import Path

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
