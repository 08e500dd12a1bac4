"""The events of a large snapshot, read out of its pickle as columns, without unpickling them.

torch writes an event as a dictionary whose keys are references, in one order, and so nearly all events of a file have
one form (trace/event_forms.py):

    EMPTY_DICT MEMOIZE MARK  action REF  addr LONG1  size BININT  stream BININT1  time_us LONG1  frames LIST  SETITEMS

Such events are cut out of the pickle. The unpickler receives the rest of the pickle, with a short stub for each run of
cut events. The stub makes as many memo entries as the cut events, and keeps the lists that later events refer to.
Events of another form stay in the pickle. So every value is the same as from the unpickler; for any other file
`NotRegular` is raised, and trace/snapshot_file.py uses the unpickler alone.

A cut event is known to begin at an opcode: events follow each other without a gap, and the opcodes between them are
walked as in trace/pickles.py.
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
from memprof.trace.pickles import MOST_TUPLES, STOP, NotRegular, PlainUnpickler, after_opcode, fixed_opcodes

_FIRST_BATCH, _BATCH = 64, 1 << 16
_SHORT_RUN = 12  # events: shorter runs are left to the unpickler
_MAX_STACKS = 1 << 18  # lists that are remembered by their bytes; the unpickler reads further ones

_FRAME = 0x95
_REF = rb"(?:h.|j.{4})"
_LIST = re.compile(rb"\]\x94(?:\(%b+e|%ba)?" % (_REF, _REF), re.DOTALL)
_RUN = re.compile(b"(?:" + fixed_opcodes(b"\x94\x95PQqrp") + b"){0,10000}+", re.DOTALL)
_ENDS_IN_PAIR = re.compile(b"(?:" + fixed_opcodes(b"\x94\x95PQqrp") + rb"){0,200}K(.)K(.)", re.DOTALL)
_FORBIDDEN = frozenset(b"PQqrp")  # persistent ids, which only stubs may use, and memo puts with an explicit index
# The memo entry for each dictionary and text that was cut out: a bytearray. A bytearray is neither a key nor a value of
# a snapshot, so that no reference to such an entry passes the checks.
_STUB = b"\x96\x01\0\0\0\0\0\0\0x"

_Array = np.ndarray[Any, Any]


def load_events_apart(data: bytes) -> tuple[object, CutEvents]:
    """Return the value in `data`, with `CutRange`s in place of events, and the events. Raises NotRegular: use
    `load_plain`, which reports any error of the file; MemoryError: out of host memory."""
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
        self.at = 0  # opcodes before this position are done
        self.memo = 0  # entries in the memo
        self.num_tuples = 0
        self.out: list[bytes] = []
        self.learned = False  # whether `forms` knows more than when the batch was parsed
        self.known: dict[bytes, int] = {}  # numbers of lists by their bytes, which hold references alone
        self.sources: list[int] = [0]  # for each list, a memo entry that holds it; 0: none yet
        self.tails: list[bytes] = [b""]  # for each list, the opcodes that put it into the memo again
        self.list_at = np.full(1 << 16, -1, np.int32)  # by memo entry: the number of its list; -1: unknown

    def load(self) -> tuple[object, CutEvents]:
        """Return the value and the events: see `load_events_apart`."""
        self._cut_all(re.compile(re.escape(self._find_event_prefix())))
        self._copy_opcodes(len(self.data))
        if self.at >= len(self.data) or self.data[self.at] != STOP:
            raise NotRegular("it is truncated")
        known = b"".join(_make_get_opcode(source) for source in self.sources[1:])
        self.out.append(b"(" + known + b"l\x86.")
        made = b"".join(self.out)
        self.out.clear()
        value, lists = _Unpickler(io.BytesIO(made)).load()
        return value, CutEvents(self.rows, [[], *lists])

    def _find_event_prefix(self) -> bytes:
        """Return the bytes that begin every event; walk the opcodes before the first event."""
        if self.data[:1] != b"\x80" or self.data[1] < 4:
            raise NotRegular("the memo is not numbered in order")
        while True:
            at = self.data.find(b"\x8c\x06action\x94", self.at)
            if at < 0 or self.data[self.at] == STOP:
                raise NotRegular("no events")
            self._copy_opcodes(at + 9)
            for entry, text in self.forms.texts.items():
                if text == b"action":
                    return b"}\x94(" + _make_get_opcode(entry)

    # -- between the events ------------------------------------------------------------------------------------------

    def _copy_opcodes(self, limit: int) -> None:
        """Copy opcodes for the unpickler until an opcode begins at `limit` or behind it."""
        data, at, run, out = self.data, self.at, _RUN.match, self.out
        begin = last = at
        while at < limit:
            code = data[at]
            found = run(data, at, limit)
            if found is not None and found.end() > at:
                last, at = at, found.end()
                continue
            if code == MEMOIZE:
                self.memo += 1
                at += 1
            elif code == _FRAME:  # frame lengths are wrong once events are cut out
                out.append(data[begin:at])
                at += 9
                begin = at
                if at + int.from_bytes(data[at - 8 : at], "little") > len(data):
                    raise NotRegular("a frame is cut off")
            elif code == TEXT:
                end = at + 2 + data[at + 1]
                text = data[at + 2 : end]
                if data[end : end + 1] == b"\x94":
                    self.learned |= self.forms.learn(self.memo, text)
                at = end
            elif code in _FORBIDDEN:
                raise NotRegular(f"opcode {code}")
            elif code == STOP:
                break
            else:
                if code in b"t\x85\x86\x87":
                    pair = _ENDS_IN_PAIR.fullmatch(data, last, at) if code == 0x86 else None
                    self.num_tuples += pair is None
                    if self.num_tuples > MOST_TUPLES:
                        raise NotRegular("many tuples")
                    if pair is not None and data[at + 1] == MEMOIZE:
                        self.forms.pairs[self.memo] = (pair[1][0], pair[2][0])
                        self.learned = True
                at = after_opcode(data, at)
        out.append(data[begin:at])
        self.at = at

    # -- the events --------------------------------------------------------------------------------------------------

    def _cut_all(self, event: re.Pattern[bytes]) -> None:
        places: Iterator[int] = (found.start() for found in event.finditer(self.data, self.at))
        size = _FIRST_BATCH
        waiting: list[int] = []
        while True:
            waiting += islice(places, max(size - len(waiting), 0))
            if not waiting or self.data[self.at] == STOP:
                return
            del waiting[: self._cut_batch(waiting, is_last=len(waiting) < size)]
            size = _FIRST_BATCH if self.learned else min(2 * size, _BATCH)

    def _cut_batch(self, places: list[int], *, is_last: bool) -> int:
        """Cut out the regular events of these candidates. Return how many candidates are done before a new form was
        learned.

        The end of a list is known from the next candidate: the last candidate waits for the next batch.
        """
        self.learned = False
        batch = self.forms.parse(np.array(places, np.int64), self.memo)
        follows = np.append(batch.ok[:-1] & batch.ok[1:] & (batch.end[:-1] == batch.start[1:]), False)
        ends = (np.flatnonzero(~follows) + 1).tolist()  # ends of runs, in order
        ok = batch.ok.tolist()
        at, next_end, count = 0, 0, len(places)
        while at < count:
            start = places[at]
            if self.learned or self.data[self.at] == STOP:
                break
            if start < self.at:  # within another value
                at += 1
            elif start > self.at:
                self._copy_opcodes(start)
            elif ok[at]:
                while ends[next_end] <= at:
                    next_end += 1
                done = self._cut_run(batch, at, ends[next_end])
                if done == at:
                    ok[at] = False
                else:
                    self.at = int(batch.end[done - 1])
                    at = done
            elif at + 1 < count:
                self._copy_opcodes(places[at + 1])
                at += 1
            elif is_last:
                self._copy_opcodes(start + 1)
                at += 1
            else:
                break
        return at

    def _cut_run(self, batch: Batch, begin: int, end: int) -> int:
        """Cut a run of regular events, but keep events with a new list. Return the end of the run (exclusive), which is
        earlier if a list holds more than references."""
        inline = (batch.reference[begin:end] < 0) & (batch.frames[begin:end] > 0)
        stacks = np.zeros(end - begin, np.int64)
        news: list[int] = []
        which = np.flatnonzero(inline)
        if len(which):
            froms, tos = batch.frames[begin:end][which], batch.end[begin:end][which] - 1
            numbers = self._number_lists(which.tolist(), froms.tolist(), tos.tolist(), news)
            if len(numbers) < len(which):
                end = begin + int(which[len(numbers)])
                which, inline, stacks = which[: len(numbers)], inline[: end - begin], stacks[: end - begin]
                if end == begin:
                    return end
            stacks[which] = numbers
        after = np.cumsum(batch.memos[begin:end] + inline) + self.memo
        list_entry = after - 1  # memo entry of the list, for events with an inline list
        self.memo = int(after[-1])
        if self.memo >= len(self.list_at):
            self.list_at = np.append(self.list_at, np.full(self.memo, -1, np.int32))
        at = 0
        for new in [*news, end - begin]:
            if new > at:
                self._cut_rows(batch, begin + at, begin + new, inline[at:new], stacks[at:new], list_entry[at:new])
            if new < end - begin:
                self._keep_events(batch, begin + new, begin + new + 1)
                entry, number = int(list_entry[new]), int(stacks[new])
                if number:
                    self.sources[number], self.tails[number] = entry, _make_get_opcode(entry) + b"\x940"
                    self.list_at[entry] = number
            at = new + 1
        return end

    def _number_lists(self, which: list[int], froms: list[int], tos: list[int], news: list[int]) -> list[int]:
        """Return the number of each list of the rows `which`, up to the first list that holds more than references.

        Lists are bytes `froms` to `tos` of the file; rows with a new list are appended to `news`.
        """
        data, known = self.data, self.known
        found = []
        for row, begin, end in zip(which, froms, tos, strict=True):
            key = data[begin:end]
            number = known.get(key, 0)
            if not number:
                if _LIST.fullmatch(key) is None:
                    break
                news.append(row)
                if len(known) < _MAX_STACKS:
                    number = known[key] = len(self.sources)
                    self.sources.append(0)
                    self.tails.append(b"")
            found.append(number)
        return found

    def _keep_events(self, batch: Batch, begin: int, end: int) -> None:
        self.out.append(self.data[int(batch.start[begin]) : int(batch.end[end - 1])])

    def _cut_rows(self, batch: Batch, begin: int, end: int, inline: _Array, stacks: _Array, list_entry: _Array) -> None:
        """Cut events whose lists are all known, or references."""
        self.list_at[list_entry[inline]] = stacks[inline]
        if end - begin < _SHORT_RUN:
            self._keep_events(batch, begin, end)
            return
        reference = batch.reference[begin:end]
        refers = reference >= 0
        if refers.any():
            entries = reference[refers]
            if (entries >= (list_entry - batch.memos[begin:end] + 1)[refers]).any():
                raise NotRegular("a reference to what comes later")
            for entry in np.unique(entries[self.list_at[entries] < 0]).tolist():
                self.list_at[entry] = len(self.sources)
                self.sources.append(entry)
                self.tails.append(_make_get_opcode(entry) + b"\x940")
            stacks[refers] = self.list_at[entries]
        memos, tails = batch.memos[begin:end].tolist(), self.tails
        heads = [b"\x94" * count for count in range(max(memos) + 1)]
        rows = zip(memos, inline.tolist(), stacks.tolist(), strict=True)
        first, count = len(self.rows), end - begin
        stubs = [heads[m] + tails[number] if has_list else heads[m] for m, has_list, number in rows]
        self.out += (b"(", _STUB, *stubs, b"1", struct.pack("<cicicc", b"J", first, b"J", count, b"\x86", b"Q"))
        for name, column in batch.columns.items():
            own: array[int] = getattr(self.rows, name)
            own.frombytes(column[begin:end].astype(own.typecode).tobytes())
        self.rows.stacks.frombytes(stacks.astype("I").tobytes())


def _make_get_opcode(entry: int) -> bytes:
    """Return the opcode that loads this entry of the memo."""
    return bytes((GET, entry)) if entry < 256 else struct.pack("<ci", b"j", entry)


class _Unpickler(PlainUnpickler):
    def persistent_load(self, pid: object) -> CutRange:
        assert isinstance(pid, tuple)  # persistent ids of the file itself are rejected earlier
        return CutRange(*pid)
