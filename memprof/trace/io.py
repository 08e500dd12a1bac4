"""Writes and reads capture files: a trace with a schema version.

The format is gzip-compressed JSON: the schema version, then the tables of `Trace`. It is not a pickle, since captures
are shared, and loading a pickle executes arbitrary code.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from memprof.device.ceiling import compute_limit_bytes, suggest_limit
from memprof.errors import UsageError
from memprof.trace.events import NONE, Caller, Event, EventKind, ModuleRole, Owner, Role, Storage, Trace, Work
from memprof.trace.facts import Facts
from memprof.trace.files import FileKind, write_atomically
from memprof.trace.json_values import fields_from_plain, from_plain, json_fields, rows_from_plain
from memprof.trace.old_names import rename_old
from memprof.units import format_bytes

# The newest readable schema. 2 adds EMPTY_CACHE events, 3 STREAM events and COMMUNICATION, 4 USE and WAIT, 5 ranks,
# UNSHARDED and POOL. A capture declares the lowest schema that covers its content, so that older releases read it.
SCHEMA = 5
_SCHEMAS = {EventKind.EMPTY_CACHE: 2, EventKind.STREAM: 3, Role.COMMUNICATION: 3, EventKind.USE: 4, Role.UNSHARDED: 5}
_SCHEMAS |= {EventKind.POOL: 5, EventKind.POOL_FREE: 5}
_RANKS_SCHEMA = 5

_FORMAT = "memprof capture"
CAPTURE = FileKind("capture", "--save", lambda begin, end: _is_capture(begin))
# Tables as long as the run: they are read row by row, without a type check of each value.
_LONG_TABLES = ("events", "storages", "last_uses", "owners", "callers", "work", "times", "others")
_MEMORY_PER_BYTE = 25  # bytes of memory per byte of JSON, at most: an empty list (3 bytes of JSON) takes 64
_DEVICE = re.compile(r"(?:cuda|mps|xpu):[0-9]{1,4}|cpu:0")
_CAPTURE_HINT = "give a file that `memprof profile --save` or `memprof run --save` wrote"


def _collect_event_kinds(trace: Trace) -> set[EventKind | Role]:
    return {event.kind for event in trace.events} | {owner.role for owner in trace.owners.values()}


def _is_capture(begin: bytes) -> bool:
    try:
        return zlib.decompressobj(wbits=31).decompress(begin, 100).startswith(f'{{"format":"{_FORMAT}"'.encode())
    except zlib.error:
        return False


def save_trace(trace: Trace, path: Path, *, force: bool = False) -> None:
    """Write `trace` to `path` atomically; an existing capture is replaced. Raises UsageError: another file is there
    (unless `force`); MemprofError: the file cannot be written (no such folder, no permission, disk full)."""
    traces = [trace, *trace.others]
    document = {
        "format": _FORMAT,
        "schema": _RANKS_SCHEMA
        if trace.others
        else max([1, *(_SCHEMAS.get(kind, 1) for kind in _collect_event_kinds(trace))]),
        **_to_json(trace),
    }
    for rank_index, peer in enumerate(trace.others, 1):
        first_equal = next(index for index, candidate in enumerate(traces) if candidate.events is peer.events)
        document["others"].append(
            {"facts": peer.facts.to_json(), "same_as": first_equal} if first_equal < rank_index else _to_json(peer)
        )
    compressed = gzip.compress(json.dumps(document, separators=(",", ":")).encode(), compresslevel=5, mtime=0)
    write_atomically(path, compressed, CAPTURE, force=force)


def _to_json(trace: Trace) -> dict[str, Any]:
    return {
        **{name: getattr(trace, field.name) for field, name, _ in json_fields(Trace)},
        "facts": trace.facts.to_json(),
        "owners": [[index, *owner] for index, owner in trace.owners.items()],
        "events": {"kind": [event.kind for event in trace.events], "ref": [event.ref for event in trace.events]},
        "others": [],
    }


def load_trace(path: Path) -> Trace:
    """Read a capture file. Raises UsageError: the file is missing, no capture, truncated, or of a newer memprof."""
    try:
        with gzip.open(path, "rb") as file:
            limit = compute_limit_bytes(path) // _MEMORY_PER_BYTE
            content = file.read(limit + 1)
        if len(content) > limit:
            raise UsageError(
                "the capture unpacks to more than memprof reads of it", value=f"{path} (over {format_bytes(limit)})",
                hint=f"record fewer steps, or {suggest_limit((limit + 1) * _MEMORY_PER_BYTE)}",
            )  # fmt: skip
        document = json.loads(content, parse_constant=_reject_constant)
    except FileNotFoundError:
        raise UsageError(
            "no such file", value=path, hint="give a capture that `memprof profile --save` wrote"
        ) from None
    except (EOFError, zlib.error) as error:
        raise UsageError("the capture is truncated or damaged", value=path, hint="record it again") from error
    except (gzip.BadGzipFile, ValueError, RecursionError) as error:
        raise UsageError("not a memprof capture", value=path, hint=_CAPTURE_HINT) from error
    except OSError as error:
        raise UsageError(
            "the capture cannot be read", value=f"{path} ({error.strerror or type(error).__name__})", hint=_CAPTURE_HINT
        ) from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise UsageError("not a memprof capture", value=path, hint=_CAPTURE_HINT)
    schema = document.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise UsageError(
            "the capture was written by a newer memprof",
            value=f"{path} (schema {schema}; this release reads up to {SCHEMA})",
            hint="update memprof",
        )
    try:
        return _build_traces(document)
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise UsageError("the capture is damaged", value=f"{path} ({error!r})", hint="record it again") from error


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of a capture")


class _OwnerRow(NamedTuple):
    storage: int
    role: str
    name: str


class _TimeRow(NamedTuple):
    time: int


class _LastUseRow(NamedTuple):
    event: int


def _build_traces(document: dict[str, Any]) -> Trace:
    """Return the first rank's trace, with the other ranks in `others`; ranks marked as equal share their tables."""
    traces = [_build_trace(document)]
    for rank_document in document.get("others", []):
        if "same_as" in rank_document:
            facts = from_plain(Facts, rename_old(rank_document["facts"]))
            traces.append(dataclasses.replace(traces[range(len(traces)).index(rank_document["same_as"])], facts=facts))
        else:
            traces.append(_build_trace(rank_document))
    traces[0].others = traces[1:]
    return traces[0]


