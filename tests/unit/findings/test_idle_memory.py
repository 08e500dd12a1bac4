"""What is kept after its last use, in hand-written traces: each effect on the peak is worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memprof.findings import Finding, Severity, find_all
from memprof.findings.edits import Edit, EditKind
from memprof.findings.idle_memory import find
from memprof.findings.idle_storages import awaits_backward, find_idle_storages, find_phase, find_replaced_models
from memprof.trace.events import NONE, Caller, CycleKind, Event, EventKind, Forward, Holder, Owner, PhaseKind, Role
from memprof.trace.facts import ProgramFacts
from memprof.units import MIB
from tests.unit.findings.figures import all_figures
from tests.unit.traces import TraceBuilder

OUT = Holder(0, "", "out", "/x/train.py:9 main", False, None, (), 0, 0, None)


class UsesBuilder(TraceBuilder):
    """Builds a trace with last uses: `use` says that an operator reads storages now."""

    def use(self, *indices: int) -> None:
        uses = self.trace.last_uses
        uses += [NONE] * (len(self.trace.storages) - len(uses))
        for index in indices:
            uses[index] = len(self.trace.events)

    def find(self, usable_bytes: int | None = None) -> list[Finding]:
        self.use()
        return find(self.context(usable_bytes))


def exits(b: TraceBuilder) -> None:
    """The program has come to its end."""
    program = ProgramFacts(("train.py",), "exit", 0, 4, ())
    b.trace.facts = dataclasses.replace(b.trace.facts, command="run", program=program)


def logits_bound(idle_mib: int = 100, other_mib: int = 300, *, held: bool = True) -> UsesBuilder:
    """Logits that the first step made lie beside the second step's forward, whose peak has `other_mib` more."""
    b = UsesBuilder(PhaseKind.FORWARD)
    logits = b.alloc(idle_mib * MIB, line="model.py:3 forward")
    b.phase(PhaseKind.BACKWARD)
    b.use(logits)
    b.free(b.alloc(2 * MIB))
    b.phase(PhaseKind.FORWARD, 2)
    activation = b.alloc(other_mib * MIB)
    b.use(activation)
    b.free(logits)
    b.phase(PhaseKind.BACKWARD, 2)
    b.use(activation)
    b.free(activation)
    if held:
        b.trace.idle_holders.append(OUT._replace(storages=(logits,)))
    return b


def test_names_the_variable_and_says_the_peak_without_it() -> None:
    (finding,) = logits_bound().find()
    assert (finding.id, finding.severity, finding.num_bytes) == ("idle-memory", Severity.WARNING, 100 * MIB)
    assert finding.title == (
        "100.00 MiB stay on the GPU unused: variable `out` (x/train.py:9), last used in backward of step 1"
    )
    fix, effect, tensors = finding.evidence
    assert (fix.text, fix.source) == ("fix: `del out` after the last use", "/x/train.py:9 main")
    assert "at most 300.00 MiB instead of 400.00 MiB" in effect.text
    # The segment of 100 MiB is kept for later, and too small for 300; that of 20 MiB is not needed any more.
    assert "reserves 400.00 MiB instead of 420.00 MiB" in effect.text and effect.num_bytes == 20 * MIB
    assert (tensors.source, tensors.num_bytes) == ("model.py:3 forward", 100 * MIB)


def test_what_fills_a_container_is_the_line_to_change() -> None:
    b = logits_bound()
    b.trace.idle_holders[:] = [b.trace.idle_holders[0]._replace(kind="dict", name="Cache.parts", fills=True)]
    (finding,) = b.find()
    assert "dict `Cache.parts` (x/train.py:9)" in finding.title
    assert finding.evidence[0].text == "fix: drop the tensors of `Cache.parts` after their use"


def windowed(num_kept: int, limit: int | None = None) -> UsesBuilder:
    """Each of four steps makes a tensor that is freed `num_kept` steps later; one was seen in a variable."""
    b = UsesBuilder(PhaseKind.MODEL)
    b.parameter("weight", 100)
    made: list[int] = []
    for step in range(1, 5):
        b.phase(PhaseKind.FORWARD, step)
        made.append(b.alloc(100 * MIB, line="train.py:7 main"))
        b.use(made[-1])
        b.phase(PhaseKind.BACKWARD, step)
        b.free(b.alloc(300 * MIB))
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        if step >= num_kept:
            b.free(made[step - num_kept])
    b.trace.idle_holders.append(OUT._replace(storages=(made[0],), limit=limit))
    return b


def test_a_window_or_a_cache_keeps_what_it_has_on_purpose() -> None:
    assert windowed(1).find()
    assert not windowed(2).find()
    assert not windowed(1, limit=8).find()


def test_where_no_holder_was_seen_the_line_is_named() -> None:
    (finding,) = logits_bound(held=False).find()
    assert "the result of aten.empty at model.py:3" in finding.title


