"""Reads a memory snapshot of torch (`torch.cuda.memory._dump_snapshot`) without torch, from an untrusted file.

All versions since torch 2.0 are supported: the dictionary with `segments` and `device_traces`, and the bare list of
segments that `torch.cuda.memory_snapshot()` returns. Every field that the analysis uses is checked; fields of newer
versions are ignored. Source of the format: torch/csrc/cuda/Module.cpp (`THCPModule_memorySnapshot`),
torch/cuda/memory.py.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

from memprof.errors import UsageError
from memprof.trace.columns import CutEvents, CutRange, EventColumns
from memprof.trace.json_values import truncate
from memprof.trace.pickles import BrokenPickle, ForbiddenGlobal, NotRegular, load_plain
from memprof.trace.snapshot import (
    EXPORT_KEY,
    Action,
    BlockState,
    Frame,
    Snapshot,
    SnapshotBlock,
    SnapshotEvent,
    SnapshotSegment,
    Stack,
)

HINT = 'a snapshot is written by torch.cuda.memory._dump_snapshot("snapshot.pickle")'

# Bytes of a file for a block or an event, at least (torch's take 40), and for a frame in a list. A small file can refer
# to the same object many times.
_RECORD_BYTES, _FRAME_BYTES = 8, 2

COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}

_MIN_COLUMN_BYTES = 1 << 21  # bytes of a file that is read as columns: importing numpy takes as long as 1 MB of events

_DEFAULT_POOL = (0, 0)
_STATES = {state.value: state for state in BlockState} | {"active_awaiting_free": BlockState.PENDING_FREE}
_ACTIONS = {action.value: action for action in Action}


def read_snapshot(path: Path) -> Snapshot:
    """Read and check the snapshot at `path`. Raises UsageError: it cannot be read, or is no snapshot."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            "cannot read the snapshot", value=str(path), hint=error.strerror or type(error).__name__
        ) from error
    return parse_snapshot(data, str(path))


def parse_snapshot(data: bytes, name: str = "snapshot") -> Snapshot:
    """Return the snapshot in the bytes `data`; errors name the file `name`. Raises UsageError: it is no snapshot."""
    for magic, format_name in COMPRESSED.items():
        if data.startswith(magic):
            raise UsageError(f"the snapshot is compressed ({format_name})", value=name, hint="unpack it first")
    if data.lstrip()[:1] == b"{":
        hint = f"memprof show FILE shows a report that memprof wrote with --json; {HINT}"
        raise UsageError("not a memory snapshot: the file is JSON", value=name, hint=hint)
    if len(data) >= _MIN_COLUMN_BYTES:
        with contextlib.suppress(NotRegular, _WrongStructure):  # `load_plain` reports the error
            from memprof.trace.pickled_events import load_events_apart

            raw, cut = load_events_apart(data)
            return _SnapshotReader(len(data), cut).build_snapshot(raw)
    try:
        raw = load_plain(data)
    except ForbiddenGlobal as error:
        raise UsageError(
            f"the file asks for {error.args[0]} to be imported, which no snapshot does; it was not run",
            value=name,
            hint=HINT,
        ) from None
    except BrokenPickle as error:
        raise UsageError(f"not a memory snapshot: {error.args[0]}", value=name, hint=HINT) from None
    try:
        return _SnapshotReader(len(data)).build_snapshot(raw)
    except _WrongStructure as error:
        raise UsageError(f"not a memory snapshot: {error}", value=name, hint=HINT) from None


class _WrongStructure(Exception):
    """A field of a snapshot has a wrong type or value."""


