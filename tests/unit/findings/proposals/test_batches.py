"""Smaller batches, and fewer rows at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memprof.findings import Context
from memprof.findings.proposals import batches, micro_batch, pairs
from memprof.findings.suggestions import Proposal
from memprof.spec import TargetSpec
from memprof.trace.events import NONE, BatchLoader, Event, EventKind, FirstStep, Forward, PhaseKind, Role
from memprof.units import MIB
from tests.unit.findings.proposals.proposed import batch, only
from tests.unit.traces import TraceBuilder


def smaller(context: Context) -> list[Proposal]:
    """Smaller batches, of an inference or of a training."""
    return [*micro_batch.propose_batches(context), *micro_batch.propose_accumulation(context)]


def test_rows_of_the_batch_are_halved() -> None:
    proposal = only(micro_batch.propose_accumulation(batch((64, 256), (64 * 12, 7, 7), (9, 64, 5), (10, 256))))
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
    assert all("loss.py:4" in one.change and one.change.startswith("use a lookup (F.embedding)") for one in chunked)


def test_inputs_of_two_lengths_are_no_batch() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    for rows in (64, 32):
        b.new(rows, 100, owner=(Role.INPUT, ""))
        b.new(rows, 256)
    assert micro_batch.find_batch_size(b.context()) is None
    assert micro_batch.find_batch_size(b.context(spec=TargetSpec(model="x", batch_size=8))) == 8


def test_batch_normalization_is_told() -> None:
    """In eval mode it keeps no mean of its batch."""
    told = "(batch normalization then sees 32 samples)"
    for size, is_told in ((256, True), (0, False)):
        context = batch((64, 256), (size,), op="aten.cudnn_batch_norm")
        assert (told in only(micro_batch.propose_accumulation(context)).change) == is_told


@pytest.mark.parametrize(("class_name", "is_told"), [("BatchNorm3d", True), ("InstanceNorm3d", False)])
def test_instance_normalization_sees_each_sample_by_itself(class_name: str, is_told: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(2, 100, owner=(Role.INPUT, ""))
    b.new(2, 1 << 20)
    b.enter("norm", class_name)
    b.new(64, op="aten.cudnn_batch_norm")
    b.leave()
    b.phase(PhaseKind.BACKWARD)
    change = only(micro_batch.propose_accumulation(b.context())).change
    assert ("(batch normalization then sees 1 sample)" in change) == is_told


@pytest.mark.parametrize(
    ("size", "rows", "batch_size"),
    [
        (32, (64, 256), 32),
        (32, (64, 80), None),
        (1, (64, 256), None),
        (None, (64, 256), None),
        (32, (64, 64), 32),  # two of each sample
        (1, (64, 64), 64),
        (48, (64, 64), 64),
    ],
)
def test_crops_of_each_sample_are_rows(size: int | None, rows: tuple[int, int], batch_size: int | None) -> None:
    """The loader's batch size divides the rows of all inputs."""
    b = TraceBuilder(PhaseKind.FORWARD)
    for count in rows:
        b.new(count, 100, owner=(Role.INPUT, ""))
    b.trace.sources.append("train.py:1 main")
    b.trace.loaders += [] if size is None else [BatchLoader(size, 0)]
    assert micro_batch.find_batch_size(b.context()) == batch_size


