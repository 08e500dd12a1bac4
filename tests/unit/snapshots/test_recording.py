"""Recordings known by hand: amounts, what is live, categories, fragmentation, refusals, leaks and what-if."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.allocator import parse_config
from memprof.report.documents.analysis_build import AnalysisRequest, RecordingOrigin, build_analysis
from memprof.snapshots.occupancy import group_blocks, measure_fragmentation
from memprof.snapshots.out_of_memory import find_out_of_memory_events
from memprof.snapshots.recording import BEFORE, NEVER, build_recordings
from memprof.snapshots.steps import _is_regular, find_leaks, find_steps
from memprof.trace.snapshot import Frame
from tests.lanes import examples
from tests.unit.snapshots.builder import (
    ACTIVATION,
    GRADIENT,
    INPUT,
    MIB,
    OPTIMIZER,
    WEIGHT,
    Program,
    stack,
    training,
)


def only(program: Program, last: int | None = None):
    (found,) = build_recordings(program.snapshot(last))
    assert found.replay.exact
    return found


def test_amounts_and_peak():
    found = only(training())
    assert found.start == (0, 0, 0)
    # From the second step on: weight, state, input, activations and gradient.
    assert found.peak() == (162 * MIB, found.peak()[1])
    assert found.at(found.end)[1] == 90 * MIB
    assert found.peak("requested")[0] == 162 * MIB
    alive = found.alive(found.peak()[1])
    assert sum(life.size for life in alive) == 162 * MIB
    # The last time that it is reached: the gradient of the last step.
    assert found.events[found.peak()[1]].frames == GRADIENT


def test_categories_are_guessed_from_stacks_and_lives():
    found = only(training(leak=True))
    of = {life.stack: life.category for life in found.lives}
    assert of[WEIGHT] == "parameters"
    assert of[INPUT] == "inputs"
    assert of[ACTIVATION] == "activations"
    assert of[OPTIMIZER] == "optimizer state"
    assert of[GRADIENT] == "gradients"


def test_a_forward_alone_leaves_activations():
    """No backward follows: what outlives the call of a module is an activation all the same."""
    program = Program()
    block, head = ("block.py:20 forward", "call"), ("head.py:3 forward", "call")
    inside = program.malloc(4 * MIB, stack("block.py:19 forward", "call", "net.py:7 forward", "call"))
    result = program.malloc(5 * MIB, stack(*block, "net.py:7 forward", "call"))
    program.free(inside)
    program.free(program.malloc(6 * MIB, stack(*head, "net.py:9 forward", "call")), result)
    found = only(program)
    assert [life.category for life in found.lives] == ["temporaries", "activations", "temporaries"]


def test_what_the_backward_frees_was_saved_outside_modules_too():
    program = Program()
    saved = program.malloc(4 * MIB, stack("attention.py:3 attend", op="mul_Tensor"))
    other = program.malloc(4 * MIB, stack("attention.py:9 attend", op="mul_Tensor"))
    gradients = [program.malloc(3 * MIB, GRADIENT)]
    program.free(saved)
    gradients.append(program.malloc(2 * MIB, GRADIENT))
    program.malloc(MIB, INPUT)
    program.free(other)
    found = only(program)
    assert [life.category for life in found.lives[:2]] == ["activations", "unattributed"]


def test_a_row_has_one_category():
    """Blocks of one line that are for different things are different rows; a kind is counted as a whole."""
    program = Program()
    line = "model.py:12 forward", "call"
    for _ in range(12):
        program.malloc(3 * MIB, stack(*line))
    program.malloc(2 * MIB, (Frame("", 0, "at::cuda::getCUDABlasLtWorkspace()"), *stack(*line)))
    found = only(program)
    groups = group_blocks(found.alive(found.end), "frame")
    assert [(one.category, one.count) for one in groups] == [("activations", 12), ("library workspace", 1)]
    document = build_analysis([found], RecordingOrigin("a", "b", "measured", ""), AnalysisRequest(top=2))
    assert [block.alike for block in document.devices[0].moment.blocks] == [12, 12]


def test_groups():
    found = only(training())
    alive = found.alive(found.peak()[1])
    frames = {one.key: (one.allocated_bytes, one.count) for one in group_blocks(alive, "frame")}
    assert frames == {
        "/home/me/train.py:50 train": (60 * MIB, 2),
        "/home/me/model.py:12 forward": (40 * MIB, 2),
        "/home/me/model.py:5 __init__": (30 * MIB, 1),
        "autograd MmBackward0": (30 * MIB, 1),
        "/home/me/train.py:40 train": (2 * MIB, 1),
    }
    assert next(one.key for one in group_blocks(alive, "module")) == "(optimizer)"
    assert {one.key for one in group_blocks(alive, "size")} == {"10 to 100 MiB", "1 to 10 MiB"}
    for by in ("frame", "module", "category", "size"):
        assert sum(one.allocated_bytes for one in group_blocks(alive, by)) == 162 * MIB


def test_recorded_from_the_middle():
    """The beginning is rebuilt from the end; blocks older than the trace have their stack in the final segments."""
    program = training()
    whole = only(program)
    found = only(program, last=12)
    assert found.start == whole.at(len(whole.events) - 13)
    assert found.at(found.end) == whole.at(whole.end)
    old = [life for life in found.lives if life.born == BEFORE and life.freed == NEVER]
    assert {life.stack for life in old} == {WEIGHT, OPTIMIZER}


@pytest.mark.parametrize(("num_bytes", "is_nearly_empty"), [(5 * MIB - 512, True), (5 * MIB, False)])
def test_a_segment_is_nearly_empty_if_less_than_a_quarter_is_in_use(num_bytes, is_nearly_empty):
    program = Program()
    freed = [program.malloc(size * MIB) for size in (6, 7)]
    program.malloc(num_bytes)
    program.free(*freed)
    found = only(program)
    (segment,) = measure_fragmentation(found, found.end)[1]
    assert (segment.size, segment.used, segment.is_nearly_empty) == (20 * MIB, num_bytes, is_nearly_empty)


@pytest.mark.parametrize(
    ("events", "is_regular"),
    [
        ([0, 10, 20], True),
        ([0, 99, 109, 120], True),  # the first step is longer
        ([0, 9, 19], True),  # one of ten
        ([0, 9, 19, 32], False),
    ],
)
def test_steps_differ_by_a_tenth_at_most(events, is_regular):
    assert _is_regular(events) == is_regular


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_an_out_of_memory_error_that_is_none_of_fragmentation(conf):
    program = Program(conf, total_bytes=100 * MIB)
    program.malloc(60 * MIB, stack("a.py:1 keep"))
    assert program.malloc(90 * MIB, stack("a.py:2 more")) is None
    (refusal,) = find_out_of_memory_events(only(program))
    assert (refusal.requested_bytes, refusal.device_free_bytes) == (90 * MIB, 40 * MIB)
    assert refusal.source == "/home/me/a.py:2 more"
    assert not refusal.fragmented
    assert any("50.00 MiB would have been missing" in reason for reason in refusal.reasons)


def test_an_out_of_memory_error_of_fragmentation():
    program = Program(total_bytes=80 * MIB)
    blocks = [program.malloc(10 * MIB - 512 * 1024, stack("a.py:1 piece")) for _ in range(8)]
    program.free(*blocks[::2])  # of every segment of 20 MiB, half is free
    assert program.malloc(30 * MIB, stack("a.py:2 whole")) is None
    (refusal,) = find_out_of_memory_events(only(program))
    assert refusal.fragmented
    assert (refusal.reserved_bytes, refusal.device_free_bytes) == (80 * MIB, 0)
    assert refusal.largest_free_bytes < 30 * MIB <= refusal.usable_bytes
    assert any("with free memory there (4) holds a block in use" in reason for reason in refusal.reasons)
    assert any("expandable_segments:True" in reason for reason in refusal.reasons)


@pytest.mark.parametrize(("more_used", "is_fragmented"), [(0, True), (512, False)])
def test_fragmentation_is_a_tenth_of_what_is_reserved(more_used, is_fragmented):
    """Of each of four segments of 20 MiB two are free, and as many are requested as all have."""
    program = Program(total_bytes=80 * MIB)
    for index in range(8):
        program.malloc(9 * MIB + (more_used if index == 0 else 0))
    assert program.malloc(8 * MIB - more_used) is None
    (refusal,) = find_out_of_memory_events(only(program))
    assert (refusal.cached_bytes, refusal.fragmented) == (8 * MIB - more_used, is_fragmented)
    assert ("the GPU is full" in refusal.reasons[-1]) != is_fragmented


def test_blocks_that_an_error_freed_are_no_temporaries():
    program = Program(total_bytes=100 * MIB)
    block = program.malloc(60 * MIB, ACTIVATION)
    assert program.malloc(90 * MIB, ACTIVATION) is None
    program.free(block)
    program.malloc(1 * MIB, ACTIVATION)
    assert next(life.category for life in only(program).lives) == "activations"


def test_leaks_are_found_by_the_period():
    found = only(training(steps=6, leak=True))
    steps = find_steps(found)
    assert steps is not None and len(steps.begins) == 6
    (leak,) = find_leaks(found, steps)
    assert leak.source == "/home/me/train.py:44 train"
    assert (leak.per_step_bytes, leak.allocated_bytes, leak.count, leak.steps) == (3 * MIB, 18 * MIB, 6, 6)


def test_layers_are_no_steps():
    """One forward of many layers, whose activations pile up as they should, and a loop that builds the layers."""
    program = Program()
    for _ in range(8):
        program.malloc(4 * MIB, stack("block.py:3 __init__", "model.py:4 __init__", op="empty_memory_format"))
    for _ in range(8):
        for line in (12, 13):
            program.malloc(
                5 * MIB, stack(f"block.py:{line} forward", "call", "model.py:9 forward", "call", op="mul_Tensor")
            )
    assert find_steps(only(program)) is None


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_a_trace_that_is_not_whole_is_analysed_all_the_same(data):
    """Events lost, in another order or with other figures: no exception, and amounts that add up."""
    snapshot = training(steps=3, settings=data.draw(st.sampled_from(["", "expandable_segments:True"]))).snapshot()
    (trace,) = snapshot.traces
    indices = st.integers(0, len(trace) - 1)
    for index in sorted(data.draw(st.sets(indices, max_size=6)), reverse=True):
        del trace[index]
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(trace) - 1))
        change = data.draw(st.sampled_from(["swap", "address", "size", "stream"]))
        if change == "swap":
            other = data.draw(st.integers(0, len(trace) - 1))
            trace[at], trace[other] = trace[other], trace[at]
        else:
            trace[at] = trace[at]._replace(**{change: data.draw(st.sampled_from([0, 1, 512, 3 * MIB, 1 << 40]))})
    found = build_recordings(snapshot)
    for one in found:
        one.steps = find_steps(one)
    document = build_analysis(
        found, RecordingOrigin("file", "torch snapshot", "measured", ""), AnalysisRequest(what_if=parse_config(""))
    )
    assert str(document)
    for device in document.devices:
        for state in (device.fragmentation_at_peak, device.fragmentation_at_end):
            assert state.free_bytes == state.releasable_bytes + state.pinned_bytes >= 0
            assert 0 <= state.used_bytes <= state.reserved_bytes
            assert state.pinned_bytes >= 0 <= state.releasable_bytes
        first = device.replay.first_difference
        assert (first is None) == (
            device.replay.final_layout_identical and device.replay.identical_addresses == device.replay.allocations
        )