@pytest.mark.parametrize(
    ("idle_mib", "other_mib", "is_told"), [(64, 300, True), (62, 300, False), (100, 1900, True), (100, 1902, False)]
)
def test_it_is_at_least_64_mib_and_a_twentieth_of_the_peak(idle_mib: int, other_mib: int, is_told: bool) -> None:
    assert bool(logits_bound(idle_mib, other_mib).find()) == is_told


def test_what_the_program_may_still_read_is_no_finding_until_it_has_ended() -> None:
    b = logits_bound(held=False)
    b.trace.idle_holders.append(OUT._replace(storages=(0,), is_read_later=True))
    assert not b.find()
    exits(b)
    assert b.find()


def test_what_an_evaluation_keeps_is_told_by_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logits_bound().find()
    monkeypatch.setattr("memprof.findings.idle_memory.find_kept_storages", lambda _: frozenset({0}))
    assert not logits_bound().find()


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


def test_says_whether_the_run_fits_without_it() -> None:
    (decides,) = logits_bound().find(300 * MIB)
    assert decides.title.endswith("; without it the run fits") and decides.is_decisive
    (too_large,) = logits_bound().find(298 * MIB)
    assert "fits" not in too_large.title and not too_large.is_decisive


def test_what_is_gone_when_memory_runs_out_is_not_the_cause() -> None:
    """It has left a segment that 20 MiB pin."""
    b = UsesBuilder(PhaseKind.FORWARD)
    idle = b.alloc(100 * MIB)
    b.use(idle)
    b.phase(PhaseKind.BACKWARD)
    b.phase(PhaseKind.FORWARD, 2)
    b.alloc(100 * MIB)
    b.free(idle)
    b.alloc(20 * MIB)
    b.alloc(120 * MIB)
    assert not b.find(250 * MIB)


def test_says_why_a_run_fits_that_reserves_more_than_there_is() -> None:
    """Without the logits a segment of 100 MiB is empty, and stays until the second step needs 300."""
    (finding,) = logits_bound().find(310 * MIB)
    effect = "reserves 400.00 MiB instead of 420.00 MiB, of which cached segments are released when the GPU is full"
    assert finding.is_decisive and finding.evidence[1].text.endswith(effect)
    (roomy,) = logits_bound().find(410 * MIB)
    assert roomy.evidence[1].text.endswith("reserves 400.00 MiB instead of 420.00 MiB")


def test_the_finding_without_which_the_run_fits_comes_first() -> None:
    b = logits_bound()
    b.use()
    ids = [finding.id for finding in find_all(b.context(300 * MIB))]
    assert ids[:2] == ["idle-memory", "does-not-fit"]


def test_silent_where_uses_are_not_known() -> None:
    b = logits_bound()
    b.use()
    b.trace.events.append(Event(EventKind.POOL, 1))
    assert not find(b.context())  # a CUDA graph may use it
    b = logits_bound()
    b.trace.last_uses.clear()
    assert not find(b.context())


def test_silent_on_the_loop_of_memprof_profile() -> None:
    b = logits_bound()
    b.trace.facts = dataclasses.replace(b.trace.facts, command="profile")
    assert not b.find()


def test_silent_on_what_is_used_again_or_dies_before_the_next_phase() -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    saved, temporary = b.alloc(100 * MIB), b.alloc(100 * MIB)
    b.use(saved, temporary)
    b.free(temporary)
    b.phase(PhaseKind.BACKWARD)
    b.free(b.alloc(300 * MIB))
    b.use(saved)
    b.free(saved)
    assert not b.find()


