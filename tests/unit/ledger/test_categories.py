"""The category of each storage of hand-written traces: by owner, phase, place and lifetime."""

from __future__ import annotations

import pytest

from memprof.ledger.categories import Category, categorize, is_half_precision_copy
from memprof.ledger.stages import list_spans
from memprof.spec import TargetSpec
from memprof.trace.events import HOST, NONE, EventKind, Forward, Holder, ModuleRole, PhaseKind, Role
from memprof.trace.facts import Facts, Target
from tests.unit.ledger.forwards import VOCABULARY, WIDTH, run_forward
from tests.unit.traces import TraceBuilder

ACTIVATIONS, GRADIENTS, INPUTS = Category.ACTIVATIONS, Category.GRADIENTS, Category.INPUTS
LOGITS, PARAMETERS, TEMPORARIES = Category.LOGITS_AND_LOSS, Category.PARAMETERS, Category.TEMPORARIES
UNATTRIBUTED = Category.UNATTRIBUTED
LETTERS = {ACTIVATIONS: "A", LOGITS: "L", TEMPORARIES: "T"}


def categories_of(b: TraceBuilder, *indices: int) -> list[Category]:
    categories = categorize(b.trace, list_spans(b.trace))
    assert len(categories) == len(b.trace.storages)
    return [categories[index] for index in indices]


# -- forward passes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "letters"),
    [
        # What dies in its module is a temporary; what is made in the stages of logits and loss is theirs.
        ("root( embedding( 4x64 ) layer0( 4x32 - 4x64 ) norm( 4x64 ) 4x1000 ) 4x1000 4x8", "ATAALLL"),
        ("root( embedding( 4x64 ) layer0( part( 4x32 ) - 4x64 ) )", "AAA"),  # outlives the part that made it
        ("root( embedding( 4x64 ) layer0( 4x64 ) norm( 4x64 4x1000 4x999 ) )", "AAALA"),  # the head's, in the norm
        ("root( embedding( 4x64 ) layer0( 4x64 ) norm( 4x64 1000 ) )", "AAAA"),  # a vector is none
        ("root( embedding( 4x64 ) layer0( 4x1000 ) )", "AA"),  # nor is what a layer makes
        ("root( embedding( 4x64 ) layer0( 4x64 ) norm( 16x1000 ) )", "AAA"),  # of a weight's shape
        # The head is the program's, or in the middle of the model's own code.
        ("root( embedding( 4x64 ) layer0( 4x64 ) 4x1000 4x999 other( 4x1000 ) 4x1 )", "AALALL"),
        ("root( embedding( 4x64 ) layer0( 4x64 ) ) other( 4x1000 ) 4x1", "AALL"),
        # The loss of a model that reads no tokens.
        ("root( conv( 4x8 ) 4x10 4x9 ) 4x10!_log_softmax", "ALAL"),
        # A weight that autocast casts is none of the loss, nor is its transposed copy in compiled code.
        ("root( embedding( 4x64 ) layer0( 4x64 ) norm( 4x64 ) 16x1000!_to_copy 1000x16!_to_copy 4x1000!_to_copy )",
         "AAAALL"),
    ],
)  # fmt: skip
def test_a_forward(code: str, letters: str) -> None:
    for kind in (PhaseKind.FORWARD, PhaseKind.EVALUATION):
        b = TraceBuilder()
        if "embedding" in code:
            b.parameter("embedding.weight", VOCABULARY, WIDTH)
        b.parameter("layers.0.weight", 16, 1000)
        b.phase(kind)
        made = run_forward(b, code)
        b.phase(PhaseKind.BACKWARD)
        assert "".join(LETTERS[category] for category in categories_of(b, *made)) == letters


@pytest.mark.parametrize(
    ("shape", "dtype", "is_copy"),
    [
        ((4, 2), "bfloat16", True),
        ((4, 2), "float16", True),
        ((4, 2), "float32", False),
        ((2, 4), "bfloat16", False),  # not transposed
    ],
)
def test_half_precision_copies_are_transposed(shape: tuple[int, ...], dtype: str, is_copy: bool) -> None:
    b = TraceBuilder()
    index = b.new(*shape, dtype=dtype)
    assert is_half_precision_copy(b.trace.storages[index], {(2, 4)}) == is_copy


