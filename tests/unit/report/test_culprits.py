"""Whose tensors at the peak a report tells apart from their categories."""

from __future__ import annotations

import pytest

from memprof.findings import Finding, Severity
from memprof.findings.finding import Culprit
from memprof.report.documents.report import _sum_by_culprit
from memprof.trace.events import PhaseKind
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


def keeps(name: str, *storages: int, severity: Severity = Severity.WARNING, is_decisive: bool = False) -> Finding:
    culprit = Culprit(name, frozenset(storages))
    return Finding("idle-memory", severity, "", None, (), (), is_decisive=is_decisive, culprit=culprit)


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ({}, {}, ["a", "b"]),
        ({"is_decisive": True}, {}, ["a"]),
        ({}, {"is_decisive": True}, ["b"]),
        ({"is_decisive": True}, {"is_decisive": True}, ["a", "b"]),
        ({"severity": Severity.ERROR}, {"severity": Severity.NOTE}, ["a"]),
        ({"severity": Severity.NOTE}, {"severity": Severity.NOTE}, []),
    ],
)
def test_of_warnings_where_nothing_is_decisive_and_never_of_notes(
    first: dict[str, object], second: dict[str, object], names: list[str]
) -> None:
    b = TraceBuilder(PhaseKind.INPUTS)
    one, other = b.alloc(2 * MIB), b.alloc(MIB, line="train.py:2 main")
    findings = [keeps("a", one, **first), keeps("b", other, **second)]  # type: ignore[arg-type]
    sizes = {"a": {"inputs": 2 * MIB}, "b": {"inputs": MIB}}
    assert _sum_by_culprit(b.context().ledger, findings) == {name: sizes[name] for name in names}


def test_what_two_findings_are_about_is_of_the_first() -> None:
    b = TraceBuilder(PhaseKind.INPUTS)
    one, other = b.alloc(2 * MIB), b.alloc(MIB, line="train.py:2 main")
    found = _sum_by_culprit(b.context().ledger, [keeps("a", one), keeps("b", one, other)])
    assert found == {"a": {"inputs": 2 * MIB}, "b": {"inputs": MIB}}