class _SnapshotReader:
    """Converts an unpickled snapshot to records; equal frames and stacks are created once.

    The file's `size` in bytes limits the number of records; `cut` has events that are already columns.
    """

    def __init__(self, size: int, cut: CutEvents | None = None) -> None:
        self.remaining_bytes = size
        self.cut = cut
        self.events = EventColumns()  # without events: the stacks and pools that the columns of all devices refer to
        self.frames: dict[int, Frame] = {}
        self.stacks: dict[int, Stack] = {}
        self.unique_frames: dict[Frame, Frame] = {}
        self.raw_stacks: dict[tuple[int, ...], Stack] = {}
        self.unique_stacks: dict[tuple[int, ...], Stack] = {}
        self.referenced_objects: list[object] = []  # objects in tables by id must stay alive

    def build_snapshot(self, raw: object) -> Snapshot:
        if isinstance(raw, list):
            raw = {"segments": raw}
        top_level = _check_mapping(raw, "the top level")
        if "segments" not in top_level:
            raise _WrongStructure("it has no 'segments'")
        traces = _check_list(top_level.get("device_traces", []), "device_traces")
        settings = top_level.get("allocator_settings", {})
        export_info = _check_mapping(top_level.get(EXPORT_KEY, {}), EXPORT_KEY)
        if self.cut is not None:
            self.number_stacks(self.cut)
        snapshot = Snapshot(
            segments=[self.build_segment(item) for item in _check_list(top_level["segments"], "segments")],
            traces=[self.build_trace(_check_list(trace, "device_traces")) for trace in traces],
            settings=self.copy_plain(settings, "allocator_settings"),
            annotations=[
                self.copy_plain(item, "external_annotations")
                for item in _check_list(top_level.get("external_annotations", []), "external_annotations")
            ],
            source="simulated" if export_info.get("source") == "simulated" else "measured",
        )
        snapshot.segments.sort(key=lambda segment: (segment.device, segment.address))
        for segment, next_segment in zip(snapshot.segments, snapshot.segments[1:], strict=False):
            if segment.device == next_segment.device and segment.address + segment.size > next_segment.address:
                raise _WrongStructure(f"the segments at {segment.address:#x} and {next_segment.address:#x} overlap")
        return snapshot

    def number_stacks(self, cut: CutEvents) -> None:
        """Change the stack and pool indices of `cut` to those of `self.events`, which all devices share."""
        stacks = array("I", [self.events.stack(self.get_stack(raw)) for raw in cut.lists])
        cut.rows.stacks = array("I", map(stacks.__getitem__, cut.rows.stacks))
        pools = array("I", map(self.events.pool, cut.rows.pool_ids))
        cut.rows.pools = array("I", map(pools.__getitem__, cut.rows.pools))
        cut.lists.clear()

    def build_trace(self, items: Sequence[object]) -> EventColumns:
        columns = EventColumns.create_sharing(self.events)
        for item in items:
            if type(item) is CutRange and self.cut is not None:
                self.charge_bytes(_RECORD_BYTES * item.count)
                columns.extend(self.cut.rows, item.first, item.first + item.count)
            else:
                columns.append(self.build_event(item))
        return columns

    def copy_plain(self, raw: object, description: str, *, depth: int = 1) -> dict[str, object]:
        """Return the dictionary `raw` with its plain values, and those of dictionaries in it down to `depth` levels."""
        item = _check_mapping(raw, description)
        self.charge_bytes(_RECORD_BYTES * len(item))
        plain_values: dict[str, object] = {}
        for key, value in item.items():
            if isinstance(value, dict) and depth:
                plain_values[str(key)] = self.copy_plain(value, description, depth=depth - 1)
            elif isinstance(value, bytearray) and self.cut is not None:
                raise _WrongStructure(f"{description} may be an event that was cut out")
            elif value is None or isinstance(value, str | int | float):
                plain_values[str(key)] = truncate(value) if isinstance(value, str) else value
        return plain_values

    def build_segment(self, raw: object) -> SnapshotSegment:
        self.charge_bytes(_RECORD_BYTES)
        item = _check_mapping(raw, "a segment")
        address, size = _read_number(item, "address"), _read_number(item, "total_size")
        next_address = address
        blocks: list[SnapshotBlock] = []
        for entry in _check_list(item.get("blocks"), "blocks"):
            block = self.build_block(entry, next_address)
            if block.address != next_address or block.size <= 0:
                raise _WrongStructure(f"the blocks do not tile the segment at {address:#x}")
            next_address += block.size
            blocks.append(block)
        if next_address != address + size:
            raise _WrongStructure(f"the blocks do not fill the segment at {address:#x}")
        segment_type = item.get("segment_type")
        if segment_type not in ("small", "large"):
            raise _WrongStructure(f"segment_type is {_describe_value(segment_type)}")
        return SnapshotSegment(
            device=_read_number(item, "device", 0),
            address=address,
            size=size,
            stream=_read_number(item, "stream", 0),
            is_small=segment_type == "small",
            pool_id=_read_pool_id(item.get("segment_pool_id", (0, 0))),
            expandable=bool(item.get("is_expandable", False)),
            blocks=tuple(blocks),
            frames=self.get_stack(item.get("frames", [])),
        )

    def build_block(self, raw: object, address: int) -> SnapshotBlock:
        self.charge_bytes(_RECORD_BYTES)
        item = _check_mapping(raw, "a block")
        state = item.get("state")
        if not isinstance(state, str) or state not in _STATES:
            raise _WrongStructure(f"a block's state is {_describe_value(state)}")
        requested = _read_number(item, "requested_size") if "requested_size" in item else None
        frames = item.get("frames", [])
        if not frames and "history" in item:  # 2.0: what the block held, newest last
            history = _check_list(item["history"], "history")
            if history:
                newest = _check_mapping(history[-1], "history")
                frames = newest.get("frames", [])
                if requested is None and _STATES[state] is not BlockState.INACTIVE:
                    requested = _read_number(newest, "real_size")
        return SnapshotBlock(
            _read_number(item, "address", address), _read_number(item, "size"), requested, _STATES[state],
            self.get_stack(frames),
        )  # fmt: skip

    def build_event(self, raw: object) -> SnapshotEvent:
        self.charge_bytes(_RECORD_BYTES)
        item = _check_mapping(raw, "an event")
        name = item.get("action")
        if not isinstance(name, str) or name not in _ACTIONS:
            raise _WrongStructure(f"an event's action is {_describe_value(name)}")
        action = _ACTIONS[name]
        address = "device_free" if action is Action.OOM and "device_free" in item else "addr"
        return SnapshotEvent(
            action=action,
            address=_read_number(item, address, 0),
            size=_read_number(item, "size", 0),
            stream=_read_number(item, "stream", 0),
            pool_id=_read_pool_id(item.get("pool_id", (0, 0))),
            time_us=_read_number(item, "time_us", below=1 << 63) if "time_us" in item else None,
            frames=self.get_stack(item.get("frames", [])),
        )

    def get_stack(self, raw: object) -> Stack:
        if not raw:
            return ()
        stack = self.stacks.get(id(raw))
        if stack is None:
            items = _check_list(raw, "frames")
            # Files repeat a stack for every event, with each frame once: identities find a known stack cheaply.
            key = tuple(map(id, items))
            stack = self.raw_stacks.get(key)
            if stack is None:
                self.charge_bytes(_FRAME_BYTES * len(items))
                frames = tuple([self.get_frame(item) for item in items])
                stack = self.unique_stacks.setdefault(tuple(map(id, frames)), frames)
                self.raw_stacks[key] = stack
            self.stacks[id(raw)] = stack
            self.referenced_objects.append(raw)
        return stack

    def get_frame(self, raw: object) -> Frame:
        known_frame = self.frames.get(id(raw))
        if known_frame is None:
            item = _check_mapping(raw, "a frame")
            filename, name = item.get("filename", ""), item.get("name", "")
            if not isinstance(filename, str) or not isinstance(name, str):
                raise _WrongStructure("a frame's filename or name is no text")
            frame = Frame(truncate(filename), _read_number(item, "line", 0), truncate(name))
            known_frame = self.frames[id(raw)] = self.unique_frames.setdefault(frame, frame)
            self.referenced_objects.append(raw)
        return known_frame

    def charge_bytes(self, num_bytes: int) -> None:
        self.remaining_bytes -= num_bytes
        if self.remaining_bytes < 0:
            raise _WrongStructure("it names the same blocks, events or frames over and over")


def _describe_value(value: object) -> str:
    """Return `value` as text for an error message; containers and huge integers by type only."""
    if isinstance(value, str):
        return repr(value[:40])
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() <= 128):
        return repr(value)
    return f"a {type(value).__name__}"


def _check_mapping(raw: object, description: str) -> Mapping[str, object]:
    if not isinstance(raw, dict):
        raise _WrongStructure(f"{description} is no dictionary")
    return raw


def _check_list(raw: object, description: str) -> Sequence[object]:
    if not isinstance(raw, list | tuple):
        raise _WrongStructure(f"{description} is no list")
    return raw


def _read_number(item: Mapping[str, object], key: str, default: int | None = None, *, below: int = 1 << 64) -> int:
    value = item.get(key, default)
    if type(value) is not int or not 0 <= value < below:
        raise _WrongStructure(f"{key!r} is {_describe_value(value)}" if key in item else f"{key!r} is missing")
    return value


def _read_pool_id(raw: object) -> tuple[int, int]:
    if raw == _DEFAULT_POOL and type(raw) is tuple:
        return _DEFAULT_POOL
    match raw:
        case (int(first), int(second)):
            return first, second
        case _:
            raise _WrongStructure(f"a pool id is {_describe_value(raw)}")