@pytest.mark.parametrize(("dtype", "category"), [("bfloat16", TEMPORARIES), ("float32", LOGITS)])
def test_a_cast_weight_is_none_of_the_logits(dtype: str, category: Category) -> None:
    b = TraceBuilder()
    b.parameter("head.weight", 1000, 64)
    b.phase(PhaseKind.FORWARD)
    b.enter("head", role=ModuleRole.HEAD)
    cast = b.new(64, 1000, dtype=dtype, op="aten._to_copy")
    b.free(cast)
    b.leave()
    assert categories_of(b, cast) == [category]


def test_a_tensor_made_from_logits_after_the_model() -> None:
    """`.float()` of inference has one value per word; the widest of what heads make counts."""
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD, 0)
    b.enter("", role=ModuleRole.ROOT)
    b.enter("head", role=ModuleRole.HEAD)
    b.new(5, op="aten.sum")  # a vector is no logits
    b.new(4, 10)
    b.new(4, 1000)
    b.new(4, 2000, hidden=True)
    b.leave()
    b.leave()
    after = [b.new(4, width, op="aten._to_copy") for width in (1000, 10, 2000)]
    assert categories_of(b, *after) == [LOGITS, ACTIVATIONS, ACTIVATIONS]


def test_a_whole_compiled_forward_has_logits_as_wide_as_the_head_has_rows() -> None:
    b = TraceBuilder()
    b.parameter("embedding.weight", 2000, 64)
    b.parameter("head.weight", 1000, 64)
    b.phase(PhaseKind.FORWARD)
    made = run_forward(b, "+head root( 4x1000@head 4x2000@head 1000@head )")
    assert categories_of(b, *made) == [LOGITS, ACTIVATIONS, ACTIVATIONS]


def test_a_cache_by_its_line_or_its_buffers_name() -> None:
    b = TraceBuilder()
    named, other = (b.new(8, owner=(Role.BUFFER, name)) for name in ("layers.0.kv_cache", "mask"))
    weight = b.new(8, owner=(Role.PARAMETER, "kv_cache.weight"))
    b.phase(PhaseKind.DECODE)
    by_line = [b.new(8, line=line) for line in ("cache_utils.py:3 update", "KVCache.py:3 f", "cache.py:3 f", None)]
    b.phase(PhaseKind.OTHER)
    assert categories_of(b, named, other, weight) == [Category.KV_CACHE, Category.BUFFERS, PARAMETERS]
    assert categories_of(b, *by_line) == [Category.KV_CACHE, Category.KV_CACHE, ACTIVATIONS, ACTIVATIONS]


@pytest.mark.parametrize(
    ("class_name", "op", "shape", "category"),
    [
        ("DistributedDataParallel", "aten.empty", (8,), Category.COMMUNICATION),
        ("DistributedDataParallel", "aten.empty", (8, 1), ACTIVATIONS),
        ("DistributedDataParallel", "aten.mm", (8,), ACTIVATIONS),
        ("Net", "aten.empty", (8,), ACTIVATIONS),
    ],
)
def test_buckets_of_distributed_data_parallel(class_name, op, shape, category) -> None:
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD)
    b.enter("", class_name)
    bucket = b.new(*shape, op=op)
    b.leave()
    assert categories_of(b, bucket) == [category]


# -- backward passes and what follows them -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "shape", "category"),
    [
        (ModuleRole.HEAD, (1000, 64), GRADIENTS),
        (ModuleRole.EMBEDDING, (1000, 64), GRADIENTS),
        (ModuleRole.LAYER, (1000, 64), ACTIVATIONS),
        (ModuleRole.HEAD, (64, 1000), ACTIVATIONS),
    ],
)
def test_the_gradient_of_a_tied_weight_in_parts(role: ModuleRole, shape: tuple[int, ...], category: Category) -> None:
    b = TraceBuilder()
    b.parameter("head.weight", 1000, 64)
    b.phase(PhaseKind.BACKWARD)
    b.enter("layers.0", role=role)
    part = b.new(*shape)
    b.leave()
    assert categories_of(b, part) == [category]