@pytest.mark.parametrize(
    ("op", "rows", "size", "batch_size"),
    [
        ("aten.stack", 640, 32, 640),
        ("aten.stack", 320, 32, 20),
        ("aten._to_copy", 640, 32, 20),
        ("aten.stack", 640, 20, 20),  # frames, or parts, of 20 samples
    ],
)
def test_samples_that_are_repeated_and_stacked_are_one_batch(op: str, rows: int, size: int, batch_size: int) -> None:
    """20 times the 32 images of a batch, as of a model with dropout that is sampled."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(20, 32, 3, 8, 8, op=op, owner=(Role.INPUT, ""))
    b.new(rows, 64, 8, 8)
    b.trace.sources.append("train.py:1 main")
    b.trace.loaders.append(BatchLoader(size, 0))
    assert micro_batch.find_batch_size(b.context()) == batch_size


@pytest.mark.parametrize(("sizes", "line"), [((64, 64, 16), 1), ((64, 16), 0), ((48,), None), ((), None)])
def test_the_line_of_the_loader(sizes: tuple[int, ...], line: int | None) -> None:
    """That of the last loader that yields such batches."""
    for context in (batch((64, 256)), batch((64, 256), trains=False)):
        trace = context.ledger.trace
        first = len(trace.sources)
        trace.sources += [f"train.py:{i} main" for i in range(len(sizes))]
        trace.loaders += [BatchLoader(size, first + i) for i, size in enumerate(sizes)]
        proposal = only(smaller(context))
        assert proposal.source == (None if line is None else f"train.py:{line} main")
        assert ("instead of 64 (train.py:" in proposal.change) == (line is not None)


@pytest.mark.parametrize(
    ("source", "is_told"), [("sample.py:7 main", True), ("/x/site-packages/pipeline.py:7 run", False)]
)
def test_without_a_loader_an_inference_has_the_line_of_its_call(source: str, is_told: bool) -> None:
    context = batch((64, 256), trains=False)
    trace = context.ledger.trace
    trace.sources.append(source)
    trace.forwards = [Forward(0, len(trace.events), 0, len(trace.sources) - 1, False, 0, ())]
    proposal = only(smaller(context))
    assert ("instead of 64 at sample.py:7" in proposal.change) is is_told
    assert proposal.source == (source if is_told else None)


@pytest.mark.parametrize(
    ("nodes", "training", "may_train", "is_told"),
    [(0, False, True, False), (3, False, True, True), (3, True, True, False), (3, True, False, True)],
)
def test_a_graph_in_vain_goes_with_the_smaller_batches(
    nodes: int, training: bool, may_train: bool, is_told: bool
) -> None:
    context = batch((64, 256), trains=False)
    trace = context.ledger.trace
    trace.may_train = may_train
    trace.forwards = [Forward(0, len(trace.events), 0, 0, training, nodes, ())]
    (proposal,) = micro_batch.propose_batches(context)
    assert proposal.change.endswith(", under torch.no_grad()") is is_told


@pytest.mark.parametrize(("after_peak", "line"), [(0, 1), (1, 0)])
def test_a_loader_that_yields_after_the_peak_is_not_meant(after_peak: int, line: int) -> None:
    """As that of an evaluation at the end, with batches as large."""
    context = batch((64, 256))
    trace, peak = context.ledger.trace, context.ledger.peak_event
    first = len(trace.sources)
    trace.sources += ["train.py:0 main", "train.py:1 main"]
    trace.loaders += [BatchLoader(64, first), BatchLoader(64, first + 1, peak + after_peak)]
    assert only(smaller(context)).source == f"train.py:{line} main"


def test_loaders_of_a_model_by_name_are_not_the_users() -> None:
    """Of a batch normalization, whose fix is told in words."""
    context = batch((64, 256), (256,), op="aten.cudnn_batch_norm")
    context.ledger.trace.sources.append("memprof/workload/data.py:9 make")
    context.ledger.trace.loaders.append(BatchLoader(64, len(context.ledger.trace.sources) - 1))
    named = replace(context, spec=TargetSpec(model="x", batch_size=64))
    assert "instead of 64, and" in only(micro_batch.propose(named)).change
    assert "instead of 64 (workload/data.py:9)" in only(micro_batch.propose_accumulation(context)).change


@pytest.mark.parametrize(
    ("file", "trains", "place"),
    [
        ("/lib/site-packages/transformers/trainer.py", True, " (per_device_train_batch_size)"),
        (r"C:\lib\site-packages\transformers\trainer.py", False, " (per_device_eval_batch_size)"),
        ("/lib/site-packages/lib/train.py", True, ""),
    ],
)
def test_the_setting_of_a_trainer(file: str, trains: bool, place: str) -> None:
    context = batch((64, 256), trains=trains)
    context.ledger.trace.trains = trains
    context.ledger.trace.sources.append(f"{file}:9 make")
    context.ledger.trace.loaders.append(BatchLoader(64, len(context.ledger.trace.sources) - 1))
    proposal = only(smaller(context))
    assert proposal.source is None and f"instead of 64{place}{', and' if trains else ''}" in proposal.change


def test_an_inference_has_no_gradients_to_add_up() -> None:
    proposal = only(smaller(batch((64, 256), trains=False)))
    assert proposal.value is None and proposal.change.startswith("use batches of 32 samples, one after another")


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
    assert proposal.value is None and proposal.change.startswith("use batches of 32 samples, one after another")
    assert [storage.shape[0] for storage in b.trace.storages] == [256, 64, 64, 64]
    assert [storage.num_bytes // 4 for storage in proposal.trace.storages[1:]] == [64 * 256, 64 * 100, 32 * 512]


def test_gradients_of_the_batches_before_are_there_from_the_beginning() -> None:
    b = TraceBuilder(None)
    b.phase(PhaseKind.FORWARD)
    b.new(64, 100, owner=(Role.INPUT, ""))
    b.new(64, 256)
    b.phase(PhaseKind.BACKWARD)
    gradient = b.new(256, 100, owner=(Role.GRADIENT, "weight"))
    events = only(micro_batch.propose_accumulation(b.context())).trace.events
    assert events[0] == Event(EventKind.ALLOC, gradient) and events.count(events[0]) == 1


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
        (1100, True, 8),
        (1098, True, 4),
        (228, True, 1),  # 100 MiB, and 62.5 in a segment of 64
        (226, True, 2),  # not half of the room with any, but all of it with two
        (160, True, 1),
    ],
)
def test_half_of_the_rows_or_the_first_fraction_that_fits(usable_mib: int | None, ended: bool, rows: int) -> None:
    """Of 1,100 MiB, 1,000 have 16 rows; of a run that has ended, half of the room beside the others must stay free."""
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


@pytest.mark.parametrize(("eye", "is_told"), [((2622, 2622), True), ((2622, 2621), False), (None, False)])
def test_rows_of_an_identity_are_a_one_hot(eye: tuple[int, int] | None, is_told: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(64, 8, owner=(Role.INPUT, ""))
    if eye is not None:
        b.new(*eye, op="aten.eye")
    b.new(6400, 8, dtype="int64", op="aten._to_copy")
    b.new(6400, 8, 2622, op="aten.index", line="data.py:4 encode")
    told = [one for one in pairs.propose(b.context()) if one.change.startswith("use a lookup (F.embedding)")]
    assert bool(told) == is_told and all(one.source == "data.py:4 encode" for one in told)


@pytest.mark.parametrize("shape", [(4, 1, 8, 8), (4, 3, 8, 8)])
def test_images_of_one_channel_are_no_beams(shape: tuple[int, ...]) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(*shape, owner=(Role.INPUT, ""))
    assert micro_batch.find_batch_size(b.context()) == 4


@pytest.mark.parametrize(("nodes", "is_batch"), [(1023, True), (1024, False)])
def test_the_nodes_of_a_graph_are_no_batch(nodes: int, is_batch: bool) -> None:
    """Its matrix [nodes x nodes] is an input beside their features."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(nodes, 32, owner=(Role.INPUT, ""))
    b.new(nodes, nodes, owner=(Role.INPUT, ""))
    assert (micro_batch.find_batch_size(b.context()) is not None) == is_batch


