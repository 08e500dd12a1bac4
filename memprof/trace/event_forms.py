"""The form of events in a pickle: the order of their keys. All events of one form are parsed at once.

A form is derived from the first event that has this form. Positions and values of many events are arrays with one row
per event: one numpy operation parses one key of all events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from memprof.trace.columns import CODES, COLUMNS, NO_TIME, EventColumns
from memprof.trace.one_thread import np
from memprof.trace.snapshot import Action

_MAX_LAYOUTS = 8
_MAX_FIELDS_BYTES = 1 << 12  # bytes of an event before its frames, at most: 255 of each text

MEMOIZE, TEXT, GET, LONG_GET = 0x94, 0x8C, ord("h"), ord("j")

_Array = np.ndarray[Any, Any]

_ROLES = {
    b"action": "action", b"addr": "address", b"device_free": "free", b"size": "size", b"stream": "stream",
    b"time_us": "time", b"pool_id": "pool", b"frames": "frames",
}  # fmt: skip
_ACTIONS = {action.value.encode(): code for action, code in CODES.items()}
# Bytes of values with their opcodes, without the variable part that a length byte gives.
_VALUES = {
    ord("K"): 2, ord("M"): 3, ord("J"): 5, GET: 2, LONG_GET: 5, ord("N"): 1, 0x88: 1, 0x89: 1, ord("G"): 9, 0x8A: 2,
    TEXT: 3,
}  # fmt: skip
_INTEGERS = {ord("K"): 1, ord("M"): 2, ord("J"): 4}  # bytes of the number after the opcode
_REFERENCES = {GET: 0xFF, LONG_GET: 0xFFFFFFFF}  # bits of the memo entry
# The same by opcode: an array of 256 each. MEMOIZE follows a text.
_WIDTHS, _NUMBER_BYTES, _MASKS = (
    np.array([table.get(code, 0) for code in range(256)], kind)
    for table, kind in ((_VALUES, np.int64), (_INTEGERS, np.int64), (_REFERENCES, np.uint64))
)
_HAS_LENGTH = np.isin(np.arange(256), (TEXT, 0x8A))
_BYTE_MASKS = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)  # a mask of the lowest `count` bytes


@dataclass(frozen=True, slots=True)
class _Layout:
    """The keys of an event in order: the bytes of each key's memo reference, and the role of the key here."""

    keys: tuple[bytes, ...]
    roles: tuple[str, ...]


class Batch(NamedTuple):
    """Candidates, one per row. Positions are byte offsets in the file; `reference` is -1 for an inline list."""

    start: _Array
    end: _Array
    ok: _Array
    memos: _Array  # memo entries that the event makes before the entry of its list
    frames: _Array  # position of the event's frames; 0: the event has no frames
    reference: _Array
    columns: dict[str, _Array]


