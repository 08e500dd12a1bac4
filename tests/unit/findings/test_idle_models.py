"""Models that are used no more, in hand-written traces: kept by variables, caches and cycles."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memprof.findings import Finding, Severity
from memprof.findings.finding import Culprit
from memprof.findings.idle_memory import _make_model_fix
from memprof.findings.idle_storages import find_idle_storages, find_replaced_models, find_unused_model
from memprof.trace.events import (
    Caller,
    CycleKind,
    Forward,
    Holder,
    Module,
    ModuleRole,
    Owner,
    PhaseKind,
    Role,
    Trace,
)
from memprof.trace.facts import ProgramFacts
from memprof.units import MIB
from tests.unit.findings.idle import OUT, UsesBuilder, exits, logits_bound

CYCLE = Holder(0, CycleKind.OBJECTS, "Node.part -> Node.part", "/x/train.py:9 main", True, None, (), 0, 0, None)


def test_what_the_program_has_dropped_is_told_by_the_cycle_that_keeps_it() -> None:
    b = logits_bound(held=False)
    b.trace.idle_holders.append(CYCLE._replace(storages=(0,)))
    (finding,) = b.find()
    assert "the program has dropped them, and a reference cycle" in finding.title and "train.py:9" in finding.title
    assert "weakref" in finding.evidence[0].text and finding.evidence[0].source == CYCLE.source


def test_models_that_a_cycle_keeps_are_no_models_to_delete() -> None:
    """As the one above, but the tensors are parameters."""
    b = logits_bound(held=False)
    b.trace.owners[0] = Owner(Role.PARAMETER, "weight")
    b.trace.idle_holders.append(CYCLE._replace(storages=(0,)))
    (finding,) = b.find()
    assert "the program has dropped them" in finding.title


def two_models(ends: bool = True, calls: int = 2, part_mib: int = 86, state_mib: int = 86) -> UsesBuilder:
    """A model of 258 MiB is trained; then a second one is called, with less memory at its peak."""
    b = UsesBuilder(PhaseKind.MODEL)
    weight = b.parameter("weight", part_mib * MIB // 4)
    b.phase(PhaseKind.FORWARD)
    b.free(b.alloc(400 * MIB))
    b.phase(PhaseKind.OPTIMIZER_STEP)
    state = [b.new(state_mib * MIB // 4, owner=(Role.OPTIMIZER_STATE, name)) for name in ("exp_avg", "exp_avg_sq")]
    b.use(weight, *state)
    for step in range(calls):
        b.phase(PhaseKind.FORWARD, 2 + step)
        b.free(b.alloc(2 * MIB))
    if ends:
        exits(b)
    return b


def test_a_model_that_is_used_no_more_is_told_even_if_the_peak_is_elsewhere() -> None:
    (finding,) = two_models().find()
    assert (finding.severity, finding.num_bytes) == (Severity.NOTE, 258 * MIB)
    assert finding.title.endswith("a model that is no longer used")
    assert finding.evidence[-1].text == "last used in optimizer step of step 1"
    assert "at another moment" in finding.evidence[1].text


@pytest.mark.parametrize("is_used", [True, False])
def test_a_model_is_in_use_while_copies_of_its_weights_are(is_used: bool) -> None:
    """Autocast keeps them, where there are no gradients, over all calls in its block."""
    b = UsesBuilder(PhaseKind.MODEL)
    weight = b.parameter("weight", 100 * MIB)
    b.phase(PhaseKind.FORWARD)
    cast = b.new(100 * MIB, dtype="float16", op="aten._to_copy")
    b.use(weight)
    for _ in range(3):
        b.phase(PhaseKind.FORWARD)
        b.free(b.alloc(300 * MIB))
        if is_used:
            b.use(cast)
    exits(b)
    assert bool(b.find()) is not is_used


def test_a_single_call_after_the_training_is_a_sample_that_is_drawn() -> None:
    assert not two_models(calls=1).find()


def test_a_model_that_is_freed_in_the_next_phase_is_the_attempt_that_has_failed() -> None:
    b = UsesBuilder(PhaseKind.MODEL)
    weight = b.parameter("weight", 300 * MIB // 4)
    b.phase(PhaseKind.BACKWARD)
    b.use(weight)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.free(b.alloc(300 * MIB))
    b.free(weight)
    for step in range(2, 4):
        b.phase(PhaseKind.FORWARD, step)
        b.free(b.alloc(2 * MIB))
    exits(b)
    assert not b.find()


def test_a_model_counts_from_256_mib_on() -> None:
    """Its weight with two states."""
    assert two_models(part_mib=84).find() and not two_models(part_mib=82).find()


@pytest.mark.parametrize(("trains", "next_step", "is_told"), [(True, 1, False), (True, 2, True), (False, 1, True)])
def test_models_that_take_turns_in_a_step_are_used_until_its_end(trains: bool, next_step: int, is_told: bool) -> None:
    """As a GAN's generator, whose critic is trained after it in each iteration."""
    b = UsesBuilder(PhaseKind.MODEL)
    weight = b.parameter("weight", 75 * MIB)
    b.phase(PhaseKind.FORWARD, 1)
    b.free(b.alloc(400 * MIB))
    b.use(weight)
    for kind in (PhaseKind.FORWARD, PhaseKind.OPTIMIZER_STEP if trains else PhaseKind.FORWARD):
        b.phase(kind, next_step)
        b.free(b.alloc(MIB))
    if trains:
        b.phase(PhaseKind.OPTIMIZER_STEP, 1)
    exits(b)
    assert any("a model that is no longer used" in finding.title for finding in b.find()) is is_told