def test_silent_on_what_was_never_used() -> None:
    """A batch that was loaded ahead, weights that are only initialized."""
    b = UsesBuilder(PhaseKind.MODEL)
    weight = b.parameter("weight", 100 * MIB // 4)
    b.use(weight)
    b.alloc(100 * MIB)
    b.phase(PhaseKind.FORWARD)
    b.use(b.alloc(300 * MIB))
    exits(b)
    assert not b.find()


@pytest.mark.parametrize("held", [True, False])
def test_what_autograd_saved_may_be_read_where_no_operator_shows_it(held: bool) -> None:
    """Only what a variable holds beyond its last use is idle in the backward."""
    b = UsesBuilder(PhaseKind.FORWARD)
    out = b.alloc(100 * MIB)
    b.use(out)
    b.phase(PhaseKind.BACKWARD)
    b.free(b.alloc(300 * MIB))
    b.free(out)
    if held:
        b.trace.idle_holders.append(OUT._replace(storages=(out,)))
    assert bool(b.find()) == held


def test_after_an_error_only_as_many_as_the_variable_had_are_idle() -> None:
    """Three layers' activations and `out` are made by one line; the backward would have read the activations."""
    b = UsesBuilder(PhaseKind.FORWARD)
    first = b.alloc(100 * MIB, line="model.py:3 forward")
    b.use(first)
    b.free(first)
    b.phase(PhaseKind.FORWARD, 2)
    made = [b.alloc(100 * MIB, line="model.py:3 forward") for _ in range(4)]
    b.use(*made)
    b.phase(PhaseKind.BACKWARD, 2)
    b.alloc(300 * MIB)
    b.trace.ended_out_of_memory = True
    b.trace.idle_holders.append(OUT._replace(storages=(first,)))
    (finding,) = b.find(600 * MIB)
    assert finding.num_bytes == 100 * MIB and finding.title.endswith("without it the script gets past this point")


@pytest.mark.parametrize("held", [True, False])
def test_after_an_error_keys_and_values_may_be_of_a_layer_that_the_call_had_not_come_to(held: bool) -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    keys = b.new(100 * MIB // 4, owner=(Role.KV_CACHE, ""))
    b.use(keys)
    b.phase(PhaseKind.FORWARD, 2)
    b.alloc(300 * MIB)
    b.trace.ended_out_of_memory = True
    if held:
        b.trace.idle_holders.append(OUT._replace(storages=(keys,)))
    assert bool(b.find(350 * MIB)) == held


def test_after_an_error_what_the_step_before_used_in_its_backward_is_not_idle() -> None:
    """The backward that the error has cut would have read it."""
    b = UsesBuilder(PhaseKind.FORWARD)
    first = b.alloc(100 * MIB, line="model.py:3 forward")
    b.phase(PhaseKind.BACKWARD)
    b.use(first)
    b.phase(PhaseKind.FORWARD, 2)
    second = b.alloc(100 * MIB, line="model.py:3 forward")
    b.use(second)
    b.free(first)
    b.phase(PhaseKind.BACKWARD, 2)
    b.alloc(300 * MIB)
    b.trace.ended_out_of_memory = True
    b.trace.idle_holders.append(OUT._replace(storages=(first,)))
    assert not b.find(300 * MIB)


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
    assert "gradients that the optimizer has used" in finding.title
    assert "zero_grad() right after the optimizer's step at train.py:9," in finding.evidence[0].text
    assert finding.num_bytes == 100 * MIB


def test_gradients_that_are_accumulated_are_used() -> None:
    b = UsesBuilder(PhaseKind.BACKWARD)
    gradient = b.new(100 * MIB // 4, owner=(Role.GRADIENT, "weight"))
    b.use(gradient)
    b.phase(PhaseKind.FORWARD, 1, 2)
    b.free(b.alloc(300 * MIB))
    b.trace.ended_out_of_memory = True
    assert not b.find(350 * MIB)


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
    assert "a model that is no longer used, last used in optimizer step of step 1" in finding.title
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
    assert "400.00 MiB stay on the GPU unused: 2 models built one after another, 200.00 MiB each" in finding.title


def given_cache(*, held: bool = True, forwards: int = 1, num_before: int = 1) -> UsesBuilder:
    """A generation has given tensors of 100 MiB to the model, one after another; then it is trained."""
    b = UsesBuilder(PhaseKind.MODEL)
    given = [b.alloc(100 * MIB, owner=(Role.INPUT, "")) for _ in range(num_before)]
    for cache in given:
        b.phase(PhaseKind.FORWARD)
        b.use(cache)
    for step in range(1, 1 + forwards):
        b.phase(PhaseKind.FORWARD, step)
        activation = b.alloc(300 * MIB)
        b.phase(PhaseKind.BACKWARD, step)
        b.use(activation)
        b.free(activation)
    if held:
        b.trace.idle_holders.append(OUT._replace(name="Decoder._cache", storages=(given[0],)))
    return b


def test_what_was_given_to_a_model_and_is_kept_over_a_later_forward() -> None:
    (finding,) = given_cache().find()
    assert finding.num_bytes == 100 * MIB and "attribute `Decoder._cache`" in finding.title


@pytest.mark.parametrize(
    "other", [{"held": False}, {"num_before": 2}, {"forwards": 0}], ids=["no holder", "one of a list", "last forward"]
)
def test_silent_on_batches(other: dict[str, Any]) -> None:
    """Of a later forward, only one that has ended counts: here memory runs out in it."""
    b = given_cache(**other)
    if other == {"forwards": 0}:
        b.phase(PhaseKind.FORWARD, 2)
        b.alloc(300 * MIB)
        b.trace.ended_out_of_memory = True
    assert not b.find(350 * MIB)


def replaced_model(computes: int = 3, new_mib: int = 64) -> tuple[UsesBuilder, int]:
    """A model of 100 MiB with its state computes in some phases; memory runs out while a second one is built."""
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
    b.alloc(300 * MIB)
    b.trace.ended_out_of_memory = True
    b.trace.idle_holders.append(OUT._replace(kind="Trainer", name="trainer", storages=(weight, state)))
    return b, weight


def test_a_model_beside_which_memory_for_another_one_runs_out() -> None:
    b, _ = replaced_model()
    (finding,) = b.find(400 * MIB)
    assert finding.title == (
        "200.00 MiB stay on the GPU unused: a model that was last used before another one was built, kept by Trainer "
        "`trainer` (x/train.py:9), last used in optimizer step of step 3; without it the script gets past "
        "this point"
    )
    assert finding.evidence[0].text.endswith("before the next one is built")


@pytest.mark.parametrize(
    ("kind", "name", "fix"),
    [
        ("Trainer", "trainer", "delete the model and its optimizer"),
        ("lru_cache", "positions", "clear the cache after the model's last use (`positions.cache_clear()`)"),
        ("dict", "CACHE", "remove each model from `CACHE` after its last use"),
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


def test_a_checkpoint_that_was_seen_at_the_error_is_no_more_than_what_was_seen() -> None:
    """The line has also loaded what the optimizer has now, and has not used yet."""
    b = UsesBuilder(PhaseKind.MODEL)
    weights, state = (b.alloc(100 * MIB, "torch.load", line="train.py:5 main") for _ in range(2))
    b.use(weights, state)
    b.phase(PhaseKind.FORWARD)
    b.alloc(300 * MIB)
    b.trace.ended_out_of_memory = True
    holder = OUT._replace(event=len(b.trace.events), kind="dict", name="loaded['model']", storages=(weights,))
    b.trace.idle_holders.append(holder)
    (finding,) = b.find(400 * MIB)
    assert finding.num_bytes == 100 * MIB
    assert finding.evidence[0].text == 'fix: load it with map_location="cpu", or `del loaded` after the last use'


def graphs_kept(*, training: bool, uses_backward: bool = False) -> UsesBuilder:
    """Two calls of a net with gradients, each of which keeps 100 MiB; memory has its peak later."""
    b = UsesBuilder(PhaseKind.MODEL)
    for step in range(1, 3):
        b.phase(PhaseKind.FORWARD, step)
        begin = len(b.trace.events)
        b.enter("", "Net")
        saved = b.alloc(100 * MIB)
        b.use(saved)
        b.leave()
        source = b.trace.storages[saved].source
        b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, source, training, 5, ()))
        if uses_backward:
            b.phase(PhaseKind.BACKWARD, step)
            b.use(saved)
    b.phase(PhaseKind.FORWARD, 3)
    b.free(b.alloc(300 * MIB))
    b.phase(PhaseKind.OTHER, 3)
    return b


def test_graphs_that_no_backward_uses_are_told_by_the_call() -> None:
    (finding,) = graphs_kept(training=True).find()
    assert "unused: the graph of 2 calls of Net at train.py:1, which no backward has used" in finding.title
    assert "torch.no_grad()" in finding.evidence[0].text and finding.evidence[0].source == "train.py:1 main"
    (other,) = graphs_kept(training=True, uses_backward=True).find()
    assert "the result of aten.empty at train.py:1" in other.title


def test_a_backward_that_came_before_the_last_use_has_used_the_graph() -> None:
    """Statistics of a layer's input are computed after the backward."""
    b = graphs_kept(training=True, uses_backward=True)
    for saved in range(2):
        b.use(saved)  # in the last phase
    b.phase(PhaseKind.FORWARD, 4)
    b.free(b.alloc(400 * MIB))
    (finding,) = b.find()
    assert "no backward has used" not in finding.title


def test_calls_are_counted_that_keep_something_at_a_time() -> None:
    b = graphs_kept(training=True)
    b.trace.events[-2:-2] = [Event(EventKind.FREE, 0), Event(EventKind.FREE, 1)]
    for call in range(2, 4):
        begin = len(b.trace.events)
        b.phase(PhaseKind.FORWARD, 2 + call)
        b.enter("", "Net")
        b.use(b.alloc(100 * MIB))
        b.leave()
        b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, b.trace.storages[0].source, True, 5, ()))
    b.phase(PhaseKind.FORWARD, 7)
    b.free(b.alloc(300 * MIB))
    b.phase(PhaseKind.OTHER, 7)
    (finding,) = b.find()
    assert "the graph of 2 calls of Net" in finding.title  # of four


def test_what_an_evaluation_keeps_for_a_backward_is_told_once() -> None:
    b = graphs_kept(training=False)
    assert not b.find()
    assert [finding.id for finding in find_all(b.context())] == ["evaluation-with-gradients"]


def test_what_piles_up_is_told_once_as_growth() -> None:
    b = UsesBuilder(PhaseKind.MODEL)
    b.parameter("weight", 100)
    for step in range(1, 7):
        b.phase(PhaseKind.FORWARD, step)
        b.use(b.alloc(100 * MIB, line="train.py:7 main"))
        b.phase(PhaseKind.BACKWARD, step)
        b.free(b.alloc(300 * MIB))
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        b.phase(PhaseKind.OTHER, step)
    # So is what the step adds in which memory runs out.
    b.phase(PhaseKind.FORWARD, 7)
    newest = b.alloc(100 * MIB, line="train.py:7 main")
    b.use(newest)
    b.trace.idle_holders.append(OUT._replace(kind="list", storages=(newest,)))
    b.phase(PhaseKind.BACKWARD, 7)
    b.alloc(400 * MIB)
    assert not b.find(1000 * MIB)


@pytest.mark.parametrize(
    ("holder", "by", "fix"),
    [
        (Holder(0, "except", "main", "/x/train.py:20 main", False, None, (), 0, 0, None),
         "the `except` block in which `main` retries (x/train.py:20)", "leave the `except` block before the retry"),
        (Holder(0, "list", "errors", "/x/train.py:20 main", True, None, (), 0, 0, None),
         "the traceback of list `errors` (x/train.py:20)", "keep no exception in `errors`"),
    ],
)  # fmt: skip
def test_what_caught_errors_keep_is_one_finding_a_holder(holder: Holder, by: str, fix: str) -> None:
    """Two attempts of 100 MiB that failed lie beside a third of 300; 400 MiB are usable."""
    b = UsesBuilder(PhaseKind.FORWARD)
    for _ in range(2):
        kept = b.alloc(100 * MIB)
        b.use(kept)
        b.trace.error_holders.append(holder._replace(storages=(kept,)))
    third = b.alloc(300 * MIB)
    b.use(third)
    (finding,) = b.find(400 * MIB)
    assert finding.is_decisive and finding.num_bytes == 200 * MIB
    assert f"tensors of an attempt that ran out of memory, kept by {by}" in finding.title
    assert fix in finding.evidence[0].text and finding.evidence[0].source == holder.source


# -- what is idle, function by function ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "kind"), [(0, PhaseKind.MODEL), (1, PhaseKind.MODEL), (3, PhaseKind.MODEL), (4, PhaseKind.FORWARD)]
)
def test_a_use_is_of_the_phase_that_was_running_before_it(used: int, kind: PhaseKind) -> None:
    """The forward begins at event 3: what is used after three events was used before it."""
    b = TraceBuilder()
    for _ in range(2):
        b.alloc(MIB)
    b.phase(PhaseKind.FORWARD)
    assert find_phase(b.context().phases, used).kind is kind