class Forms:
    """The known forms of the events of one pickle (`data`); `rows` numbers the pools of the events."""

    def __init__(self, data: bytes, rows: EventColumns) -> None:
        self.data = data
        self.rows = rows
        self.bytes = np.frombuffer(data, np.uint8)
        self.words = np.ndarray((len(data) - 8,), "<u8", data, 0, (1,))  # the eight bytes from each position on
        self.layouts: list[_Layout] = []
        self.texts: dict[int, bytes] = {}  # by memo entry; empty for a text that is neither a key nor an action
        self.actions: dict[int, int] = {}
        self.pairs: dict[int, tuple[int, int]] = {}  # by memo entry: pairs that may be pool ids

    def learn(self, entry: int, text: bytes) -> bool:
        """Record that a memo entry is a text; return whether the text is a key or an action."""
        matters = text in _ROLES or text in _ACTIONS
        self.texts[entry] = text if matters else b""
        if text in _ACTIONS:
            self.actions[entry] = _ACTIONS[text]
        if matters:  # layouts that were derived before may have mistaken a key
            self.layouts.clear()
        return matters

    def parse(self, start: _Array, memo: int) -> Batch:
        """Parse the candidates that begin at `start` (rising). Values are known for the rows that are `ok`. `memo` is
        the number of memo entries before the first candidate."""
        count = len(start)
        following = np.append(start[1:], len(self.data))
        batch = Batch(
            start, np.zeros(count, np.int64), np.zeros(count, bool), np.ones(count, np.int64),
            np.zeros(count, np.int64), np.full(count, -1, np.int64),
            {name: np.zeros(count, np.uint64) for name in COLUMNS if name != "stacks"},
        )  # fmt: skip
        batch.columns["times"] = np.full(count, NO_TIME, np.int64)
        possible = start < len(self.data) - _MAX_FIELDS_BYTES
        num_tried = 0
        while True:
            left = np.flatnonzero(possible & ~batch.ok)
            if num_tried == len(self.layouts):
                layout = self._derive_layout(int(start[left[0]])) if len(left) else None
                if layout is None or layout in self.layouts or num_tried >= _MAX_LAYOUTS:
                    return batch
                self.layouts.append(layout)
            if len(left):
                self._parse_as(self.layouts[num_tried], batch, left, following, memo)
            num_tried += 1

    def _derive_layout(self, at: int) -> _Layout | None:
        """Derive the layout of the event at `at`; None: the bytes there are no event."""
        keys, roles = [], []
        data, at = self.data, at + 3
        while data[at] != ord("u"):
            width = {GET: 2, LONG_GET: 5}.get(data[at])
            if width is None:
                return None
            keys.append(data[at : at + width])
            text = self.texts.get(int.from_bytes(keys[-1][1:], "little"))
            if text is None:  # the entry of a key must be a text
                return None
            roles.append(_ROLES.get(text, "other"))
            at += width
            if roles[-1] == "frames":
                break
            size = _measure_value(data, at, roles[-1])
            if size is None:
                return None
            at += size
        named = [role for role in roles if role != "other"]
        return None if len(set(named)) < len(named) or "action" not in named else _Layout(tuple(keys), tuple(roles))

    def _parse_as(self, layout: _Layout, batch: Batch, rows: _Array, following: _Array, memo: int) -> None:
        """Mark the rows of `rows` that have this layout as ok, and store their values in `batch`."""
        words = self.words
        at = batch.start[rows] + 3
        ok = np.ones(len(rows), bool)
        memos = np.ones(len(rows), np.int64)
        found: dict[str, _Array] = {}
        frames = np.zeros(len(rows), np.int64)
        for key, role in zip(layout.keys, layout.roles, strict=True):
            mask = (1 << 8 * len(key)) - 1
            ok &= (words[at] & np.uint64(mask)) == int.from_bytes(key, "little")
            at = at + len(key)
            if role == "frames":
                frames = at
                break
            if role == "pool":
                at = self._parse_pools(at, ok, memos, found)
                continue
            word = words[at]
            code = (word & np.uint64(255)).astype(np.int64)
            length_byte = ((word >> np.uint64(8)) & np.uint64(255)).astype(np.int64)
            width = _WIDTHS[code] + np.where(_HAS_LENGTH[code], length_byte, 0)
            if role == "other":
                ok &= (width > 0) & ((word >> np.uint64(8)) & _MASKS[code] < max(memo, 1))
                text = code == TEXT
                memos += text
                ok &= ~text | self._is_ascii(at + 2, np.where(text, length_byte, 0))
                ok &= (code != 0x8A) | (length_byte <= 9)  # 64 bits
                ok &= ~text | (self.bytes[np.minimum(at + width - 1, len(self.bytes) - 1)] == MEMOIZE)
            elif role == "action":
                ok &= (code == GET) | (code == LONG_GET)
                found[role] = (word >> np.uint64(8)) & _MASKS[code]
            else:
                found[role] = self._parse_numbers(at, word, code, length_byte, ok)
            at = at + np.where(ok, width, 0)
        ok &= self._parse_frames(frames, at, following[rows], batch, rows)
        action = np.full(len(rows), -1, np.int64)
        for entry, known in self.actions.items():
            action[found["action"] == entry] = known
        ok &= action >= 0
        if "free" in found or "address" not in found:  # the address of an OOM event is the free bytes of the device
            is_oom = action == CODES[Action.OOM]
            ok &= is_oom if "address" not in found else ~is_oom
            found["address"] = found.get("free", np.zeros(len(rows), np.uint64))
        good = rows[ok]
        batch.ok[good] = True
        batch.memos[good] = memos[ok]
        batch.columns["actions"][good] = action[ok]
        for name, role in (("addresses", "address"), ("sizes", "size"), ("streams", "stream"), ("pools", "pool")):
            if role in found:
                batch.columns[name][good] = found[role][ok]
        if "time" in found:
            batch.columns["times"][good] = found["time"][ok].astype(np.int64)

    def _parse_numbers(self, at: _Array, word: _Array, code: _Array, length_byte: _Array, ok: _Array) -> _Array:
        """Return the numbers at `at`; clear `ok` for numbers that are negative or above 2^63."""
        long = code == 0x8A
        size = np.where(long, length_byte, _NUMBER_BYTES[code])
        ok &= (size > 0) & (size <= 8)
        size = np.clip(size, 1, 8)
        value: _Array = np.where(long, self.words[at + 2], word >> np.uint64(8)) & _BYTE_MASKS[size]
        signed = long | (code == ord("J"))
        ok &= ~signed | (value >> (np.uint64(8) * size.astype(np.uint64) - np.uint64(1)) == 0)
        return value

    def _is_ascii(self, at: _Array, size: _Array) -> _Array:
        """Return whether the `size` bytes at each position are ASCII; the unpickler checks other texts."""
        plain = np.ones(len(at), bool)
        for begin in range(0, int(size.max()), 8):
            bits = _BYTE_MASKS[np.clip(size - begin, 0, 8)] & np.uint64(0x8080808080808080)
            plain &= (self.words[at + begin] & bits) == 0
        return plain

    def _parse_pools(self, at: _Array, ok: _Array, memos: _Array, found: dict[str, Any]) -> _Array:
        """Parse the pools at `at`, each a reference or a pair of two bytes; return the position after each pool."""
        word = self.words[at]
        code = (word & np.uint64(255)).astype(np.int64)
        refers = (code == GET) | (code == LONG_GET)
        entry = np.where(refers, (word >> np.uint64(8)) & _MASKS[code], 0)
        is_inline = (word & np.uint64(0xFFFF00FF00FF)) == int.from_bytes(b"K\0K\0\x86\x94", "little")
        pair = np.where(is_inline, word & np.uint64(0xFF00FF00), 0)
        number = np.full(len(at), -1, np.int64)
        for known, pool in self.pairs.items():
            number[refers & (entry == known)] = self.rows.pool(pool)
        for known in np.unique(pair[is_inline & ok]).tolist():
            number[is_inline & (pair == known)] = self.rows.pool((known >> 8 & 255, known >> 24 & 255))
        ok &= number >= 0
        memos += is_inline
        found["pool"] = np.maximum(number, 0)
        width: _Array = np.where(is_inline, 6, np.where(code == GET, 2, np.where(code == LONG_GET, 5, 0)))
        return at + width

    def _parse_frames(self, frames: _Array, at: _Array, following: _Array, batch: Batch, rows: _Array) -> _Array:
        """Store the end and the frames of each event in `batch`; return which events are complete."""
        if not frames.any():
            batch.end[rows], batch.frames[rows], batch.reference[rows] = at + 1, 0, -1
            ends: _Array = self.bytes[at] == ord("u")
            return ends
        word = self.words[at]
        code = (word & np.uint64(255)).astype(np.int64)
        refers = (code == GET) | (code == LONG_GET)
        end = at + np.where(code == GET, 2, 5)
        ends = refers & (self.bytes[np.minimum(end, len(self.bytes) - 1)] == ord("u"))
        listed = (word & np.uint64(0xFFFF)) == int.from_bytes(b"]\x94", "little")
        ends |= listed & (self.bytes[following - 1] == ord("u")) & (following - 2 > at)
        # An inline list is assumed to end where the next event begins; `_numbers` of pickled_events.py verifies that.
        batch.end[rows] = np.where(refers, end + 1, following)
        batch.frames[rows] = at
        batch.reference[rows] = np.where(refers, (word >> np.uint64(8)) & _MASKS[code], 0).astype(np.int64)
        batch.reference[rows[listed]] = -1
        return ends


def _measure_value(data: bytes, at: int, role: str) -> int | None:
    """Return the bytes of the value at `at`; None: an event has no such value."""
    if role == "pool" and data[at] == ord("K"):
        return 6
    width = _VALUES.get(data[at])
    return width if width is None or data[at] not in (TEXT, 0x8A) else width + data[at + 1]
