"""Rules for proposals on hand-written traces: when they must be silent, and what they replay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from memprof.allocator import parse_config, parse_release, replay_in_host_memory, replay_on_gpu
from memprof.findings import Context
from memprof.findings.evidence import file_and_line
from memprof.findings.proposals import (
    attention,
    autocast,
    batches,
    checkpointing,
    chunked_loss,
    copies,
    data_parallel,
    double,
    gradients,
    history,
    host_memory,
    messages,
    micro_batch,
    models,
    optimizer,
    pairs,
    segments,
    sparse,
    vmap,
    weights,
)
from memprof.findings.suggestions import Proposal
from memprof.ledger.ledger import build_ledger
from memprof.ledger.what_if import compute_allocated_peak
from memprof.spec import TargetSpec
from memprof.trace.events import (
    NONE,
    Caller,
    EvalCall,
    Event,
    EventKind,
    Forward,
    ModuleRole,
    MovedModel,
    PhaseKind,
    Role,
    VmapCall,
)
from memprof.trace.facts import DeviceFacts
from memprof.units import GIB, MIB
from tests.unit.findings.figures import figures
from tests.unit.traces import TraceBuilder

ALLOC, FREE = EventKind.ALLOC, EventKind.FREE


def smaller(context: Context) -> list[Proposal]:
    """Smaller batches, of an inference or of a training."""
    return [*micro_batch.propose_batches(context), *micro_batch.propose(context)]


def listed(proposals: Iterable[Proposal]) -> list[Proposal]:
    """The proposals; a line that one names is its source, whose code the report shows."""
    found = list(proposals)
    for one in found:
        if ".py:" in one.change:
            assert one.source and file_and_line(one.source) in one.change
    return found


def only(proposals: Iterable[Proposal]) -> Proposal:
    (proposal,) = listed(proposals)
    return proposal


# -- the history of LBFGS ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_pairs", [10, 12])
def test_a_history_of_more_than_ten_pairs_may_be_shorter(num_pairs: int) -> None:
    b = TraceBuilder()
    b.phase(PhaseKind.OPTIMIZER_STEP)
    for _ in range(num_pairs):
        for name in ("old_dirs", "old_stps"):
            b.new(MIB, owner=(Role.OPTIMIZER_STATE, name), line="train.py:8 main")
    if num_pairs == 10:
        assert not list(history.propose(b.context()))
        return
    change = only(history.propose(b.context()))
    assert change.change.startswith("history_size=10 in torch.optim.LBFGS, which steps at train.py:8")
    # A vector lives until the one ten later is there: ten of each list, and one more.
    assert compute_allocated_peak(change.trace) == 21 * 4 * MIB


# -- chunked loss -----------------------------------------------------------------------------------------------------


def losses(width: int, *, tokens: bool) -> Context:
    """A cross-entropy over `width` classes, in a model with a table of as many words or without."""
    b = TraceBuilder()
    b.parameter("embed.weight" if tokens else "head.weight", width, 512)
    if tokens:
        b.inputs(1, 8192)
    else:
        b.phase(PhaseKind.FORWARD)
    b.new(8192, width, op="aten._log_softmax")
    b.phase(PhaseKind.BACKWARD)
    b.new(8192, width, op="aten._log_softmax_backward_data")
    return b.context(spec=TargetSpec(model="x")) if tokens else b.context()


def test_a_loss_over_words_is_chunked_and_one_over_classes_is_not() -> None:
    changed = only(chunked_loss.propose(losses(50304, tokens=True))).trace
    # The two copies of 1.54 GiB are one chunk together.
    assert sum(storage.num_bytes for storage in changed.storages[2:]) == pytest.approx(GIB, rel=0.001)
    assert not list(chunked_loss.propose(losses(50304, tokens=False)))


@pytest.mark.parametrize(("num_tokens", "is_told"), [(8192, True), (4096, False)])
def test_one_word_of_each_token_needs_no_log_probabilities_of_all(num_tokens: int, is_told: bool) -> None:
    b = TraceBuilder()
    b.parameter("embed.weight", 50304, 512)
    b.inputs(1, 8192)
    b.new(8192, 50304, op="aten._log_softmax")
    b.new(num_tokens, op="aten.gather", line="loss.py:4 score")
    b.phase(PhaseKind.BACKWARD)
    (proposal,) = chunked_loss.propose(b.context())
    change = proposal.change
    assert ("logsumexp" in change) == ("loss.py:4" in change) == is_told


@pytest.mark.parametrize(("op", "is_told"), [("aten.scatter", True), ("aten.zeros_like", True), ("aten.add", False)])
def test_smoothed_targets_as_large_as_the_logits_are_not_needed(op: str, is_told: bool) -> None:
    b = TraceBuilder()
    b.parameter("embed.weight", 50304, 512)
    b.inputs(1, 8192)
    b.new(8192, 50304, op="aten.addmm", line="model.py:8 forward")
    b.new(8192, 50304, op=op, line="loss.py:4 smooth")
    b.new(8192, 50304, op="aten._log_softmax", line="loss.py:5 smooth")
    b.new(8192, 50304, op="aten.mul", line="loss.py:6 smooth")
    b.phase(PhaseKind.BACKWARD)
    (proposal,) = chunked_loss.propose(b.context())
    assert ("label_smoothing" in proposal.change) == is_told
    assert proposal.source == ("loss.py:4 smooth" if is_told else "model.py:8 forward")


# -- float64 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("other_mib", "is_told"), [(180, True), (181, False)])
def test_a_quarter_of_float64_may_be_float32(other_mib: int, is_told: bool) -> None:
    b = TraceBuilder()
    data = [b.new(MIB // 8, mib, dtype="float64", op="aten._to_copy", line="data.py:3 load") for mib in (20, 40)]
    b.alloc(other_mib * MIB)
    found = listed(double.propose(b.context()))
    assert bool(found) == is_told
    for one in found:
        assert [one.trace.storages[index].num_bytes for index in data] == [10 * MIB, 20 * MIB]
        assert one.change.endswith("[131072 x 40] at data.py:3")


# -- models ----------------------------------------------------------------------------------------------------------


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


# -- micro-batches ----------------------------------------------------------------------------------------------------


def batch(
    *shapes: tuple[int, ...], inputs: tuple[int, ...] = (64, 100), op: str = "aten.mm", trains: bool = True
) -> Context:
    """A forward with a result of each of `shapes`, for inputs of the shape `inputs`."""
    b = TraceBuilder()
    b.parameter("weight", 256, 100)
    b.phase(PhaseKind.FORWARD)
    b.new(*inputs, owner=(Role.INPUT, ""))
    for shape in shapes:
        b.new(*shape, op=op)
    if trains:
        b.phase(PhaseKind.BACKWARD)
    return b.context()


def test_rows_of_the_batch_are_halved() -> None:
    proposal = only(micro_batch.propose(batch((64, 256), (64 * 12, 7, 7), (9, 64, 5), (10, 256))))
    assert proposal.value == 32
    # The inputs stay; so does what has no factor of 64.
    assert [storage.num_bytes // 4 for storage in proposal.trace.storages[1:]] == [
        64 * 100, 32 * 256, 32 * 12 * 49, 9 * 32 * 5, 10 * 256,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "context",
    [
        pytest.param(batch((2560, 2560), inputs=(50, 100)), id="pairs of other things than samples"),
        pytest.param(batch((640, 640), (64, 256)), id="pairs of samples"),
        pytest.param(batch((64, 64, 8), (64, 256)), id="pairs of samples with features"),
        pytest.param(batch((65, 256)), id="nothing with the batch as a factor"),
        pytest.param(batch((64, 256), inputs=(1, 100)), id="one sample"),
    ],
)
def test_no_smaller_batches(context: Context) -> None:
    assert not smaller(context)


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_an_evaluation_keeps_has_all_batches(is_kept: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(64, 8, owner=(Role.INPUT, ""))
    for _ in range(5):
        begin = len(b.trace.events)
        b.enter("", "Net")
        output = b.new(64, 1000)
        b.leave()
        call = Forward(begin, len(b.trace.events), 0, NONE, training=False, nodes=0, outputs=(output,))
        b.trace.forwards.append(call)
        b.free(*[] if is_kept else [output])
    assert bool(smaller(b.context())) is not is_kept


@pytest.mark.parametrize(("classes", "batches_stay"), [(2622, True), (2621, False), (1, False)])
def test_where_pairs_fill_the_gpu_batches_stay(classes: int, batches_stay: bool) -> None:
    """A one_hot of a choice for each of 64 samples and 100 layers: of a chunk of one GiB, of less, and of one class,
    which is as large as the choice."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(64, 8, owner=(Role.INPUT, ""))
    b.new(64, 512)
    b.new(6400, 8, dtype="int64", op="aten.topk")
    b.new(6400, 8, classes, dtype="int64", op="aten.zeros", line="loss.py:4 balance")
    context = b.context()
    chunked = list(pairs.propose(context))
    assert bool(chunked) == (classes > 1)
    assert batches_stay == (not smaller(context))
    assert all("loss.py:4" in one.change and one.change.startswith("a lookup (F.embedding)") for one in chunked)


