"""Time ranges of small recordings: stages, annotations and module calls, in microseconds."""

from __future__ import annotations

from memprof.snapshots.from_trace import TimelineSlice
from memprof.snapshots.recording import Recording, build_recordings
from memprof.snapshots.slices import build_slices, list_annotations, list_event_times, name_stages
from tests.unit.snapshots.builder import GRADIENT, MIB, OPTIMIZER, Program, stack


def recording(*stacks, times: tuple[int | None, ...] | None = None) -> Recording:
    """Small blocks with these stacks, of which the first takes the segment: events 1, 2 and so on, at 10, 20 ..."""
    program = Program()
    for frames in stacks:
        program.malloc(512, frames)
    snapshot = program.snapshot()
    (events,) = snapshot.traces
    times = times or tuple(10 * index for index in range(len(events)))
    snapshot.traces = [[event._replace(time_us=time) for event, time in zip(events, times, strict=True)]]
    (found,) = build_recordings(snapshot)
    return found


def call(*lines: str):
    """A stack of nested module calls, outermost first, such as "net:7"."""
    frames: list[str] = []
    for line in reversed(lines):
        file, _, number = line.partition(":")
        frames += [f"{file}.py:{number} forward", "call"]
    return stack(*frames)


def test_times_never_decrease_and_an_event_without_one_has_its_index() -> None:
    found = recording((), (), (), (), (), times=(None, 1, 5, 3, None, 9))
    assert list_event_times(found) == [0, 1, 5, 5, 5, 9]


def test_stages_are_ranges_of_events() -> None:
    found = recording((), (), ())  # at 0, 10, 20, 30
    name_stages(
        found, [TimelineSlice("inner", 10, 11, ""), TimelineSlice("all", 0, 99, ""), TimelineSlice("first", 0, 10, "")]
    )
    assert found.stages == [("all", 0, 4), ("first", 0, 1), ("inner", 1, 2)]
    name_stages(found, [])
    assert found.stages == []


def test_annotations_are_pairs_of_one_name_on_the_device() -> None:
    found = recording(())

    def note(stage: str, name: object, time: object, device: int | None = 0) -> dict[str, object]:
        return {"stage": stage, "name": name, "time_us": time} | ({} if device is None else {"device": device})

    notes = [
        note("START", "d", 4, 1), note("END", "a", 1), note("START", "a", 10), note("START", "b", 10),
        note("START", "a", 20),
        note("END", "a", 30), note("END", "b", 40), note("END", "a", 35),
        note("START", "c", 5, None), note("END", "c", 6, None),
        note("START", "d", 5, 1), note("END", "d", 6, 1), note("START", 7, 5), note("END", 7, 6),
        note("START", "e", "5"), note("END", "e", 6), note("START", "f", 5), note("MARK", "f", 6),
    ]  # fmt: skip
    assert list_annotations(found, notes) == [
        TimelineSlice("c", 5, 6, "stages"),
        TimelineSlice("b", 10, 40, "stages"),
        TimelineSlice("a", 10, 35, "stages"),  # the outer of two
        TimelineSlice("a", 20, 30, "stages"),
    ]


def test_parts_of_a_step_are_stages_where_nothing_is_annotated() -> None:
    found = recording(call("net:7"), call("net:7"), GRADIENT, GRADIENT, OPTIMIZER, (), call("net:7"))
    stages = [one for one in build_slices(found) if one.track == "stages"]
    assert [(one.name, one.begin, one.end) for one in stages] == [
        ("forward", 10, 30), ("backward", 30, 50), ("optimizer step", 50, 70), ("forward", 70, 70),
    ]  # fmt: skip
    notes = [
        {"stage": stage, "name": "mine", "time_us": time, "device": 0} for stage, time in (("START", 3), ("END", 9))
    ]
    assert [one.name for one in build_slices(found, notes) if one.track == "stages"] == ["mine"]


def test_a_call_lasts_until_an_allocation_outside_it() -> None:
    found = recording(
        call("net:7", "block:3"), call("net:7", "block:3", "linear:1"), call("net:7", "block:4"), stack("train.py:9 f"),
        call("net:7"), call("head:2"),
    )  # fmt: skip
    modules = [one for one in build_slices(found) if one.track == "modules"]
    assert [(one.name, one.begin, one.end) for one in modules] == [
        ("net:7", 10, 40), ("block:3", 10, 30), ("linear:1", 20, 30), ("block:4", 30, 40), ("net:7", 50, 60),
        ("head:2", 60, 60),
    ]  # fmt: skip


def test_open_calls_end_with_the_recording() -> None:
    program = Program()
    block = program.malloc(512, call("net:7"))
    program.free(block)
    (found,) = build_recordings(program.snapshot())  # at 1000 and so on
    assert build_slices(found) == [
        TimelineSlice("forward", 1001, 1001, "stages"),
        TimelineSlice("net:7", 1001, 1003, "modules"),
    ]


def test_blocks_from_before_the_recording_are_in_no_slice() -> None:
    program = Program()
    program.malloc(30 * MIB, call("net:7"))
    program.malloc(512, call("head:2"))
    (found,) = build_recordings(program.snapshot(last=1))
    assert [one.name for one in build_slices(found)] == ["forward", "head:2"]
    snapshot = program.snapshot(last=1)
    snapshot.traces = [[]]
    assert build_slices(build_recordings(snapshot)[0]) == []
