"""Matches of the tensors of two runs' peaks, and the differences of the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from memprof.report.documents.comparison import ONLY_IN_A, ONLY_IN_B, TensorRow, TensorSide

BY_SHAPE = "category, place, shape and dtype"
BY_BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Matched:
    """The result of matching the tensors of two runs."""

    rows: tuple[TensorRow, ...]  # Those that are not the same, largest differences first.
    same: int
    same_bytes: int
    by: str


def match_tensors(a: list[TensorSide], b: list[TensorSide], *, by_shape: bool) -> Matched:
    """Pair the tensors of two peaks.

    In this order: all the same; another operator or another number of them; another shape or dtype at the same place,
    by the same operator. What is left is only in one. Where a file does not know shapes (`by_shape` is False), tensors
    are matched by their bytes alone.
    """
    matching = _Matching(a, b)
    if by_shape:
        matching.equal()
        matching.alike(lambda one: (one.category, one.where, one.shape, one.dtype, one.num_bytes))
        matching.changed()
    else:
        matching.alike(lambda one: one.num_bytes)
    return matching.result(BY_SHAPE if by_shape else BY_BYTES)


def _exact(one: TensorSide) -> Hashable:
    return one.category, one.where, one.op, one.shape, one.dtype, one.num_bytes


class _Matching:
    def __init__(self, a: list[TensorSide], b: list[TensorSide]) -> None:
        # Lines may differ from release to release of a library: rows that differ in nothing else are one.
        self.a, self.b = ([_sum(alike) for alike, _ in _groups(side, [], _exact)] for side in (a, b))
        self.rows: list[TensorRow] = []
        self.same = self.same_bytes = 0

    def equal(self) -> None:
        """Take out what is the same, count included."""
        for mine, theirs in _groups(self.a, self.b, _exact):
            if mine and theirs and mine[0].count == theirs[0].count:
                self._take(mine, theirs)
                self._are_the_same(mine[0])

    def alike(self, key: Callable[[TensorSide], Hashable]) -> None:
        """Pair what has the same key on both sides, whatever its operators and however many there are."""
        for mine, theirs in _groups(self.a, self.b, key):
            if not mine or not theirs:
                continue
            self._take(mine, theirs)
            first, other = _sum(mine), _sum(theirs)
            if first.count != other.count:
                self._row("count", first, other)
            elif first.shape is not None and other.shape is not None and first.op != other.op:
                self._row("operator", first, other)
            else:
                self._are_the_same(first)

    def changed(self) -> None:
        """Pair by size what is at one place by one operator, where both sides have as many kinds of it."""
        for mine, theirs in _groups(self.a, self.b, lambda one: (one.category, one.where, one.op)):
            if len(mine) == len(theirs):
                self._take(mine, theirs)
                for first, other in zip(sorted(mine, key=_size), sorted(theirs, key=_size), strict=True):
                    self._row("dtype" if first.shape == other.shape else "shape", first, other)

    def result(self, by: str) -> Matched:
        for one in self.a:
            self._row(ONLY_IN_A, one, None)
        for one in self.b:
            self._row(ONLY_IN_B, None, one)
        rows = sorted(self.rows, key=lambda row: (-abs(row.difference_bytes), row.category, row.where or ""))
        return Matched(tuple(rows), self.same, self.same_bytes, by)

    def _take(self, mine: list[TensorSide], theirs: list[TensorSide]) -> None:
        for one in mine:
            self.a.remove(one)
        for one in theirs:
            self.b.remove(one)

    def _are_the_same(self, one: TensorSide) -> None:
        self.same += 1
        self.same_bytes += one.total_bytes

    def _row(self, status: str, mine: TensorSide | None, theirs: TensorSide | None) -> None:
        known = mine or theirs
        assert known is not None
        size = [0 if one is None else one.total_bytes for one in (mine, theirs)]
        self.rows.append(TensorRow(status, known.category, known.where, mine, theirs, size[1] - size[0]))


def _size(one: TensorSide) -> tuple[int, int, str]:
    return one.num_bytes, one.count, str(one.dtype)


def _sum(alike: list[TensorSide]) -> TensorSide:
    """Return alike tensors as one row; of their operators, places and lines, all that there are."""
    return replace(
        alike[0],
        op=", ".join(sorted({one.op for one in alike})),
        where=alike[0].where if len({one.where for one in alike}) == 1 else None,
        category=", ".join(sorted({one.category for one in alike})),
        count=sum(one.count for one in alike),
    )


def _groups(
    a: list[TensorSide], b: list[TensorSide], key: Callable[[TensorSide], Hashable]
) -> list[tuple[list[TensorSide], list[TensorSide]]]:
    found: dict[Hashable, tuple[list[TensorSide], list[TensorSide]]] = defaultdict(lambda: ([], []))
    for side, tensors in enumerate((a, b)):
        for one in tensors:
            found[key(one)][side].append(one)
    return list(found.values())