def test_what_a_backward_makes() -> None:
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD)
    b.enter("", role=ModuleRole.ROOT)
    b.enter("layers.0", role=ModuleRole.LAYER)
    of_layer = len(b.trace.events)
    b.new(8)
    b.leave()
    b.leave()
    of_loss = len(b.trace.events)
    b.new(8)
    last = len(b.trace.events)
    b.phase(PhaseKind.BACKWARD)
    made = [b.new(8, forward_event=event) for event in (of_layer, of_loss, last)]
    b.enter("layers.0", role=ModuleRole.LAYER)
    again, temporary = b.new(8), b.new(8)
    unknown = b.new(8, line=None)
    b.free(temporary)
    b.leave()
    outside = b.new(8)
    assert categories_of(b, *made) == [TEMPORARIES, LOGITS, TEMPORARIES]  # the last is of no stage
    assert categories_of(b, again, temporary, unknown, outside) == [ACTIVATIONS, TEMPORARIES, TEMPORARIES, TEMPORARIES]


def test_hooks_of_modules_after_a_backward() -> None:
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD)
    b.new(8)
    b.phase(PhaseKind.BACKWARD)
    b.phase(PhaseKind.OTHER)
    b.enter("layers.0", role=ModuleRole.LAYER)
    kept, temporary = b.new(8), b.new(8)
    b.free(temporary)
    b.leave()
    assert categories_of(b, kept, temporary) == [ACTIVATIONS, TEMPORARIES]


@pytest.mark.parametrize("kind", [PhaseKind.OPTIMIZER_STEP, PhaseKind.ZERO_GRAD, PhaseKind.OPTIMIZER])
def test_what_an_optimizer_makes_is_temporary(kind: PhaseKind) -> None:
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD)
    b.new(8)
    b.phase(kind)
    assert categories_of(b, b.new(8)) == [TEMPORARIES]


def test_what_a_program_without_modules_saves() -> None:
    """What a backward differentiates is an activation if it lives until that backward begins."""
    b = TraceBuilder(PhaseKind.OTHER)
    births, made = [], []
    for _ in range(3):
        births.append(len(b.trace.events))
        made.append(b.new(8))
    other = b.new(8)
    b.free(made[1])
    b.phase(PhaseKind.BACKWARD)
    b.new(8, forward_event=births[0])
    b.new(8, forward_event=births[1])
    b.phase(PhaseKind.OTHER)
    late = len(b.trace.events)
    after_it = b.new(8)
    b.free(made[2])
    b.phase(PhaseKind.OTHER)
    b.new(8, forward_event=late)
    assert categories_of(b, *made, other) == [ACTIVATIONS, TEMPORARIES, INPUTS, INPUTS]
    assert categories_of(b, after_it) == [TEMPORARIES]  # no backward follows


def test_a_backward_that_begins_as_it_is_freed_did_not_need_it() -> None:
    b = TraceBuilder(PhaseKind.OTHER)
    first, second = len(b.trace.events), len(b.trace.events) + 1
    made = [b.new(8), b.new(8)]
    b.free(made[0])
    b.phase(PhaseKind.BACKWARD)
    b.new(8, forward_event=first)
    b.new(8, forward_event=second)
    b.free(made[1])
    assert categories_of(b, *made) == [TEMPORARIES, ACTIVATIONS]


# -- outputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "op", "is_logits"),
    [
        ((2, 5, 6), "aten._log_softmax", True), ((2, 5, 6), "aten._softmax", True), ((10, 6), "aten._softmax", True),
        ((2, 5, 7), "aten._softmax", False), ((2, 5, 6), "aten.relu", False),
    ],
)  # fmt: skip
def test_what_a_model_returns_and_a_softmax_is_taken_of(shape: tuple[int, ...], op: str, is_logits: bool) -> None:
    b = TraceBuilder()
    b.phase(PhaseKind.EVALUATION)
    begin = len(b.trace.events)
    b.enter("", role=ModuleRole.ROOT)
    b.enter("conv", role=ModuleRole.CHILD)
    returned, other = b.new(2, 5, 6), b.new(2, 5, 6)
    b.leave()
    b.leave()
    b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, NONE, False, 0, (returned,)))
    b.phase(PhaseKind.EVALUATION)
    taken = b.new(*shape, op=op)
    expected = LOGITS if is_logits else ACTIVATIONS
    assert categories_of(b, returned, taken, other) == [expected, expected, ACTIVATIONS]


