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