def test_a_program_that_was_stopped_may_use_the_model_later() -> None:
    assert not two_models(ends=False).find()


@pytest.mark.parametrize("is_used", [False, True])
def test_models_built_one_after_another_are_counted(is_used: bool) -> None:
    """Three folds with a weight of 100 MiB and its state: two stay beside the last, unless all are used again."""
    b = UsesBuilder(PhaseKind.MODEL)
    weights = []
    for fold in range(1, 4):
        weight = b.parameter("weight", 25 * MIB)
        b.phase(PhaseKind.FORWARD, fold)
        b.use(weight)
        b.phase(PhaseKind.OPTIMIZER_STEP, fold)
        state = b.new(25 * MIB, owner=(Role.OPTIMIZER_STATE, "exp_avg"))
        b.use(weight, state)
        weights += [weight, state]
        b.phase(PhaseKind.MODEL)
    b.phase(PhaseKind.EVALUATION, 3)
    b.use(*(weights if is_used else weights[-2:]))
    findings = b.find(500 * MIB)
    if is_used:
        assert not findings
        return
    (finding,) = findings
    assert finding.is_decisive and finding.severity is Severity.WARNING
    assert finding.culprit == Culprit("2 models built one after another", frozenset(weights[:4]))
    assert (
        "400.00 MiB stay on the GPU after their last use: 2 models built one after another, 200.00 MiB each"
        in finding.title
    )


def test_latents_that_are_optimized_one_after_another_are_no_models() -> None:
    """The network that they are optimized for is larger, and the same for all."""
    b = UsesBuilder(PhaseKind.MODEL)
    weight = b.parameter("weight", 100 * MIB)
    for image in range(1, 4):
        latent = b.parameter("", 25 * MIB)
        b.phase(PhaseKind.FORWARD, image)
        b.use(weight, latent)
        b.phase(PhaseKind.OPTIMIZER_STEP, image)
        b.use(latent)
    b.phase(PhaseKind.EVALUATION, 3)
    b.phase(PhaseKind.EVALUATION, 3)
    assert not any("models built" in finding.title for finding in b.find(500 * MIB))


@pytest.mark.parametrize(("last_mib", "num_replaced"), [(63, 0), (64, 1)])
def test_a_model_may_call_its_parts_while_it_is_built(last_mib: int, num_replaced: int) -> None:
    """What is built after such a call is no other model, if it is small."""
    b, weight = replaced_model(runs_out=False)
    parts = []
    for num_bytes in (64 * MIB, last_mib * MIB):
        parts.append(b.parameter("part", num_bytes // 4))
        b.phase(PhaseKind.FORWARD, 4)
        begin = len(b.trace.events)
        made = b.alloc(MIB)
        b.use(parts[-1])
        b.free(made)
        b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, 0, True, 0, ()))
    run_out(b)
    found = find_replaced_models(b.context())
    assert weight in found and len(found.intersection(parts)) == num_replaced


@pytest.mark.parametrize("is_freed", [False, True])
def test_another_model_is_what_is_live_of_it_where_memory_runs_out(is_freed: bool) -> None:
    """64 MiB, and of the model before a part is gone."""
    b = UsesBuilder(PhaseKind.MODEL)
    weight, part = b.parameter("weight", 25 * MIB), b.parameter("part", 16 * MIB)
    for kind in (PhaseKind.FORWARD, PhaseKind.OPTIMIZER_STEP):
        b.phase(kind)
        b.use(weight, part)
    b.free(part)
    b.phase(PhaseKind.MODEL)
    new = b.parameter("weight", 16 * MIB)
    b.free(*[new] * is_freed)
    b.use()
    run_out(b)
    assert find_replaced_models(b.context()) == ({weight} if not is_freed else set())