@pytest.mark.parametrize(
    ("shape", "dtype", "category"),
    [
        ((4, 1000), "float32", LOGITS),
        ((4, 999), "float32", INPUTS),
        ((4, 1000), "int64", INPUTS),
        ((1000,), "float32", INPUTS),
    ],
)
def test_what_logits_are_collected_in(shape: tuple[int, ...], dtype: str, category: Category) -> None:
    for kind in (PhaseKind.MODEL, PhaseKind.OTHER):
        b = TraceBuilder(kind)
        collected = b.new(*shape, dtype=dtype, op="aten.zeros")
        b.phase(PhaseKind.FORWARD)
        b.enter("", role=ModuleRole.ROOT)
        b.enter("head", role=ModuleRole.HEAD)
        b.new(4, 1000)
        assert categories_of(b, collected) == [category]


# -- before the first forward, and between steps -----------------------------------------------------------------------


def test_what_is_made_before_the_model_is_called() -> None:
    b = TraceBuilder()
    data, freed, without_line = b.new(8), b.new(8), b.new(8, line=None)
    b.enter("", role=ModuleRole.ROOT)
    inside = b.new(8)
    b.leave()
    b.free(freed)
    b.phase(PhaseKind.OTHER)
    batch = b.new(8)
    b.phase(PhaseKind.FORWARD)
    b.new(8)
    b.free(data)
    assert categories_of(b, data, freed, without_line, inside, batch) == [
        INPUTS, TEMPORARIES, TEMPORARIES, TEMPORARIES, INPUTS,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "has_target", "category"),
    [("simulated", False, UNATTRIBUTED), ("measured", False, INPUTS), ("measured", True, UNATTRIBUTED)],
)
def test_lines_that_a_measured_script_lacks(source: str, has_target: bool, category: Category) -> None:
    b = TraceBuilder(PhaseKind.OTHER)
    batch = b.new(8, line=None)
    b.phase(PhaseKind.FORWARD)
    b.new(8)
    b.trace.source = source
    if has_target:
        b.trace.facts = Facts(target=Target(TargetSpec(model="gpt2"), "gpt2"))
    assert categories_of(b, batch) == [category]


@pytest.mark.parametrize(("num_forwards", "category"), [(0, PARAMETERS), (1, INPUTS)])
def test_weights_of_a_run_that_ended_while_it_built_the_model(num_forwards: int, category: Category) -> None:
    """Those without an owner are known by the line and the operator of the others."""
    b = TraceBuilder()
    b.new(8, op="aten.empty", line="model.py:1 __init__", owner=(Role.PARAMETER, "a"))
    b.new(8, op="aten.ones", line="model.py:1 __init__", owner=(Role.BUFFER, "mask"))
    like_it = b.new(7, op="aten.empty", line="model.py:1 __init__")
    others = [b.new(7, op="aten.ones", line="model.py:1 __init__"), b.new(7, op="aten.empty", line="model.py:2 f")]
    for _ in range(num_forwards):
        b.phase(PhaseKind.FORWARD)
        b.new(8)
    assert categories_of(b, like_it, *others) == [category, INPUTS, INPUTS]


@pytest.mark.parametrize(("first", "last", "category"), [
    (1, 1, UNATTRIBUTED),  # within its step
    (1, 2, INPUTS),
    (1, 3, UNATTRIBUTED),  # over two steps
    (2, 3, INPUTS),
    (3, None, UNATTRIBUTED),  # no step follows
])  # fmt: skip
def test_what_is_live_as_just_one_step_begins(first: int, last: int | None, category: Category) -> None:
    b = TraceBuilder(None)
    index = None
    for step in (1, 2, 3):
        for micro_batch in (1, 2):  # a step begins once
            b.phase(PhaseKind.FORWARD, step, micro_batch)
            b.new(8)
        b.phase(PhaseKind.OTHER, step)
        if step == first:
            index = b.new(8)
        if step == last:
            b.free(index)
    assert categories_of(b, index) == [category]


def test_a_step_begins_with_its_forward() -> None:
    """What the program makes in a phase of the step before that is its batch."""
    b = TraceBuilder(None)
    b.phase(PhaseKind.FORWARD, 1)
    b.new(8)
    b.phase(PhaseKind.OTHER, 2)
    batch = b.new(8)
    b.phase(PhaseKind.FORWARD, 2)
    b.free(batch)
    assert categories_of(b, batch) == [INPUTS]


