"""Pairs of all with all, and calls of torch.func.vmap, in chunks."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.findings import Context
from memprof.findings.proposals import joined_pairs, pairs, table_products, vmap
from memprof.trace.events import NONE, Caller, EvalCall, EventKind, Forward, PhaseKind, VmapCall
from memprof.units import GIB, MIB
from tests.unit.findings.figures import figures
from tests.unit.findings.proposals.proposed import listed, only
from tests.unit.traces import TraceBuilder


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
    assert bool(found) == is_told and all("4,096 rows" in one.change and "loss.py:3" in one.change for one in found)


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
    assert figures(only(pairs.propose(b.context())).change) == ["8,192", "32,768", "[32768 x 32768]", "model.py:1"]


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
    assert proposal.change == f"pass chunk_size={rows} to torch.func.vmap at train.py:7, which takes 100 rows at once"
    sizes = [storage.num_bytes for storage in proposal.trace.storages]
    assert sizes == [MIB, 10 * rows * MIB, 100 * MIB, 100 * MIB]  # the result, and once more as it is joined
    assert [event.kind for event in proposal.trace.events if event.ref == 3] == [EventKind.ALLOC, EventKind.FREE]


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


@pytest.mark.parametrize(
    ("operands", "op", "shape", "told"),
    [
        (((512, 600), (512, 700)), "mul", (512, 600, 700), "use one matrix product (x.T @ y) if these products are"),
        (((512, 8), (600, 8)), "mul", (512, 600, 8), "use a matrix product (x @ y.T) if these products are summed"),
        (((512, 8), (600, 8)), "div", (512, 600, 8), "use F.normalize(x) @ F.normalize(y).T for cosine"),
        (((512, 600), (512, 700)), "div", (512, 600, 700), "compute in chunks"),
        (((512, 8), (600, 8)), "add", (512, 600, 8), "compute in chunks"),
        (((512, 8), (600, 9)), "mul", (512, 600, 8), "compute in chunks"),
    ],
)
def test_a_sum_of_elementwise_products_is_a_matrix_product(
    operands: tuple[tuple[int, ...], ...], op: str, shape: tuple[int, ...], told: str
) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    for operand in operands:
        b.new(*operand, op="aten.randn")
    b.new(*shape, op=f"aten.{op}", line="net.py:4 forward")
    b.trace.trains = False
    assert only(pairs.propose(b.context())).change.startswith(told)


@pytest.mark.parametrize(("points", "is_told"), [(255, False), (256, True)])
def test_pairs_of_the_points_of_each_sample(points: int, is_told: bool) -> None:
    """What a linear layer makes of them has a row for each pair of all samples."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(16, points, 6, op="aten.randn")
    b.new(16, points, points, 6, op="aten.sub", line="net.py:4 forward")
    b.new(16 * points * points, 512, op="aten.addmm", line="net.py:5 forward")  # two chunks
    proposal = only(pairs.propose(b.context()))
    assert proposal.change.startswith("compare each point with its nearest ones only, not with all 256; or") == is_told
    assert ("128 of the 256 rows along dimension 1" if is_told else "8 of the 16 rows") in proposal.change
    assert proposal.trace.storages[2].num_bytes == 16 * points * points * 512 * 4 // 2


@pytest.mark.parametrize(("rows", "is_told"), [(1023, False), (1024, True)])
@pytest.mark.parametrize("trains", [True, False])
def test_pairs_with_all_rows_of_an_embedding_table(rows: int, is_told: bool, trains: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.parameter("items.weight", rows, 8)
    b.new(512, 8, op="aten.embedding")
    b.new(512, rows, 64, op="aten.sub", line="net.py:4 score")
    b.trace.trains = trains
    b.phase(PhaseKind.BACKWARD if trains else PhaseKind.OTHER)
    told = "compare with the rows of `items.weight` that the loss takes (sampled negatives), not with all"
    assert (told in only(pairs.propose(b.context())).change) == (is_told and trains)


@pytest.mark.parametrize(
    ("shape", "is_told"), [((4096, 4096, 8), True), ((512, 512, 512), False), ((4096, 512, 512), False)]
)
def test_distances_have_features_in_their_last_dimension(shape: tuple[int, ...], is_told: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(shape[0], 8, op="aten.randn")
    b.new(*shape, op="aten.sub")
    assert ("torch.cdist" in only(pairs.propose(b.context())).change) == is_told


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({}, True),
        ({"items": 64}, True),
        ({"items": 63}, False),
        ({"rows": 100 * 100 + 1}, False),  # no square
        ({"width": 24}, False),  # not twice that of the tensors before
        ({"op": "aten.stack"}, False),
        ({"of": 99}, False),  # nothing has as many rows as there are items
    ],
)
def test_features_of_all_pairs_that_are_joined(change: dict[str, Any], is_told: bool) -> None:
    known = {"items": 100, "width": 16, "op": "aten.cat"} | change
    items = known["items"]
    rows = known.get("rows", items * items)
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(known.get("of", items), 8)
    b.new(rows, 8, op="aten.index_select")
    b.new(rows, 8, op="aten.repeat")
    b.new(rows, known["width"], op=known["op"], line="gat.py:32 prepare")
    found = listed(joined_pairs.propose(b.context()))
    assert [one.trace.storages[3].num_bytes for one in found] == [rows * 4] * is_told
    assert all(f"([{items}, 1] + [1, {items}])" in one.change and "gat.py:32" in one.change for one in found)


@pytest.mark.parametrize(
    ("tables", "op", "shape", "is_told"),
    [
        (((2048, 16), (1024, 16)), "aten.mm", (2048, 1024), True),
        (((2048, 16), (1023, 16)), "aten.mm", (2048, 1023), False),
        (((2048, 16), (1024, 17)), "aten.mm", (2048, 1024), False),
        (((2048, 16),), "aten.mm", (2048, 1024), False),  # a layer on inputs
        (((2048, 16), (1024, 16)), "aten.mul", (2048, 1024), False),
    ],
)
def test_a_product_of_two_tables(
    tables: tuple[tuple[int, int], ...], op: str, shape: tuple[int, int], is_told: bool
) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    for number, table in enumerate(tables):
        b.parameter(f"table{number}", *table)
    product = b.new(*shape, op=op, line="net.py:4 forward")
    gradient = b.new(*shape, op="aten.zeros")
    found = listed(table_products.propose(b.context()))
    assert bool(found) == is_told
    for one in found:
        assert "[2048 x 1024] at net.py:4" in one.change and one.source == "net.py:4 forward"
        assert not one.trace.storages[product].num_bytes and not one.trace.storages[gradient].num_bytes


@pytest.mark.parametrize(
    ("shape", "trains", "is_told"),
    [((4096, 4096, 2), False, True), ((4096, 4095, 2), False, False), ((4096, 4096, 2), True, False)],
)
def test_candidates_of_an_inference_may_be_fewer(shape: tuple[int, ...], trains: bool, is_told: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(4096, 4, op="aten.randn")
    b.new(*shape, op="aten.maximum", line="nms.py:4 iou")
    b.trace.trains = trains
    change = only(pairs.propose(b.context())).change
    assert ("or select fewer rows first (such as torch.topk)" in change) == is_told
