"""Parameters in half precision that a line copies to float32, one after the other."""

from __future__ import annotations

import pytest

from memprof.findings import Finding
from memprof.findings.parameter_upcast import find
from memprof.trace.events import Caller, Owner, Role
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

NUM_WEIGHTS, WEIGHT = 4, 5 * MIB  # 10 MiB in bfloat16, 20 in float32


def cast(*, other_mib: int = 0, frees: bool = True, role: Role = Role.PARAMETER, old: str = "bfloat16") -> TraceBuilder:
    """A model is cast, weight by weight."""
    b = TraceBuilder()
    weights = [b.new(WEIGHT, dtype=old, op="aten.empty") for _ in range(NUM_WEIGHTS)]
    if other_mib:
        b.alloc(other_mib * MIB)
    for weight in weights:
        copy = b.new(WEIGHT, op="aten._to_copy", line="lib/other.py:9 prepare")
        b.trace.owners[copy] = Owner(role, "")
        if frees:
            b.free(weight)
    b.trace.sources.append("train.py:3 main")
    b.trace.callers = [Caller(copy, len(b.trace.sources) - 1, "")]
    return b


def find_in(b: TraceBuilder, usable_mib: int = 60) -> list[Finding]:
    return find(b.context(usable_mib * MIB))


@pytest.mark.parametrize(("is_cut", "when"), [(True, " when memory ran out"), (False, "")])
def test_the_line_and_its_bytes_are_named(is_cut: bool, when: str) -> None:
    b = cast()
    b.trace.ended_out_of_memory = is_cut
    (finding,) = find_in(b)
    assert finding.id == "parameters-upcast" and finding.num_bytes == 40 * MIB
    where = "Parameters in bfloat16 are copied to float32 at lib/other.py:9"
    assert finding.title == f"{where}: 80.00 MiB instead of 40.00 MiB{when}"
    assert finding.evidence[-1].text.startswith("fix: ") and finding.evidence[-1].source == "train.py:3 main"


@pytest.mark.parametrize(("usable_mib", "decides"), [(50, True), (49, False)])
def test_they_are_the_cause_if_the_run_fits_without(usable_mib: int, decides: bool) -> None:
    """The last original of 10 MiB beside 40 MiB in place of 80."""
    assert [finding.is_decisive for finding in find_in(cast(), usable_mib)] == [decides]


def test_a_model_that_fits_may_be_float32() -> None:
    assert not find_in(cast(), usable_mib=100)


def test_what_is_no_cast_of_parameters_in_place() -> None:
    assert not find_in(cast(frees=False))
    assert not find_in(cast(role=Role.INPUT))
    assert not find_in(cast(old="float32"))


@pytest.mark.parametrize(("other_mib", "is_told"), [(228, True), (230, True), (232, False)])
def test_copies_are_a_quarter_of_the_peak(other_mib: int, is_told: bool) -> None:
    """The peak is where the last original of 10 MiB is beside its copy: 80 of 318, 320 or 322 MiB."""
    assert bool(find_in(cast(other_mib=other_mib))) is is_told
