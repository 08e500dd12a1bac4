"""Small files that ask for all memory or all time: what their bytes can name again and again, or nest.

Nothing adversarial is committed: each is built here.
"""

from __future__ import annotations

import gzip
import json
import pickle
import struct
from collections.abc import Callable, Iterable
from typing import Any

MIB = 1 << 20
_EVENT = {"action": "alloc", "addr": 0x1000, "size": 512, "stream": 0, "time_us": 1, "frames": []}
_FRAME = {"filename": "train.py", "line": 7, "name": "step"}
_MODULUS = (1 << 61) - 1  # Of Python's hashes of numbers.


def _snapshot(**parts: Any) -> bytes:
    return pickle.dumps({"segments": [], "device_traces": [], **parts}, protocol=4)


def _memoized_lists(depth: int, width: int, leaf: Any) -> list[Any]:
    """A list of `width` times the same list, and so on: width ** depth leaves in a few bytes."""
    made = leaf
    for _ in range(depth):
        made = [made] * width
    return made


def shared_events() -> bytes:
    """19 million events in 18 KB: a trace of 4,400 events that is one and the same, named 4,400 times."""
    return _snapshot(device_traces=[[dict(_EVENT)] * 4400] * 4400)


def shared_traces() -> bytes:
    return _snapshot(device_traces=_memoized_lists(2, 100_000, _EVENT))


def _segment(**parts: Any) -> dict[str, Any]:
    block = {"size": 512, "requested_size": 512, "state": "active_allocated", "frames": []}
    return {
        "device": 0, "address": 0x1000, "total_size": 512, "stream": 0, "segment_type": "small", "frames": [],
        "blocks": [block], **parts,
    }  # fmt: skip


def shared_blocks() -> bytes:
    block = {"size": 512, "requested_size": 512, "state": "active_allocated", "frames": []}
    blocks = [block] * 10_000
    segments = [_segment(blocks=blocks, total_size=5_120_000, address=number << 30) for number in range(2000)]
    return _snapshot(segments=segments)


def shared_segments() -> bytes:
    return _snapshot(segments=[_segment()] * 200_000)


def shared_history() -> bytes:
    history = [{"addr": 0, "real_size": 512, "frames": []}] * 100_000
    block = {"size": 512, "state": "active_allocated", "history": history}
    return _snapshot(segments=[_segment(blocks=[dict(block) for _ in range(10_000)], total_size=5_120_000)])


def shared_annotations() -> bytes:
    note = {f"key {number}": number for number in range(20_000)}
    return _snapshot(external_annotations=[note] * 100_000, device_traces=[[_EVENT]])


def long_annotations() -> bytes:
    """Stages that begin and never end, of one long name."""
    name = "n" * 100_000
    notes = [{"name": name, "stage": stage, "device": 0, "time_us": 1} for stage in ("START", "END") * 20_000]
    return _snapshot(external_annotations=notes, device_traces=[[_EVENT]])


def deep_stack() -> bytes:
    """A stack of 100,000 frames at each of 5,000 events."""
    stack = [dict(_FRAME, line=line) for line in range(100_000)]
    return _snapshot(device_traces=[[dict(_EVENT, addr=n << 10, frames=stack) for n in range(5000)]])


def repeated_frame() -> bytes:
    stack = [_FRAME] * 200_000
    return _snapshot(device_traces=[[dict(_EVENT, addr=n << 10, frames=list(stack)) for n in range(3)]])


def long_names() -> bytes:
    """Frames that share a name of a megabyte."""
    name = "n" * MIB
    stacks = [[{"filename": name, "line": line, "name": name}] for line in range(5000)]
    return _snapshot(device_traces=[[dict(_EVENT, addr=n << 10, frames=stack) for n, stack in enumerate(stacks)]])


def long_settings() -> bytes:
    """Settings that are lists in lists: two to the power of 40 when written out."""
    return _snapshot(
        allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": _memoized_lists(40, 2, "x")}, device_traces=[[_EVENT]]
    )


def holds_itself() -> bytes:
    settings: dict[str, Any] = {}
    settings["PYTORCH_CUDA_ALLOC_CONF"] = settings
    return _snapshot(allocator_settings=settings, device_traces=[[_EVENT]])


def empty_lists() -> bytes:
    """A list of 400 million empty ones would need as many bytes; of three million, 300 MB."""
    return b"\x80\x04(" + b"]" * (3 * MIB) + b"l."


def empty_dicts() -> bytes:
    return b"\x80\x04](" + b"}K\x00K\x00s" * MIB + b"e."


def memos() -> bytes:
    return b"\x80\x04](" + b"}\x94" * (2 * MIB) + b"e."


def marks() -> bytes:
    return b"\x80\x04" + b"(" * (8 * MIB) + b"."


