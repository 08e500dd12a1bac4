"""Parses the events in a pickle by form (the order of their keys): all events of one form are parsed at once.

A form is derived from the first event that has it. Positions and values of many events are arrays with one row per
event, so that one numpy operation parses one key of all events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from memprof.trace.columns import ACTION_CODES, COLUMNS, NO_TIME, EventColumns
from memprof.trace.one_thread import np
from memprof.trace.snapshot import Action

_MAX_LAYOUTS = 8
_MAX_FIELDS_BYTES = 1 << 12  # bytes of an event before its frames, at most: 255 of each text

MEMOIZE, TEXT, GET, LONG_GET = 0x94, 0x8C, ord("h"), ord("j")

_Array = np.ndarray[Any, Any]

_ROLES_BY_KEY = {
    b"action": "action", b"addr": "address", b"device_free": "free", b"size": "size", b"stream": "stream",
    b"time_us": "time", b"pool_id": "pool", b"frames": "frames",
}  # fmt: skip
_ACTIONS = {action.value.encode(): code for action, code in ACTION_CODES.items()}
# Bytes of values with their opcodes, without the variable part that a length byte gives.
_VALUE_BYTES = {
    ord("K"): 2, ord("M"): 3, ord("J"): 5, GET: 2, LONG_GET: 5, ord("N"): 1, 0x88: 1, 0x89: 1, ord("G"): 9, 0x8A: 2,
    TEXT: 3,
}  # fmt: skip
_INTEGER_BYTES = {ord("K"): 1, ord("M"): 2, ord("J"): 4}  # bytes of the number after the opcode
_REFERENCE_MASKS = {GET: 0xFF, LONG_GET: 0xFFFFFFFF}  # bits of the memo entry
# The same by opcode: an array of 256 each. MEMOIZE follows a text.
_WIDTHS, _NUMBER_BYTES, _MASKS = (
    np.array([table.get(code, 0) for code in range(256)], kind)
    for table, kind in ((_VALUE_BYTES, np.int64), (_INTEGER_BYTES, np.int64), (_REFERENCE_MASKS, np.uint64))
)
_HAS_LENGTH = np.isin(np.arange(256), (TEXT, 0x8A))
_BYTE_MASKS = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)  # a mask of the lowest `count` bytes


@dataclass(frozen=True, slots=True)
class _Layout:
    """The keys of an event in order: the bytes of each key's memo reference, and its role in `_ROLES_BY_KEY`."""

    keys: tuple[bytes, ...]
    roles: tuple[str, ...]


class Batch(NamedTuple):
    """Byte sequences that may be events, one per row. Positions are byte offsets in the file."""

    start: _Array
    end: _Array
    ok: _Array
    num_memos: _Array  # memo entries that the event adds before the entry of its list
    frames: _Array  # position of the event's frames; 0: the event has no frames
    reference: _Array  # memo entry of the frames; -1: an inline list
    columns: dict[str, _Array]


