"""Recordings, replayed by the compiled rules and by plain Python: the same, also where they are damaged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.allocator import Recorded, parse_config, replay_snapshot
from memprof.trace.snapshot import Snapshot
from tests.lanes import examples
from tests.unit.allocator.compiled.forced import UNCOMPILED, played_by
from tests.unit.allocator.recorder import Recorder
from tests.unit.allocator.requests import MIB, SIZES, TOTAL
from tests.unit.allocator.test_recorded import SETTINGS, run


def both(snapshot: Snapshot) -> tuple[list[Recorded], list[int]]:
    """What came out, twice the same; and the stretches that were played by the compiled rules."""
    with played_by(None):
        plain = replay_snapshot(snapshot, TOTAL)
    with played_by(UNCOMPILED) as lengths:
        found = replay_snapshot(snapshot, TOTAL)
    assert found == plain
    return found, lengths


@pytest.mark.parametrize("text", SETTINGS.values(), ids=SETTINGS.keys())
@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 1 << 32), part=st.floats(0, 1))
def test_as_plain_python(text, seed, part):
    recorder = run(text, seed)
    both(recorder.snapshot(round(part * len(recorder.events))))


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 1 << 32), text=st.sampled_from(sorted(SETTINGS.values())), data=st.data())
def test_damaged_ones_too(seed, text, data):
    snapshot = run(text, seed, steps=60).snapshot()
    trace = snapshot.traces[0]
    if not trace:
        return
    at = data.draw(st.integers(0, len(trace) - 1))
    number = data.draw(st.sampled_from([0, *SIZES, 1 << 56, 1 << 58, (1 << 64) - 1, trace[0].address]))
    field = data.draw(st.sampled_from(["address", "size", "stream"]))
    trace[at] = trace[at]._replace(**{field: number})
    both(snapshot)


def steady() -> Recorder:
    """Three turns of the same loop."""
    recorder = Recorder(parse_config(""), TOTAL)
    for _ in range(3):
        blocks = [recorder.malloc(size) for size in (MIB, 5 * MIB, 300, 30 * MIB, 11 * MIB)]
        for block in blocks:
            assert block is not None
            recorder.free(block)
    return recorder


def test_what_is_usual_is_one_stretch():
    recorder = steady()
    (found,), lengths = both(recorder.snapshot())
    assert found.exact
    assert max(lengths) > len(recorder.events) / 2


def test_the_first_difference():
    snapshot = steady().snapshot()
    trace = snapshot.traces[0]
    last = max(index for index, event in enumerate(trace) if event.action == "alloc")
    elsewhere = trace[last].address + 512
    for index in (last, len(trace) - 2, len(trace) - 1):
        trace[index] = trace[index]._replace(address=elsewhere)
    (found,), lengths = both(snapshot)
    assert found.first_difference is not None and found.first_difference.event == last
    assert found.identical_addresses == found.allocations - 1 and sum(lengths) > 10
