"""What is suggested where a graph is dense, a module runs again and again, a sequence is long, or a call returns more
than it has to: at each threshold, in traces by hand."""

from __future__ import annotations

import pytest

from memprof.findings import attention_scores
from memprof.findings.proposals import (
    activations,
    attention,
    checkpointing,
    long_input,
    loops,
    messages,
    micro_batch,
    pairs,
    recurrence,
)
from memprof.findings.suggestions import Proposal
from memprof.spec import TargetSpec
from memprof.trace.events import EventKind, Forward, Holder, PhaseKind, Role
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


def sizes(proposal: Proposal, *indices: int) -> list[int]:
    return [proposal.trace.storages[index].num_bytes for index in indices]


# -- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_nodes", "num_edges", "phase", "is_told"),
    [
        (1024, 500, PhaseKind.INPUTS, True),
        (1023, 500, PhaseKind.INPUTS, False),  # may be a size of the model
        (1024, 1024 * 1024 * 4 // 20, PhaseKind.INPUTS, True),  # 20 bytes for each edge, 4 for each pair of nodes
        (1024, 1024 * 1024 * 4 // 20 + 1, PhaseKind.INPUTS, False),
        (1024, 500, PhaseKind.BACKWARD, False),  # the gradient of a sparse matrix
    ],
)
def test_a_dense_matrix_of_a_graph(num_nodes: int, num_edges: int, phase: PhaseKind, is_told: bool) -> None:
    b = TraceBuilder(phase)
    b.new(2, num_edges, dtype="int64", op="aten.randint")
    dense = b.new(num_nodes, num_nodes, op="aten.zeros", line="graph.py:3 to_dense")
    other = b.new(num_nodes, num_nodes, op="aten.mul", line="graph.py:5 normalize")
    found = list(messages.propose_adjacency(b.context()))
    assert bool(found) == is_told
    assert all("graph.py:3" in one.change and sizes(one, dense, other) == [20 * num_edges] * 2 for one in found)


def test_matrices_of_no_graph_stay() -> None:
    b = TraceBuilder(PhaseKind.INPUTS)
    b.new(4096, 4096, op="aten.zeros")
    assert not list(messages.propose_adjacency(b.context()))


# -- pairs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "begin"),
    [((1, 96, 80, 16), "compare one class at a time (target == c)"), ((1, 96, 16), "use a lookup (F.embedding)")],
)
def test_labels_of_an_image_need_one_class_at_a_time(shape: tuple[int, ...], begin: str) -> None:
    """Scores of as many numbers are there already: a one_hot is not made of these."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(*shape[:-1], dtype="int64", op="aten.randint")
    b.new(*shape, op="aten._softmax")
    b.new(*shape, dtype="int64", op="aten.zeros", line="loss.py:3 dice")
    (proposal,) = pairs.propose(b.context())
    assert proposal.change.startswith(begin) and "of the 96 rows along dimension 1" in proposal.change


@pytest.mark.parametrize(
    ("weight", "axis"),
    [((19, 64, 1, 1), 2), ((20, 64, 1, 1), 1), ((19, 64), 1), ((19, 64, 1), 1)],
    ids=["classes", "others", "queries", "a kernel of one dimension"],
)
def test_scores_of_classes_stay_together(weight: tuple[int, ...], axis: int) -> None:
    b = TraceBuilder()
    b.parameter("head.weight", *weight)
    b.phase(PhaseKind.EVALUATION)
    b.new(1, 19, 64, 64, op="aten.convolution")
    b.new(1, 19, 512, 512, op="aten.upsample_bilinear2d", line="post.py:3 resize")
    (proposal,) = pairs.propose(b.context())
    assert f"along dimension {axis}" in proposal.change
    assert proposal.change.startswith("resize the classes (after argmax)") == (axis == 2)


# -- long inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "is_along"), [(2, True), (16, True), (17, False), (2.5, False)])
def test_an_image_may_become_larger(times: float, is_along: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.enter("net")
    b.new(1, 3, 1024, 8, owner=(Role.INPUT, "x"))
    b.new(1, 64, int(1024 * times), 8, op="aten.pixel_shuffle")
    assert bool(list(long_input.propose(b.context()))) == is_along


@pytest.mark.parametrize(
    ("num_steps", "is_saved", "is_told"), [(512, True, True), (511, True, False), (512, False, False)]
)
def test_windows_of_a_long_sequence(num_steps: int, is_saved: bool, is_told: bool) -> None:
    """An inference saves nothing."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.enter("lstm", "LSTM")
    output = b.new(num_steps, 4, 64, op="aten._cudnn_rnn", line="model.py:9 forward")
    saved = b.new(8 * MIB, dtype="uint8", op="aten._cudnn_rnn", hidden=not is_saved)
    other = b.new(4, 64, op="aten._cudnn_rnn")
    b.leave()
    found = list(recurrence.propose_windows(b.context()))
    assert bool(found) == is_told
    for one in found:
        assert "parts of 64 of the 512 steps at model.py:9" in one.change
        assert sizes(one, output, saved, other) == [64 * 4 * 64 * 4, MIB, 4 * 64 * 4 // 8]


# -- modules and calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_calls", "class_name", "is_told"),
    [(16, "Func", True), (15, "Func", False), (16, "LSTMCell", False)],
)
def test_a_module_that_runs_again_and_again(num_calls: int, class_name: str, is_told: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.enter("", "Net")
    for _ in range(num_calls):
        b.enter("func", class_name)
        b.new(MIB, line="ode.py:4 forward")
        b.new(MIB, line="ode.py:5 forward")
        b.leave()
    b.trace.ended_out_of_memory = True
    found = list(checkpointing.propose_repeated(b.context()))
    assert bool(found) == is_told
    for one in found:
        assert one.change.startswith("run each of the 16 calls of `func` (Func, ode.py:4) under torch.utils.checkpoint")


def sample(b: TraceBuilder, class_name: str = "UNet", nodes: int = 2) -> None:
    """Call a model at one line, which saves 1 MiB beside its result."""
    begin = len(b.trace.events)
    b.enter("", class_name)
    b.new(MIB)
    b.new(MIB)
    b.leave()
    end, line = len(b.trace.events), b._index(b.trace.sources, "sample.py:4 sample")
    b.trace.forwards.append(Forward(begin, end, b.trace.events[begin].ref, line, True, nodes, ()))


@pytest.mark.parametrize(
    ("num_calls", "class_name", "nodes", "begins_anew", "is_told"),
    [
        (16, "UNet", 2, False, True),
        (15, "UNet", 2, False, False),
        (16, "GRUCell", 2, False, False),
        (16, "UNet", 0, False, False),
        (16, "UNet", 2, True, False),
    ],
)
def test_a_model_that_is_called_again_and_again_before_a_backward(
    num_calls: int, class_name: str, nodes: int, begins_anew: bool, is_told: bool
) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    for number in range(num_calls):
        if begins_anew and number == 1:
            b.phase(PhaseKind.BACKWARD)
            b.phase(PhaseKind.FORWARD)
        sample(b, class_name, nodes)
    b.trace.ended_out_of_memory = True
    found = list(checkpointing.propose_calls_of_a_loop(b.context()))
    assert bool(found) == is_told
    for one in found:
        assert one.change.startswith(f"run each of the 16 calls of {class_name} at sample.py:4")
        assert sum(kind is EventKind.FREE for kind, _ in one.trace.events) == 16  # of two tensors, one is the result


@pytest.mark.parametrize(
    ("what", "is_told"),
    [
        ("", True),
        ("no graph", False),
        ("no training", False),
        ("a model by name", False),
        ("peak before the last call", False),
        ("backward after the peak", True),
    ],
)
def test_calls_whose_graphs_wait_at_the_peak_of_a_training(what: str, is_told: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    for number in range(16):
        if number == 15 and what == "peak before the last call":
            b.free(b.new(64 * MIB))
        sample(b, nodes=0 if what == "no graph" else 2)
    b.new(16 * MIB)
    if what == "backward after the peak":
        b.phase(PhaseKind.BACKWARD)
    b.trace.trains, b.trace.may_train = what != "no training", what != "no training"
    b.trace.ended_out_of_memory = True
    context = b.context(spec=TargetSpec(model="x") if what == "a model by name" else None)
    assert bool(list(checkpointing.propose_calls_of_a_loop(context))) == is_told


def erode(num_rounds: int, *, other_mib: int = 0, path: str | None = None) -> TraceBuilder:
    """Two tensors of each round, of which the second is the next round's input."""
    b = TraceBuilder(PhaseKind.FORWARD)
    if path is not None:
        b.enter(path)
    b.new(4 * MIB, dtype="uint8", line="train.py:2 main")
    for _ in range(num_rounds):
        b.new(MIB, dtype="uint8", op="aten.neg", line="loss.py:4 erode")
        b.new(MIB // 2, dtype="uint8", op="aten.max_pool2d_with_indices", line="loss.py:5 erode")
    if other_mib:
        b.alloc(other_mib * MIB)
    b.trace.ended_out_of_memory = True
    return b


@pytest.mark.parametrize(
    ("b", "is_told"),
    [
        (erode(16), True),
        (erode(15), False),
        (erode(16, path=""), False),  # of a module that is not the model itself: a layer may do as much
        (erode(17, other_mib=70), True),  # 17 + 8 of 99.5
        (erode(17, other_mib=72), False),  # of 101.5
    ],
)
def test_a_loop_of_functions(b: TraceBuilder, is_told: bool) -> None:
    found = list(loops.propose(b.context()))
    assert bool(found) == is_told
    for one in found:
        assert "rounds at loss.py:4 under torch.utils.checkpoint, 4 rounds at a time" in one.change


def test_what_the_program_keeps_itself_is_no_loop() -> None:
    b = erode(16)
    pooled = tuple(i for i, one in enumerate(b.trace.storages) if one.num_bytes == MIB)
    b.trace.holders.append(Holder(0, "list", "kept", None, False, None, pooled, 0, 0, None))
    (proposal,) = loops.propose(b.context())
    assert "loss.py:5" in proposal.change


@pytest.mark.parametrize(("other", "batch_size"), [((16, 12, 768), 16), ((16, 11, 768), None), ((192, 12), 192)])
def test_beams_are_no_samples(other: tuple[int, ...], batch_size: int | None) -> None:
    b = TraceBuilder(PhaseKind.DECODE)
    b.new(192, 768, dtype="int64", owner=(Role.INPUT, "ids"))
    b.new(*other, dtype="int64", owner=(Role.INPUT, "running"))
    assert micro_batch.find_batch_size(b.context()) == batch_size


@pytest.mark.parametrize(("num_layers", "nodes", "is_told"), [(3, 0, True), (2, 0, False), (3, 50, False)])
def test_attentions_that_a_call_returns(num_layers: int, nodes: int, is_told: bool) -> None:
    b = TraceBuilder()
    b.inputs(1, 1024)
    b.trace.sources.append("show.py:7 main")
    source = len(b.trace.sources) - 1
    begin = len(b.trace.events)
    for number in range(num_layers):
        b.enter(f"layers.{number}")
        b.free(b.new(16, 1024, 1024, op="aten.bmm", line="site-packages/transformers/llama.py:3 attend"))
        b.new(1, 16, 1024, 1024, op="aten._softmax", line="site-packages/transformers/llama.py:4 attend")
        b.leave()
    b.trace.failed_forward = Forward(begin, len(b.trace.events), 0, source, training=False, nodes=nodes, outputs=())
    context = b.context()
    (proposal,) = attention.propose(context)
    assert ("(output_attentions=False) at show.py:7" in proposal.change) == is_told
    (finding,) = attention_scores.find(context)
    assert ("the call at show.py:7 has no gradients" in finding.title) == is_told


# -- activation functions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ops", "name"),
    [
        (("sigmoid", "mul"), "silu"),
        (("softplus", "tanh", "mul"), "mish"),
        (("sigmoid", "add"), None),
        (("tanh", "mul"), None),
    ],
)
def test_a_function_that_torch_has(ops: tuple[str, ...], name: str | None) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    made = [b.new(64, 64, op=f"aten.{op}", line="act.py:4 forward") for op in ops]
    found = list(activations.propose(b.context()))
    assert [one.change.split()[1] for one in found] == [f"torch.nn.functional.{name}"] * bool(name)
    assert all(sizes(one, *made) == [0] * (len(ops) - 1) + [4 * 64 * 64] for one in found)


@pytest.mark.parametrize(
    ("line", "function"), [("act.py:4 forward", "silu(c * x) / c"), ("act.py:3 forward", "silu (glu for two tensors)")]
)
def test_a_function_of_a_scaled_argument(line: str, function: str) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.free(b.new(64, 64, op="aten.mul", line=line))
    for op in ("sigmoid", "mul"):
        b.new(64, 64, op=f"aten.{op}", line="act.py:4 forward")
    (found,) = activations.propose(b.context())
    assert found.change.startswith(f"use torch.nn.functional.{function} instead")


@pytest.mark.parametrize(("op", "line", "is_told"), [("tanh", 4, False), ("tanh", 3, True), ("exp", 4, True)])
def test_a_product_of_two_functions_is_none_of_an_input(op: str, line: int, is_told: bool) -> None:
    """tanh(f(x)) * sigmoid(g(x)), with a convolution between."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(64, 64, op=f"aten.{op}", line=f"act.py:{line} forward")
    b.new(64, 64, op="aten.convolution", line="conv.py:1 forward")
    for second in ("sigmoid", "mul"):
        b.new(64, 64, op=f"aten.{second}", line="act.py:4 forward")
    assert bool(list(activations.propose(b.context()))) == is_told


@pytest.mark.parametrize("change", ["another line", "another shape", "freed"])
def test_a_gate_is_another_function(change: str) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    gate = b.new(64, 64, op="aten.sigmoid", line="act.py:4 forward")
    line = "act.py:5 forward" if change == "another line" else "act.py:4 forward"
    b.new(64, 32 if change == "another shape" else 64, op="aten.mul", line=line)
    if change == "freed":
        b.free(gate)
    b.alloc(MIB)
    assert not list(activations.propose(b.context()))