@pytest.mark.parametrize(("eye", "is_told"), [((2622, 2622), True), ((2622, 2621), False), (None, False)])
def test_rows_of_an_identity_are_a_one_hot(eye: tuple[int, int] | None, is_told: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(64, 8, owner=(Role.INPUT, ""))
    if eye is not None:
        b.new(*eye, op="aten.eye")
    b.new(6400, 8, dtype="int64", op="aten._to_copy")
    b.new(6400, 8, 2622, op="aten.index", line="data.py:4 encode")
    told = [one for one in pairs.propose(b.context()) if one.change.startswith("a lookup (F.embedding)")]
    assert bool(told) == is_told and all(one.source == "data.py:4 encode" for one in told)


@pytest.mark.parametrize("shape", [(4, 1, 8, 8), (4, 3, 8, 8)])
def test_images_of_one_channel_are_no_beams(shape: tuple[int, ...]) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(*shape, owner=(Role.INPUT, ""))
    assert micro_batch.find_batch_size(b.context()) == 4


def test_inputs_of_two_lengths_are_no_batch() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    for rows in (64, 32):
        b.new(rows, 100, owner=(Role.INPUT, ""))
        b.new(rows, 256)
    assert micro_batch.find_batch_size(b.context()) is None
    assert micro_batch.find_batch_size(b.context(spec=TargetSpec(model="x", batch_size=8))) == 8


def test_batch_normalization_is_told() -> None:
    """In eval mode it keeps no mean of its batch."""
    proposal = only(micro_batch.propose(batch((64, 256), (256,), op="aten.cudnn_batch_norm")))
    assert proposal.value is None and proposal.change.startswith(
        "add up gradients of batches of 32 (batch normalization"
    )
    assert only(micro_batch.propose(batch((64, 256), (0,), op="aten.cudnn_batch_norm"))).value == 32


def test_an_inference_has_no_gradients_to_add_up() -> None:
    proposal = only(smaller(batch((64, 256), trains=False)))
    assert proposal.value is None and proposal.change.startswith("batches of 32 samples, one after another")


def test_an_evaluation_of_a_training_is_in_smaller_batches_and_the_training_as_before() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.parameter("weight", 256, 100)
    trained = b.new(64, 256)
    b.phase(PhaseKind.BACKWARD)
    b.free(trained)
    b.phase(PhaseKind.EVALUATION)
    b.new(64, 100, owner=(Role.INPUT, ""))
    b.new(64, 512)
    proposal = only(smaller(b.context()))
    assert proposal.value is None and proposal.change.startswith("batches of 32 samples, one after another")
    assert [storage.shape[0] for storage in b.trace.storages] == [256, 64, 64, 64]
    assert [storage.num_bytes // 4 for storage in proposal.trace.storages[1:]] == [64 * 256, 64 * 100, 32 * 512]


def test_gradients_of_the_batches_before_are_there_from_the_beginning() -> None:
    b = TraceBuilder(None)
    b.phase(PhaseKind.FORWARD)
    b.new(64, 100, owner=(Role.INPUT, ""))
    b.new(64, 256)
    b.phase(PhaseKind.BACKWARD)
    gradient = b.new(256, 100, owner=(Role.GRADIENT, "weight"))
    events = only(micro_batch.propose(b.context())).trace.events
    assert events[0] == Event(ALLOC, gradient) and events.count(Event(ALLOC, gradient)) == 1


# -- checkpointing ----------------------------------------------------------------------------------------------------


def layers(*, backward: bool) -> TraceBuilder:
    """Two layers, each with a temporary of 1 MiB, 4 MiB that are saved and a result of 2 MiB."""
    b = TraceBuilder(PhaseKind.FORWARD)
    saved, calls = [], []
    for layer in range(2):
        b.enter(f"layers.{layer}", "Layer", ModuleRole.LAYER)
        calls.append(len(b.trace.events))
        b.free(b.alloc(MIB))
        saved += [b.alloc(4 * MIB), b.alloc(2 * MIB)]
        b.leave()
    if backward:
        b.phase(PhaseKind.BACKWARD)
        for layer in (1, 0):
            b.alloc(MIB, forward_event=calls[layer])
            b.free(*saved[2 * layer : 2 * layer + 2])
    return b


def test_layers_run_again_when_their_backward_begins() -> None:
    b = layers(backward=True)
    events = only(checkpointing.propose(b.context())).trace.events
    refs = [(event.kind, event.ref) for event in events if event.kind in (ALLOC, FREE)]
    assert refs == [
        (ALLOC, 0), (FREE, 0), (ALLOC, 1), (ALLOC, 2), (FREE, 1),
        (ALLOC, 3), (FREE, 3), (ALLOC, 4), (ALLOC, 5), (FREE, 4),
        (ALLOC, 3), (FREE, 3), (ALLOC, 4), (ALLOC, 6), (FREE, 4), (FREE, 5),
        (ALLOC, 0), (FREE, 0), (ALLOC, 1), (ALLOC, 7), (FREE, 1), (FREE, 2),
    ]  # fmt: skip


def test_of_a_run_that_ended_before_its_backward_what_layers_left_is_freed() -> None:
    events = only(checkpointing.propose(layers(backward=False).context())).trace.events
    assert [event.ref for event in events if event.kind is FREE] == [0, 1, 3, 4]
    b = TraceBuilder(PhaseKind.FORWARD)
    b.alloc(4 * MIB)
    assert not list(checkpointing.propose(b.context()))  # there are no layers


# -- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_a_gpu_without_bfloat16_is_told_float16(has_bfloat16: bool) -> None:
    b = TraceBuilder()
    b.trace.facts = replace(b.trace.facts, device=DeviceFacts(has_bfloat16=has_bfloat16))
    b.parameter("weight", 256, 100)
    b.phase(PhaseKind.FORWARD)
    b.enter("net")
    b.new(64, 512, op="aten.addmm")
    b.leave()
    context = b.context()
    assert bool(list(autocast.propose_bfloat16(context))) == has_bfloat16
    assert bool(list(autocast.propose_float16(context))) != has_bfloat16
    assert bool(list(weights.propose_bfloat16(context))) == has_bfloat16


def test_products_and_what_follows_from_them_alone_are_halved() -> None:
    b = TraceBuilder()
    b.parameter("weight", 256, 100)
    b.phase(PhaseKind.FORWARD)
    b.enter("net")
    stream = b.new(64, 256, op="aten.native_layer_norm")
    product = b.new(64, 512, op="aten.addmm")
    follows = b.new(64, 512, op="aten.gelu")
    back = b.new(64, 256, op="aten.mm")
    added = b.new(64, 256, op="aten.add")  # to the stream, which is in float32
    scores = b.new(64, 512, op="aten._softmax")
    b.leave()
    sizes = [storage.num_bytes for storage in only(autocast.propose_bfloat16(b.context())).trace.storages]
    assert sizes[0] == 6 * 256 * 100  # the weight, and its copy
    halved = {index for index in (stream, product, follows, back, added, scores)
              if sizes[index] < b.trace.storages[index].num_bytes}  # fmt: skip
    assert halved == {product, follows, back}


# -- optimizers -------------------------------------------------------------------------------------------------------


def step(*names: str, ends: bool = False) -> Context:
    """An optimizer's step with a temporary of 4 MiB; or one that `ends` while it makes the last of its state."""
    b = TraceBuilder()
    b.parameter("weight", 1024, 1024)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    for position, name in enumerate(names):
        is_known = not ends or position < len(names) - 1
        b.new(1024, 1024, op="aten.zeros_like", owner=(Role.OPTIMIZER_STATE, name) if is_known else None)
    if not ends:
        b.new(1024, 1024, op="aten._foreach_sqrt")
    return b.context()


def test_state_in_8_bits_has_a_scale_for_256_elements() -> None:
    changed = only(optimizer.propose_8_bit(step("exp_avg", "exp_avg_sq"))).trace
    assert [storage.num_bytes for storage in changed.storages] == [4 * MIB, *[MIB + 4 * 4096] * 2, 0]
    assert not list(optimizer.propose_8_bit(step("momentum_buffer")))


def test_what_an_optimizer_makes_as_memory_runs_out_is_its_state() -> None:
    context = step("exp_avg", "exp_avg_sq", "max_exp_avg_sq", ends=True)
    assert [one.num_bytes for one in only(optimizer.propose_on_host(context)).trace.storages] == [4 * MIB, 0, 0, 0]
    assert not list(optimizer.propose_fused(context))  # there are no temporaries


def test_a_fused_step_has_no_temporaries() -> None:
    for names in (("exp_avg", "exp_avg_sq"), ("momentum_buffer",)):
        sizes = [one.num_bytes for one in only(optimizer.propose_fused(step(*names))).trace.storages]
        assert sizes == [*[4 * MIB] * (1 + len(names)), 0]
    assert not list(optimizer.propose_fused(step("exp_inf")))  # an optimizer without such a kernel


# -- DataParallel -----------------------------------------------------------------------------------------------------


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


# -- host memory ------------------------------------------------------------------------------------------------------


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


# -- all pairs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "op", "is_told"),
    [
        (((4096, 8), (4096, 4096, 8)), "aten.sub", True),
        (((4096, 8), (4096, 4096)), "aten.mm", True),
        (((4096, 8), (4096, 64, 64)), "aten.stack", True),
        (((4096, 8), (4096, 8)), "aten.stack", False),
        (((4096, 512), (4096, 512)), "aten.add", False),  # as large as its operand
        (((4096, 512), (4096, 2048)), "aten.mm", False),  # of a wider layer
        (((4096, 8), (4096, 4096, 8)), "aten.convolution", False),
    ],
)
def test_pairs_are_larger_than_what_they_are_made_of(
    shapes: tuple[tuple[int, ...], ...], op: str, is_told: bool
) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(*shapes[0], op="aten.randn")
    b.new(*shapes[1], op=op, line="loss.py:3 loss")
    found = listed(pairs.propose(b.context()))
    assert bool(found) == is_told and all("4096 rows" in one.change and "loss.py:3" in one.change for one in found)


@pytest.mark.parametrize("trains", [True, False])
def test_chunks_are_checkpointed_unless_the_model_was_called_without_gradients(trains: bool) -> None:
    """In a run that has ended without memory, before a backward."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(4096, 8, op="aten.randn")
    b.trace.forwards.append(Forward(0, len(b.trace.events), NONE, NONE, training=trains, nodes=trains, outputs=()))
    b.new(4096, 4096, 8, op="aten.sub")
    b.trace.trains, b.trace.ended_out_of_memory = trains, True
    assert ("checkpoint" in only(pairs.propose(b.context())).change) == trains


@pytest.mark.parametrize("is_evaluation", [True, False])
def test_chunks_of_an_evaluation_between_steps_are_not_checkpointed(is_evaluation: bool) -> None:
    """From eval() on until the next forward or backward."""
    b = TraceBuilder()
    calls = [EvalCall(len(b.trace.events), NONE, NONE)]
    b.phase(PhaseKind.BACKWARD)
    b.phase(PhaseKind.OTHER)
    calls.append(EvalCall(len(b.trace.events), NONE, NONE))
    b.trace.eval_calls = calls[: 1 + is_evaluation]
    b.new(4096, 8, op="aten.randn")
    b.new(4096, 4096, 8, op="aten.sub")
    assert ("checkpoint" in only(pairs.propose(b.context())).change) != is_evaluation


def test_a_square_of_weights_is_no_pairs() -> None:
    b = TraceBuilder()
    b.parameter("nodes", 4096, 8)
    b.phase(PhaseKind.FORWARD)
    b.new(4096, 4096)
    assert not list(pairs.propose(b.context()))


def test_chunks_of_pairs_have_a_gibibyte() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(32768, 8, op="aten.randn")
    b.new(32768, 32768, op="aten.sub")
    b.new(32768, 32768, op="aten.pow")
    b.new(32768, op="aten.sum")
    sizes = [storage.num_bytes for storage in only(pairs.propose(b.context())).trace.storages]
    assert sizes == [MIB, GIB, GIB, 4 * 32768]
    assert figures(only(pairs.propose(b.context())).change) == ["8192", "32768", "[32768 x 32768]", "model.py:1"]


# -- torch.func -------------------------------------------------------------------------------------------------------


def vmapped(*, ended: bool) -> Context:
    """100 gradients of a parameter, each with 10 MiB for what it is computed from."""
    b = TraceBuilder()
    b.parameter("weight", 256, 1024)
    begin = len(b.trace.events)
    inner = b.alloc(1000 * MIB)
    b.trace.storages[inner] = b.trace.storages[inner]._replace(shape=(100, 10 * MIB))
    b.new(100, 256, 1024, line="model.py:2 loss")
    if ended:
        b.free(inner)
    b.trace.ended_out_of_memory = not ended
    b.trace.sources.append("train.py:7 main")
    b.trace.vmaps.append(VmapCall(begin, len(b.trace.events), 100, "vmap", len(b.trace.sources) - 1))
    b.empty_cache()
    return b.context(900 * MIB if ended else 1050 * MIB)


@pytest.mark.parametrize(("ended", "rows"), [(True, 50), (False, 25)])
def test_results_of_chunks_are_joined(ended: bool, rows: int) -> None:
    """Of a call that has ended without memory, what has the shape of a gradient is the result."""
    context = vmapped(ended=ended)
    proposal = only(vmap.propose(context))
    assert proposal.change == f"chunk_size={rows} in torch.func.vmap at train.py:7, which takes 100 rows at once"
    sizes = [storage.num_bytes for storage in proposal.trace.storages]
    assert sizes == [MIB, 10 * rows * MIB, 100 * MIB, 100 * MIB]  # the result, and once more as it is joined
    assert [event.kind for event in proposal.trace.events if event.ref == 3] == [ALLOC, FREE]


def test_what_the_called_function_has_made_is_no_input_of_the_call() -> None:
    """jacrev calls its function before it calls vmap: a batch of that function's tensors is not the result."""
    b = TraceBuilder()
    b.parameter("scales", 1024)
    b.trace.sources.append("train.py:7 main")
    b.trace.callers.append(Caller(b.new(1024, 1024, line="model.py:2 residual"), 1, "torch.func.jacrev"))
    begin = len(b.trace.events)
    failed = b.new(1024, 1024, 1024, line="model.py:3 residual")
    b.trace.vmaps.append(VmapCall(begin, len(b.trace.events), 1024, "jacrev", 1))
    b.trace.ended_out_of_memory = True
    assert only(vmap.propose(b.context(GIB))).trace.storages[failed].num_bytes < GIB


def test_pairs_in_such_a_call_are_not_its_own() -> None:
    b = TraceBuilder(PhaseKind.OTHER)
    b.new(1024, 8, op="aten.randn")
    begin = len(b.trace.events)
    b.new(1024, 1024, 8, op="aten.sub")
    assert list(pairs.propose(b.context()))
    b.trace.vmaps.append(VmapCall(begin, len(b.trace.events), 1024, "jacrev", 0))
    assert not list(pairs.propose(b.context()))


# -- sparse gradients of embeddings -----------------------------------------------------------------------------------


def lookups(
    num_lookups: int = 400, *, num_rows: int = 4000, num_micro_batches: int = 1, owner: bool = True
) -> TraceBuilder:
    """A step in which rows of a table of 256 numbers each are looked up, and a temporary of it, the largest tensor."""
    b = TraceBuilder()
    b.parameter("users.weight", num_rows, 256)
    for number in range(1, num_micro_batches + 1):
        b.phase(PhaseKind.FORWARD, 1, number)
        begin = len(b.trace.events)
        b.new(num_lookups, 256, op="aten.embedding")
        b.phase(PhaseKind.BACKWARD, 1, number)
        named = (Role.GRADIENT, "users.weight") if owner and number == 1 else None
        b.new(num_rows, 256, op="aten.embedding_dense_backward", owner=named, forward_event=begin)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.new(num_rows, 256, op="aten._foreach_sqrt")
    return b


def test_an_embedding_of_which_a_batch_reads_few_rows() -> None:
    proposal = only(sparse.propose_embeddings(lookups().context()))
    assert "`users.weight`, of whose 4000 rows a step reads 400 at most" in proposal.change
    row_bytes = 256 * 4 + 8
    sizes = [storage.num_bytes for storage in proposal.trace.storages]
    assert sizes == [4000 * 1024, 400 * 1024, 400 * row_bytes, 400 * row_bytes]


@pytest.mark.parametrize(("num_lookups", "is_told"), [(399, True), (400, True), (401, False)])
def test_few_rows_are_a_tenth(num_lookups: int, is_told: bool) -> None:
    assert bool(list(sparse.propose_embeddings(lookups(num_lookups).context()))) == is_told


@pytest.mark.parametrize(("num_lookups", "is_told"), [(200, True), (201, False)])
def test_rows_of_all_micro_batches_add_up(num_lookups: int, is_told: bool) -> None:
    assert bool(list(sparse.propose_embeddings(lookups(num_lookups, num_micro_batches=2).context()))) == is_told


def test_a_gradient_that_is_added_to_another_stays_dense() -> None:
    assert not list(sparse.propose_embeddings(lookups(owner=False).context()))


@pytest.mark.parametrize(("width", "is_told"), [(4000, False), (4001, True)])
def test_words_with_logits_have_no_sparse_gradient(width: int, is_told: bool) -> None:
    b = lookups()
    b.new(8, width)
    assert bool(list(sparse.propose_embeddings(b.context()))) == is_told


@pytest.mark.parametrize(("num_rows", "is_told"), [(3999, True), (4002, False)])
def test_the_table_is_as_large_as_any_tensor(num_rows: int, is_told: bool) -> None:
    b = lookups()
    b.new(num_rows, 256)
    assert bool(list(sparse.propose_embeddings(b.context()))) == is_told


# -- sparse products --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sparse", [True, False])
def test_the_dense_gradient_of_a_sparse_matrix(is_sparse: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(2, 5000, dtype="int64", op="aten.randint")
    b.new(4096, 16, op="aten._sparse_addmm" if is_sparse else "aten.mm")
    b.phase(PhaseKind.BACKWARD)
    b.new(4096, 4096)
    found = listed(sparse.propose(b.context()))
    assert bool(found) == is_sparse and all(one.trace.storages[2].num_bytes == 4 * 5000 for one in found)


@pytest.mark.parametrize(
    ("indices", "phase", "is_told"),
    [
        ((2, 5000), PhaseKind.BACKWARD, True),
        ((2, 5000), PhaseKind.FORWARD, False),
        ((3, 5000), PhaseKind.BACKWARD, False),
        ((2, 5000, 1), PhaseKind.BACKWARD, False),
    ],
)
def test_the_indices_of_a_sparse_matrix_are_two_rows(indices: tuple[int, ...], phase: PhaseKind, is_told: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(2, 60, dtype="int64", op="aten.randint")
    b.new(*indices, dtype="int64", op="aten.randint")
    b.new(4096, 16, op="aten._sparse_addmm")
    b.phase(phase)
    b.new(4096, 4096)
    found = listed(sparse.propose(b.context()))
    sizes = [one.trace.storages[3].num_bytes for one in found]
    assert sizes == ([] if phase is PhaseKind.FORWARD else [4 * (5000 if is_told else 60)])


@pytest.mark.parametrize("op", ["aten.sparse_sampled_addmm", "aten.mul"])
def test_rows_instead_of_a_mask_that_is_made_dense(op: str) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(4096, 16, op="aten.randn")
    b.new(8, 4096, op="aten.randn")
    b.new(4096, 64, 64, op="aten.randn")
    b.new(4096, 32, dtype="bfloat16", op="aten.randn")
    b.new(5000, op=op, line="score.py:3 score")
    b.phase(PhaseKind.BACKWARD)
    b.alloc(MIB, hidden=True)
    made = [b.alloc(num_bytes, op="aten.sparse_mask", hidden=True) for num_bytes in (4096 * 4096, 8 * 4096 * 4096)]
    found = listed(sparse.propose_rows(b.context()))
    assert len(found) == (op == "aten.sparse_sampled_addmm")
    for one in found:
        assert "of the 5000 nonzero elements" in one.change and "score.py:3" in one.change
        assert [one.trace.storages[index].num_bytes for index in made] == [3 * 5000 * 16 * 4, 0]


@pytest.mark.parametrize(("indices", "op", "is_told"), [
    *(((2, 5000), f"aten.{name}", True) for name in ("index", "index_select", "gather", "embedding")),
    ((3, 5000), "aten.index", False),
    ((2, 5000, 1), "aten.index", False),
    ((2, 5000), "aten.mul", False),  # not gathered
    ((5000, 2), "aten.index", False),
])  # fmt: skip
def test_messages_of_all_edges(indices: tuple[int, ...], op: str, is_told: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(*indices, dtype="int64", op="aten.randint")
    made = [b.new(5000, 64, op=op, line="conv.py:3 forward"), b.new(5000, 64, op="aten.mul", line="conv.py:4 forward")]
    found = listed(messages.propose(b.context()))
    assert bool(found) == is_told
    for one in found:
        assert figures(one.change) == ["[5000 x 64]", "conv.py:3"]
        assert [one.trace.storages[index].num_bytes for index in made] == [5000 * 20, 0]


def test_messages_have_features_and_what_has_none_stays() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(2, 5000, dtype="int64", op="aten.randint")
    made = [b.new(5000, 64, op="aten.index"), b.new(5000), b.new(64, 5000)]
    found = only(messages.propose(b.context()))
    assert [found.trace.storages[index].num_bytes for index in made] == [100_000, 20_000, 64 * 20_000]
    b.new(5000 * 64 * 9)
    assert not list(messages.propose(b.context()))


# -- attention --------------------------------------------------------------------------------------------------------


SDPA = "scaled_dot_product_attention instead of the scores of model.py:3"


@pytest.mark.parametrize(
    ("ops", "line", "change"),
    [
        (
            ("aten.bmm", "aten._softmax"),
            "model.py:3 attend",
            "scaled_dot_product_attention instead of the scores of model.py:3",
        ),
        (("aten.bmm", "aten._softmax"), "/x/transformers/bert.py:3 attend", ""),  # the fix changes the library
        (("aten.bmm", "aten._softmax"), r"C:\x\transformers\bert.py:3 attend", ""),
        (("aten.bmm", "aten._softmax"), None, ""),
        (("aten.add", "aten._softmax"), "model.py:3 attend", None),
        (("aten.bmm", "aten._safe_softmax"), "model.py:3 attend", None),  # SDPA's own
    ],
)
def test_scores_that_are_products_are_left_to_a_kernel(
    ops: tuple[str, str], line: str | None, change: str | None
) -> None:
    b = TraceBuilder()
    b.inputs(1, 512)
    made = [b.new(1, 4, 512, 512, op=op, line=line) for op in ops]
    b.new(1, 1, 512, 512, dtype="bool")
    found = listed(attention.propose(b.context()))
    assert [one.change for one in found] == ([] if change is None else [change])
    for one in found:
        assert one.source == (line if change else None)
        sizes = [storage.num_bytes for storage in one.trace.storages]
        assert [sizes[index] for index in made] == [0, 0] and sizes[-1] == 512 * 512


@pytest.mark.parametrize(
    ("class_name", "parameter", "is_told"),
    [
        ("MultiheadAttention", "attn.in_proj_weight", True),
        ("MultiheadAttention", "attn.q_proj_weight", True),
        ("MultiheadAttention", "attn.query.weight", False),  # a class of the program's
        ("MultiheadAttention", "other.in_proj_weight", False),
        ("Attention", "attn.in_proj_weight", False),
    ],
)
def test_the_attention_of_torch_is_asked_for_no_weights(class_name: str, parameter: str, is_told: bool) -> None:
    b = TraceBuilder()
    b.parameter(parameter, 24, 8)
    b.inputs(1, 512)
    b.enter("attn", class_name)
    for op in ("aten.bmm", "aten._softmax"):
        b.new(1, 4, 512, 512, op=op, line="model.py:3 forward")
    b.leave()
    change = only(attention.propose(b.context())).change
    expected = "need_weights=False in the call of nn.MultiheadAttention at model.py:3"
    assert change.startswith(
        expected if is_told else "scaled_dot_product_attention instead of the scores of model.py:3"
    )


# -- the allocator ----------------------------------------------------------------------------------------------------


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


# -- weights ----------------------------------------------------------------------------------------------------------


def weighty(weight_mib: int = 30, other_mib: int = 60, *, steps: bool = True) -> TraceBuilder:
    """Two layers with a weight and a gradient each, state of the first, a head; and other tensors in the forward."""
    b = TraceBuilder()
    for layer in range(2):
        b.enter(f"layers.{layer}", role=ModuleRole.LAYER)
        b.leave()
        b.parameter(f"module.layers.{layer}.mlp.weight", 10 * (1 + layer), MIB // 4)
    b.parameter("head.weight", weight_mib - 30, MIB // 4)
    b.inputs(1, 8)
    b.new(other_mib, MIB // 4)
    b.new(1, MIB // 4, hidden=True)
    b.new(1, MIB // 2, dtype="bfloat16")
    b.phase(PhaseKind.BACKWARD)
    if steps:
        for layer in range(2):
            b.new(10 * (1 + layer), MIB // 4, owner=(Role.GRADIENT, f"layers.{layer}.mlp.weight"))
        b.phase(PhaseKind.OPTIMIZER_STEP)
        b.new(10, MIB // 4, op="aten.zeros_like", owner=(Role.OPTIMIZER_STATE, "exp_avg"))
        b.new(30, MIB // 4, op="aten.zeros_like", owner=(Role.OPTIMIZER_STATE, "exp_avg"))
        b.new(10, MIB // 4, op="aten.sqrt")
    return b


def mib_of(proposal: Proposal) -> list[float]:
    return [storage.num_bytes / MIB for storage in proposal.trace.storages]


def test_all_but_logits_may_be_in_bfloat16() -> None:
    b = weighty()
    sizes = mib_of(only(weights.propose_bfloat16(b.context(vocab_size=MIB // 2))))
    # Two weights, the head, token ids, activations, a workspace, what is in half precision, and the step's.
    assert sizes == [5, 10, 0, 64 / MIB, 30, 1, 1, 5, 10, 5, 15, 5]
    sizes = mib_of(only(weights.propose_bfloat16(b.context(vocab_size=MIB // 4))))
    assert sizes[4] == 60  # [60 x words]: losses compute in float32


@pytest.mark.parametrize(("other_mib", "is_told"), [(86, True), (88, False)])
def test_weights_that_take_a_quarter_of_the_peak(other_mib: int, is_told: bool) -> None:
    """30 of 118 MiB, or of 120 and the token ids."""
    b = weighty(other_mib=other_mib, steps=False)
    assert bool(list(weights.propose_bfloat16(b.context()))) == is_told
    assert bool(list(weights.propose_on_host(b.context()))) == is_told


@pytest.mark.parametrize(("frozen_mib", "is_told"), [(18, False), (20, True), (22, True)])
def test_frozen_weights_may_be_in_float16_on_a_gpu_that_is_slow_in_bfloat16(frozen_mib: int, is_told: bool) -> None:
    """A quarter of the peak is of a frozen weight, beside an adapter with its gradient."""
    b = TraceBuilder()
    b.trace.facts = replace(b.trace.facts, device=DeviceFacts("", None, has_bfloat16=False))
    frozen = b.parameter("base", frozen_mib, MIB // 4)
    adapter = b.parameter("adapter", MIB // 4)
    b.phase(PhaseKind.FORWARD)
    b.alloc(58 * MIB)
    b.phase(PhaseKind.BACKWARD)
    b.new(MIB // 4, owner=(Role.GRADIENT, "adapter"))
    found = listed(weights.propose_frozen(b.context()))
    assert bool(found) == is_told
    assert all(mib_of(one)[frozen] == frozen_mib / 2 and mib_of(one)[adapter] == 1 for one in found)
    b.trace.facts = replace(b.trace.facts, device=DeviceFacts("", None))
    assert not list(weights.propose_frozen(b.context()))


def test_frozen_weights_are_known_where_something_is_trained_or_nothing() -> None:
    """In an inference all are frozen; before any gradient and optimizer, none is known to be."""
    b = TraceBuilder()
    b.trace.facts = replace(b.trace.facts, device=DeviceFacts("", None, has_bfloat16=False))
    b.parameter("base", 20, MIB // 4)
    assert not list(weights.propose_frozen(b.context()))
    b.phase(PhaseKind.FORWARD)
    assert len(list(weights.propose_frozen(b.context()))) == 1


def test_with_lora_no_weight_has_a_gradient_or_state() -> None:
    b = weighty()
    b.parameter("embed.weight", 100, 64)
    context = b.context(spec=TargetSpec(model="x"))
    assert mib_of(only(weights.propose_lora(context)))[:-1] == [10, 20, 0, 64 / MIB, 60, 1, 1, 0, 0, 0, 0, 0]
    assert not list(weights.propose_lora(b.context()))  # of a script, it is not the fix that says what is trained
    assert not list(weights.propose_lora(weighty(steps=False).context(spec=TargetSpec(model="x"))))


def test_one_layer_at_a_time_has_its_weights_on_the_gpu() -> None:
    """The larger one; state and temporaries of the other's shape are gone too."""
    sizes = mib_of(only(weights.propose_on_host(weighty().context())))
    assert sizes == [0, 20, 0, 64 / MIB, 60, 1, 1, 0, 20, 0, 30, 0]
    b = TraceBuilder()
    b.enter("layers.0", role=ModuleRole.LAYER)
    b.leave()
    b.parameter("layers.0.weight", 10, MIB // 4)
    assert not list(weights.propose_on_host(b.context()))


# -- torch.func.grad --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "phase", "is_freed", "in_vmap", "is_told"),
    [
        ("torch.func.grad", PhaseKind.BACKWARD, False, False, True),
        ("torch.func.grad_and_value", PhaseKind.BACKWARD, False, False, True),
        ("torch.func.vmap", PhaseKind.BACKWARD, False, False, False),
        ("torch.func.grad", PhaseKind.FORWARD, False, False, False),
        ("torch.func.grad", PhaseKind.BACKWARD, True, False, False),
        ("torch.func.grad", PhaseKind.BACKWARD, False, True, False),
    ],
)
def test_what_torch_func_grad_keeps_may_be_freed_as_it_is_used(
    by: str, phase: PhaseKind, is_freed: bool, in_vmap: bool, is_told: bool
) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    begin = len(b.trace.events)
    saved = b.alloc(100 * MIB)
    end = len(b.trace.events)
    if in_vmap:
        b.trace.vmaps.append(VmapCall(begin, end, 4, "vmap", 0))
    b.trace.sources.append("train.py:7 main")
    b.trace.callers = [Caller(saved, 1, by)]
    b.phase(phase)
    b.alloc(MIB)
    used = len(b.trace.events)
    if is_freed:
        b.free(saved)
    b.alloc(200 * MIB)
    b.trace.last_uses = [used, NONE, NONE]
    found = listed(gradients.propose(b.context()))
    assert [one.change for one in found] == [
        f"torch.autograd.grad instead of {by} at train.py:7, unless it is differentiated again"
    ] * is_told
    for one in found:
        assert one.trace.events[used] == Event(FREE, saved)
    b.trace.last_uses = []
    assert not list(gradients.propose(b.context()))


# -- rows at a time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usable_mib", "ended", "rows"),
    [
        (None, False, 8),
        (None, True, 8),
        (600, False, 8),
        (598, False, 4),
        (348, False, 2),
        (200, False, 1),
        (10, False, 1),
        (1200, True, 8),
        (1196, True, 4),
        (328, True, 1),  # 100 MiB, and 62.5 in a segment of 64
        (326, True, 2),  # not half of the GPU with any, but all of it with two
        (160, True, 1),
    ],
)
def test_half_of_the_rows_or_the_first_fraction_that_fits(usable_mib: int | None, ended: bool, rows: int) -> None:
    """Of 1,100 MiB, 1,000 have 16 rows; of a run that has ended, twice as much must be free."""
    b = TraceBuilder()
    b.alloc(100 * MIB)
    batched = b.alloc(1000 * MIB)
    b.trace.ended_out_of_memory = ended
    context = b.context(None if usable_mib is None else usable_mib * MIB)
    assert batches.find_fitting_rows(context, [batched], 16) == rows


def test_rows_fit_by_a_replay_where_a_run_wastes_memory() -> None:
    """Each round needs 50 MiB more for its rows than the segment of the round before has: 1,050 MiB are reserved where
    nothing is released, but half of the rows have 150 at most."""
    b = TraceBuilder()
    batched = []
    for num_mib in (50, 100, 150, 200, 250, 300):
        batched.append(b.alloc(num_mib * MIB))
        b.free(batched[-1])
    assert batches.find_fitting_rows(b.context(150 * MIB), batched, 16) == 8
    assert batches.find_fitting_rows(b.context(149 * MIB), batched, 16) == 4