def deep_lists() -> bytes:
    return b"\x80\x04" + b"]" * 500_000 + b"a" * 499_999 + b"."


def deep_tuples() -> bytes:
    return b"\x80\x04K\x01" + b"\x85" * 500_000 + b"."


def deep_tuple_as_key() -> bytes:
    return b"\x80\x04}K\x01" + b"\x85" * 9_000 + b"K\x01s."


def _keys(encoded: Iterable[bytes]) -> bytes:
    """A dictionary with these keys, which is not made here: that would take as long as reading it."""
    return b"\x80\x04}" + b"".join(key + b"K\x00s" for key in encoded) + b"."


def _number(value: int) -> bytes:
    return pickle.dumps(value, protocol=4).split(b"\x8a", 1)[1][:-1].join((b"\x8a", b""))


def colliding_numbers() -> bytes:
    """60,000 keys with one hash: each is looked up past all before it."""
    return _keys(_number(number * _MODULUS) for number in range(10, 60_000))


def colliding_numbers_as_text() -> bytes:
    return _keys(b"L%dL\n" % (number * _MODULUS) for number in range(1, 60_000))


def colliding_set() -> bytes:
    return b"\x80\x04\x8f(" + b"".join(_number(number * _MODULUS) for number in range(10, 60_000)) + b"\x90."


def _second(first: int) -> int:
    """The second number with which the pair has the hash of all others (xxHash's steps, as in CPython)."""
    mask = (1 << 64) - 1
    one, two, five = 11400714785074694791, 14029467366897019727, 2870177450012600261

    def after(accumulated: int, lane: int) -> int:
        accumulated = (accumulated + lane * two) & mask
        return ((accumulated << 31 | accumulated >> 33) * one) & mask

    found = (1 - after(five, first)) * pow(two, -1, 1 << 64) & mask
    return found - (1 << 64) if found >> 63 else found


def colliding_tuples() -> bytes:
    """60,000 different pairs of 64-bit numbers with one hash."""
    pairs = [(first, second) for first in range(300, 300_000) if abs(second := _second(first)) < _MODULUS][:60_000]
    assert len({hash(pair) for pair in pairs[:9]}) == 1
    return _keys(b"M" + struct.pack("<H", first & 0xFFFF) + _number(second) + b"\x86" for first, second in pairs)


def colliding_frozensets() -> bytes:
    return _keys(b"(" + _number(number * _MODULUS) + b"\x91" for number in range(10, 60_000))


def long_number() -> bytes:
    return b"\x80\x04}\x8c\x08segmentsL" + b"9" * MIB + b"L\ns."


def long_binary_number() -> bytes:
    return b"\x80\x04\x8b" + struct.pack("<i", MIB) + b"\x7f" * MIB + b"."


SNAPSHOTS: tuple[Callable[[], bytes], ...] = (
    shared_events, shared_traces, shared_blocks, shared_segments, shared_history, shared_annotations, long_annotations,
    deep_stack, repeated_frame, long_names, long_settings, holds_itself, empty_lists, empty_dicts, memos, marks,
    deep_lists, deep_tuples, deep_tuple_as_key, colliding_numbers, colliding_numbers_as_text, colliding_set,
    colliding_tuples, colliding_frozensets, long_number, long_binary_number,
)  # fmt: skip


def _changed(document: dict[str, Any], **parts: Any) -> bytes:
    text = json.dumps({**document, **parts}, separators=(",", ":"))
    return gzip.compress(text.encode(), 6, mtime=0)


def _events(document: dict[str, Any], kind: int, refs: Iterable[int], **parts: Any) -> bytes:
    more, events = list(refs), document["events"]
    joined = {"kind": events["kind"] + [kind] * len(more), "ref": events["ref"] + more}
    return _changed(document, events=joined, **parts)


def _text(document: dict[str, Any], more: bytes) -> bytes:
    """With more text before the last bracket."""
    return gzip.compress(json.dumps(document, separators=(",", ":")).encode()[:-1] + more + b"}", 1)


def _long_names(document: dict[str, Any]) -> bytes:
    modules = [["n" * 4 * MIB, *row[1:]] if row[0] and row[2] != "layer" else row for row in document["modules"]]
    ops, sources = ["o" * 4 * MIB] * len(document["ops"]), ["s" * 4 * MIB + ":1 f"] * len(document["sources"])
    return _changed(document, modules=modules, ops=ops, sources=sources)


