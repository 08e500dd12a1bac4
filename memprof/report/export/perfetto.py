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
_WRITER_NAME = "memprof"
TRACE_FILE = FileKind(
    "trace", "--to", lambda begin, end: begin[:1] == b"{" and f'"writer":"{_WRITER_NAME}' in end.decode("latin-1")
)


def write_perfetto(
    recordings: Iterable[tuple[Recording, list[int], list[TimelineSlice]]], path: Path, *, force: bool = False
) -> None:
    """Write recordings, each with the times of its events and its slices, to `path` atomically. Raises UsageError:
    `path` is a file of another kind and `force` is False; MemprofError: the file cannot be written."""
    text = json.dumps(build_trace_events(recordings), separators=(",", ":"))
    write_atomically(path, text.encode(), TRACE_FILE, force=force)


def build_trace_events(recordings: Iterable[tuple[Recording, list[int], list[TimelineSlice]]]) -> dict[str, Any]:
    """Return recordings as a dictionary in Chrome's trace event format, with one process per device."""
    events: list[dict[str, Any]] = []
    for recording, times, slices in recordings:
        device = recording.device
        events.append(_make_name_event("process_name", device, 0, f"GPU {device}"))
        for track_id, track in enumerate(TRACKS, 1):
            if any(s.track == track for s in slices):
                events.append(_make_name_event("thread_name", device, track_id, track))
        last_values: dict[str, int] = {}
        for time, allocated, reserved in zip(times, recording.allocated, recording.reserved, strict=True):
            for name, value in (("allocated", allocated), ("reserved", reserved)):
                if last_values.get(name) != value:
                    last_values[name] = value
                    events.append({"ph": "C", "pid": device, "ts": time, "name": name, "args": {"bytes": value}})
        events += [
            {
                "ph": "X", "pid": device, "tid": TRACKS.index(s.track) + 1, "ts": s.begin,
                "dur": s.end - s.begin, "name": s.name, "cat": s.track,
            }
            for s in slices
        ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"writer": f"{_WRITER_NAME} {__version__}"}}


def _make_name_event(event_name: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": event_name, "args": {"name": name}}