class Forms:
    """The known forms of the events in the pickle `data`; `rows` holds the pools of the events."""

    def __init__(self, data: bytes, rows: EventColumns) -> None:
        self.data = data
        self.rows = rows
        self.bytes = np.frombuffer(data, np.uint8)
        self.words = np.ndarray((len(data) - 8,), "<u8", data, 0, (1,))  # the eight bytes from each position on
        self.layouts: list[_Layout] = []
        self.texts: dict[int, bytes] = {}  # by memo entry; empty for a text that is neither a key nor an action
        self.actions: dict[int, int] = {}
        self.pairs: dict[int, tuple[int, int]] = {}  # by memo entry: pairs that may be pool ids

    def record_text(self, entry: int, text: bytes) -> bool:
        """Record that memo entry `entry` is the string `text`; return whether it is a key of events or an action."""
        is_relevant = text in _ROLES_BY_KEY or text in _ACTIONS
        self.texts[entry] = text if is_relevant else b""
        if text in _ACTIONS:
            self.actions[entry] = _ACTIONS[text]
        if is_relevant:  # layouts that were derived before may have mistaken a key
            self.layouts.clear()
        return is_relevant

    def parse(self, start: _Array, memo_size: int) -> Batch:
        """Parse the possible events at the positions `start`, in ascending order; the result's `ok` is True for events.
        `memo_size` is the number of memo entries before the first."""
        count = len(start)
        next_start = np.append(start[1:], len(self.data))
        batch = Batch(
            start, np.zeros(count, np.int64), np.zeros(count, bool), np.ones(count, np.int64),
            np.zeros(count, np.int64), np.full(count, -1, np.int64),
            {name: np.zeros(count, np.uint64) for name in COLUMNS if name != "stacks"},
        )  # fmt: skip
        batch.columns["times"] = np.full(count, NO_TIME, np.int64)
        is_candidate = start < len(self.data) - _MAX_FIELDS_BYTES
        num_layouts_tried = 0
        while True:
            unparsed = np.flatnonzero(is_candidate & ~batch.ok)
            if num_layouts_tried == len(self.layouts):
                layout = self._derive_layout(int(start[unparsed[0]])) if len(unparsed) else None
                if layout is None or layout in self.layouts or num_layouts_tried >= _MAX_LAYOUTS:
                    return batch
                self.layouts.append(layout)
            if len(unparsed):
                self._parse_layout(self.layouts[num_layouts_tried], batch, unparsed, next_start, memo_size)
            num_layouts_tried += 1

    def _derive_layout(self, position: int) -> _Layout | None:
        """Return the layout of the event at `position`; None if the bytes are not an event."""
        keys, roles = [], []
        data, position = self.data, position + 3
        while data[position] != ord("u"):
            width = {GET: 2, LONG_GET: 5}.get(data[position])
            if width is None:
                return None
            keys.append(data[position : position + width])
            text = self.texts.get(int.from_bytes(keys[-1][1:], "little"))
            if text is None:  # the entry of a key must be a text
                return None
            roles.append(_ROLES_BY_KEY.get(text, "other"))
            position += width
            if roles[-1] == "frames":
                break
            size = _measure_value(data, position, roles[-1])
            if size is None:
                return None
            position += size
        known = [role for role in roles if role != "other"]
        return None if len(set(known)) < len(known) or "action" not in known else _Layout(tuple(keys), tuple(roles))

    def _parse_layout(self, layout: _Layout, batch: Batch, rows: _Array, next_start: _Array, memo_size: int) -> None:
        """Parse the candidates `rows` that have this layout: set `batch.ok`, and store their values in `batch`."""
        words = self.words
        position = batch.start[rows] + 3
        ok = np.ones(len(rows), bool)
        num_memos = np.ones(len(rows), np.int64)
        values: dict[str, _Array] = {}
        frames = np.zeros(len(rows), np.int64)
        for key, role in zip(layout.keys, layout.roles, strict=True):
            mask = (1 << 8 * len(key)) - 1
            ok &= (words[position] & np.uint64(mask)) == int.from_bytes(key, "little")
            position = position + len(key)
            if role == "frames":
                frames = position
                break
            if role == "pool":
                position = self._parse_pools(position, ok, num_memos, values)
                continue
            word = words[position]
            code = (word & np.uint64(255)).astype(np.int64)
            length_byte = ((word >> np.uint64(8)) & np.uint64(255)).astype(np.int64)
            width = _WIDTHS[code] + np.where(_HAS_LENGTH[code], length_byte, 0)
            if role == "other":
                ok &= (width > 0) & ((word >> np.uint64(8)) & _MASKS[code] < max(memo_size, 1))
                is_text = code == TEXT
                num_memos += is_text
                ok &= ~is_text | self._is_ascii(position + 2, np.where(is_text, length_byte, 0))
                ok &= (code != 0x8A) | (length_byte <= 9)  # 64 bits
                ok &= ~is_text | (self.bytes[np.minimum(position + width - 1, len(self.bytes) - 1)] == MEMOIZE)
            elif role == "action":
                ok &= (code == GET) | (code == LONG_GET)
                values[role] = (word >> np.uint64(8)) & _MASKS[code]
            else:
                values[role] = self._parse_numbers(position, word, code, length_byte, ok)
            position = position + np.where(ok, width, 0)
        ok &= self._parse_frames(frames, position, next_start[rows], batch, rows)
        action = np.full(len(rows), -1, np.int64)
        for entry, action_code in self.actions.items():
            action[values["action"] == entry] = action_code
        ok &= action >= 0
        if "free" in values or "address" not in values:  # the address of an OOM event is the free bytes of the device
            is_oom = action == ACTION_CODES[Action.OOM]
            ok &= is_oom if "address" not in values else ~is_oom
            values["address"] = values.get("free", np.zeros(len(rows), np.uint64))
        valid_rows = rows[ok]
        batch.ok[valid_rows] = True
        batch.num_memos[valid_rows] = num_memos[ok]
        batch.columns["actions"][valid_rows] = action[ok]
        for name, role in (("addresses", "address"), ("sizes", "size"), ("streams", "stream"), ("pools", "pool")):
            if role in values:
                batch.columns[name][valid_rows] = values[role][ok]
        if "time" in values:
            batch.columns["times"][valid_rows] = values["time"][ok].astype(np.int64)

    def _parse_numbers(self, position: _Array, word: _Array, code: _Array, length_byte: _Array, ok: _Array) -> _Array:
        """Return the integers at `position`; set `ok` to False where one is negative or exceeds 64 bits."""
        is_long = code == 0x8A
        size = np.where(is_long, length_byte, _NUMBER_BYTES[code])
        ok &= (size > 0) & (size <= 8)
        size = np.clip(size, 1, 8)
        value: _Array = np.where(is_long, self.words[position + 2], word >> np.uint64(8)) & _BYTE_MASKS[size]
        is_signed = is_long | (code == ord("J"))
        ok &= ~is_signed | (value >> (np.uint64(8) * size.astype(np.uint64) - np.uint64(1)) == 0)
        return value

    def _is_ascii(self, position: _Array, size: _Array) -> _Array:
        """Return for each position whether the `size` bytes there are ASCII."""
        is_ascii = np.ones(len(position), bool)
        for begin in range(0, int(size.max()), 8):
            bits = _BYTE_MASKS[np.clip(size - begin, 0, 8)] & np.uint64(0x8080808080808080)
            is_ascii &= (self.words[position + begin] & bits) == 0
        return is_ascii

    def _parse_pools(self, position: _Array, ok: _Array, num_memos: _Array, values: dict[str, Any]) -> _Array:
        """Parse the pool ids at `position` (references or pairs of bytes) into `values`; return their ends."""
        word = self.words[position]
        code = (word & np.uint64(255)).astype(np.int64)
        is_reference = (code == GET) | (code == LONG_GET)
        entry = np.where(is_reference, (word >> np.uint64(8)) & _MASKS[code], 0)
        is_inline = (word & np.uint64(0xFFFF00FF00FF)) == int.from_bytes(b"K\0K\0\x86\x94", "little")
        pair = np.where(is_inline, word & np.uint64(0xFF00FF00), 0)
        pool_index = np.full(len(position), -1, np.int64)
        for pair_entry, pool_id in self.pairs.items():
            pool_index[is_reference & (entry == pair_entry)] = self.rows.pool(pool_id)
        for value in np.unique(pair[is_inline & ok]).tolist():
            pool_index[is_inline & (pair == value)] = self.rows.pool((value >> 8 & 255, value >> 24 & 255))
        ok &= pool_index >= 0
        num_memos += is_inline
        values["pool"] = np.maximum(pool_index, 0)
        width: _Array = np.where(is_inline, 6, np.where(code == GET, 2, np.where(code == LONG_GET, 5, 0)))
        return position + width

    def _parse_frames(self, frames: _Array, position: _Array, next_start: _Array, batch: Batch, rows: _Array) -> _Array:
        """Store end and frames of the candidates `rows` in `batch`; return which of them are complete events."""
        if not frames.any():
            batch.end[rows], batch.frames[rows], batch.reference[rows] = position + 1, 0, -1
            is_complete: _Array = self.bytes[position] == ord("u")
            return is_complete
        word = self.words[position]
        code = (word & np.uint64(255)).astype(np.int64)
        is_reference = (code == GET) | (code == LONG_GET)
        end = position + np.where(code == GET, 2, 5)
        is_complete = is_reference & (self.bytes[np.minimum(end, len(self.bytes) - 1)] == ord("u"))
        is_inline = (word & np.uint64(0xFFFF)) == int.from_bytes(b"]\x94", "little")
        is_complete |= is_inline & (self.bytes[next_start - 1] == ord("u")) & (next_start - 2 > position)
        # An inline list is assumed to end where the next event begins; `_numbers` of pickled_events.py verifies that.
        batch.end[rows] = np.where(is_reference, end + 1, next_start)
        batch.frames[rows] = position
        batch.reference[rows] = np.where(is_reference, (word >> np.uint64(8)) & _MASKS[code], 0).astype(np.int64)
        batch.reference[rows[is_inline]] = -1
        return is_complete


def _measure_value(data: bytes, position: int, role: str) -> int | None:
    """Return the number of bytes of the value at `position`; None if its type does not occur in events."""
    if role == "pool" and data[position] == ord("K"):
        return 6
    width = _VALUE_BYTES.get(data[position])
    return width if width is None or data[position] not in (TEXT, 0x8A) else width + data[position + 1]