@pytest.mark.parametrize("before_free", [False, True])
def test_what_dies_as_the_next_phase_begins_is_no_more_idle(before_free: bool) -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    out = b.alloc(100 * MIB)
    b.use(out)
    if before_free:
        b.free(out)
    b.phase(PhaseKind.FORWARD, 2)
    if not before_free:
        b.free(out)
    assert find_idle_storages(b.context()) == [out] * (not before_free)


@pytest.mark.parametrize(
    ("change", "is_idle"),
    [
        ({}, True),
        ({"device": "cpu"}, False),
        ({"hidden": True}, False),
        ({"next": PhaseKind.OTHER}, False),
        ({"next": PhaseKind.DECODE}, True),
        ({"next": PhaseKind.EVALUATION}, True),
    ],
)
def test_idle_storages_are_on_the_gpu_when_a_phase_computes(change: dict[str, Any], is_idle: bool) -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    following = change.pop("next", PhaseKind.FORWARD)
    out = b.alloc(100 * MIB, **change)
    b.use(out)
    b.phase(following, 2)
    b.alloc(MIB)
    b.phase(PhaseKind.OTHER, 2)
    b.free(out)
    b.use()
    assert find_idle_storages(b.context()) == [out] * is_idle


@pytest.mark.parametrize(
    ("second", "is_idle"),
    [(PhaseKind.FORWARD, True), (PhaseKind.DECODE, True), (PhaseKind.EVALUATION, True), (PhaseKind.BACKWARD, False)],
)
def test_a_batch_is_idle_after_a_whole_pass_that_goes_forward(second: PhaseKind, is_idle: bool) -> None:
    b = UsesBuilder(PhaseKind.MODEL)
    batch = b.alloc(100 * MIB, owner=(Role.INPUT, ""))
    b.phase(PhaseKind.FORWARD)
    b.use(batch)
    b.alloc(MIB)
    b.phase(second, 2)
    b.alloc(MIB)
    b.phase(PhaseKind.OPTIMIZER_STEP, 2)
    b.use()
    b.trace.idle_holders.append(OUT._replace(storages=(batch,)))
    assert find_idle_storages(b.context()) == [batch] * is_idle


