"""Another place for what is there: host memory, other GPUs, expandable segments, one model at a time."""

from __future__ import annotations

import pytest

from memprof.allocator import parse_config, parse_release, replay_in_host_memory, replay_on_gpu
from memprof.findings import Context
from memprof.findings.proposals import copies, data_parallel, host_memory, models, segments
from memprof.ledger.ledger import build_ledger
from memprof.trace.events import NONE, Forward, MovedModel, PhaseKind
from memprof.units import MIB
from tests.unit.findings.proposals.proposed import listed
from tests.unit.traces import TraceBuilder


@pytest.mark.parametrize(("moved_mib", "stays"), [(90, [2, 3]), (91, None)])
def test_one_model_at_a_time_where_memory_runs_out_in_moving_one(moved_mib: int, stays: list[int] | None) -> None:
    """Of 270 MiB, three times as many as the moved model has, 90 MiB stay, and the request of the moved model."""
    b = TraceBuilder()
    made = [b.parameter("weight", MIB // 4, mib) for mib in (100, 80, 90)]
    made.append(b.new(MIB // 4, 90, op="aten._to_copy"))
    b.trace.ended_out_of_memory = True
    b.trace.moved_model = MovedModel("Net", 1, moved_mib * MIB, "float32")
    found = listed(models.propose(b.context(300 * MIB)))
    assert [[i for i in made if one.trace.storages[i].num_bytes] for one in found] == ([] if stays is None else [stays])
    assert all("270.00 MiB of models are there when Net (90.00 MiB) is moved" in one.change for one in found)
    b.phase(PhaseKind.FORWARD)
    assert not list(models.propose(b.context(300 * MIB)))


@pytest.mark.parametrize(("class_name", "is_told"), [("DataParallel", True), ("Sequential", False)])
def test_what_is_computed_of_gathered_outputs_is_spread(class_name: str, is_told: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.enter("", class_name)
    own = b.new(8, 100)
    b.new(8, 100, device="cuda:1")
    gathered = b.new(16, 100, op="aten.empty")
    b.leave()
    b.trace.gpus = {"cuda:0": True, "cuda:1": True}
    b.trace.forwards.append(Forward(0, len(b.trace.events), 0, NONE, training=True, nodes=1, outputs=(gathered,)))
    loss = b.new(16, 200, op="aten._log_softmax", line="train.py:7 main")
    found = listed(data_parallel.propose(b.context()))
    assert bool(found) == is_told
    for one in found:
        assert "DistributedDataParallel" in one.change and "train.py:7" in one.change
        assert [one.trace.storages[i].num_bytes // 400 for i in (own, gathered, loss)] == [8, 8, 16]


@pytest.mark.parametrize(
    ("phase", "op", "is_told"),
    [
        (PhaseKind.OTHER, "aten.zeros", True),
        (PhaseKind.OTHER, "aten.mm", False),
        (PhaseKind.FORWARD, "aten.zeros", False),  # a mask, a one_hot
    ],
)
def test_what_the_program_creates_may_be_in_host_memory(phase: PhaseKind, op: str, is_told: bool) -> None:
    b = TraceBuilder(phase)
    b.trace.trains = b.trace.ended_out_of_memory = True
    b.alloc(60 * MIB)
    created = b.alloc(30 * MIB, op=op, line="slide.py:7 run")
    found = listed(host_memory.propose(b.context()))
    assert bool(found) == is_told
    assert all("slide.py:7" in one.change and not one.trace.storages[created].num_bytes for one in found)


@pytest.mark.parametrize(
    ("phase", "shape", "is_told"),
    [
        (PhaseKind.OTHER, (1024, 1024), True),
        (PhaseKind.OTHER, (512, 1024), False),
        (PhaseKind.FORWARD, (1024, 1024), False),  # a gradient may be computed of them
        (PhaseKind.FORWARD, (1024 * 1024,), True),  # of a state_dict, by copy.deepcopy
        (PhaseKind.EVALUATION, (1024 * 1024,), True),
        (PhaseKind.BACKWARD, (1024 * 1024,), False),
        (PhaseKind.FORWARD, (1024 * 1025,), False),
    ],
)
def test_copies_of_parameters_may_be_in_host_memory(phase: PhaseKind, shape: tuple[int, ...], is_told: bool) -> None:
    b = TraceBuilder()
    b.parameter("weight", 1024, 1024)
    b.phase(phase)
    made = [b.new(*shape, op="aten.clone", line="ema.py:7 save") for _ in range(8)]
    found = listed(copies.propose(b.context(24 * MIB)))
    assert bool(found) == is_told
    for one in found:
        assert "ema.py:7" in one.change and not any(one.trace.storages[index].num_bytes for index in made)


@pytest.mark.parametrize(
    ("kib", "phase", "is_used", "is_told"),
    [
        (4096, PhaseKind.OPTIMIZER_STEP, False, True),  # two of 4 MiB are a tenth of 80
        (4608, PhaseKind.OPTIMIZER_STEP, False, True),
        (4092, PhaseKind.OPTIMIZER_STEP, False, False),
        (4096, PhaseKind.BACKWARD, False, True),
        (4096, PhaseKind.FORWARD, False, False),  # it may be called yet, as a teacher
        (4096, PhaseKind.OPTIMIZER_STEP, True, False),
    ],
)
def test_a_copy_of_the_model_that_no_pass_has_used(kib: int, phase: PhaseKind, is_used: bool, is_told: bool) -> None:
    b = TraceBuilder()
    for name in ("a", "b"):
        b.parameter(name, kib, 256)
    made = [b.new(kib, 256, op="aten.clone", line="ema.py:7 make") for _ in range(2)]
    b.phase(PhaseKind.FORWARD)
    b.alloc(60 * MIB - 4 * kib * 1024)
    used = len(b.trace.events)
    b.phase(phase)
    b.alloc(20 * MIB)
    b.trace.last_uses = [NONE] * len(b.trace.storages)
    if is_used:
        b.trace.last_uses[made[0]] = b.trace.last_uses[made[1]] = used
    found = listed(copies.propose_unused(b.context(75 * MIB)))
    assert bool(found) == is_told
    for one in found:
        assert "move the copy of the model made at ema.py:7 to host memory" in one.change
        assert not any(one.trace.storages[index].num_bytes for index in made)


@pytest.mark.parametrize(
    ("config", "release", "is_told"),
    [("", "2.8", True), ("expandable_segments:True", "2.8", False), ("", "2.0", False)],
)
def test_segments_may_be_expandable(config: str, release: str, is_told: bool) -> None:
    b = TraceBuilder()
    b.alloc(MIB)
    run = replay_on_gpu(b.trace, None, parse_config(config), parse_release(release))
    found = listed(segments.propose(Context(build_ledger(b.trace, run), None)))
    assert [one.config is not None and one.config.expandable_segments for one in found] == [True] * is_told


def test_a_run_on_the_cpu_has_no_segments() -> None:
    b = TraceBuilder()
    b.alloc(MIB)
    assert not list(segments.propose(Context(build_ledger(b.trace, replay_in_host_memory(b.trace)), None)))
