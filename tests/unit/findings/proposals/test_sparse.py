"""Gradients of embeddings, products and messages of graphs that may be sparse."""

from __future__ import annotations

import pytest

from memprof.findings.proposals import messages, sparse
from memprof.trace.events import Forward, Module, ModuleRole, PhaseKind, Role
from memprof.units import MIB
from tests.unit.findings.figures import figures
from tests.unit.findings.proposals.proposed import listed, only
from tests.unit.traces import TraceBuilder


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


@pytest.mark.parametrize("kind", [PhaseKind.EVALUATION, PhaseKind.FORWARD])
@pytest.mark.parametrize(("after", "are_messages"), [((100, 32), True), ((3000, 64), False), ((100,), False)])
def test_pairs_are_no_edges(kind: PhaseKind, after: tuple[int, ...], are_messages: bool) -> None:
    """A call before has gathered 3000 rows by the same line, and made no tensor of nodes of them."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.trace.modules.append(Module("", "Net", ModuleRole.ROOT, ""))
    b.new(100, 64, op="aten.zeros")
    begin = len(b.trace.events)
    b.free(b.new(3000, 64, op="aten.index", line="net.py:3 forward"))
    b.free(b.new(*after, op="aten.zeros"))
    b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, 0, True, 1, ()))
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.phase(kind)
    b.new(2, 5000, dtype="int64", op="aten.stack")
    made = b.new(5000, 64, op="aten.index", line="net.py:3 forward")
    found = listed(messages.propose(b.context()))
    assert len(found) == (are_messages or kind is PhaseKind.EVALUATION)
    for one in found:
        assert ("torch.sparse.mm" in one.change) == are_messages
        assert one.trace.storages[made].num_bytes == (5000 * 20 if are_messages else 2500 * 64 * 4)
        assert are_messages or figures(one.change) == ["2,500", "5,000", "[5000 x 64]", "net.py:3"]


def test_messages_have_features_and_what_has_none_stays() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(2, 5000, dtype="int64", op="aten.randint")
    made = [b.new(5000, 64, op="aten.index"), b.new(5000), b.new(64, 5000)]
    found = only(messages.propose(b.context()))
    assert [found.trace.storages[index].num_bytes for index in made] == [100_000, 20_000, 64 * 20_000]
    b.new(5000 * 64 * 9)
    assert not list(messages.propose(b.context()))
