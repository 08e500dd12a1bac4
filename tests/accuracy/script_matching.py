"""The allocations of a whole script on both sides, side by side in order; and what explains those of one side alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

from tests.accuracy.cpu_events import Change
from tests.accuracy.cpu_temporaries import NUMBER_BYTES, _in_order, _temporaries
from tests.accuracy.script_events import TO_GPU

# What the CPU allocates beyond the GPU (cpu_temporaries.py has the rest): operator, outermost or innermost -> why.
REASONS: dict[str, str] = {
    TO_GPU: "a move of what is on the GPU already: the CPU's stub for the GPU copies it, a GPU does not",
    "aten::sum": "booleans are cast to integers before their sum",
    "aten::repeat": "the order of dimensions, computed in tensors on the host",
    "aten::multinomial": "exponential variates: memory that no tensor shows, on CUDA too, where it is counted",
    "aten::cumsum": "scratch of a scan, as above",
    "aten::sort": "a copy of what is sorted, as above",
    "": "no operator: buffers of files and of the profiler",
}


# An operator that is one kernel on CUDA -> the CPU's operators that make tensors of the same sizes instead.
IN_PIECES = {"aten._fused_rms_norm_backward": ("aten::mul", "aten::pow", "aten::div", "aten::rms_norm")}


class Matching(NamedTuple):
    cpu: int  # Allocations that the CPU made, those of the host alone left out.
    virtual: int
    matched: int  # In order and bytes.
    kernels: Counter[str]  # Of the CPU's rest: temporaries of its kernels (cpu_temporaries.py), by operator.
    numbers: int  # ... single numbers, which a program on a GPU keeps on the host.
    explained: Counter[str]  # ... what REASONS has, by operator.
    rest_cpu: Counter[tuple[str, int]]  # ... and what is left, by operator and bytes.
    # Of the virtual GPU's rest: comparisons and reductions of `torch.isin`, one kernel on the CPU (TensorCompare.cpp).
    isin: int
    # Of the virtual GPU's rest: storages that copy.deepcopy copies, on the CPU outside of every operator.
    deep_copies: int
    rest_virtual: Counter[tuple[str, int]]  # Of the virtual GPU's, by operator and bytes.
    in_pieces: int = 0  # Of the virtual GPU's rest: results of operators that the CPU runs in pieces (IN_PIECES).


def match(cpu: list[Change], virtual: list[Change]) -> Matching:
    temporaries = _temporaries(cpu)
    theirs = [c for c in _in_order([c for c in cpu if c.block not in temporaries]) if not c.free]
    ours = [c for c in virtual if not c.free]
    large = [[c for c in side if c.num_bytes > NUMBER_BYTES] for side in (theirs, ours)]
    keys = [[_key(c) for c in side] for side in large]
    pairs = longest_common(len(keys[0]), len(keys[1]), lambda i, j: _same(keys[0][i], keys[1][j]))
    matched_cpu = {large[0][i].block for i, _ in pairs}
    matched_ours = {large[1][j].block for _, j in pairs}
    single, missing, surplus = _numbers(theirs, ours, matched_cpu, matched_ours)
    rest = [c for c in large[0] if c.block not in matched_cpu]
    reasons = [next((n for n in (c.op, *(call.name for call in c.calls)) if n in REASONS), None) for c in rest]
    alone = [*missing, *(c for c in large[1] if c.block not in matched_ours)]
    whole = [c for c in alone if c.op in IN_PIECES]
    pieces = {(piece, c.num_bytes) for c in whole for piece in IN_PIECES[c.op]}
    alone = [c for c in alone if c.op not in IN_PIECES]
    return Matching(
        cpu=len(theirs) + len(temporaries),
        virtual=len(ours),
        matched=len(pairs) + single,
        kernels=Counter(temporaries.values()),
        numbers=surplus,
        explained=Counter(reason for reason in reasons if reason is not None),
        rest_cpu=Counter(
            (_op(c), c.num_bytes)
            for c, why in zip(rest, reasons, strict=True)
            if why is None and (_op(c), c.num_bytes) not in pieces
        ),
        isin=_isin(alone),
        deep_copies=sum(c.op == "aten.clone" for c in alone),
        rest_virtual=Counter((c.op, c.num_bytes) for c in alone if not _isin(alone) and c.op != "aten.clone"),
        in_pieces=len(whole),
    )


def _isin(alone: list[Change]) -> int:
    """How many these are if they are a comparison and a reduction, of as many bytes, again and again; else 0."""
    sizes = {name: sorted(c.num_bytes for c in alone if c.op == name) for name in ("aten.eq", "aten.any")}
    return len(alone) if sizes["aten.eq"] == sizes["aten.any"] and len(alone) == 2 * len(sizes["aten.eq"]) else 0


def _numbers(
    theirs: list[Change], ours: list[Change], matched_cpu: set[int], matched_ours: set[int]
) -> tuple[int, list[Change], int]:
    """Numbers that both have between the same larger allocations, first those of the same operator; those of the GPU
    that are left; and how many the CPU has beyond."""
    gaps: list[defaultdict[tuple[int, int], list[Change]]] = []
    for side, known in ((theirs, matched_cpu), (ours, matched_ours)):
        gap, found = 0, defaultdict(list)
        for change in side:
            if change.num_bytes <= NUMBER_BYTES:
                found[gap, change.num_bytes].append(change)
            elif change.block in known:
                gap += 1
        gaps.append(found)
    waiting, matched, left = gaps[0], 0, []
    for strict in (True, False):
        left = []
        for (gap, num_bytes), changes in gaps[1].items():
            for change in changes:
                here = waiting[gap, num_bytes]
                fits = [c for c in here if not strict or _same(_key(c), _key(change))]
                if fits:
                    here.remove(fits[0])
                    matched += 1
                else:
                    left.append((gap, change))
        gaps[1] = defaultdict(list)
        for gap, change in left:
            gaps[1][gap, change.num_bytes].append(change)
    return matched, [change for _, change in left], sum(map(len, waiting.values()))


def _op(change: Change) -> str:
    return change.calls[0].name if change.calls else change.op


# Operators that have another name on the CPU.
_SAME = {
    "cudnn_batch_norm": "native_batch_norm",
    "cudnn_batch_norm_backward": "native_batch_norm_backward",
    "convolution": "_convolution",
}


def _key(change: Change) -> tuple[int, frozenset[str]]:
    """Bytes, and the operators that it may be of: on the CPU all those inside which it was made."""
    names = {call.name.removeprefix("aten::") for call in change.calls}
    own = change.op.removeprefix("aten.").removeprefix("aten::")
    if "repeat" in names and own != "empty":  # the order of dimensions, on the host
        names, own = {"repeat"}, "repeat"
    made = {TO_GPU, "empty"} if own == "_to_copy" else set()  # by a move, or by torch.tensor(..., device=...)
    return change.num_bytes, frozenset({*names, own, *made, *({_SAME[own]} if own in _SAME else ())})


def _same(left: tuple[int, frozenset[str]], right: tuple[int, frozenset[str]]) -> bool:
    return left[0] == right[0] and not left[1].isdisjoint(right[1])


def longest_common(left: int, right: int, same: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    """Positions of a longest common subsequence of two sequences of these lengths (Myers' algorithm, which is quick
    where they differ little)."""
    reach = {1: 0}
    traces: list[dict[int, int]] = []
    for apart in range(left + right + 1):
        traces.append(dict(reach))
        for diagonal in range(-apart, apart + 1, 2):
            down = diagonal == -apart or (diagonal != apart and reach[diagonal - 1] < reach[diagonal + 1])
            x = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            y = x - diagonal
            while x < left and y < right and same(x, y):
                x, y = x + 1, y + 1
            reach[diagonal] = x
            if x >= left and y >= right:
                return _walked_back(traces, left, right)
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
