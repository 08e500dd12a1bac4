"""A data set that fills the GPU before anything is trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memprof.findings import Context, Severity, find_all
from memprof.findings.loaded_ahead import find
from memprof.trace.events import NONE, Holder, PhaseKind, Role
from memprof.units import MIB
from tests.unit.full_gpu import run_out_of_memory
from tests.unit.traces import TraceBuilder

pytestmark = pytest.mark.usefixtures("small_heap")


def test_the_list_that_keeps_them_is_named() -> None:
    def program() -> None:
        features = []
        for _ in range(100):
            features.append(torch.randn(2048, 2048, device="cuda").exp())  # noqa: PERF401
        nn.Linear(2048, 2048).cuda()(features[0])

    first, *_ = find_all(run_out_of_memory(program, 400 * MIB))
    assert first.id == "loaded-ahead" and first.is_decisive and "kept by list `features`" in first.title
    assert first.culprit is not None and first.culprit.name == "list `features`"
    assert first.edit is not None and ".cpu()" in first.evidence[0].text


def fill(
    num_tensors: int, *, other_mib: int = 0, owner: tuple[Role, str] | None = None, computes: bool = False
) -> Context:
    b = TraceBuilder()
    if computes:
        b.phase(PhaseKind.FORWARD)
        b.phase(PhaseKind.OTHER)
    if other_mib:
        b.alloc(other_mib // 2 * MIB, line="train.py:2 main")
        b.alloc((other_mib - other_mib // 2) * MIB, line="train.py:3 main")
    for _ in range(num_tensors):
        b.alloc(MIB, line="train.py:8 main", owner=owner)
    b.alloc(MIB, line="train.py:9 main")
    b.trace.ended_out_of_memory = True
    return b.context()


@pytest.mark.parametrize(
    ("context", "is_found"),
    [
        (fill(8), True),
        (fill(7), False),
        (fill(8, other_mib=7), True),
        (fill(8, other_mib=8), False),
        (fill(49, other_mib=49), False),
        (fill(8, owner=(Role.PARAMETER, "weight")), False),
        (fill(8, computes=True), False),
    ],
)
def test_eight_tensors_of_one_line_that_are_half_of_the_peak(context: Context, is_found: bool) -> None:
    assert bool(find(context)) is is_found


@pytest.mark.parametrize(
    ("op", "fix"), [("torch.load", 'load it with map_location="cpu"'), ("aten.randn", "keep the data")]
)
def test_what_is_loaded_from_files_is_loaded_elsewhere(op: str, fix: str) -> None:
    b = TraceBuilder()
    for _ in range(8):
        b.alloc(MIB, op=op, line="average.py:8 main")
    b.trace.ended_out_of_memory = True
    (finding,) = find(b.context())
    assert finding.evidence[0].text.startswith(f"fix at average.py:8: {fix}")


@pytest.mark.parametrize(("is_used", "is_found"), [(True, True), (False, False)])
def test_a_step_that_no_module_begins(is_used: bool, is_found: bool) -> None:
    """What it uses is used before its first phase, the backward."""
    b = TraceBuilder(PhaseKind.INPUTS)
    loaded = [b.alloc(8 * MIB, line="train.py:8 main") for _ in range(8)]
    used = len(b.trace.events) + 1
    b.phase(PhaseKind.OTHER, 0)
    b.alloc(MIB)
    b.phase(PhaseKind.BACKWARD)
    b.trace.last_uses = [used if is_used and index == loaded[3] else NONE for index in range(len(b.trace.storages))]
    assert bool(find(b.context())) == is_found


@pytest.mark.parametrize(("num_held", "is_named"), [(4, False), (5, True)])
def test_a_container_of_most_of_them_is_named(num_held: int, is_named: bool) -> None:
    context = fill(8)
    held = tuple(range(num_held))
    context.ledger.trace.holders += [
        Holder(0, "list", "first", "/x/train.py:6 main", True, None, held[:1], 0, 0, None),
        Holder(0, "list", "data", "/x/train.py:7 main", True, None, held, 0, 0, None),
    ]
    (finding,) = find(context)
    assert ("kept by list `data` (x/train.py:7)" in finding.title) == (finding.edit is not None) == is_named
    kept, filled = ("/x/train.py:7 main",) * 2 if is_named else ("train.py:8 main", None)
    assert [line.source for line in finding.evidence] == [kept, filled, None, "train.py:8 main"]
    assert [line.num_bytes for line in finding.evidence] == [None, None, 8 * MIB, MIB]


def train_on(
    num_tensors: int = 8, *, mib: int = 8, other_mib: int = 0, uses_all: bool = False, is_late: bool = False
) -> Context:
    """Five steps, each of which uses one of the tensors that were loaded, or all."""
    b = TraceBuilder(PhaseKind.INPUTS)
    if is_late:
        b.phase(PhaseKind.FORWARD)
    loaded = [b.alloc(mib * MIB, line="train.py:8 main") for _ in range(num_tensors)]
    if other_mib:
        b.alloc(other_mib * MIB, line="train.py:2 main")
    uses = [NONE] * len(b.trace.storages)
    for step in range(1, 6):
        b.phase(PhaseKind.FORWARD, step)
        made = b.alloc(MIB)
        for index in loaded if uses_all else loaded[step : step + 1]:
            uses[index] = len(b.trace.events)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        b.free(made)
        uses.append(NONE)
    b.trace.last_uses = uses
    return b.context(4096 * MIB)


@pytest.mark.parametrize(
    ("context", "is_found"),
    [
        (train_on(), True),
        (train_on(7, mib=10), False),
        (train_on(mib=7), False),  # 56 MiB
        (train_on(9, mib=7), False),  # 63
        (train_on(other_mib=570), True),  # 64 of 635
        (train_on(other_mib=580), False),  # of 645
        (train_on(20), True),  # most were not used yet
        (train_on(uses_all=True), False),
        (train_on(is_late=True), False),
    ],
)
def test_what_steps_use_in_turn(context: Context, is_found: bool) -> None:
    """64 MiB and a tenth of the peak, in a run that fits: a note."""
    found = find(context)
    assert bool(found) is is_found and all(one.severity is Severity.NOTE and not one.is_decisive for one in found)
