"""A finding is one file: dropped into the package, it is asked in its place."""

import sys

import pytest

import memprof.findings
from memprof.findings import find_all, rules
from memprof.findings.finding import RULES, rule
from tests.unit.traces import TraceBuilder

TOY = """
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule

@rule(5)
def find(context: Context) -> list[Finding]:
    return [Finding("toy", Severity.NOTE, "A toy.", None, (Evidence("seen"),), ())]
"""


def test_a_new_file_is_a_new_rule(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(TOY)
    b = TraceBuilder()
    b.new(1 << 20)
    assert "toy" not in [finding.id for finding in find_all(b.context())]
    monkeypatch.setattr(memprof.findings, "__path__", [*memprof.findings.__path__, str(tmp_path)])
    try:
        rules.import_rules()
        assert "toy" in [finding.id for finding in find_all(b.context())]
    finally:
        RULES.pop(5, None)
        sys.modules.pop("memprof.findings.toy", None)


def test_two_rules_have_two_places():
    with pytest.raises(ValueError, match="has place 10"):
        rule(10)(lambda context: [])


def test_rules_are_asked_in_this_order():
    names = [RULES[place].__module__.rpartition(".")[2] for place in sorted(RULES)]
    assert names == [
        "run_failed", "device_mismatch", "does_not_fit", "out_of_memory_caught", "memory_growth", "idle_memory",
        "larger_batch", "evaluation_batch", "evaluation_accumulates", "evaluation_with_gradients",
        "eval_mode", "frozen_in_vain", "untrained_gradients", "fragmentation",
        "streams", "duplicate_gradients", "state_not_sharded", "unsharded_group", "kept_unsharded", "weight_delta",
        "prefetch", "float32_reduction", "unreduced_gradients", "column_with_row",
        "logits", "attention_scores", "graph_breaks",
        "compiled_saved_tensors", "upcast", "weight_cache", "optimizer_state", "vocabulary", "positions",
        "unattributed",
    ]  # fmt: skip
