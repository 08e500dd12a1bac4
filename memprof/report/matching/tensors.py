"""Matching of the tensors at the peaks of two runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from memprof.report.documents.comparison import ONLY_IN_A, ONLY_IN_B, TensorGroup, TensorRow

BY_SHAPE = "category, place, shape and dtype"
BY_BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The result of matching the tensors of two runs."""

    rows: tuple[TensorRow, ...]  # Rows that differ, largest differences first.
    num_same: int
    same_bytes: int
    matched_by: str


def match_tensors(a: list[TensorGroup], b: list[TensorGroup], *, by_shape: bool) -> MatchResult:
    """Match the tensors live at the peaks of two runs, and return the differences.

    Matched first are equal tensors, then tensors that differ only in operator or count, then tensors of the same owner
    and operator. Unmatched tensors are in one run only. Without shapes (`by_shape` is False), only bytes are compared.
    """
    matcher = _TensorMatcher(a, b)
    if by_shape:
        matcher.match_equal()
        matcher.match_by_key(
            lambda tensor: (tensor.category, tensor.where, tensor.shape, tensor.dtype, tensor.num_bytes)
        )
        matcher.match_changed()
    else:
        matcher.match_by_key(lambda tensor: tensor.num_bytes)
    return matcher.build_result(BY_SHAPE if by_shape else BY_BYTES)


def _make_exact_key(tensor: TensorGroup) -> Hashable:
    return tensor.category, tensor.where, tensor.op, tensor.shape, tensor.dtype, tensor.num_bytes


class _TensorMatcher:
    def __init__(self, a: list[TensorGroup], b: list[TensorGroup]) -> None:
        # Lines may change between releases of a library: rows that differ in nothing else are merged.
        self.a, self.b = (
            [_merge_tensors(group) for group, _ in _group_tensors(side, [], _make_exact_key)] for side in (a, b)
        )
        self.rows: list[TensorRow] = []
        self.num_same = self.same_bytes = 0

    def match_equal(self) -> None:
        """Match tensors that are equal in both runs, including their count."""
        for a_group, b_group in _group_tensors(self.a, self.b, _make_exact_key):
            if a_group and b_group and a_group[0].count == b_group[0].count:
                self._remove(a_group, b_group)
                self._count_equal(a_group[0])

    def match_by_key(self, key: Callable[[TensorGroup], Hashable]) -> None:
        """Match tensors with the same `key` in both runs, whatever their operators and counts."""
        for a_group, b_group in _group_tensors(self.a, self.b, key):
            if not a_group or not b_group:
                continue
            self._remove(a_group, b_group)
            a_tensor, b_tensor = _merge_tensors(a_group), _merge_tensors(b_group)
            if a_tensor.count != b_tensor.count:
                self._add_row("count", a_tensor, b_tensor)
            elif a_tensor.shape is not None and b_tensor.shape is not None and a_tensor.op != b_tensor.op:
                self._add_row("operator", a_tensor, b_tensor)
            else:
                self._count_equal(a_tensor)

    def match_changed(self) -> None:
        """Match tensors of the same owner and operator in order of size, if both runs have the same number of them."""
        for a, b in _group_tensors(self.a, self.b, lambda t: (t.category, t.where, t.op)):
            if len(a) == len(b):
                self._remove(a, b)
                for first, second in zip(sorted(a, key=_size_key), sorted(b, key=_size_key), strict=True):
                    self._add_row("dtype" if first.shape == second.shape else "shape", first, second)

    def build_result(self, matched_by: str) -> MatchResult:
        for tensor in self.a:
            self._add_row(ONLY_IN_A, tensor, None)
        for tensor in self.b:
            self._add_row(ONLY_IN_B, None, tensor)
        rows = sorted(self.rows, key=lambda row: (-abs(row.difference_bytes), row.category, row.where or ""))
        return MatchResult(tuple(rows), self.num_same, self.same_bytes, matched_by)

    def _remove(self, a_group: list[TensorGroup], b_group: list[TensorGroup]) -> None:
        for tensor in a_group:
            self.a.remove(tensor)
        for tensor in b_group:
            self.b.remove(tensor)

    def _count_equal(self, tensor: TensorGroup) -> None:
        self.num_same += 1
        self.same_bytes += tensor.total_bytes

    def _add_row(self, status: str, a_tensor: TensorGroup | None, b_tensor: TensorGroup | None) -> None:
        either = a_tensor or b_tensor
        assert either is not None
        sizes = [0 if tensor is None else tensor.total_bytes for tensor in (a_tensor, b_tensor)]
        self.rows.append(TensorRow(status, either.category, either.where, a_tensor, b_tensor, sizes[1] - sizes[0]))


def _size_key(tensor: TensorGroup) -> tuple[int, int, str]:
    return tensor.num_bytes, tensor.count, str(tensor.dtype)


def _merge_tensors(tensors: list[TensorGroup]) -> TensorGroup:
    """Return `tensors` as one group, with all their operators and categories, and their owner if it is the same."""
    return replace(
        tensors[0],
        op=", ".join(sorted({tensor.op for tensor in tensors})),
        where=tensors[0].where if len({tensor.where for tensor in tensors}) == 1 else None,
        category=", ".join(sorted({tensor.category for tensor in tensors})),
        count=sum(tensor.count for tensor in tensors),
    )


def _group_tensors(
    a: list[TensorGroup], b: list[TensorGroup], key: Callable[[TensorGroup], Hashable]
) -> list[tuple[list[TensorGroup], list[TensorGroup]]]:
    groups: dict[Hashable, tuple[list[TensorGroup], list[TensorGroup]]] = defaultdict(lambda: ([], []))
    for side_index, tensors in enumerate((a, b)):
        for tensor in tensors:
            groups[key(tensor)][side_index].append(tensor)
    return list(groups.values())
