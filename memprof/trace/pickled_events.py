"""Reads the events of a large snapshot from the bytes of its pickle, as columns, without unpickling them.

torch writes an event as a dictionary whose keys are references, in one order, and so nearly all events of a file have
one form (trace/event_forms.py):

    EMPTY_DICT MEMOIZE MARK  action REF  addr LONG1  size BININT  stream BININT1  time_us LONG1  frames LIST  SETITEMS

Such events are cut out of the pickle. The unpickler receives the remaining pickle, with a short stub for each run of
cut events. The stub adds as many memo entries as the cut events, and has the lists that later events refer to. Events
of another form stay in the pickle. So the result equals that of the unpickler; for any other file `NotRegular` is
raised, and trace/snapshot_file.py uses the unpickler alone.

A cut event always begins at an opcode: events follow each other without a gap, and the opcodes between them are
skipped one by one, as in trace/pickles.py.
"""

from __future__ import annotations

import io
import re
import struct
from array import array
from collections.abc import Iterator
from itertools import islice
from typing import Any

from memprof.trace.columns import CutEvents, CutRange, EventColumns
from memprof.trace.event_forms import GET, MEMOIZE, TEXT, Batch, Forms
from memprof.trace.one_thread import np
from memprof.trace.pickles import MAX_TUPLES, STOP, NotRegular, PlainUnpickler, build_fixed_opcode_pattern, skip_opcode

_FIRST_BATCH, _BATCH = 64, 1 << 16
_MIN_RUN = 12  # events: shorter runs are left to the unpickler
_MAX_STACKS = 1 << 18  # lists that are remembered by their bytes; the unpickler reads further ones

_FRAME = 0x95
_REF = rb"(?:h.|j.{4})"
_LIST = re.compile(rb"\]\x94(?:\(%b+e|%ba)?" % (_REF, _REF), re.DOTALL)
_RUN = re.compile(b"(?:" + build_fixed_opcode_pattern(b"\x94\x95PQqrp") + b"){0,10000}+", re.DOTALL)
_ENDS_IN_PAIR = re.compile(b"(?:" + build_fixed_opcode_pattern(b"\x94\x95PQqrp") + rb"){0,200}K(.)K(.)", re.DOTALL)
_FORBIDDEN = frozenset(b"PQqrp")  # persistent ids, which only stubs may use, and memo puts with an explicit index
# The memo entry for each dictionary and text that was cut out: a bytearray. A bytearray is neither a key nor a value of
# a snapshot, so that no reference to such an entry passes the checks.
_STUB = b"\x96\x01\0\0\0\0\0\0\0x"

_Array = np.ndarray[Any, Any]


def load_events_apart(data: bytes) -> tuple[object, CutEvents]:
    """Return the value in the pickle `data`, with a `CutRange` in place of each run of events, and the events. Raises
    NotRegular: `load_plain` must be used, which reports any error of the file; MemoryError: out of host memory."""
    try:
        return _Cutter(data).load()
    except (NotRegular, MemoryError):
        raise
    except Exception as error:
        raise NotRegular(repr(error)) from None