def test_a_batch_that_is_freed_as_the_pass_ends_is_not() -> None:
    b = UsesBuilder(PhaseKind.MODEL)
    batch = b.alloc(100 * MIB, owner=(Role.INPUT, ""))
    b.phase(PhaseKind.FORWARD)
    b.use(batch)
    b.phase(PhaseKind.FORWARD, 2)
    b.alloc(MIB)
    b.free(batch)
    b.phase(PhaseKind.BACKWARD, 2)
    b.use()
    b.trace.idle_holders.append(OUT._replace(storages=(batch,)))
    assert not find_idle_storages(b.context())


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


def waiting(
    nodes: int = 5,
    *,
    ended: bool = True,
    then: PhaseKind | None = None,
    in_call: bool = True,
    phase: PhaseKind = PhaseKind.FORWARD,
) -> bool:
    """A parameter is used in a forward, in its call or after it, and perhaps another phase begins."""
    b = UsesBuilder(PhaseKind.MODEL)
    weight = b.parameter("weight", 100)
    b.phase(phase)
    b.enter("", "Net")
    begin = len(b.trace.events)
    b.alloc(MIB)
    if in_call:
        b.use(weight)
    b.alloc(MIB)
    b.leave()
    b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, 0, True, nodes, ()))
    b.alloc(MIB)
    b.alloc(MIB)
    if not in_call:
        b.use(weight)
    if then is not None:
        b.phase(then)
        b.alloc(MIB)
    b.trace.ended_out_of_memory = ended
    return awaits_backward(b.context(), weight)