def run_out(b: UsesBuilder) -> None:
    b.alloc(300 * MIB)
    b.trace.ended_out_of_memory = True


def replaced_model(
    computes: int = 3, new_mib: int = 64, *, frees_state: bool = False, runs_out: bool = True
) -> tuple[UsesBuilder, int]:
    """A model of 100 MiB with as much state computes in some phases; memory runs out while a second one is built."""
    b = UsesBuilder(PhaseKind.MODEL)
    weight = b.parameter("weight", 25 * MIB)
    for step in range(1, computes):
        b.phase(PhaseKind.FORWARD, step)
    b.phase(PhaseKind.OPTIMIZER_STEP, computes)
    state = b.new(25 * MIB, owner=(Role.OPTIMIZER_STATE, "exp_avg"))
    b.use(weight, state)
    b.phase(PhaseKind.MODEL)
    for _ in range(2):
        b.use(b.parameter("weight", new_mib * MIB // 8))
    b.free(*[state] * frees_state)
    if runs_out:
        run_out(b)
    b.trace.idle_holders.append(OUT._replace(kind="Trainer", name="trainer", storages=(weight, state)))
    return b, weight


def test_a_model_beside_which_memory_for_another_one_runs_out() -> None:
    b, _ = replaced_model()
    (finding,) = b.find(400 * MIB)
    assert finding.title == (
        "200.00 MiB stay on the GPU after their last use: an earlier model, kept by Trainer `trainer` (x/train.py:9)"
    )
    assert finding.evidence[-1].text == "last used in optimizer step of step 3"


def test_what_has_the_model_is_told_though_the_program_was_to_read_it_when_it_was_first_seen() -> None:
    b, _ = replaced_model()
    (trainer,) = b.trace.idle_holders
    b.trace.idle_holders[:] = [trainer._replace(is_read_later=True), trainer]
    (finding,) = b.find(400 * MIB)
    assert finding.title.endswith("an earlier model, kept by Trainer `trainer` (x/train.py:9)")


def test_what_was_freed_before_memory_runs_out_is_not_told_of() -> None:
    b, _ = replaced_model(frees_state=True)
    (finding,) = b.find(400 * MIB)
    assert finding.title.startswith("100.00 MiB stay on the GPU after their last use")


@pytest.mark.parametrize(
    ("kind", "name", "fix"),
    [
        ("Trainer", "trainer", "drop the model and its optimizer before the next one is built: set the attribute"),
        ("lru_cache", "positions", "clear the cache after the model's last use (`positions.cache_clear()`)"),
        ("dict", "CACHE", "move each model of `CACHE` to the CPU (.cpu())"),
    ],
)
def test_a_model_is_taken_out_of_the_cache_that_keeps_it(kind: str, name: str, fix: str) -> None:
    b, weight = replaced_model()
    b.trace.idle_holders[:] = [OUT._replace(kind=kind, name=name, storages=(weight,))]
    (finding,) = b.find(400 * MIB)
    assert finding.evidence[0].text.startswith(f"fix: {fix}")


@pytest.mark.parametrize(("computes", "new_mib"), [(1, 64), (3, 62)], ids=["one call", "no model"])
def test_what_was_called_once_or_gets_a_small_part_more_is_in_use(computes: int, new_mib: int) -> None:
    """Two parts of one model, the first of which was called for the shape of its output; adapters of a model."""
    assert not replaced_model(computes, new_mib)[0].find(400 * MIB)


def test_a_model_that_is_copied_is_in_use() -> None:
    b, weight = replaced_model()
    b.use(weight)
    assert not b.find(400 * MIB)


@pytest.mark.parametrize(
    ("elements", "op", "is_used"),
    [(100, "aten._to_copy", True), (99, "aten._to_copy", False), (100, "aten.mul", False)],
)
def test_a_parameter_is_used_while_its_copy_in_half_precision_is(elements: int, op: str, is_used: bool) -> None:
    """The copy has as many elements, and is made as the parameter is read."""
    b = UsesBuilder(PhaseKind.MODEL)
    weight = b.parameter("weight", 100)
    b.phase(PhaseKind.FORWARD)
    copy = b.new(elements, dtype="float16", op=op)
    b.use(weight)
    b.phase(PhaseKind.FORWARD, 2)
    b.use(copy)
    b.alloc(MIB)
    b.phase(PhaseKind.FORWARD, 3)
    b.use(copy)
    assert (weight in find_idle_storages(b.context())) is not is_used


@pytest.mark.parametrize("computes", [False, True])
def test_parameters_with_names_of_their_own_are_added_to_one_model(*, computes: bool) -> None:
    """As adapters are; a forward that begins without a call only makes tensors."""
    b = UsesBuilder(PhaseKind.MODEL)
    b.trace.sources.append("x/score.py:7 main")
    for number in range(4):
        b.phase(PhaseKind.MODEL)
        weight = b.new(
            25 * MIB, op="aten.empty", line="/site-packages/peft.py:3 add", owner=(Role.PARAMETER, f"lora.task{number}")
        )
        b.trace.callers.append(Caller(weight, 0, ""))
        b.phase(PhaseKind.FORWARD)
        if computes:
            b.trace.forwards.append(Forward(len(b.trace.events), len(b.trace.events), 0, 0, False, 0, ()))
        b.use(weight)
    for _ in range(3):
        b.phase(PhaseKind.EVALUATION, 2)
        b.free(b.alloc(300 * MIB))
    exits(b)
    titles = [finding.title for finding in b.find()]
    sets = "400.00 MiB stay on the GPU after their last use: 4 sets of parameters added to one model one after another"
    assert any(title.startswith(f"{sets} at x/score.py:7, 100.00 MiB each") for title in titles) == computes


@pytest.mark.parametrize(
    ("second", "num_models"),
    [
        ({}, 2),
        ({"shape": (25 * MIB, 1)}, 1),
        ({"dtype": "int64"}, 1),
        ({"line": "model.py:2 f"}, 1),
        ({"op": "aten.ones"}, 1),
    ],
)
def test_models_are_counted_by_parameters_that_are_made_alike(second: dict[str, Any], num_models: int) -> None:
    """Parts of one model may be built and called one after another."""
    b = UsesBuilder(PhaseKind.MODEL)
    for step, change in enumerate(({}, second), 1):
        settings: dict[str, Any] = {"shape": (25 * MIB,), "op": "aten.empty", "line": "model.py:1 f"} | change
        weight = b.new(*settings.pop("shape"), owner=(Role.PARAMETER, "weight"), **settings)
        b.phase(PhaseKind.BACKWARD, step)
        b.use(weight)
        b.phase(PhaseKind.MODEL)
    b.phase(PhaseKind.EVALUATION, 3)
    b.use(b.alloc(300 * MIB))
    b.trace.ended_out_of_memory = True
    assert any("2 models built one after another" in one.title for one in b.find()) == (num_models == 2)


def test_a_model_is_used_as_long_as_one_of_its_parameters_is() -> None:
    """Two calls follow the last use of the first, but one that of the second."""

    def run(calls: int) -> list[Finding]:
        b = UsesBuilder(PhaseKind.MODEL)
        first, second = b.parameter("a", 150 * MIB // 4), b.parameter("b", 150 * MIB // 4)
        b.phase(PhaseKind.FORWARD)
        b.use(first, second)
        b.phase(PhaseKind.FORWARD, 2)
        b.use(second)
        b.free(b.alloc(400 * MIB))
        for step in range(calls):
            b.phase(PhaseKind.FORWARD, 3 + step)
            b.free(b.alloc(2 * MIB))
        exits(b)
        return b.find()

    assert run(2) and not run(1)


def test_a_program_has_come_to_its_end_if_it_says_so() -> None:
    b = two_models()
    program = ProgramFacts(("train.py",), "steps", 0, 4, ())
    b.trace.facts = dataclasses.replace(b.trace.facts, program=program)
    assert not b.find()


def test_state_of_a_model_that_a_cycle_keeps_is_no_model_of_its_own() -> None:
    b, weight = replaced_model()
    b.trace.idle_holders[:] = [CYCLE._replace(storages=(weight,))]
    assert not any("another one was built" in finding.title for finding in b.find(400 * MIB))


def test_what_was_computed_with_of_a_model_that_another_one_replaces() -> None:
    """Its gradients too, but not what was never used, was used to build it, or is in host memory."""
    b = UsesBuilder(PhaseKind.MODEL)
    weight, unused, built, host, ids = (
        b.parameter("weight", 25 * MIB),
        b.parameter("unused", MIB),
        b.parameter("built", MIB),
        b.new(MIB, device="cpu", owner=(Role.PARAMETER, "host")),
        b.new(MIB, owner=(Role.INPUT, "")),
    )
    b.use(built)
    b.phase(PhaseKind.FORWARD)
    b.use(weight, host, ids)
    b.phase(PhaseKind.BACKWARD)
    gradient = b.new(25 * MIB, owner=(Role.GRADIENT, "weight"))
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.use(weight, gradient)
    b.phase(PhaseKind.MODEL)
    b.parameter("weight", 25 * MIB)
    b.alloc(300 * MIB)
    b.use()
    b.trace.ended_out_of_memory = True
    assert find_replaced_models(b.context(400 * MIB)) == {weight, gradient}
    b.trace.ended_out_of_memory = False
    assert not find_replaced_models(b.context(400 * MIB)) and unused


@pytest.mark.parametrize(
    ("kind", "name", "has_state", "is_deleted"),
    [
        ("", "model", False, True),
        ("", "model", True, False),  # its optimizer keeps it too
        ("", "Trainer.model", False, False),
        ("", "parts['model']", False, False),
        (None, "", False, False),
    ],
)
def test_only_a_plain_variable_of_a_model_without_optimizer_state_is_deleted(
    kind: str | None, name: str, has_state: bool, is_deleted: bool
) -> None:
    holder = None if kind is None else OUT._replace(kind=kind, name=name)
    fix = _make_model_fix(Trace("simulated"), holder, has_state=has_state)
    assert (f"(`del {name}`)" in fix) == is_deleted and fix.startswith("delete the model")


@pytest.mark.parametrize(("kind", "is_model"), [("Net", True), ("ModelManager", False)])
def test_an_object_that_keeps_a_model_drops_it(kind: str, is_model: bool) -> None:
    trace = Trace("simulated")
    trace.modules.append(Module("", "Net", ModuleRole.ROOT, ""))
    fix = _make_model_fix(trace, OUT._replace(kind=kind, name="kept"), has_state=False)
    assert ("`del kept`" in fix) is is_model and ("set the attribute of `kept` to None" in fix) is not is_model


@pytest.mark.parametrize("is_held", [True, False])
def test_a_model_has_a_row_in_the_breakdown(is_held: bool) -> None:
    b, weight = replaced_model()
    b.trace.idle_holders *= is_held
    (finding,) = b.find(400 * MIB)
    assert finding.culprit == Culprit("an earlier model", frozenset({weight, weight + 1}))


def beside_another(used: int = 0, *, runs_out: bool = True, backward: bool = True, mib: int = 256) -> UsesBuilder:
    """Three models of one parameter each are put on the GPU; `used` of the first two take part in a step."""
    b = UsesBuilder(PhaseKind.MODEL)
    weights = [b.parameter("weight", mib * MIB // 4) for _ in range(2)]
    trained = b.parameter("weight", 10 * MIB)
    b.use(*weights, trained)  # as it is initialized
    b.phase(PhaseKind.FORWARD)
    made = b.alloc(100 * MIB)
    b.use(trained, *weights[:used])
    if backward:
        b.phase(PhaseKind.BACKWARD)
    b.alloc(100 * MIB)
    b.use(made)
    b.trace.ended_out_of_memory = runs_out
    return b


@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ({}, (0, 1)),
        ({"used": 1}, (1,)),
        ({"used": 2}, ()),
        ({"runs_out": False}, ()),  # it may be used later, and is seen to be
        ({"backward": False}, ()),  # it may be a teacher, called after its student
    ],
)
def test_a_model_that_nothing_has_computed_with(settings: dict[str, Any], unused: tuple[int, ...]) -> None:
    assert find_unused_model(beside_another(**settings).context(700 * MIB)) == unused


def test_what_lies_between_parameters_that_are_used_is_no_model() -> None:
    """As experts that no token was sent to: of two such groups the larger one counts."""
    b = UsesBuilder(PhaseKind.MODEL)
    parameters = [b.parameter("weight", size * MIB) for size in (1, 2, 3, 4, 5)]
    b.phase(PhaseKind.FORWARD)
    b.alloc(MIB)
    b.use(parameters[1], parameters[3])
    b.phase(PhaseKind.BACKWARD)
    b.alloc(100 * MIB)
    b.trace.ended_out_of_memory = True
    b.use()
    assert find_unused_model(b.context(50 * MIB)) == (parameters[4],)


@pytest.mark.parametrize(("mib", "is_told"), [(127, False), (128, True)])
def test_the_need_without_a_model_that_was_not_used(mib: int, is_told: bool) -> None:
    """Two parameters of so many MiB: the one that is trained has 40, and 200 are made."""
    b = beside_another(mib=mib)
    findings = [one for one in b.find(450 * MIB) if "were not used" in one.title]
    assert bool(findings) == is_told
    for finding in findings:
        assert finding.title == "256.00 MiB are on the GPU and were not used: a model made at model.py:1"
        assert finding.is_decisive and finding.evidence[1].required_bytes == 240 * MIB
        assert finding.culprit is not None and finding.culprit.name == "a model that was not used"
