"""Export of a snapshot as the pickle that pytorch.org/memory_viz and torch.cuda._memory_viz read.

Pickle protocol 4 with plain types only, since the viewer's unpickler supports no more. Field names as in
`THCPModule_memorySnapshot` (torch/csrc/cuda/Module.cpp).
"""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

from memprof.trace.files import FileKind, write_atomically
from memprof.trace.snapshot import (
    EXPORT_KEY,
    Action,
    BlockState,
    Frame,
    Snapshot,
    SnapshotEvent,
    SnapshotSegment,
    Stack,
)
from memprof.version import __version__

PICKLE_PROTOCOL = 4
SNAPSHOT_FILE = FileKind("snapshot", "--to", lambda begin, end: begin[:1] == b"\x80" and EXPORT_KEY.encode() in end)


def write_snapshot(snapshot: Snapshot, path: Path, *, force: bool = False) -> None:
    """Write `snapshot` to `path` atomically. Raises UsageError: `path` is a file of another kind and `force` is False;
    MemprofError: the file cannot be written."""
    data = convert_snapshot(snapshot) | {EXPORT_KEY: {"source": snapshot.source, "version": __version__}}
    write_atomically(path, pickle.dumps(data, protocol=PICKLE_PROTOCOL), SNAPSHOT_FILE, force=force)


def convert_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """Return `snapshot` in the form of torch's `_snapshot()`; equal stacks are one object, to keep the file small."""
    stacks = _StackConverter()
    return {
        "segments": [_convert_segment(segment, stacks) for segment in snapshot.segments],
        "device_traces": [[_convert_event(event, stacks) for event in trace] for trace in snapshot.traces],
        "allocator_settings": dict(snapshot.settings),
        "external_annotations": [dict(note) for note in snapshot.annotations],
    }


class _StackConverter:
    def __init__(self) -> None:
        self.stacks: dict[int, list[dict[str, Any]]] = {}
        self._convert_frame = functools.cache(Frame._asdict)

    def convert(self, stack: Stack) -> list[dict[str, Any]]:
        frames = self.stacks.get(id(stack))
        if frames is None:
            frames = self.stacks[id(stack)] = [self._convert_frame(frame) for frame in stack]
        return frames


def _convert_segment(segment: SnapshotSegment, stacks: _StackConverter) -> dict[str, Any]:
    blocks = segment.blocks
    used_blocks = [block for block in blocks if block.state is not BlockState.INACTIVE]
    return {
        "device": segment.device,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": sum(block.size for block in used_blocks if block.state is BlockState.ALLOCATED),
        "active_size": sum(block.size for block in used_blocks),
        "requested_size": sum(block.size if block.requested is None else block.requested for block in used_blocks),
        "stream": segment.stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": tuple(segment.pool_id),
        "is_expandable": segment.expandable,
        "frames": stacks.convert(segment.frames),
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.size if block.requested is None else block.requested,
                "state": block.state.value,
                "frames": stacks.convert(block.frames),
            }
            for block in blocks
        ],
    }


def _convert_event(event: SnapshotEvent, stacks: _StackConverter) -> dict[str, Any]:
    values: dict[str, Any] = {
        "action": event.action.value,
        "device_free" if event.action is Action.OOM else "addr": event.address,
        "size": event.size,
        "stream": event.stream,
    }
    if event.time_us is not None:
        values["time_us"] = event.time_us
    constants = {"compile_context": "N/A", "user_metadata": "", "pool_id": tuple(event.pool_id)}
    return {**values, **constants, "frames": stacks.convert(event.frames)}