@pytest.mark.parametrize(
    ("other", "rows", "is_told"), [((16, 12, 768), 8, True), ((192, 12), 96, False), ((192, 768), 96, False)]
)
def test_fewer_beams_are_told_where_rows_are_samples_times_beams(
    other: tuple[int, ...], rows: int, is_told: bool
) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(192, 768, owner=(Role.INPUT, ""))
    b.new(*other, owner=(Role.INPUT, ""))
    b.new(192, 4096)
    proposal = only(micro_batch.propose_batches(b.context()))
    assert f"batches of {rows} samples" in proposal.change and proposal.change.endswith("fewer beams") == is_told
    assert proposal.trace.storages[2].num_bytes == 96 * 4096 * 4


def call(b: TraceBuilder, rows: int) -> None:
    """Call a model with so many rows of inputs, which are freed then."""
    given = b.new(rows, 100, owner=(Role.INPUT, ""))
    begin = len(b.trace.events)
    b.enter("", "Net")
    b.leave()
    b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, NONE, training=False, nodes=0, outputs=()))
    b.free(given)


@pytest.mark.parametrize(
    ("rows", "live_rows", "batch_size"),
    [((64,), None, 64), ((32, 64), None, 64), ((64, 32), None, 32), ((64,), 48, 48), ((64,), 1, None)],
)
def test_inputs_that_are_gone_at_the_peak_are_those_of_the_last_call(
    rows: tuple[int, ...], live_rows: int | None, batch_size: int | None
) -> None:
    """Not of one that begins after the peak. What is live there counts alone, even if that is no batch."""
    b = TraceBuilder(PhaseKind.FORWARD)
    for count in rows:
        call(b, count)
    if live_rows is not None:
        b.new(live_rows, 100, owner=(Role.INPUT, ""))
    b.free(b.new(64, 4096))
    call(b, 16)
    assert micro_batch.find_batch_size(b.context()) == batch_size