def test_the_weights_of_a_call_with_a_graph_wait_for_its_backward() -> None:
    assert waiting()
    assert waiting(1) and not waiting(0)
    assert waiting(0, in_call=False)  # by a function that is no module, with a graph of its own
    assert not waiting(ended=False)  # then the run shows it
    assert not waiting(phase=PhaseKind.EVALUATION)
    assert waiting(then=PhaseKind.OTHER)


@pytest.mark.parametrize("then", [PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP, PhaseKind.EVALUATION])
def test_after_a_backward_no_graph_of_the_forward_is_waited_for(then: PhaseKind) -> None:
    assert not waiting(then=then)


# -- what a finding shows of it --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "fix", "edit"),
    [
        ({}, "`del out` after the last use", Edit(EditKind.DELETE, "/x/train.py:9 main", "out")),
        ({"name": "out[0]"}, "`del out` after the last use", Edit(EditKind.DELETE, "/x/train.py:9 main", "out")),
        ({"name": "self.out"}, "drop the tensors of `self.out` after their use", None),
        ({"kind": "list"}, "drop the tensors of `out` after their use", None),
        ({"source": None}, "`del out` after the last use", None),
        (
            {"kind": CycleKind.CTX, "name": "ctx.out -> Out"},
            "give it to ctx.save_for_backward(...), which keeps no cycle",
            Edit(EditKind.SAVE_FOR_BACKWARD, "/x/train.py:9 main", "out"),
        ),
    ],
)
def test_the_change_of_the_program_and_its_edit(change: dict[str, Any], fix: str, edit: Edit | None) -> None:
    b = logits_bound()
    b.trace.idle_holders[:] = [b.trace.idle_holders[0]._replace(**change)]
    (finding,) = b.find()
    assert (finding.evidence[0].text, finding.edit) == (f"fix: {fix}", edit)
    assert finding.evidence[0].source == change.get("source", "/x/train.py:9 main")
    assert ("train.py:9" in finding.title) == ("source" not in change)
    assert ("garbage collector" in finding.evidence[2].text) == (change.get("kind") is CycleKind.CTX)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("largest", ["torch.load", "aten.empty"])
def test_what_is_loaded_may_be_loaded_into_host_memory(held: bool, largest: str) -> None:
    """If the largest tensor that is kept is of torch.load."""
    b = UsesBuilder(PhaseKind.MODEL)
    loaded = b.alloc(100 * MIB, op=largest, line="train.py:5 main")
    small = b.alloc(4 * MIB, op="torch.load", line="train.py:5 main")
    b.use(loaded, small)
    b.phase(PhaseKind.FORWARD)
    b.free(b.alloc(300 * MIB))
    exits(b)
    if held:
        b.trace.idle_holders.append(OUT._replace(kind="dict", name="state", storages=(loaded, small)))
    (finding,) = b.find()
    is_load = largest == "torch.load"
    assert ('map_location="cpu"' in finding.evidence[0].text) == is_load
    assert finding.edit == (Edit(EditKind.LOAD_ON_HOST, "train.py:5 main") if is_load else None)


def test_the_largest_kinds_of_tensors_are_shown() -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    made = [b.alloc(mib * MIB, op=f"aten.op{mib}") for mib in (20, 60, 40, 30, 30, 30)]
    b.use(*made)
    b.phase(PhaseKind.FORWARD, 2)
    b.free(b.alloc(300 * MIB))
    b.phase(PhaseKind.OTHER, 2)
    exits(b)
    b.trace.idle_holders.append(OUT._replace(storages=tuple(made)))
    (finding,) = b.find()
    assert [all_figures(finding)[0][0], *all_figures(finding)[3:]] == [
        "210.00 MiB",
        ["3", "[31457280]", "uint8", "aten.op30", "train.py:1"],
        ["1", "[62914560]", "uint8", "aten.op60", "train.py:1"],
        ["1", "[41943040]", "uint8", "aten.op40", "train.py:1"],
    ]
    assert [line.num_bytes for line in finding.evidence[2:]] == [90 * MIB, 60 * MIB, 40 * MIB]


@pytest.mark.parametrize(
    ("first", "then", "text"),
    [
        (PhaseKind.OTHER, None, "(x/train.py:9)"),
        (PhaseKind.FORWARD, None, "last used in code after the model"),
        (PhaseKind.FORWARD, PhaseKind.EVALUATION, "last used in evaluation of step 3, micro-batch 2"),
    ],
)
def test_the_last_use_is_told_by_its_stage(first: PhaseKind, then: PhaseKind | None, text: str) -> None:
    """A phase that allocates nothing is no stage of the ledger, and what is outside of all is not named."""
    b = UsesBuilder(first)
    out = b.alloc(100 * MIB)
    if then is not None:
        b.phase(then, 3, 2)
    b.use(out)
    b.phase(PhaseKind.FORWARD, 4)
    b.free(b.alloc(300 * MIB))
    b.phase(PhaseKind.OTHER, 4)
    exits(b)
    b.trace.idle_holders.append(OUT._replace(storages=(out,)))
    (finding,) = b.find()
    assert finding.title.endswith(text)


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
        assert "optimizer's step, before" in finding.evidence[0].text  # whose line is not known
        return finding.edit

    assert edit((5, True, 0), (5, True, 1), (0, True, 0), (5, False, 0)) == Edit(
        EditKind.FREE_GRADIENTS, "train.py:3 main"
    )
    assert edit((0, True, 0)) is edit() is None


