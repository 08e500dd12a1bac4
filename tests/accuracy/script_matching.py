"""The allocations of a whole script on both sides, put side by side in order; and what explains those of one side alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tests.accuracy.cpu_events import Call, Change
from tests.accuracy.cpu_temporaries import NUMBER_BYTES, _in_order, _temporaries


class Matching(NamedTuple):
    """How the two sides of a script compare."""

    cpu: int
    """Allocations that the CPU made, those of the host alone left out."""
    virtual: int
    matched: int
    """In order and bytes."""
    kernels: Counter[str]
    """Of the CPU's rest: temporaries of its kernels (cpu_temporaries.py), by operator."""
    numbers: int
    """... single numbers, which a program on a card keeps on the host."""
    rest_cpu: Counter[tuple[str, int]]
    """... and what is left, by operator and bytes."""
    rest_virtual: Counter[tuple[str, int]]


def read(rows: Sequence[Sequence[object]]) -> list[Change]:
    """Changes as script_events.py writes them."""
    return [Change(*row[:4], tuple(Call(n, *_tuples(s, t), k) for n, s, t, k in row[4])) for row in rows]  # type: ignore[misc,attr-defined]


def _tuples(*lists: object) -> list[object]:
    return [tuple(None if part is None else tuple(part) for part in parts) for parts in lists]  # type: ignore[attr-defined]


def match(cpu: list[Change], virtual: list[Change]) -> Matching:
    """Lay both sides' allocations side by side."""
    temporaries = _temporaries(cpu)
    theirs = [c for c in _in_order([c for c in cpu if c.block not in temporaries]) if not c.free]
    ours = [c for c in virtual if not c.free]
    large = [[c for c in side if c.num_bytes > NUMBER_BYTES] for side in (theirs, ours)]
    pairs = longest_common([c.num_bytes for c in large[0]], [c.num_bytes for c in large[1]])
    matched_cpu = {large[0][i].block for i, _ in pairs}
    matched_ours = {large[1][j].block for _, j in pairs}
    # Numbers: between the same larger ones, those of the card have one on the CPU.
    gaps: list[defaultdict[tuple[int, int], list[Change]]] = []
    for side, known in ((theirs, matched_cpu), (ours, matched_ours)):
        gap, found = 0, defaultdict(list)
        for change in side:
            if change.num_bytes <= NUMBER_BYTES:
                found[gap, change.num_bytes].append(change)
            elif change.block in known:
                gap += 1
        gaps.append(found)
    surplus, single = 0, 0
    missing: list[Change] = []
    for key in {*gaps[0], *gaps[1]}:
        both = min(len(gaps[0][key]), len(gaps[1][key]))
        single += both
        surplus += len(gaps[0][key]) - both
        missing += gaps[1][key][both:]
    return Matching(
        cpu=len(theirs) + len(temporaries),
        virtual=len(ours),
        matched=len(pairs) + single,
        kernels=Counter(temporaries.values()),
        numbers=surplus,
        rest_cpu=Counter((_op(c), c.num_bytes) for c in large[0] if c.block not in matched_cpu),
        rest_virtual=Counter(
            (c.op, c.num_bytes) for c in [*missing, *(c for c in large[1] if c.block not in matched_ours)]
        ),
    )


def _op(change: Change) -> str:
    return change.calls[0].name if change.calls else change.op


def longest_common(left: Sequence[int], right: Sequence[int]) -> list[tuple[int, int]]:
    """Positions of a longest common subsequence (Myers' algorithm, which is quick where the two differ little)."""
    reach = {1: 0}
    traces: list[dict[int, int]] = []
    for apart in range(len(left) + len(right) + 1):
        traces.append(dict(reach))
        for diagonal in range(-apart, apart + 1, 2):
            down = diagonal == -apart or (diagonal != apart and reach[diagonal - 1] < reach[diagonal + 1])
            x = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            y = x - diagonal
            while x < len(left) and y < len(right) and left[x] == right[y]:
                x, y = x + 1, y + 1
            reach[diagonal] = x
            if x >= len(left) and y >= len(right):
                return _walked_back(traces, len(left), len(right))
    raise AssertionError("unreachable: two sequences differ by at most all they have")


def _walked_back(traces: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs = []
    for apart in range(len(traces) - 1, -1, -1):
        reach, diagonal = traces[apart], x - y
        down = diagonal == -apart or (diagonal != apart and reach[diagonal - 1] < reach[diagonal + 1])
        before = diagonal + 1 if down else diagonal - 1
        from_x = reach[before] if apart else 0
        from_y = from_x - before if apart else 0
        while x > from_x and y > from_y and (x, y) != (0, 0):
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = from_x, from_y
    return pairs[::-1]
