import json

import pytest
from hypothesis import given, settings

from memprof.allocator import GpuMemory, replay_in_host_memory, replay_on_gpu
from memprof.ledger.ledger import build_ledger
from memprof.ledger.over_time import FRAGMENTATION, OverTime, build_over_time, select_peak_events, sum_by_category
from memprof.trace.events import CPU, HOST, PhaseKind, Role
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


def test_bytes_and_peaks_of_each_category():
    """Of every kind of event that changes them, and of those that do not: host memory, another GPU, empty storages."""
    b = TraceBuilder()
    b.parameter("weight", 100)  # 512 bytes
    b.phase(PhaseKind.INPUTS)
    batch = b.new(1000, dtype="uint8")
    b.new(3 * MIB, dtype="uint8", device=HOST)
    b.new(3 * MIB, dtype="uint8", device="cuda:1")
    b.new(0)
    failed = b.new(3 * MIB, dtype="uint8")
    b.free(failed)
    b.trace.refused.append(failed)
    large = b.new(45 * MIB, dtype="uint8")  # in a segment of 46 MiB, whose last MiB is not split off
    b.free(large)
    b.free(batch)
    b.new(700, dtype="uint8")
    ledger = build_ledger(b.trace, replay_on_gpu(b.trace, GpuMemory(50 * MIB, 0)))
    end = len(b.trace.events) - 1
    sizes, peaks = sum_by_category(ledger, [3, 9, end])
    assert sizes == {
        "parameters": [512, 512, 512],
        "inputs": [1024, 45 * MIB + 1024, 1024],
        "fragmentation": [0, MIB, 0],
    }
    assert peaks == {"parameters": 512, "inputs": 45 * MIB + 1024, "fragmentation": MIB}
    assert sum_by_category(ledger, []) == ({}, {})


def test_a_run_on_the_cpu_has_no_fragmentation():
    b = TraceBuilder()
    b.trace.device = CPU
    b.alloc(1, device=CPU)
    sizes, peaks = sum_by_category(build_ledger(b.trace, replay_in_host_memory(b.trace)), [1])
    assert sizes == {"inputs": [1], "fragmentation": [0]} and peaks == {"inputs": 1, "fragmentation": 0}


def test_at_most_a_hundred_moments_and_the_first_event_of_each_step():
    b = TraceBuilder()
    for step in (1, 2):
        for micro_batch in (1, 2):
            b.phase(PhaseKind.FORWARD, step, micro_batch)
            for _ in range(30):
                b.free(b.alloc(512))
    b.alloc(MIB)
    b.phase(PhaseKind.OTHER)  # with as much
    found = build_over_time(build_ledger(b.trace))
    assert (found.num_events, len(found.events)) == (247, 100)
    assert found.steps == ((1, 1), (2, 123)) and found.peak_event == found.events[-1] == 245
    assert build_over_time(build_ledger(b.trace, replay_on_gpu(b.trace, GpuMemory(MIB, 0)))).failed_event == 2


def test_the_largest_category_comes_first():
    b = TraceBuilder()
    b.parameter("weight", 1000)
    b.phase(PhaseKind.INPUTS)
    b.new(2000)
    b.phase(PhaseKind.BACKWARD)
    b.new(1500, owner=(Role.GRADIENT, "weight"))
    found = build_over_time(build_ledger(b.trace))
    assert found.most_bytes == {"inputs": 8192, "gradients": 6144, "parameters": 4096}
    assert list(found.categories) == list(found.most_bytes) == ["inputs", "gradients", "parameters"]
    assert found.categories["inputs"] == (0, 0, 0, 8192, 8192, 8192)