@pytest.mark.parametrize(
    ("line", "op", "category"),
    [("train.py:9 main", "aten.randn", INPUTS), ("train.py:8 main", "aten.randn", UNATTRIBUTED),
     ("train.py:9 main", "aten.rand", UNATTRIBUTED), (None, "aten.randn", UNATTRIBUTED)],
)  # fmt: skip
def test_what_the_line_makes_that_makes_inputs(line: str | None, op: str, category: Category) -> None:
    """A replay buffer, of which a model has been given some, and others not yet; all stay for several steps."""
    b = TraceBuilder()
    other = None
    for step in (1, 2, 3):
        b.phase(PhaseKind.FORWARD, step)
        b.new(8)
        b.phase(PhaseKind.OTHER, step)
        if step == 1:
            b.new(8, op="aten.randn", line="train.py:9 main", owner=(Role.INPUT, ""))
            other = b.new(8, op=op, line=line)
    assert categories_of(b, other) == [category]


# -- copies of weights -------------------------------------------------------------------------------------------------

WEIGHTS = [(2, 3), (4, 5), (6, 7), (8, 9)]


def copies(
    *shapes: tuple[int, ...],
    weights: list[tuple[int, ...]] = WEIGHTS,
    buffers: tuple[tuple[int, ...], ...] = (),
    phase: PhaseKind = PhaseKind.OTHER,
    module: ModuleRole | None = None,
    freed: bool = False,
    earlier: int = 0,
    **how: object,
) -> bool:
    """Whether tensors of `shapes`, made after a step of a model with `weights` and `buffers`, are copies of weights.

    `earlier` models alike were freed before."""
    b = TraceBuilder()
    for _ in range(earlier):
        b.free(*[b.parameter(f"{number}.weight", *shape) for number, shape in enumerate(weights)])
    for number, shape in enumerate(weights):
        b.parameter(f"{number}.weight", *shape)
    for number, shape in enumerate(buffers):
        b.new(*shape, owner=(Role.BUFFER, f"{number}.table"))
    b.new(77, 78, owner=(Role.PARAMETER, "on the host"), device=HOST)
    b.phase(PhaseKind.FORWARD)
    b.new(1)
    b.phase(phase)
    if module is not None:
        b.enter("", role=module)
    made = [b.new(*shape, **{"op": "aten.clone", "line": "train.py:9 main", **how}) for shape in shapes]
    if module is not None:
        b.leave()
    if freed:
        b.free(*made)
    b.phase(PhaseKind.FORWARD)
    b.new(1)
    found = set(categories_of(b, *made))
    assert PARAMETERS not in found or len(found) == 1
    return PARAMETERS in found


def test_copies_of_weights() -> None:
    assert copies(*WEIGHTS)
    assert copies(*WEIGHTS[:2])  # half of them
    assert not copies(*WEIGHTS[:1], *WEIGHTS[:1])  # two of one shape
    assert not copies(*WEIGHTS[:3], (9, 9))  # another shape is none
    six = [(2, 3)] * 6
    assert copies(*six[:3], weights=six) and not copies(*six[:2], weights=six)  # half as many as parameters
    assert copies((2, 3), (2, 3), weights=[(2, 3)]) and not copies((2, 3), weights=[(2, 3)])  # two at least
    assert copies(*six[:3], weights=six, earlier=1)  # which has no copy now
    # Buffers are copied with them, flat or not, and so are counters.
    assert copies(*WEIGHTS[:2], (5, 5), (25,), (), buffers=((5, 5),))
    assert not copies(*WEIGHTS[:2], (26,), buffers=((5, 5),))
    assert not copies((5, 5), (5, 5), (5, 5), buffers=((5, 5),))
    assert not copies((77, 78), (77, 78), weights=[])  # of a weight in host memory


def test_where_and_how_copies_are_made() -> None:
    for phase, is_outside in [
        (PhaseKind.MODEL, True), (PhaseKind.OTHER, True), (PhaseKind.OPTIMIZER, True),
        (PhaseKind.OPTIMIZER_STEP, True), (PhaseKind.INPUTS, False), (PhaseKind.BACKWARD, False),
    ]:  # fmt: skip
        assert copies(*WEIGHTS, phase=phase) == is_outside
        assert copies(*WEIGHTS, phase=phase, op="aten._to_copy") == is_outside
    for phase in (PhaseKind.FORWARD, PhaseKind.EVALUATION):  # after a call, before the next phase begins
        assert copies(*WEIGHTS, phase=phase)
        assert not copies(*WEIGHTS, phase=phase, op="aten._to_copy")
        assert not copies(*WEIGHTS, phase=phase, module=ModuleRole.ROOT)
    assert copies(*WEIGHTS, module=ModuleRole.ROOT) and not copies(*WEIGHTS, module=ModuleRole.LAYER)
    assert not copies(*WEIGHTS, line=None)
    assert not copies(*WEIGHTS, hidden=True)
    assert not copies(*WEIGHTS, freed=True)  # in the phase that made them