@pytest.mark.parametrize(
    ("trains", "change", "is_halved"),
    [
        (False, {}, True),
        (False, {"op": "aten.randn"}, False),  # the data set, it may be
        (False, {"rows": 1}, False),
        (False, {"role": Role.BUFFER}, False),
        (True, {}, False),
    ],
)
def test_what_is_moved_for_a_call_shrinks_where_no_gradients_are_accumulated(
    trains: bool, change: dict[str, Any], is_halved: bool
) -> None:
    settings = {"op": "aten._to_copy", "rows": 64, "role": Role.INPUT} | change
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(64, 8, owner=(Role.INPUT, ""))
    moved = b.new(settings["rows"], 100, op=settings["op"], owner=(settings["role"], ""))
    b.new(64, 256)
    if trains:
        b.phase(PhaseKind.BACKWARD)
    proposal = only(smaller(b.context()))
    assert proposal.trace.storages[moved].num_bytes == settings["rows"] * 400 // (1 + is_halved)


def test_what_is_moved_alone_is_no_reason_for_smaller_batches() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(64, 100, op="aten._to_copy", owner=(Role.INPUT, ""))
    assert not smaller(b.context())


@pytest.mark.parametrize(
    ("end", "accumulates"),
    [("memory", False), ("itself", True), ("first step", True), ("later step", True), ("no call", True)],
)
def test_no_gradients_are_accumulated_where_memory_ends_a_run_before_its_first_optimizer(
    end: str, accumulates: bool
) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    weight = b.parameter("weight", 256, 100)
    if end == "later step":
        b.phase(PhaseKind.OPTIMIZER_STEP)
        b.phase(PhaseKind.FORWARD, 2)
    b.new(64, 100, owner=(Role.INPUT, ""))
    begin = len(b.trace.events)
    b.enter("", "Net")
    b.new(64, 256)
    b.leave()
    if end != "no call":
        b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, NONE, training=True, nodes=3, outputs=()))
    if end == "itself":
        b.phase(PhaseKind.BACKWARD)
    b.trace.trains = True
    b.trace.ended_out_of_memory = end != "itself"
    b.trace.first_steps = [FirstStep((weight,), (NONE,), (2,))] * (end == "first step")
    assert ("accumulate gradients" in only(smaller(b.context())).change) == accumulates
