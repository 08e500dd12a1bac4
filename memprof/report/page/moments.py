"""A run as columns of numbers, from which the HTML page computes the live bytes after any event (a moment)."""

from __future__ import annotations

from dataclasses import dataclass, field

from memprof.allocator.rounding import round_request
from memprof.findings import Evidence
from memprof.ledger.ledger import Ledger
from memprof.ledger.stages import format_stage
from memprof.trace.events import NONE, EventKind, Storage, without_numbers
from memprof.trace.json_values import JsonValue, json_name


@dataclass(slots=True)
class StorageKinds:
    """Columns of storage kinds: storages equal in all columns are one kind; strings are indices of `Moments.words`."""

    requested: list[int] = field(default_factory=list)  # Bytes of one storage.
    # The same, rounded by the allocator: the bytes that the ledger counts to the category.
    rounded: list[int] = field(default_factory=list)
    category: list[int] = field(default_factory=list)
    shape: list[int] = field(default_factory=list)
    dtype: list[int] = field(default_factory=list)
    module: list[int] = field(default_factory=list)  # Its path; -1: outside every module.
    op: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    name: list[int] = field(default_factory=list)  # Of the parameter, gradient or state; -1: none of these.
    # Kinds of one group are one row of the report: they differ only in their layer number.
    group: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Moments(JsonValue):
    """The lifetimes of all storages of a run on one GPU, as columns; times are event indices, sizes are bytes."""

    events: int  # Number of events.
    words: list[str]
    kinds: StorageKinds
    begin: list[int]  # One entry per life: the event of the allocation.
    end: list[int]  # The event of the free; `events` if it is not freed.
    kind: list[int]
    extra: list[int]  # Bytes of its block beyond `rounded`, which the ledger counts as fragmentation.
    fragmentation: int  # Index of that category's name.
    reserved_at: list[int]  # Events after which reserved bytes change; the first is 0.
    reserved: list[int]
    # Index of the name with its step, begin, end (exclusive), index of the layer's stack and layer number, or -1.
    stages: list[tuple[int, int, int, int, int]]
    peak: int
    peak_reserved: int
    refused: int  # The event of the first failed allocation; -1: none.
    tried_bytes: int  # Of that allocation.
    kind_of: dict[int, int] = field(repr=False, metadata=json_name(None))  # By index of the storage.


def build_moments(ledger: Ledger) -> Moments:
    """Return the storage lifetimes of a run. Raises AssertionError: live bytes differ from the allocated bytes."""
    trace, timeline = ledger.trace, ledger.run.timeline
    table = _KindTable(ledger)
    begin, end, kinds, extras = list[int](), list[int](), list[int](), list[int]()
    blocks, open_lives, kind_of = list[int](), dict[int, int](), dict[int, int]()
    failed_storages, num_events = ledger.run.refused, len(trace.events)
    bytes_before = live_bytes = 0
    for time, (event_kind, ref) in enumerate(trace.events):
        allocated_bytes = ledger.allocated[time]
        if event_kind is EventKind.ALLOC:
            storage = trace.storages[ref]
            if storage.device == trace.device and storage.num_bytes and ref not in failed_storages:
                kind = kind_of[ref] = table.add_kind(ref, storage)
                open_lives[ref] = len(begin)
                begin.append(time)
                end.append(num_events)
                kinds.append(kind)
                blocks.append(allocated_bytes - bytes_before)
                extras.append(blocks[-1] - table.kinds.rounded[kind])
                live_bytes += blocks[-1]
        elif event_kind is EventKind.FREE and ref in open_lives:
            life = open_lives.pop(ref)
            end[life] = time
            live_bytes -= blocks[life]
        if live_bytes != allocated_bytes:
            raise AssertionError(f"the lives do not sum to what is allocated after event {time}")
        bytes_before = allocated_bytes
    changes = [0, *(time for time in range(1, num_events) if timeline.reserved[time] != timeline.reserved[time - 1])]
    add_word = table.add_word
    fragmentation, oom = add_word("fragmentation"), ledger.out_of_memory
    stages = [
        (add_word(format_stage(span.name, span.step)), span.begin, span.end, add_word(span.stack or None), span.index)
        for span in ledger.spans
    ]
    return Moments(
        events=num_events,
        words=list(table.words),
        kinds=table.kinds,
        begin=begin,
        end=end,
        kind=kinds,
        extra=extras,
        fragmentation=fragmentation,
        reserved_at=changes,
        reserved=[timeline.reserved[time] for time in changes],
        stages=stages,
        peak=ledger.peak_event,
        peak_reserved=ledger.peak_reserved_event,
        refused=NONE if oom is None else oom.event,
        tried_bytes=0 if oom is None else oom.tried_bytes,
        kind_of=kind_of,
    )


