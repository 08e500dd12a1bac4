"""Traces, replayed by the compiled rules and by plain Python: the same after every event, under every setting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.allocator import TraceReplay
from memprof.trace.events import EventKind
from tests.lanes import examples
from tests.unit.allocator.compiled.forced import UNCOMPILED, played_by
from tests.unit.allocator.compiled.programs import CARD, SETTINGS, history, program
from tests.unit.allocator.requests import MIB
from tests.unit.allocator.traces import Script

SEEDS = st.integers(0, 1 << 32)


@pytest.mark.parametrize("text", SETTINGS.values(), ids=SETTINGS.keys())
@settings(max_examples=examples(30), deadline=None)
@given(seed=SEEDS, limited=st.booleans(), writes=st.booleans(), parts=st.lists(st.integers(0, 200), max_size=3))
def test_as_plain_python(text, seed, limited, writes, parts):
    trace, card = program(seed), CARD if limited else None
    with played_by(UNCOMPILED):
        one = history(trace, text, card, parts, writes=writes)
    with played_by(None) as none:
        two = history(trace, text, card, parts, writes=writes)
    assert one == two and not none


def test_up_to_the_first_refusal():
    trace = program(3)
    for functions in (UNCOMPILED, None):
        with played_by(functions):
            replay = TraceReplay(trace, CARD)
            replay.advance(stop_at_oom=True)
            oom = replay.timeline.first_oom
            assert oom is not None and replay.event == oom.event + 1 == len(replay.timeline.reserved)


@pytest.mark.parametrize("text", ["", "max_split_size_mb:40", "roundup_power2_divisions:8"])
def test_nothing_is_left_to_plain_python_that_need_not_be(text):
    """The first request has no free blocks on its stream yet, which plain Python makes; the rest is one stretch."""
    script = Script()
    kept = [script.new((number % 7) * 3 * MIB + 10_000) for number in range(400)]
    script.free(*kept[::2])
    kept = [script.new(2 * MIB), script.new(70 * MIB)]
    script.free(*kept)
    with played_by(UNCOMPILED) as lengths:
        history(script.trace, text, None, [], writes=True)
    assert max(lengths) > 600 and sum(lengths) > len(script.trace.events) - 10


def test_expandable_segments_that_have_grown():
    script = Script()
    for _ in range(30):
        script.free(*[script.new(9 * MIB + number) for number in range(20)])
    with played_by(UNCOMPILED) as lengths:
        history(script.trace, "expandable_segments:True", None, [], writes=True)
    assert sum(lengths) > len(script.trace.events) / 2


def test_more_blocks_than_there_is_room_for():
    script = Script()
    kept = [script.new(512) for _ in range(5000)]
    script.free(*kept[::3])
    outcomes = []
    for functions in (UNCOMPILED, None):
        with played_by(functions):
            outcomes.append(history(script.trace, "", None, [], writes=True))
    assert outcomes[0] == outcomes[1]


def test_numbers_that_no_allocator_has():
    script = Script()
    script.free(script.new(MIB))
    with played_by(UNCOMPILED) as lengths:
        TraceReplay(script.trace).advance()
        assert lengths
        lengths.clear()
        script.trace.storages[0] = script.trace.storages[0]._replace(num_bytes=1 << 70)
        script.trace.events[:] = [one for one in script.trace.events if one.kind is EventKind.PHASE]
        TraceReplay(script.trace).advance()
        assert not lengths
