"""The history of LBFGS, where it is most of the memory."""

from __future__ import annotations

import pytest

from memprof.findings import Context
from memprof.findings.lbfgs_history import find
from memprof.trace.events import PhaseKind, Role
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


def history(num_pairs: int, *, vector_mib: int = 4, other_mib: int = 0, usable_mib: int | None = None) -> Context:
    b = TraceBuilder(PhaseKind.OPTIMIZER_STEP)
    if other_mib:
        b.alloc(other_mib * MIB)
    for _ in range(num_pairs):
        for name in ("old_dirs", "old_stps"):
            b.new(vector_mib * MIB // 4, line="train.py:8 main", owner=(Role.OPTIMIZER_STATE, name))
    b.trace.last_uses = [0] * len(b.trace.storages)
    return b.context(None if usable_mib is None else usable_mib * MIB)


def test_it_is_named_with_what_a_shorter_one_needs() -> None:
    (finding,) = find(history(20, usable_mib=100))
    assert finding.is_decisive and finding.num_bytes == 160 * MIB
    assert "which steps at train.py:8, keeps 40 vectors" in finding.title and "160.00 MiB (100%" in finding.title
    assert finding.is_decisive


@pytest.mark.parametrize(
    ("num_pairs", "other_mib", "is_found"), [(10, 0, False), (11, 0, True), (11, 264, True), (11, 265, False)]
)
def test_ten_iterations_and_a_quarter_of_the_peak(num_pairs: int, other_mib: int, is_found: bool) -> None:
    assert bool(find(history(num_pairs, other_mib=other_mib))) is is_found


@pytest.mark.parametrize(("num_pairs", "is_found"), [(31, False), (32, True)])
def test_64_mib(num_pairs: int, is_found: bool) -> None:
    assert bool(find(history(num_pairs, vector_mib=1))) is is_found
