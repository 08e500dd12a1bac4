"""Export of a recording as a trace for ui.perfetto.dev, in Chrome's JSON trace event format.

Counters of allocated and reserved bytes; slices for stages and modules. Timestamps are microseconds; without a clock,
one per event.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from memprof.snapshots.from_trace import TimelineSlice
from memprof.snapshots.recording import Recording
from memprof.trace.files import FileKind, write_atomically
from memprof.version import __version__

TRACKS = ("stages", "modules")
_WRITER = "memprof"
FORM = FileKind(
    "trace", "--to", lambda begin, end: begin[:1] == b"{" and f'"writer":"{_WRITER}' in end.decode("latin-1")
)


def write_perfetto(
    recordings: Iterable[tuple[Recording, list[int], list[TimelineSlice]]], path: Path, *, force: bool = False
) -> None:
    """Write recordings, each with the times of its events and its slices, to `path` atomically. Raises UsageError:
    another file is there, which only `force` replaces; MemprofError: the file cannot be written."""
    text = json.dumps(build_trace_events(recordings), separators=(",", ":"))
    write_atomically(path, text.encode(), FORM, force=force)


def build_trace_events(recordings: Iterable[tuple[Recording, list[int], list[TimelineSlice]]]) -> dict[str, Any]:
    """Return recordings as a JSON value with the trace events; a process per device."""
    events: list[dict[str, Any]] = []
    for recording, times, slices in recordings:
        device = recording.device
        events.append(_make_name_event("process_name", device, 0, f"GPU {device}"))
        for number, track in enumerate(TRACKS, 1):
            if any(one.track == track for one in slices):
                events.append(_make_name_event("thread_name", device, number, track))
        shown: dict[str, int] = {}
        for time, allocated, reserved in zip(times, recording.allocated, recording.reserved, strict=True):
            for name, value in (("allocated", allocated), ("reserved", reserved)):
                if shown.get(name) != value:
                    shown[name] = value
                    events.append({"ph": "C", "pid": device, "ts": time, "name": name, "args": {"bytes": value}})
        events += [
            {
                "ph": "X", "pid": device, "tid": TRACKS.index(one.track) + 1, "ts": one.begin,
                "dur": one.end - one.begin, "name": one.name, "cat": one.track,
            }
            for one in slices
        ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"writer": f"{_WRITER} {__version__}"}}


def _make_name_event(event_name: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": event_name, "args": {"name": name}}