_MANY, _MILLION, _SEGMENTS = 300_000, 1_000_000, 150_000
# Captures, made of what one has in it: each with a table that is long or deep.
CAPTURES: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "long shapes": lambda d: _changed(d, storages=[[row[0], [1] * _MANY, *row[2:]] for row in d["storages"]]),
    # As many live storages as a GPU of 288 GB has segments of 2 MiB.
    "many storages": lambda d: _events(
        d, 0, range(len(d["storages"]), len(d["storages"]) + _SEGMENTS),
        storages=d["storages"] + d["storages"][-1:] * _SEGMENTS,
    ),
    "many phases": lambda d: _events(d, 2, [0] * _MILLION),
    "phases of a table": lambda d: _events(
        d, 2, range(len(d["phases"]), len(d["phases"]) + _MANY), phases=d["phases"] + d["phases"][-1:] * _MANY
    ),
    "many steps": lambda d: _events(
        d, 2, range(len(d["phases"]), len(d["phases"]) + _MANY),
        phases=d["phases"] + [["forward", step, 1] for step in range(_MANY)],
    ),
    "many modules entered": lambda d: _events(d, 3, [1] * _MILLION),
    "many modules": lambda d: _changed(
        d, modules=d["modules"] + [[f"layers.{n}", "Layer", "layer", "layers"] for n in range(_MANY)]
    ),
    "deep modules": lambda d: _changed(d, modules=[*d["modules"], [".".join("a" * 100_000), "Layer", "", ""]]),
    "many deep modules": lambda d: _changed(
        d, modules=d["modules"] + [[".".join("a" * n), "L", "", ""] for n in range(3000)]
    ),
    "long names": _long_names,
    "many emptied caches": lambda d: _events(d, 5, [0] * _MILLION),
    "streams": lambda d: _events(d, 6, range(_MANY)),
    "many GPUs": lambda d: _changed(d, gpus={f"cuda:{n}": True for n in range(10_000)}),
    "many assumptions": lambda d: _changed(d, assumptions=["It is assumed."] * _MILLION),
    "a long assumption": lambda d: _changed(d, assumptions=["word " * 4 * _MILLION]),
    "a long command": lambda d: _changed(d, facts={**d["facts"], "command": "x" * 20 * _MILLION}),
    "many refused": lambda d: _changed(d, refused=[0] * _MILLION),
    "many samples": lambda d: _changed(
        d, samples=[[n % len(d["events"]["ref"]), n / 1000, 1, 1, 1, 1, 1] for n in range(_MANY)], source="measured"
    ),
    "many forwards": lambda d: _changed(d, forwards=[[0, 9, 0, 0, True, 1, [0] * 10]] * _MANY),
    "long outputs": lambda d: _changed(d, forwards=[[0, 9, 0, 0, True, 1, [0] * 20_000]] * 100),
    "many holders": lambda d: _changed(
        d, holders=[[9, "list", f"name {n}", None, False, None, [0] * 100, 0, 0, None] for n in range(20_000)]
    ),
    "one holder of much": lambda d: _changed(
        d, holders=[[9, "list", "n", None, False, None, [0] * _MILLION, 0, 0, None]]
    ),
    "much work": lambda d: _changed(d, work=[[0, 0, "cuda:0", "float32", 1, 1, 0, 0, 1]] * _MANY),
    "many workspaces": lambda d: _changed(
        d, workspaces=[[n % len(d["events"]["ref"]) + 1, "cuda:0", 1 << 20, 1 << 30] for n in range(_MANY)]
    ),
    "many mismatches": lambda d: _changed(d, mismatches=[[0, 0, 0, 0, [["cpu", [1] * 50, "float32", 0]]]] * 50_000),
    "a long failure": lambda d: _changed(d, failure=["error", "p", "E", "m" * 20 * _MILLION, None, None, None, None]),
    "many owners": lambda d: _changed(
        d, owners=[[n % len(d["storages"]), "parameter", f"p{n}"] for n in range(_MILLION // 2)]
    ),
    "unknown tables": lambda d: _changed(d, other=[[]] * 4 * _MILLION),
    "a large number": lambda d: _changed(d, storages=[[1 << 62, *row[1:]] for row in d["storages"]]),
    "a deep list": lambda d: _text(d, b',"x":' + b"[" * 900 + b"]" * 900),
    "a deeper list": lambda d: _text(d, b',"x":' + b"[" * 100_000 + b"]" * 100_000),
    "the deepest list": lambda d: _text(d, b',"x":' + b"[" * 5 * _MILLION),
    "a number of many digits": lambda d: _text(d, b',"x":' + b"9" * _MILLION),
    "a member that comes again": lambda d: _text(d, b',"device":"cuda:0"' * _MILLION),
    "many different members": lambda d: _text(d, b"".join(b',"m%d":1' % n for n in range(_MILLION))),
    "only blanks": lambda d: gzip.compress(b" " * (1 << 30), 1),
    "many small archives": lambda d: gzip.compress(b" ", 1) * 50_000,
}  # fmt: skip