def _build_trace(document: dict[str, Any]) -> Trace:
    kinds = {int(kind): kind for kind in EventKind}
    columns = document["events"]
    tables = {name: value for name, value in document.items() if name not in _LONG_TABLES}
    if "facts" in tables:
        tables["facts"] = rename_old(tables["facts"])
    trace = Trace(
        **fields_from_plain(Trace, tables),  # captures of earlier releases lack some
        events=[Event(kinds[kind], ref) for kind, ref in zip(columns["kind"], columns["ref"], strict=True)],
        storages=rows_from_plain(Storage, document["storages"]),
        owners={row.storage: Owner(Role(row.role), row.name) for row in rows_from_plain(_OwnerRow, document["owners"])},
        callers=rows_from_plain(Caller, document.get("callers", [])),
        work=rows_from_plain(Work, document.get("work", [])),
        last_uses=[row.event for row in rows_from_plain(_LastUseRow, [[one] for one in document.get("last_uses", [])])],
        times=[row.time for row in rows_from_plain(_TimeRow, [[time] for time in document.get("times", [])])],
    )
    _check_references(trace)
    return trace


def _check_references(trace: Trace) -> None:
    """Raise ValueError if an index in `trace` is out of range: a damaged file must fail here, not in the analysis."""
    table_sizes = {
        EventKind.ALLOC: len(trace.storages),
        EventKind.FREE: len(trace.storages),
        EventKind.PHASE: len(trace.phases),
        EventKind.ENTER: len(trace.modules),
        EventKind.EXIT: len(trace.modules),
        EventKind.EMPTY_CACHE: 1,
        EventKind.STREAM: 1 << 63,
        EventKind.POOL: 1 << 31,
        EventKind.POOL_FREE: 1 << 31,
        EventKind.USE: len(trace.uses),
        EventKind.WAIT: len(trace.waits),
    }
    unallocated, live = set(range(len(trace.storages))), set()
    births: dict[int, int] = {}
    for time, (kind, ref) in enumerate(trace.events):
        if not (isinstance(ref, int) and 0 <= ref < table_sizes[kind]):
            raise ValueError(f"an event points to {kind.name} {ref!r}")
        if kind is EventKind.ALLOC:
            unallocated.remove(ref)
            live.add(ref)
            births[ref] = time
        elif kind is EventKind.FREE:
            live.remove(ref)
    if unallocated:
        raise ValueError(f"storage {unallocated.pop()} is never allocated")
    for device in (trace.device, *trace.gpus):
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"{device!r} is no device")
    used_storages = (use.storage for use in trace.uses)
    made_of_few, gradients = (
        (*trace.column_broadcasts, *trace.repeats),
        (*trace.untrained_gradients, *trace.discarded_gradients),
    )
    own_indices = (*trace.refused, *trace.owners, *used_storages, *gradients, *made_of_few)
    if any(not 0 <= index < len(trace.storages) for index in own_indices):
        raise ValueError("a failed allocation, an owner, a use or a gradient points outside the table")
    if any(not (0 <= c.storage < len(trace.storages) and 0 <= c.source < len(trace.sources)) for c in trace.callers):
        raise ValueError("a caller points outside its tables")
    if any(
        not (0 <= c.module < len(trace.modules) and NONE <= c.source < len(trace.sources)) for c in trace.inner_calls
    ):
        raise ValueError("a call of a module points outside its tables")
    if trace.last_uses and len(trace.last_uses) != len(trace.storages):
        raise ValueError("there is not one last use for each storage")
    for index, used in enumerate(trace.last_uses):
        if used != NONE and not births[index] < used <= len(trace.events):
            raise ValueError(f"storage {index} is used outside its life")
    if trace.times and len(trace.times) != len(trace.events):
        raise ValueError("there is not one time for each event")
    for work in trace.work:
        if not (0 <= work.phase < len(trace.phases) and 0 <= work.op < len(trace.ops)):
            raise ValueError("some work points outside its tables")
    if any(not 0 < workspace.event <= len(trace.events) for workspace in trace.workspaces):
        raise ValueError("a workspace points outside the events")
    for module in trace.modules:
        if module.role is ModuleRole.LAYER:
            _ = module.number
    forwards = trace.list_calls()
    storage_indices = {
        index
        for row in (
            *(f.outputs for f in forwards),
            *(h.storages for h in (*trace.holders, *trace.idle_holders, *trace.error_holders)),
            *(span.storages for span in trace.untrained_spans),
            *(step.parameters for step in trace.first_steps),
            *(tuple(index for index in step.gradients if index != NONE) for step in trace.first_steps),
            *(frozen.parameters for frozen in trace.frozen_in_vain),
        )
        for index in row
    }
    if not (
        all(0 <= index < len(trace.storages) for index in storage_indices)
        and all(0 <= f.module < len(trace.modules) and max(f.source, f.caller) < len(trace.sources) for f in forwards)
        and all(0 <= e.module < len(trace.modules) and e.source < len(trace.sources) for e in trace.eval_calls)
        and all(0 <= frozen.module < len(trace.modules) for frozen in trace.frozen_in_vain)
    ):
        raise ValueError("a call, a holder or a span points outside its tables")
    if any(
        not 0 <= call.begin <= call.end <= len(trace.events) or call.source >= len(trace.sources)
        for call in trace.vmaps
    ):
        raise ValueError("a call of vmap points outside its tables")
    if any(not 0 <= loader.source < len(trace.sources) for loader in trace.loaders):
        raise ValueError("a data loader points outside its table")
    if any(
        not 0 <= call.begin <= call.end <= len(trace.events) or max(call.source, call.caller) >= len(trace.sources)
        for call in trace.graph_backwards
    ):
        raise ValueError("a backward pass points outside its tables")
    if any(not 0 <= index < len(trace.sources) for line in trace.checkpointed_lines for index in line):
        raise ValueError("a checkpointed line points outside its table")
    for span in trace.untrained_spans:
        for index, used in zip(span.storages, span.last_uses, strict=True):
            if not births[index] < used <= len(trace.events):
                raise ValueError(f"storage {index} is used outside its life")
    for storage in trace.storages:
        if storage.num_bytes < 0 or min(storage.shape, default=0) < 0:
            raise ValueError("a storage has a negative size")
        if not (
            0 <= storage.op < len(trace.ops)
            and storage.module < len(trace.modules)
            and storage.source < len(trace.sources)
            and 0 <= storage.phase < len(trace.phases)
        ):
            raise ValueError("a storage points outside its tables")
