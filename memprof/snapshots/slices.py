"""Named time ranges of a recorded run, for a timeline: annotations, parts of steps, and module calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from memprof.snapshots.from_trace import TimelineSlice
from memprof.snapshots.origins import UNKNOWN
from memprof.snapshots.recording import BEFORE, Recording
from memprof.trace.columns import NO_TIME


def event_times(recording: Recording) -> list[int]:
    """Return the microseconds of each event, never falling; the event's index where the file has no clock."""
    times: list[int] = []
    latest = 0
    for number, time in enumerate(recording.events.times):
        own = number if time == NO_TIME else time
        if own > latest:
            latest = own
        times.append(latest)
    return times


def name_stages(recording: Recording, stages: Iterable[TimelineSlice]) -> None:
    """Set the stages of `recording` from `stages`, whose times are microseconds."""
    named = sorted(stages, key=lambda one: (one.begin, -one.end))
    times = event_times(recording) if named else []
    recording.stages = [(one.name, bisect_left(times, one.begin), bisect_left(times, one.end)) for one in named]


def annotated(recording: Recording, annotations: Iterable[dict[str, object]]) -> list[TimelineSlice]:
    """Return the annotations of torch.profiler.record_function and of the optimizer on this device."""
    begun: dict[str, list[int]] = {}
    found: list[TimelineSlice] = []
    for note in annotations:
        name, time = note.get("name"), note.get("time_us")
        if note.get("device", 0) != recording.device or not isinstance(name, str) or not isinstance(time, int):
            continue
        if note.get("stage") == "START":
            begun.setdefault(name, []).append(time)
        elif note.get("stage") == "END" and begun.get(name):
            found.append(TimelineSlice(name, begun[name].pop(), time, "stages"))
    return sorted(found, key=lambda one: (one.begin, -one.end))


def slices_of(recording: Recording, annotations: Iterable[dict[str, object]] = ()) -> list[TimelineSlice]:
    """Return the stages and module calls of a snapshot, from annotations and stacks.

    Without a clock or annotations, stages are the parts of a step (forward, backward, optimizer step). A module's slice
    lasts from its first to its last allocation without one of another module between.
    """
    times = event_times(recording)
    if not times:
        return []
    found = annotated(recording, annotations)
    born = [life for life in recording.lives if life.born != BEFORE and life.origin is not UNKNOWN]
    if not found:
        for life in born:
            part, time = life.origin.part.value, times[life.born]
            if found and found[-1].name == part:
                found[-1].end = time
            else:
                if found:
                    found[-1].end = time
                found.append(TimelineSlice(part, time, time, "stages"))
    running: list[TimelineSlice] = []
    done: list[TimelineSlice] = []
    for life in born:
        chain = life.origin.module.split(" > ") if life.origin.in_module else []
        time = times[life.born]
        same = 0
        while same < min(len(chain), len(running)) and running[same].name == chain[same]:
            same += 1
        while len(running) > same:
            done.append(running.pop())
            done[-1].end = time
        running += [TimelineSlice(name, time, time, "modules") for name in chain[same:]]
    for one in running:
        one.end = times[-1]
    return found + sorted(done + running, key=lambda one: (one.begin, -one.end))
