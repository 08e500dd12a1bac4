"""Gradients that lie unused under the next forward, in hand-written traces."""

from __future__ import annotations

from memprof.findings.edits import Edit, EditKind
from memprof.findings.idle_storages import find_idle_storages
from memprof.trace.events import Forward, PhaseKind, Role
from memprof.units import MIB
from tests.unit.findings.idle import UsesBuilder


def test_gradients_that_lie_under_the_next_forward() -> None:
    b = UsesBuilder(PhaseKind.MODEL)
    b.parameter("weight", 100 * MIB // 4)
    b.phase(PhaseKind.BACKWARD)
    gradient = b.new(100 * MIB // 4, owner=(Role.GRADIENT, "weight"))
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.free(b.alloc(MIB, line="train.py:9 main"))
    b.use(gradient)
    b.phase(PhaseKind.FORWARD, 2)
    b.free(b.alloc(300 * MIB))
    b.phase(PhaseKind.ZERO_GRAD, 2)
    b.free(gradient)
    (finding,) = b.find()
    assert "gradients (.grad) after the optimizer's step" in finding.title
    assert finding.evidence[0].text.endswith("zero_grad() right after the optimizer's step at train.py:9")
    assert finding.num_bytes == 100 * MIB


def test_gradients_that_are_accumulated_are_used() -> None:
    b = UsesBuilder(PhaseKind.BACKWARD)
    gradient = b.new(100 * MIB // 4, owner=(Role.GRADIENT, "weight"))
    b.use(gradient)
    b.phase(PhaseKind.FORWARD, 1, 2)
    b.free(b.alloc(300 * MIB))
    b.trace.ended_out_of_memory = True
    assert not b.find(350 * MIB)


def test_the_line_that_trains_is_to_free_gradients() -> None:
    """The last call that trains, of those that were recorded."""

    def edit(*calls: tuple[int, bool, int]) -> Edit | None:
        b = UsesBuilder(PhaseKind.MODEL)
        b.parameter("weight", 100 * MIB // 4)
        b.phase(PhaseKind.BACKWARD)
        gradient = b.new(100 * MIB // 4, owner=(Role.GRADIENT, "weight"))
        b.phase(PhaseKind.OPTIMIZER_STEP)
        b.use(gradient)
        b.phase(PhaseKind.FORWARD, 2)
        b.free(b.alloc(300 * MIB, line="train.py:3 main"))
        b.phase(PhaseKind.ZERO_GRAD, 2)
        b.free(gradient)
        b.trace.forwards = [Forward(0, 1, 0, source, training, nodes, ()) for nodes, training, source in calls]
        (finding,) = b.find()
        assert finding.evidence[0].text.endswith("optimizer's step")  # whose line is not known
        return finding.edit

    assert edit((5, True, 0), (5, True, 1), (0, True, 0), (5, False, 0)) == Edit(
        EditKind.FREE_GRADIENTS, "train.py:3 main"
    )
    assert edit((0, True, 0)) is edit() is None


def test_gradients_that_are_there_when_memory_runs_out() -> None:
    """What has a role is not autograd's, which may keep other tensors for a backward."""
    b = UsesBuilder(PhaseKind.BACKWARD)
    gradient = b.new(25 * MIB, owner=(Role.GRADIENT, "weight"))
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.use(gradient)
    b.phase(PhaseKind.FORWARD, 2)
    b.alloc(300 * MIB)
    b.use()
    b.trace.ended_out_of_memory = True
    assert find_idle_storages(b.context(350 * MIB)) == [gradient]


def test_the_step_that_has_used_them_is_named() -> None:
    """Another optimizer has made a step at another line before."""
    b = UsesBuilder(PhaseKind.MODEL)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.free(b.alloc(MIB, line="train.py:3 main"))
    b.phase(PhaseKind.BACKWARD, 2)
    gradient = b.new(100 * MIB // 4, owner=(Role.GRADIENT, "weight"))
    b.phase(PhaseKind.OPTIMIZER_STEP, 2)
    b.free(b.alloc(MIB, line="train.py:9 main"))
    b.use(gradient)
    b.phase(PhaseKind.FORWARD, 3)
    b.free(b.alloc(300 * MIB))
    b.phase(PhaseKind.OPTIMIZER_STEP, 3)
    b.alloc(MIB, line="train.py:3 main")
    b.free(gradient)
    (finding,) = b.find()
    assert finding.evidence[0].text.endswith("zero_grad() right after the optimizer's step at train.py:9")