@pytest.mark.parametrize(("at", "is_of_call"), [("begin", True), ("end", False)])
def test_a_call_makes_what_is_allocated_from_its_begin_until_before_its_end(at: str, is_of_call: bool) -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    b.enter("", "Net")
    kept = b.alloc(100 * MIB)
    b.use(kept)
    b.leave()
    birth = 2
    begin, end = {"begin": (birth, birth + 1), "end": (0, birth)}[at]
    b.trace.forwards.append(Forward(begin, end, 0, 0, True, 5, ()))
    b.phase(PhaseKind.FORWARD, 3)
    b.free(b.alloc(300 * MIB))
    b.phase(PhaseKind.OTHER, 3)
    (finding,) = b.find()
    assert ("1 call of Net at train.py:1" in finding.title) == is_of_call
    assert finding.edit == (Edit(EditKind.NO_GRADIENTS, "train.py:1 main") if is_of_call else None)


@pytest.mark.parametrize(
    ("name", "source", "by"),
    [
        ("main", "/x/train.py:20 main", "`main` retries (x/train.py:20)"),
        ("<module>", "/x/train.py:20 <module>", "the script retries (x/train.py:20)"),
        ("", None, "a library retries"),
    ],
)
def test_an_except_block_is_named_by_its_function(name: str, source: str | None, by: str) -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    kept = b.alloc(100 * MIB)
    b.use(kept)
    b.trace.error_holders.append(Holder(0, "except", name, source, False, None, (kept,), 0, 0, None))
    b.use(b.alloc(350 * MIB))
    (finding,) = b.find(400 * MIB)
    assert by in finding.title
    assert finding.edit == (None if source is None else Edit(EditKind.RETRY_AFTER_HANDLER, source, name))


def test_an_error_in_a_variable_is_to_be_kept_as_its_text() -> None:
    """Two variables are two findings."""
    b = UsesBuilder(PhaseKind.FORWARD)
    for number in (1, 2):
        kept = b.alloc(100 * MIB)
        b.use(kept)
        line = f"/x/train.py:{number} main"
        b.trace.error_holders.append(Holder(0, "", f"error{number}", line, True, None, (kept,), 0, 0, None))
    b.use(b.alloc(350 * MIB))
    edits = [finding.edit for finding in b.find(460 * MIB)]
    assert edits == [Edit(EditKind.KEEP_ERROR_TEXT, f"/x/train.py:{n} main", f"error{n}") for n in (1, 2)]


@pytest.mark.parametrize("computes", [False, True])
def test_parameters_with_names_of_their_own_are_added_to_one_model(*, computes: bool) -> None:
    """As adapters are; a forward that begins without a call only makes tensors."""
    b = UsesBuilder(PhaseKind.MODEL)
    b.trace.sources.append("x/score.py:7 main")
    for number in range(4):
        b.phase(PhaseKind.MODEL)
        weight = b.parameter(f"lora.task{number}", 25 * MIB)
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
    sets = "400.00 MiB stay on the GPU unused: 4 sets of parameters added to one model one after another"
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


@pytest.mark.parametrize("role", [Role.KV_CACHE, None])
def test_a_cache_of_keys_and_values_is_kept_by_its_variable(role: Role | None) -> None:
    b = logits_bound()
    if role is not None:
        b.trace.owners[0] = Owner(role, "")
    (finding,) = b.find()
    assert "variable `out`" in finding.title


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


def test_what_is_used_as_a_call_begins_was_used_before_it() -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    weight = b.parameter("weight", 100)
    b.alloc(MIB)
    b.use(weight)
    begin = len(b.trace.events)
    b.alloc(MIB)
    b.trace.forwards.append(Forward(begin, begin + 1, 0, 0, True, 0, ()))
    b.use()
    b.trace.ended_out_of_memory = True
    assert awaits_backward(b.context(), weight)  # the call itself has no graph


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_use_is_that_of_the_tensor_that_was_used_last(order: tuple[int, int]) -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    made = [b.alloc(50 * MIB, op=f"aten.op{number}") for number in range(2)]
    for step, number in enumerate(order, 1):
        b.phase(PhaseKind.EVALUATION, step)
        b.alloc(MIB)
        b.use(made[number])
    b.phase(PhaseKind.FORWARD, 3)
    b.free(b.alloc(300 * MIB))
    b.phase(PhaseKind.OTHER, 3)
    exits(b)
    b.trace.idle_holders.append(OUT._replace(storages=tuple(made)))
    (finding,) = b.find()
    assert finding.title.endswith("of step 2")


