"""The ledger's rules on random traces: rows sum to the peak, and stages cover every event once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.allocator.rounding import round_size
from memprof.ledger.categories import Category
from memprof.ledger.ledger import build_ledger, find_live_storages
from memprof.ledger.stages import list_spans
from memprof.trace.events import (
    HOST,
    NONE,
    Event,
    EventKind,
    Module,
    ModuleRole,
    Owner,
    Phase,
    PhaseKind,
    Role,
    Storage,
    Trace,
)
from tests.lanes import examples

MIB = 1 << 20


MODULES = [
    Module("", "Model", ModuleRole.ROOT, ""),
    Module("embedding", "Embedding", ModuleRole.EMBEDDING, ""),
    *(Module(f"layers.{i}", "Layer", ModuleRole.LAYER, "layers") for i in range(3)),
    Module("layers.0.norm", "Norm", ModuleRole.NORM, ""),
    Module("head", "Linear", ModuleRole.HEAD, ""),
    Module("child", "Linear", ModuleRole.CHILD, ""),
]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any order of phases, well-nested module calls, births and deaths, that a recorder could write."""
    trace = Trace(ops=["a", "b"], sources=["s", "cache_utils.py:1 f"], modules=list(MODULES))
    trace.phases.append(Phase(PhaseKind.OTHER, 0, 0))
    trace.events.append(Event(EventKind.PHASE, 0))
    stack: list[int] = []
    alive: list[int] = []
    for action in draw(st.lists(st.sampled_from("pexaaaaff"), max_size=60)):
        if action == "p" and not stack:
            trace.phases.append(Phase(draw(st.sampled_from(list(PhaseKind))), draw(st.integers(0, 2)), 1))
            trace.events.append(Event(EventKind.PHASE, len(trace.phases) - 1))
        elif action == "e":
            stack.append(draw(st.integers(0, len(MODULES) - 1)))
            trace.events.append(Event(EventKind.ENTER, stack[-1]))
        elif action == "x" and stack:
            trace.events.append(Event(EventKind.EXIT, stack.pop()))
        elif action == "a":
            index = len(trace.storages)
            num_bytes = draw(st.one_of(st.integers(1, 5000), st.integers(MIB, 50 * MIB)))
            forward = draw(st.integers(NONE, len(trace.events) - 1))
            trace.storages.append(
                Storage(
                    num_bytes, (num_bytes,), "uint8", draw(st.sampled_from(["cuda:0", "cuda:0", HOST])),
                    draw(st.integers(0, 1)), stack[-1] if stack else NONE, draw(st.integers(NONE, 1)),
                    len(trace.phases) - 1, forward, draw(st.booleans()),
                )
            )  # fmt: skip
            trace.events.append(Event(EventKind.ALLOC, index))
            alive.append(index)
            if draw(st.integers(0, 3)) == 0:
                trace.owners[index] = Owner(draw(st.sampled_from(list(Role))), f"layers.{index}.weight")
        elif action == "f" and alive:
            trace.events.append(Event(EventKind.FREE, alive.pop(draw(st.integers(0, len(alive) - 1)))))
    while stack:
        trace.events.append(Event(EventKind.EXIT, stack.pop()))
    return trace


def brute_force(trace: Trace) -> list[set[int]]:
    """The GPU storages live after every event."""
    result = []
    for time in range(len(trace.events)):
        counts = Counter[int]()
        for event in trace.events[: time + 1]:
            if event.kind is EventKind.ALLOC:
                counts[event.ref] += 1
            elif event.kind is EventKind.FREE:
                counts[event.ref] -= 1
        result.append({i for i, n in counts.items() if n and trace.storages[i].device != HOST})
    return result


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(traces())
def test_rows_sum_to_the_peak_and_the_live_set_is_right(trace: Trace) -> None:
    alive = brute_force(trace)
    if not any(alive):
        with pytest.raises(ValueError, match="no allocation"):
            build_ledger(trace)
        return
    ledger = build_ledger(trace)
    blocks = ledger.run.timeline.blocks
    for index, block in blocks.items():
        assert 0 <= block - round_size(trace.storages[index].num_bytes) <= MIB
    totals = [sum(blocks[i] for i in now) for now in alive]
    assert list(ledger.allocated) == totals
    assert ledger.peak_bytes == max(totals) == totals[ledger.peak_event]
    assert sum(row.allocated_bytes for row in ledger.rows) == ledger.peak_bytes
    rest = ledger.sum_by_category().get(Category.FRAGMENTATION, 0)
    assert sum(tensor.allocated_bytes for tensor in ledger.live) + rest == ledger.peak_bytes
    assert sum(ledger.sum_by_category().values()) == ledger.peak_bytes
    assert max(stage.peak_reserved_bytes for stage in ledger.stages) == ledger.peak_reserved_bytes >= ledger.peak_bytes
    live = [index for tensor in ledger.live for index in tensor.storages]
    assert len(live) == len(set(live)) and set(live) == alive[ledger.peak_event] == set(
        find_live_storages(trace, ledger.peak_event, ledger.run.refused)
    )
    assert all(tensor.count == len(tensor.storages) for tensor in ledger.live)
    assert len(ledger.categories) == len(trace.storages)


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(traces())
def test_stages_cover_every_birth_and_death_once(trace: Trace) -> None:
    moves = [t for t, event in enumerate(trace.events) if event.kind in (EventKind.ALLOC, EventKind.FREE)]
    found = list_spans(trace)
    covered = [t for span in found for t in range(span.begin, span.end)]
    assert len(covered) == len(set(covered)) and covered == sorted(covered)
    assert set(moves) <= set(covered)
    assert all(any(span.begin <= t < span.end for t in moves) for span in found)