class _Cutter:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.rows = EventColumns()
        self.forms = Forms(data, self.rows)
        self.position = 0  # opcodes before this position are copied or cut
        self.memo_size = 0  # entries in the memo
        self.num_tuples = 0
        self.output: list[bytes] = []
        self.has_learned = False  # whether `forms` knows more than when the batch was parsed
        self.index_by_list: dict[bytes, int] = {}  # indices of lists by their bytes, which hold only references
        self.list_entries: list[int] = [0]  # for each list, a memo entry that holds it; 0: none yet
        self.tails: list[bytes] = [b""]  # for each list, the opcodes that put it into the memo again
        self.list_by_entry = np.full(1 << 16, -1, np.int32)  # by memo entry: the index of its list; -1: unknown

    def load(self) -> tuple[object, CutEvents]:
        """Return the value and the events: see `load_events_apart`."""
        self._cut_all(re.compile(re.escape(self._find_event_prefix())))
        self._copy_opcodes(len(self.data))
        if self.position >= len(self.data) or self.data[self.position] != STOP:
            raise NotRegular("it is truncated")
        get_opcodes = b"".join(_make_get_opcode(source) for source in self.list_entries[1:])
        self.output.append(b"(" + get_opcodes + b"l\x86.")
        remaining_pickle = b"".join(self.output)
        self.output.clear()
        value, lists = _Unpickler(io.BytesIO(remaining_pickle)).load()
        return value, CutEvents(self.rows, [[], *lists])

    def _find_event_prefix(self) -> bytes:
        """Return the bytes with which every event begins; copy the opcodes before the first event."""
        if self.data[:1] != b"\x80" or self.data[1] < 4:
            raise NotRegular("the memo is not numbered in order")
        while True:
            position = self.data.find(b"\x8c\x06action\x94", self.position)
            if position < 0 or self.data[self.position] == STOP:
                raise NotRegular("no events")
            self._copy_opcodes(position + 9)
            for entry, text in self.forms.texts.items():
                if text == b"action":
                    return b"}\x94(" + _make_get_opcode(entry)

    # -- between the events ------------------------------------------------------------------------------------------

    def _copy_opcodes(self, limit: int) -> None:
        """Copy opcodes to the remaining pickle, up to the first that begins at or after position `limit`."""
        data, position, match_run, out = self.data, self.position, _RUN.match, self.output
        begin = last_begin = position
        while position < limit:
            code = data[position]
            match = match_run(data, position, limit)
            if match is not None and match.end() > position:
                last_begin, position = position, match.end()
                continue
            if code == MEMOIZE:
                self.memo_size += 1
                position += 1
            elif code == _FRAME:  # frame lengths are wrong once events are cut out
                out.append(data[begin:position])
                position += 9
                begin = position
                if position + int.from_bytes(data[position - 8 : position], "little") > len(data):
                    raise NotRegular("a frame is cut off")
            elif code == TEXT:
                end = position + 2 + data[position + 1]
                text = data[position + 2 : end]
                if data[end : end + 1] == b"\x94":
                    self.has_learned |= self.forms.record_text(self.memo_size, text)
                position = end
            elif code in _FORBIDDEN:
                raise NotRegular(f"opcode {code}")
            elif code == STOP:
                break
            else:
                if code in b"t\x85\x86\x87":
                    pair = _ENDS_IN_PAIR.fullmatch(data, last_begin, position) if code == 0x86 else None
                    self.num_tuples += pair is None
                    if self.num_tuples > MAX_TUPLES:
                        raise NotRegular("many tuples")
                    if pair is not None and data[position + 1] == MEMOIZE:
                        self.forms.pairs[self.memo_size] = (pair[1][0], pair[2][0])
                        self.has_learned = True
                position = skip_opcode(data, position)
        out.append(data[begin:position])
        self.position = position

    # -- the events --------------------------------------------------------------------------------------------------

    def _cut_all(self, event_pattern: re.Pattern[bytes]) -> None:
        positions: Iterator[int] = (match.start() for match in event_pattern.finditer(self.data, self.position))
        size = _FIRST_BATCH
        candidates: list[int] = []
        while True:
            candidates += islice(positions, max(size - len(candidates), 0))
            if not candidates or self.data[self.position] == STOP:
                return
            del candidates[: self._cut_batch(candidates, is_last=len(candidates) < size)]
            size = _FIRST_BATCH if self.has_learned else min(2 * size, _BATCH)

    def _cut_batch(self, positions: list[int], *, is_last: bool) -> int:
        """Cut out the regular events among the candidates at `positions`, until a new form is found. Return how many
        candidates are done.

        An inline list ends at the next candidate, so that the last candidate is left for the next batch.
        """
        self.has_learned = False
        batch = self.forms.parse(np.array(positions, np.int64), self.memo_size)
        is_adjacent = np.append(batch.ok[:-1] & batch.ok[1:] & (batch.end[:-1] == batch.start[1:]), False)
        run_ends = (np.flatnonzero(~is_adjacent) + 1).tolist()  # ends of runs, in order
        ok = batch.ok.tolist()
        index, run_index, count = 0, 0, len(positions)
        while index < count:
            start = positions[index]
            if self.has_learned or self.data[self.position] == STOP:
                break
            if start < self.position:  # within another value
                index += 1
            elif start > self.position:
                self._copy_opcodes(start)
            elif ok[index]:
                while run_ends[run_index] <= index:
                    run_index += 1
                end = self._cut_run(batch, index, run_ends[run_index])
                if end == index:
                    ok[index] = False
                else:
                    self.position = int(batch.end[end - 1])
                    index = end
            elif index + 1 < count:
                self._copy_opcodes(positions[index + 1])
                index += 1
            elif is_last:
                self._copy_opcodes(start + 1)
                index += 1
            else:
                break
        return index

    def _cut_run(self, batch: Batch, begin: int, end: int) -> int:
        """Cut out the events `begin` to `end` (exclusive) that have no new list. Return the end: a lower one if a list
        holds other values than references."""
        is_inline = (batch.reference[begin:end] < 0) & (batch.frames[begin:end] > 0)
        stacks = np.zeros(end - begin, np.int64)
        new_rows: list[int] = []
        rows = np.flatnonzero(is_inline)
        if len(rows):
            starts, stops = batch.frames[begin:end][rows], batch.end[begin:end][rows] - 1
            numbers = self._number_lists(rows.tolist(), starts.tolist(), stops.tolist(), new_rows)
            if len(numbers) < len(rows):
                end = begin + int(rows[len(numbers)])
                rows, is_inline, stacks = rows[: len(numbers)], is_inline[: end - begin], stacks[: end - begin]
                if end == begin:
                    return end
            stacks[rows] = numbers
        entries_after = np.cumsum(batch.num_memos[begin:end] + is_inline) + self.memo_size
        list_entry = entries_after - 1  # memo entry of the list, for events with an inline list
        self.memo_size = int(entries_after[-1])
        if self.memo_size >= len(self.list_by_entry):
            self.list_by_entry = np.append(self.list_by_entry, np.full(self.memo_size, -1, np.int32))
        at = 0
        for new in [*new_rows, end - begin]:
            if new > at:
                self._cut_rows(batch, begin + at, begin + new, is_inline[at:new], stacks[at:new], list_entry[at:new])
            if new < end - begin:
                self._keep_events(batch, begin + new, begin + new + 1)
                entry, number = int(list_entry[new]), int(stacks[new])
                if number:
                    self.list_entries[number], self.tails[number] = entry, _make_get_opcode(entry) + b"\x940"
                    self.list_by_entry[entry] = number
            at = new + 1
        return end

    def _number_lists(self, rows: list[int], starts: list[int], stops: list[int], new_rows: list[int]) -> list[int]:
        """Return the indices of the lists of `rows`, up to the first list that holds other values than references.

        `starts` and `stops` are the positions of the lists; rows with a new list are appended to `new_rows`.
        """
        data, index_by_list = self.data, self.index_by_list
        numbers = []
        for row, begin, end in zip(rows, starts, stops, strict=True):
            content = data[begin:end]
            number = index_by_list.get(content, 0)
            if not number:
                if _LIST.fullmatch(content) is None:
                    break
                new_rows.append(row)
                if len(index_by_list) < _MAX_STACKS:
                    number = index_by_list[content] = len(self.list_entries)
                    self.list_entries.append(0)
                    self.tails.append(b"")
            numbers.append(number)
        return numbers

    def _keep_events(self, batch: Batch, begin: int, end: int) -> None:
        self.output.append(self.data[int(batch.start[begin]) : int(batch.end[end - 1])])

    def _cut_rows(self, batch: Batch, begin: int, end: int, inline: _Array, stacks: _Array, list_entry: _Array) -> None:
        """Cut out the events `begin` to `end`, whose lists are known or references; keep them if they are few."""
        self.list_by_entry[list_entry[inline]] = stacks[inline]
        if end - begin < _MIN_RUN:
            self._keep_events(batch, begin, end)
            return
        reference = batch.reference[begin:end]
        is_reference = reference >= 0
        if is_reference.any():
            entries = reference[is_reference]
            if (entries >= (list_entry - batch.num_memos[begin:end] + 1)[is_reference]).any():
                raise NotRegular("a reference to what comes later")
            for entry in np.unique(entries[self.list_by_entry[entries] < 0]).tolist():
                self.list_by_entry[entry] = len(self.list_entries)
                self.list_entries.append(entry)
                self.tails.append(_make_get_opcode(entry) + b"\x940")
            stacks[is_reference] = self.list_by_entry[entries]
        memos, tails = batch.num_memos[begin:end].tolist(), self.tails
        memo_opcodes = [b"\x94" * count for count in range(max(memos) + 1)]
        rows = zip(memos, inline.tolist(), stacks.tolist(), strict=True)
        first, count = len(self.rows), end - begin
        stubs = [memo_opcodes[m] + tails[number] if has_list else memo_opcodes[m] for m, has_list, number in rows]
        self.output += (b"(", _STUB, *stubs, b"1", struct.pack("<cicicc", b"J", first, b"J", count, b"\x86", b"Q"))
        for name, column in batch.columns.items():
            target: array[int] = getattr(self.rows, name)
            target.frombytes(column[begin:end].astype(target.typecode).tobytes())
        self.rows.stacks.frombytes(stacks.astype("I").tobytes())


def _make_get_opcode(entry: int) -> bytes:
    """Return the opcode that loads memo entry `entry`."""
    return bytes((GET, entry)) if entry < 256 else struct.pack("<ci", b"j", entry)


class _Unpickler(PlainUnpickler):
    def persistent_load(self, pid: object) -> CutRange:
        assert isinstance(pid, tuple)  # persistent ids of the file itself are rejected earlier
        return CutRange(*pid)