@pytest.mark.parametrize(
    ("after", "category"), [(PhaseKind.BACKWARD, GRADIENTS), (PhaseKind.OPTIMIZER_STEP, PARAMETERS)]
)
def test_copies_before_the_optimizers_step_are_of_gradients(after: PhaseKind, category: Category) -> None:
    for has_gradients in (True, False):
        b = TraceBuilder()
        for number, shape in enumerate(WEIGHTS):
            b.parameter(f"{number}.weight", *shape)
        b.phase(PhaseKind.BACKWARD)
        for number, shape in enumerate(WEIGHTS if has_gradients else ()):
            b.new(*shape, owner=(Role.GRADIENT, f"{number}.weight"))
        b.phase(after)
        b.phase(PhaseKind.OTHER)
        made = [b.new(*shape, op="aten.clone", line="train.py:9 main") for shape in WEIGHTS]
        assert set(categories_of(b, *made)) == {category if has_gradients else PARAMETERS}


def test_what_has_an_owner_is_no_copy() -> None:
    """Of two tensors that one line makes, the optimizer's says nothing of the other."""
    b = TraceBuilder()
    b.parameter("weight", 2, 3)
    b.phase(PhaseKind.FORWARD)
    b.new(1)
    b.phase(PhaseKind.OTHER)
    copy = b.new(2, 3, op="aten.clone")
    b.new(2, 3, op="aten.clone", owner=(Role.OPTIMIZER_STATE, "average"))
    b.phase(PhaseKind.FORWARD)
    assert categories_of(b, copy) == [UNATTRIBUTED]


def test_copies_in_the_last_phase_are_live_at_its_end() -> None:
    for freed in (False, True):
        b = TraceBuilder()
        for number, shape in enumerate(WEIGHTS):
            b.parameter(f"{number}.weight", *shape)
        b.phase(PhaseKind.OTHER)
        made = [b.new(*shape, op="aten.clone") for shape in WEIGHTS]
        if freed:
            b.free(*made)
        assert (categories_of(b, made[0]) == [PARAMETERS]) != freed


FLAT = [(6,), (20,), (42,), (72,)]


def test_a_loaded_checkpoint_has_storages_without_a_shape() -> None:
    assert copies(*FLAT, op="torch.load") and not copies(*FLAT, op="aten._to_copy")
    assert not copies(*WEIGHTS, op="torch.load")


def test_a_deep_copy_of_a_state_has_storages_without_a_shape() -> None:
    """As copy.deepcopy(model.state_dict()) makes, after an evaluation too."""
    for phase in (PhaseKind.OTHER, PhaseKind.EVALUATION):
        assert copies(*FLAT, phase=phase) and copies(*FLAT[:2], (25,), (1,), phase=phase, buffers=((5, 5),))
        assert not copies(*FLAT[:3], (73,), phase=phase) and not copies(*FLAT[:1], *FLAT[:1], phase=phase)
    assert not copies(*FLAT[:2], *WEIGHTS[2:])  # one or the other


def test_what_an_optimizer_has_is_copied_with_the_weights() -> None:
    for state, is_copied in (((9, 9), True), ((9, 8), False)):
        b = TraceBuilder()
        b.parameter("weight", 2, 3)
        b.new(*state, owner=(Role.OPTIMIZER_STATE, "weight.factors"))
        b.phase(PhaseKind.OTHER)
        made = [b.new(*shape, op="aten.clone") for shape in [(6,), (81,)]]
        assert (set(categories_of(b, *made)) == {PARAMETERS}) == is_copied


def test_the_copy_that_was_refused_is_one() -> None:
    for is_last in (True, False):
        b = TraceBuilder()
        for number, shape in enumerate(WEIGHTS):
            b.parameter(f"{number}.weight", *shape)
        b.phase(PhaseKind.OTHER)
        made = [b.new(*shape, op="aten.clone") for shape in FLAT]
        b.free(made[-1])
        if not is_last:
            b.new(1)
        b.trace.ended_out_of_memory = True
        assert (categories_of(b, made[-1]) == [PARAMETERS]) == is_last


