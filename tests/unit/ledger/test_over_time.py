import json

import pytest
from hypothesis import given, settings

from memprof.ledger.ledger import build_ledger
from memprof.ledger.over_time import FRAGMENTATION, OverTime, build_over_time, select_peak_events, sum_by_category
from memprof.trace.events import PhaseKind
from memprof.trace.json_values import from_plain, to_plain
from memprof.units import MIB
from tests.golden.test_report import training_run
from tests.lanes import examples
from tests.unit.report.runs import traces
from tests.unit.traces import TraceBuilder


@given(traces())
@settings(max_examples=examples(60), deadline=None)
def test_categories_sum_to_what_is_allocated_at_every_event(trace):
    ledger = build_ledger(trace)
    everything = range(len(ledger.allocated))
    held, most = sum_by_category(ledger, everything)
    for event in everything:
        assert sum(column[event] for column in held.values()) == ledger.allocated[event]
    assert {name: max(column) for name, column in held.items()} == most
    at_peak = {name: column[ledger.peak_event] for name, column in held.items()}
    known = {category.value: num_bytes for category, num_bytes in ledger.sum_by_category().items()}
    assert {name: size for name, size in at_peak.items() if size} == {n: s for n, s in known.items() if s}


def test_moments_of_a_run():
    ledger = build_ledger(training_run())
    found = build_over_time(ledger)
    assert found.num_events == len(ledger.allocated) and found.peak_event in found.events
    assert found.allocated_bytes == tuple(ledger.allocated[event] for event in found.events)
    assert max(found.allocated_bytes) == ledger.peak_bytes
    assert [step for step, _ in found.steps] == [1, 2] and found.failed_event is None
    assert FRAGMENTATION not in found.categories  # it never takes a hundredth
    assert list(found.most_bytes.values()) == sorted(found.most_bytes.values(), reverse=True)
    assert from_plain(OverTime, json.loads(json.dumps(to_plain(found)))) == found


@pytest.mark.parametrize(("num_bytes", "is_shown"), [(2 * MIB - 512, False), (2 * MIB, True)])
def test_categories_are_shown_from_a_hundredth_of_the_peak_on(num_bytes, is_shown):
    b = TraceBuilder()
    b.parameter("weight", 99 * MIB, dtype="bfloat16")
    b.phase(PhaseKind.FORWARD)
    b.new(num_bytes, dtype="uint8")
    assert ("activations" in build_over_time(build_ledger(b.trace)).categories) == is_shown


def test_each_stretch_is_shown_by_its_fullest_moment():
    allocated = [0, 5, 1, 9, 9, 2, 7, 0]
    assert select_peak_events(allocated, 4, 4) == [1, 3, 4, 6]
    assert select_peak_events(allocated, 1, 3) == [3] and select_peak_events(allocated, 100, 4) == list(range(8))