# -- copies of a model's state ---------------------------------------------------------------------------------------

COPY_LINE = "train.py:7 main"


def copied(
    *, made_before: bool = False, trained_on: bool = True, used: bool = False, op: str = "aten.clone"
) -> UsesBuilder:
    """A state of 200 MiB that is copied after the first step, or before it, beside a forward of 300 MiB."""
    b = UsesBuilder()
    weights = [b.parameter(f"{number}.weight", 100, MIB // 4) for number in range(2)]

    def copy() -> tuple[int, ...]:
        made = tuple(b.new(100 * MIB // 4, op=op, line=COPY_LINE) for _ in weights)
        b.use(*made)
        return made

    if made_before:
        b.phase(PhaseKind.OTHER, 0)
        made = copy()
    b.phase(PhaseKind.FORWARD)
    b.use(*weights)
    if trained_on:
        b.phase(PhaseKind.OPTIMIZER_STEP)
        b.use(*weights)
    b.phase(PhaseKind.EVALUATION, 0)
    b.use(*weights)
    if not made_before:
        made = copy()
    elif used:
        b.use(*made)
    for step in (2, 3):
        b.phase(PhaseKind.FORWARD, step)
        b.free(b.alloc(100 * step * MIB))
        b.use(*weights)
    holder = OUT._replace(kind="dict", name="best", source=COPY_LINE, storages=made, is_read_later=True)
    b.trace.idle_holders.append(holder)
    return b


def test_a_copy_of_the_state_that_is_read_later_belongs_to_the_host() -> None:
    (finding,) = copied().find()
    assert finding.title == (
        "200.00 MiB stay on the GPU unused: a copy of the model's state in dict `best` (train.py:7)"
    )
    fix = finding.evidence[0]
    assert (fix.source, finding.num_bytes) == (COPY_LINE, 200 * MIB) and "host memory" in fix.text
    assert not copied(op="torch.load").find()  # a checkpoint that is read later is no copy that the program made


@pytest.mark.parametrize(
    ("how", "is_told"),
    [
        ({"made_before": True}, True),  # the state to begin anew with
        ({"made_before": True, "used": True}, False),  # an average of weights
        ({"made_before": True, "trained_on": False}, False),  # it may wait for the first step's end
        ({"trained_on": False}, False),
    ],
)
def test_a_copy_is_idle_if_the_program_has_trained_on_without_it(how: dict[str, bool], is_told: bool) -> None:
    b = copied(**how)
    assert bool(b.find()) == is_told
    exits(b)
    assert b.find()


@pytest.mark.parametrize("failing_line", [COPY_LINE, "train.py:8 main"])
def test_a_copy_in_progress_when_memory_runs_out(failing_line: str) -> None:
    b = UsesBuilder()
    weights = [b.parameter(f"{number}.weight", 100, MIB // 4) for number in range(4)]
    for step, kind in ((1, PhaseKind.OPTIMIZER_STEP), (2, PhaseKind.FORWARD)):
        b.phase(kind, step)
        b.use(*weights)
    for _ in range(3):
        b.use(b.new(100 * MIB // 4, op="aten.clone", line=COPY_LINE))
    b.free(b.new(100 * MIB // 4, op="aten.clone", line=failing_line))
    b.trace.ended_out_of_memory = True
    found = b.find(720 * MIB)
    assert bool(found) == (failing_line == COPY_LINE)
    for one in found:
        assert one.is_decisive and "a copy of the model's state made at train.py:7" in one.title


@pytest.mark.parametrize(
    ("shape", "too_early", "is_told"),
    [
        ((100 * MIB // 4,), 0, True),
        ((100 * MIB // 4,), 1, False),  # not known to be unused until the second step
        ((100, MIB // 4), 0, False),  # of a model: an average that waits for its next update
    ],
)
def test_a_copy_that_is_read_again_at_the_end(shape: tuple[int, ...], too_early: int, is_told: bool) -> None:
    """As the state that a learning rate finder restores: on the host it takes nothing at the peak, in step 1."""
    b = UsesBuilder()
    weights = [b.parameter(f"{number}.weight", 100, MIB // 4) for number in range(2)]
    b.phase(PhaseKind.OTHER, 0)
    made = tuple(b.new(*shape, op="aten.clone", line=COPY_LINE) for _ in weights)
    b.use(*made)
    begins = []
    for step in (1, 2):
        b.phase(PhaseKind.FORWARD, step)
        begins.append(len(b.trace.events) - 1)
        b.free(b.alloc(300 * MIB))
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        b.use(*weights)
    b.phase(PhaseKind.OTHER, 0)
    b.use(*weights, *made)
    name = "Finder.state"
    holder = OUT._replace(event=begins[0] + 1, name=name, storages=made, unused_until=begins[1] + 1 - too_early)
    b.trace.idle_holders.append(holder)
    exits(b)
    found = b.find()
    assert bool(found) == is_told
    for one in found:
        assert one.num_bytes == 200 * MIB and "last used" not in one.title
        assert "in host memory, the run allocates at most" in one.evidence[1].text
