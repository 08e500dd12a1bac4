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
    """Match the tensors of two peaks.

    The order is: equal tensors; tensors with another operator or count; tensors with another shape or dtype at the same
    place, by the same operator. The rest is only in one run. Where a file lacks shapes (`by_shape` is False), tensors
    are matched by their bytes alone.
    """
    matching = _TensorMatcher(a, b)
    if by_shape:
        matching.match_equal()
        matching.match_by_key(
            lambda tensor: (tensor.category, tensor.where, tensor.shape, tensor.dtype, tensor.num_bytes)
        )
        matching.match_changed()
    else:
        matching.match_by_key(lambda tensor: tensor.num_bytes)
    return matching.build_result(BY_SHAPE if by_shape else BY_BYTES)


def _make_exact_key(tensor: TensorGroup) -> Hashable:
    return tensor.category, tensor.where, tensor.op, tensor.shape, tensor.dtype, tensor.num_bytes


class _TensorMatcher:
    def __init__(self, a: list[TensorGroup], b: list[TensorGroup]) -> None:
        # Lines may change between releases of a library: rows that differ in nothing else are merged.
        self.a, self.b = (
            [_merge_tensors(alike) for alike, _ in _group_tensors(side, [], _make_exact_key)] for side in (a, b)
        )
        self.rows: list[TensorRow] = []
        self.num_same = self.same_bytes = 0

    def match_equal(self) -> None:
        """Match tensors that are equal in both runs, including their count."""
        for mine, theirs in _group_tensors(self.a, self.b, _make_exact_key):
            if mine and theirs and mine[0].count == theirs[0].count:
                self._remove(mine, theirs)
                self._count_equal(mine[0])

    def match_by_key(self, key: Callable[[TensorGroup], Hashable]) -> None:
        """Match tensors with the same key in both runs, with any operators and counts."""
        for mine, theirs in _group_tensors(self.a, self.b, key):
            if not mine or not theirs:
                continue
            self._remove(mine, theirs)
            first, other = _merge_tensors(mine), _merge_tensors(theirs)
            if first.count != other.count:
                self._add_row("count", first, other)
            elif first.shape is not None and other.shape is not None and first.op != other.op:
                self._add_row("operator", first, other)
            else:
                self._count_equal(first)

    def match_changed(self) -> None:
        """Match tensors of the same owner and operator by size, if both runs have equally many."""
        for mine, theirs in _group_tensors(self.a, self.b, lambda tensor: (tensor.category, tensor.where, tensor.op)):
            if len(mine) == len(theirs):
                self._remove(mine, theirs)
                for first, other in zip(sorted(mine, key=_size_key), sorted(theirs, key=_size_key), strict=True):
                    self._add_row("dtype" if first.shape == other.shape else "shape", first, other)

    def build_result(self, matched_by: str) -> MatchResult:
        for tensor in self.a:
            self._add_row(ONLY_IN_A, tensor, None)
        for tensor in self.b:
            self._add_row(ONLY_IN_B, None, tensor)
        rows = sorted(self.rows, key=lambda row: (-abs(row.difference_bytes), row.category, row.where or ""))
        return MatchResult(tuple(rows), self.num_same, self.same_bytes, matched_by)

    def _remove(self, mine: list[TensorGroup], theirs: list[TensorGroup]) -> None:
        for tensor in mine:
            self.a.remove(tensor)
        for tensor in theirs:
            self.b.remove(tensor)

    def _count_equal(self, tensor: TensorGroup) -> None:
        self.num_same += 1
        self.same_bytes += tensor.total_bytes

    def _add_row(self, status: str, mine: TensorGroup | None, theirs: TensorGroup | None) -> None:
        known = mine or theirs
        assert known is not None
        size = [0 if tensor is None else tensor.total_bytes for tensor in (mine, theirs)]
        self.rows.append(TensorRow(status, known.category, known.where, mine, theirs, size[1] - size[0]))


def _size_key(tensor: TensorGroup) -> tuple[int, int, str]:
    return tensor.num_bytes, tensor.count, str(tensor.dtype)


def _merge_tensors(alike: list[TensorGroup]) -> TensorGroup:
    """Return tensors as one group, with all their operators and categories, and the owner if all have the same."""
    return replace(
        alike[0],
        op=", ".join(sorted({tensor.op for tensor in alike})),
        where=alike[0].where if len({tensor.where for tensor in alike}) == 1 else None,
        category=", ".join(sorted({tensor.category for tensor in alike})),
        count=sum(tensor.count for tensor in alike),
    )


def _group_tensors(
    a: list[TensorGroup], b: list[TensorGroup], key: Callable[[TensorGroup], Hashable]
) -> list[tuple[list[TensorGroup], list[TensorGroup]]]:
    found: dict[Hashable, tuple[list[TensorGroup], list[TensorGroup]]] = defaultdict(lambda: ([], []))
    for side, tensors in enumerate((a, b)):
        for tensor in tensors:
            found[key(tensor)][side].append(tensor)
    return list(found.values())
