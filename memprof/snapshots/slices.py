"""Named time ranges of a recorded run, for a timeline: annotations, parts of steps, and module calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from memprof.snapshots.from_trace import TimelineSlice
from memprof.snapshots.origins import UNKNOWN
from memprof.snapshots.recording import BEFORE, Recording
from memprof.trace.columns import NO_TIME


def list_event_times(recording: Recording) -> list[int]:
    """Return the time of each event in microseconds, never decreasing; an event without a time has its index."""
    times: list[int] = []
    latest = 0
    for index, time in enumerate(recording.events.times):
        event_time = index if time == NO_TIME else time
        if event_time > latest:
            latest = event_time
        times.append(latest)
    return times


def name_stages(recording: Recording, stages: Iterable[TimelineSlice]) -> None:
    """Set the stages of `recording`, as event ranges, from `stages` in microseconds."""
    sorted_stages = sorted(stages, key=lambda one: (one.begin, -one.end))
    times = list_event_times(recording) if sorted_stages else []
    recording.stages = [(one.name, bisect_left(times, one.begin), bisect_left(times, one.end)) for one in sorted_stages]


def list_annotations(recording: Recording, annotations: Iterable[dict[str, object]]) -> list[TimelineSlice]:
    """Return the record_function annotations (torch's, with optimizer steps) on the recording's device as slices."""
    open_starts: dict[str, list[int]] = {}
    slices: list[TimelineSlice] = []
    for annotation in annotations:
        name, time = annotation.get("name"), annotation.get("time_us")
        if annotation.get("device", 0) != recording.device or not isinstance(name, str) or not isinstance(time, int):
            continue
        if annotation.get("stage") == "START":
            open_starts.setdefault(name, []).append(time)
        elif annotation.get("stage") == "END" and open_starts.get(name):
            slices.append(TimelineSlice(name, open_starts[name].pop(), time, "stages"))
    return sorted(slices, key=lambda item: (item.begin, -item.end))


def build_slices(recording: Recording, annotations: Iterable[dict[str, object]] = ()) -> list[TimelineSlice]:
    """Return the stages and module calls of a snapshot, from annotations and stacks.

    Without a clock or annotations, stages are the parts of a step (forward, backward, optimizer step). A module's slice
    lasts from its first to its last allocation without one of another module between.
    """
    times = list_event_times(recording)
    if not times:
        return []
    stages = list_annotations(recording, annotations)
    lives = [life for life in recording.lives if life.born != BEFORE and life.origin is not UNKNOWN]
    if not stages:
        for life in lives:
            part, time = life.origin.part.value, times[life.born]
            if stages and stages[-1].name == part:
                stages[-1].end = time
            else:
                if stages:
                    stages[-1].end = time
                stages.append(TimelineSlice(part, time, time, "stages"))
    open_slices: list[TimelineSlice] = []
    closed: list[TimelineSlice] = []
    for life in lives:
        chain = life.origin.module.split(" > ") if life.origin.in_module else []
        time = times[life.born]
        num_common = 0
        while num_common < min(len(chain), len(open_slices)) and open_slices[num_common].name == chain[num_common]:
            num_common += 1
        while len(open_slices) > num_common:
            closed.append(open_slices.pop())
            closed[-1].end = time
        open_slices += [TimelineSlice(name, time, time, "modules") for name in chain[num_common:]]
    for item in open_slices:
        item.end = times[-1]
    return stages + sorted(closed + open_slices, key=lambda item: (item.begin, -item.end))