class _KindTable:
    """A builder of `StorageKinds` and of the strings that they refer to."""

    def __init__(self, ledger: Ledger) -> None:
        self.kinds = StorageKinds()
        self.words: dict[str, int] = {}  # Word -> index.
        self._ledger = ledger
        self._kind_indices: dict[tuple[object, ...], int] = {}
        self._groups: dict[tuple[object, ...], int] = {}

    def add_word(self, word: str | None) -> int:
        """Return the index of the string `word`, adding the string if it is new; -1 for None."""
        return NONE if word is None else self.words.setdefault(word, len(self.words))

    def add_kind(self, ref: int, storage: Storage) -> int:
        """Return the index of a storage's kind, adding the kind if it is new; `ref` is the index of the storage."""
        trace = self._ledger.trace
        owner = trace.owners.get(ref)
        name = None if owner is None else owner.name or None
        module = trace.module_path(storage)
        attributes = (
            storage.num_bytes, storage.shape, storage.dtype, self._ledger.categories[ref], storage.op, storage.source,
            trace.phases[storage.phase].kind,
        )  # fmt: skip
        key = (*attributes, module, name)
        index = self._kind_indices.get(key)
        if index is not None:
            return index
        kinds, num_bytes = self.kinds, storage.num_bytes
        self._kind_indices[key] = index = len(kinds.group)
        kinds.requested.append(num_bytes)
        kinds.rounded.append(round_request(num_bytes, storage.device) if self._ledger.run.rounds else num_bytes)
        category, shape = self._ledger.categories[ref].value, "x".join(map(str, storage.shape))
        words = (category, shape, storage.dtype, module, trace.op(storage), trace.source_line(storage), name)
        columns = (kinds.category, kinds.shape, kinds.dtype, kinds.module, kinds.op, kinds.source, kinds.name)
        for column, word in zip(columns, words, strict=True):
            column.append(self.add_word(word))
        masked_names = tuple(None if path is None else without_numbers(path) for path in (module, name))
        kinds.group.append(self._groups.setdefault((*attributes, *masked_names), len(self._groups)))
        return index


def find_kinds(moments: Moments, evidence: Evidence) -> list[int]:
    """Return the indices of storage kinds that match `evidence`; [] if it has neither source line nor operator."""
    if evidence.source is None and evidence.op is None:
        return []
    words, kinds = moments.words, moments.kinds
    shape = None if evidence.shape is None else "x".join(map(str, evidence.shape))
    columns = (kinds.shape, kinds.dtype, kinds.op, kinds.source)
    columns_with_values = zip(columns, (shape, evidence.dtype, evidence.op, evidence.source), strict=True)
    conditions = [(column, value) for column, value in columns_with_values if value is not None]
    module = None if evidence.module is None else without_numbers(evidence.module)
    return [
        kind
        for kind, module_index in enumerate(kinds.module)
        if (module is None or (module_index != NONE and without_numbers(words[module_index]) == module))
        and all(column[kind] != NONE and words[column[kind]] == value for column, value in conditions)
    ]