def test_copies_are_made_by_one_line_in_one_phase() -> None:
    b = TraceBuilder()
    for number, shape in enumerate(WEIGHTS):
        b.parameter(f"{number}.weight", *shape)
    b.phase(PhaseKind.FORWARD)
    b.new(1)
    made = []
    for shape in WEIGHTS:
        b.phase(PhaseKind.OTHER)
        made.append(b.new(*shape, op="aten.clone", line="train.py:9 main"))
    b.phase(PhaseKind.OTHER)
    made += [b.new(*shape, op="aten.clone", line=f"train.py:{shape[0]} main") for shape in WEIGHTS]
    made += [b.new(*shape, op=f"aten.op{shape[0]}", line="train.py:9 main") for shape in WEIGHTS]
    assert set(categories_of(b, *made)) == {UNATTRIBUTED}


# -- what outlives the call that made it -------------------------------------------------------------------------------


def test_what_outlives_its_call_when_the_run_ends_out_of_memory() -> None:
    """What is live at the last request counts as outliving: the error frees it afterwards."""
    for ended, expected in ((True, [ACTIVATIONS] * 2), (False, [TEMPORARIES] * 2)):
        b = TraceBuilder()
        b.phase(PhaseKind.FORWARD)
        b.enter("layers.0", role=ModuleRole.LAYER)
        first = b.new(8)
        gone = b.new(8)
        b.free(gone)
        last = b.new(8)
        b.free(last, first)
        b.leave()
        b.trace.ended_out_of_memory = ended
        assert categories_of(b, first, last) == expected
        assert categories_of(b, gone) == [TEMPORARIES]


def test_a_call_ends_at_its_return_and_at_nothing_else() -> None:
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD)
    b.enter("layers.0", role=ModuleRole.LAYER)
    temporary = b.new(8)
    b.empty_cache()
    b.free(temporary)
    b.leave()
    b.add(EventKind.EXIT, 0)  # of no call
    outside = b.new(8)
    b.free(outside)
    assert categories_of(b, temporary) == [TEMPORARIES]


def test_a_call_that_raised_has_no_end() -> None:
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD)
    b.enter("layers.0", role=ModuleRole.LAYER)
    inside = b.new(8)
    assert categories_of(b, inside) == [TEMPORARIES]
    b.leave()
    assert categories_of(b, inside) == [ACTIVATIONS]


@pytest.mark.parametrize(("num_ends", "category"), [(1, UNATTRIBUTED), (2, Category.KEPT), (3, Category.KEPT)])
def test_what_outlives_the_next_step_is_kept_by_the_program(num_ends: int, category: Category) -> None:
    """Of one line, in one step; what another line makes is freed with the next step."""
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD, 1)
    b.free(b.new(5))
    b.phase(PhaseKind.OTHER, 1)
    kept, other = b.new(5, line="train.py:1 main"), b.new(5, line="train.py:2 main")
    for step in range(1, num_ends + 1):
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        b.phase(PhaseKind.OTHER, step)
        b.free(*[other] * (step == 1))
    last = b.new(5, line="train.py:1 main")
    assert categories_of(b, kept, last) == [category, category]
    assert categories_of(b, other) == [UNATTRIBUTED]


@pytest.mark.parametrize(("kind", "line", "is_kept"), [("list", 1, True), ("", 1, False), ("list", 2, False)])
def test_what_piles_up_in_a_container_is_kept_by_the_program(kind: str, line: int, is_kept: bool) -> None:
    """In an evaluation: two outputs that were seen in the container, and one that came later."""
    b = TraceBuilder()
    b.phase(PhaseKind.EVALUATION)
    seen = b.new(5, line="train.py:1 main"), b.new(5, line="train.py:1 main")
    b.trace.holders.append(Holder(9, kind, "outputs", None, False, None, seen, 0, 0, None))
    later = b.new(5, line=f"train.py:{line} main")
    assert (categories_of(b, later) == [Category.KEPT]) is is_kept


@pytest.mark.parametrize(("ended_out_of_memory", "category"), [(True, INPUTS), (False, TEMPORARIES)])
def test_what_is_loaded_until_memory_runs_out_is_no_temporary(ended_out_of_memory: bool, category: Category) -> None:
    """It is freed as the run unwinds."""
    b = TraceBuilder()
    loaded, _ = b.new(5, op="torch.load"), b.new(5, op="torch.load")
    b.free(loaded)
    b.trace.ended_out_of_memory = ended_out_of_memory
    assert categories_of(b, loaded) == [category]
