"""Which tensors of two runs are the same, and what differs about the others."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.report.documents.comparison import TensorGroup, TensorRow
from memprof.report.matching.tensors import match_tensors


def tensor(num_bytes: int = 8, count: int = 1, **fields: Any) -> TensorGroup:
    """Return so many tensors of so many bytes, by default activations of a layer."""
    default = {"shape": (2,), "dtype": "float32", "op": "mm", "source": "model.py:1 forward"}
    return TensorGroup(num_bytes, count, **{**default, "category": "activations", "where": "layers.*", **fields})


def match(a: list[TensorGroup], b: list[TensorGroup]) -> list[tuple[str, int]]:
    """Return the status and the difference of each row."""
    return [(row.status, row.difference_bytes) for row in match_tensors(a, b, by_shape=True).rows]


def test_equal_tensors_have_no_row_wherever_their_lines_are() -> None:
    a = [tensor(count=1, source="old.py:1 f"), tensor(count=2, source="old.py:2 f"), tensor(16, shape=(4,))]
    found = match_tensors(a, [tensor(count=3), tensor(16, shape=(4,))], by_shape=True)
    assert (found.rows, found.num_same, found.same_bytes) == ((), 2, 3 * 8 + 16)
    assert found.matched_by == "category, place, shape and dtype"


def test_the_row_of_a_difference_has_both_sides() -> None:
    a, b = tensor(count=3), tensor(count=5)
    assert match_tensors([a], [b], by_shape=True).rows == (TensorRow("count", "activations", "layers.*", a, b, 16),)
    only_a, only_b = tensor(8, where="head"), tensor(16, category="gradients", where=None)
    assert match_tensors([only_a], [only_b], by_shape=True).rows == (
        TensorRow("only in B", "gradients", None, None, only_b, 16),
        TensorRow("only in A", "activations", "head", only_a, None, -8),
    )


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"op": "addmm"}, ("operator", 0)),
        ({"num_bytes": 4, "dtype": "bfloat16"}, ("dtype", -4)),
        ({"num_bytes": 12, "shape": (3,)}, ("shape", 4)),
        ({"num_bytes": 6, "shape": (3,), "dtype": "bfloat16"}, ("shape", -2)),
        ({"dtype": "int32"}, ("dtype", 0)),
        ({"num_bytes": 12}, ("dtype", 4)),  # of one shape, and stored otherwise
    ],
)
def test_what_differs(changes: dict[str, Any], row: tuple[str, int]) -> None:
    assert match([tensor()], [tensor(**changes)]) == [row]


@pytest.mark.parametrize("changes", [{"category": "gradients"}, {"where": "head"}])
def test_another_place_is_another_tensor(changes: dict[str, Any]) -> None:
    assert sorted(match([tensor()], [tensor(**changes)])) == [("only in A", -8), ("only in B", 8)]


def test_a_tensor_of_one_run_hides_no_other_difference() -> None:
    assert match([tensor(where="gone"), tensor(count=3)], [tensor(count=5)]) == [("count", 16), ("only in A", -8)]


@pytest.mark.parametrize("changes", [{"num_bytes": 12, "shape": (3,)}, {"dtype": "int32"}])
def test_tensors_of_another_operator_differ_in_nothing_else(changes: dict[str, Any]) -> None:
    found = match([tensor()], [tensor(op="add", **changes)])
    assert sorted(status for status, _ in found) == ["only in A", "only in B"]


def test_operators_of_equal_tensors_are_taken_together() -> None:
    a = [tensor(op=op, source=f"{op}.py:1 f") for op in ("mul", "add", "sub", "div", "exp")]
    (row,) = match_tensors(a, [tensor(op="addmm", count=5)], by_shape=True).rows
    assert row.a is not None and (row.status, row.a.op, row.a.count) == ("operator", "add, div, exp, mul, sub", 5)
    assert row.a.source == "mul.py:1 f"  # that of the first


def test_equal_tensors_are_matched_before_those_of_another_operator() -> None:
    found = match_tensors([tensor()], [tensor(op="add"), tensor()], by_shape=True)
    assert (found.num_same, [(row.status, row.b.op) for row in found.rows if row.b]) == (1, [("only in B", "add")])


def test_tensors_of_one_operator_are_matched_in_order_of_size() -> None:
    a = [tensor(16, shape=(4,)), tensor(8, shape=(2,))]
    b = [tensor(40, shape=(10,)), tensor(12, shape=(3,))]
    rows = match_tensors(a, b, by_shape=True).rows
    assert [(row.a.num_bytes, row.b.num_bytes, row.status) for row in rows if row.a and row.b] == [
        (16, 40, "shape"), (8, 12, "shape"),
    ]  # fmt: skip
    # Of one size, by their number, and then by dtype.
    a = [tensor(count=2), tensor(shape=(1, 2), dtype="int32"), tensor(shape=(1, 2))]
    b = [tensor(shape=(1, 1, 2)), tensor(shape=(1, 1, 2), dtype="int32"), tensor(shape=(2, 1), count=2)]
    assert sorted((row.a.count, row.a.dtype, row.b.count, row.b.dtype)
                  for row in match_tensors(a, b, by_shape=True).rows if row.a and row.b) == [
        (1, "float32", 1, "float32"), (1, "int32", 1, "int32"), (2, "float32", 2, "float32"),
    ]  # fmt: skip


def test_which_of_several_is_new_cannot_be_told() -> None:
    a, b = [tensor(16, shape=(4,)), tensor(8, shape=(2,))], [tensor(12, shape=(3,)), tensor(40, shape=(10,))]
    assert sorted(match(a, [*b, tensor(4, shape=(1,))])) == [
        ("only in A", -16), ("only in A", -8), ("only in B", 4), ("only in B", 12), ("only in B", 40),
    ]  # fmt: skip


def test_the_largest_differences_come_first_then_by_category_and_place() -> None:
    a = [tensor(count=2, where="b"), tensor(count=2, where=None), tensor(count=2, where="a", category="gradients")]
    b = [tensor(where="b"), tensor(where=None), tensor(where="a", category="gradients"), tensor(24, where="new")]
    rows = match_tensors(a, b, by_shape=True).rows
    assert [(row.difference_bytes, row.category, row.where) for row in rows] == [
        (24, "activations", "new"), (-8, "activations", None), (-8, "activations", "b"), (-8, "gradients", "a"),
    ]  # fmt: skip


def test_without_shapes_only_bytes_are_compared() -> None:
    unknown = {"shape": None, "dtype": None}
    a = [tensor(**unknown), tensor(op="mul", where="head", category="gradients", **unknown), tensor(16, **unknown)]
    found = match_tensors(a, [tensor(op="add", count=2), tensor(16, count=3, op="other")], by_shape=False)
    assert (found.num_same, found.same_bytes, found.matched_by) == (1, 16, "bytes")
    (row,) = found.rows
    assert (row.status, row.difference_bytes) == ("count", 32)
    # A run without shapes has no operators to compare.
    for known, other in ((tensor(), tensor(op="add", **unknown)), (tensor(op="add", **unknown), tensor())):
        assert match_tensors([known], [other], by_shape=False).rows == ()
    # Of several places there is none, of several categories all.
    (row,) = match_tensors(a[:2], [tensor(count=3)], by_shape=False).rows
    assert (row.category, row.where, row.difference_bytes) == ("activations, gradients", None, 8)
    assert row.a is not None and (row.a.count, row.a.op) == (2, "mm, mul")
