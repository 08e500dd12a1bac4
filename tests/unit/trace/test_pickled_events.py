"""Events read as columns are those that the unpickler reads, whatever stands around them and is damaged."""

from __future__ import annotations

import pickle
import pickletools
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.errors import UsageError
from memprof.trace import pickled_events, snapshot_file
from memprof.trace.columns import EventColumns
from memprof.trace.pickled_events import load_events_apart
from memprof.trace.pickles import NotRegular
from memprof.trace.snapshot import Action, Snapshot, SnapshotEvent
from tests.lanes import examples

FRAMES = [{"filename": f"file{n}.py", "line": n, "name": f"call{n}"} for n in range(400)]
NUMBERS = (0, 1, 255, 256, 65_535, 65_536, (1 << 31) - 1, 1 << 31, 1 << 32, 0x7F0000000000, (1 << 63) - 1, 1 << 63)
POOLS = ((0, 0), (0, 1), (7, 255), (300, 2))
PADDING = 5000  # Bytes: events at the very end of a file are left to the unpickler.


def event(number: int, frames: Any, *, action: str = "alloc", **other: Any) -> dict[str, Any]:
    """As torch writes it: keys in this order, texts of its own each time."""
    return {
        "action": action, "addr": 0x7F0000000000 + 512 * number, "size": 512 * number, "stream": 0, "time_us": number,
        "compile_context": "".join(("N/", "A")), **other, "frames": frames,
    }  # fmt: skip


def dumped(*traces: list[Any], protocol: int = 4, **parts: Any) -> bytes:
    value = {"segments": [], "device_traces": list(traces), **parts, "padding": "x" * PADDING}
    return pickle.dumps(value, protocol)


def as_unpickled(data: bytes) -> Snapshot | str:
    """What the reference makes of `data`: the snapshot, or its error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_file, "_MIN_COLUMN_BYTES", 1 << 60)
        return _read(data)


def as_columns(data: bytes) -> Snapshot | str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_file, "_MIN_COLUMN_BYTES", 0)
        return _read(data)


def _read(data: bytes) -> Snapshot | str:
    try:
        return snapshot_file.parse_snapshot(data)
    except UsageError as error:
        return str(error)


def cut_out(data: bytes) -> int:
    return len(load_events_apart(data)[1].rows)


def training(steps: int = 20, *, shared: bool = True) -> list[dict[str, Any]]:
    """Allocations with stacks of references, and frees that share the list, as torch's, or have none."""
    found = []
    for step in range(steps):
        for layer in range(20):
            own = FRAMES[layer : layer + 30]
            found.append(event(layer + 1, own))
            found.append(event(layer + 1, own if shared else [], action="free_requested"))
            found.append(event(layer + 1, own if shared else [], action="free_completed", time_us=step))
    return found


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("shared", [True, False])
def test_a_run_is_cut_out_nearly_whole(protocol, shared):
    trace = training(shared=shared)
    data = dumped(trace, protocol=protocol)
    assert cut_out(data) > 0.85 * len(trace)
    assert as_columns(data) == as_unpickled(data)
    found = as_columns(data)
    assert isinstance(found, Snapshot) and isinstance(found.traces[0], EventColumns)
    assert len({id(one.frames) for one in found.traces[0]}) == 20 + (not shared)


@pytest.mark.parametrize("protocol", range(4))
def test_older_protocols_are_the_unpicklers(protocol):
    with pytest.raises(NotRegular):
        load_events_apart(dumped(training(), protocol=protocol))
    assert as_columns(dumped(training(), protocol=protocol)) == as_unpickled(dumped(training(), protocol=4))


_actions = st.sampled_from([action.value for action in Action])


@st.composite
def _traces(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Events of a few forms, in stretches; some dictionaries and lists are there twice."""
    stacks = [draw(st.lists(st.sampled_from(FRAMES), max_size=5)) for _ in range(4)]
    found: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 12))):
        keys = draw(st.permutations(["addr", "size", "stream", "time_us", "pool_id", "note"]))
        keys = keys[: draw(st.integers(3, 6))]
        last = draw(st.sampled_from(["frames", "frames", "none", "other"]))
        for _ in range(draw(st.integers(1, 20))):
            one: dict[str, Any] = {"action": draw(_actions)}
            for key in keys:
                if key == "pool_id":
                    one[key] = draw(st.sampled_from(POOLS))
                elif key == "note":
                    one[key] = draw(st.sampled_from(["N/A", "", 1, None, True, 2.5, (1,)]))
                else:
                    one[key] = draw(st.sampled_from(NUMBERS[:-2])) + draw(st.integers(0, 3))
            if one["action"] == "oom" and draw(st.booleans()):
                one["device_free"] = one.pop("addr", 5)
            if last != "none":
                stack = draw(st.sampled_from(stacks))
                one["frames"] = stack if draw(st.booleans()) else list(stack)
            if last == "other":
                one["later"] = draw(st.sampled_from(NUMBERS))
            found.append(one)
        if draw(st.integers(0, 9)) == 0:
            found += found[-2:]
    return found


@pytest.fixture
def _no_run_is_short(monkeypatch):
    monkeypatch.setattr(pickled_events, "_MIN_RUN", 1)


@pytest.mark.usefixtures("_no_run_is_short")
@settings(deadline=None, max_examples=examples(30))
@given(st.lists(_traces(), min_size=1, max_size=3), st.sampled_from([4, 5]))
def test_any_events_are_read_as_the_unpickler_reads_them(traces, protocol):
    data = dumped(*traces, protocol=protocol)
    assert as_columns(data) == as_unpickled(data)


@pytest.mark.usefixtures("_no_run_is_short")
@settings(deadline=None, max_examples=examples(100))
@given(st.data())
def test_damage_is_found_as_the_unpickler_finds_it(data):
    whole = bytearray(dumped(training(3), training(1, shared=False)))
    # How long a pickle's frame is tells a reader what to fetch at once, and nothing of the value: it may be wrong.
    lengths = {at + n for op, _, at in pickletools.genops(bytes(whole)) if op.name == "FRAME" for n in range(9)}
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(2, len(whole) - PADDING).filter(lambda at: at not in lengths))
        whole[at] = data.draw(st.integers(0, 255))
    assert as_columns(bytes(whole)) == as_unpickled(bytes(whole))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("key", ["addr", "size", "stream", "time_us"])
def test_numbers_of_every_width(number, key):
    trace = [event(1, []) | {key: number} for _ in range(40)]
    trace = [{name: one[name] for name in event(1, [])} for one in trace]
    assert as_columns(dumped(trace)) == as_unpickled(dumped(trace))


@pytest.mark.parametrize("number", [-1, 1 << 64, 1.5, None, True, "1"])
def test_what_is_no_number_is_the_unpicklers_error(number):
    trace = [*training(2), event(1, FRAMES[:3]) | {"size": number}, *training(2)]
    found = as_columns(dumped(trace))
    assert isinstance(found, str) and found == as_unpickled(dumped(trace))


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        pytest.param(b"\x8c\x03N/A", b"\x8c\x03N/\x80", id="no UTF-8"),
        pytest.param(b"\x8c\x03N/A", b"\x8c\x0c" + b"a" * 11 + b"\xff", id="no UTF-8, far behind"),
        pytest.param(b"\x8c\x03N/A", b"\x8c\x04N/\xc3\xa9", id="UTF-8"),
        pytest.param(b"\x8c\x03N/A\x94", b"\x8a\x0a" + b"\x01" * 10, id="80 bits"),
        pytest.param(b"\x8c\x03N/A\x94", b"\x8a\x09" + b"\x01" * 9, id="72 bits"),
        pytest.param(b"\x8c\x03N/A", b"\x8c\xf0" + b"long" * 60, id="long"),
    ],
)
def test_values_of_other_keys(said, instead):
    """In every event, and in one."""
    whole = dumped(training(4))
    whole = whole[:2] + whole[11:]  # its frame would have another length
    assert as_columns(whole.replace(said, instead)) == as_unpickled(whole.replace(said, instead))
    at = whole.index(said, len(whole) // 2)
    one = whole[:at] + instead + whole[at + len(said) :]
    assert as_columns(one) == as_unpickled(one)


@pytest.mark.parametrize("begin", [b"\x80\x04.", b"\x80\x04}.", b"\x80\x04\x8c\x03a.b\x94."])
def test_a_pickle_that_ends_before_its_events(begin):
    data = begin + dumped(training(2))
    assert as_columns(data) == as_unpickled(data)


def test_bytes_that_look_like_an_event_within_a_text():
    trace = training(5)
    data = dumped(trace)
    begin = data.index(b"free_requested")
    at = next(
        position for _, _, position in pickletools.genops(data) if position > begin and data[position:][:3] == b"}\x94("
    )
    look_alike = data[at : at + 60].decode("latin-1")
    odd = [one | {"user_metadata": look_alike if n % 7 == 0 else ""} for n, one in enumerate(trace)]
    odd = [{**{k: v for k, v in one.items() if k != "frames"}, "frames": one["frames"]} for one in odd]
    assert as_columns(dumped(odd)) == as_unpickled(dumped(odd))


@pytest.mark.parametrize("opcode", [b"K\x00Q0", b"P1\n0", b"N0q\x05", b"Nr\x05\x00\x00\x000"])
def test_names_and_places_in_the_memo_are_not_taken(opcode):
    """A file may not give names that stand for what was cut out, nor overwrite what later events refer to."""
    data = dumped(training(3))
    at = data.index(b"\x8c\x06action") - 3  # before the first event
    with pytest.raises(NotRegular):
        load_events_apart(data[:at] + opcode + data[at:])


def test_frames_of_a_pickle_are_no_hindrance():
    trace = training(60)
    data = dumped(trace)
    assert data.count(b"\x95") > 2 and cut_out(data) > 0.95 * len(trace)
    assert as_columns(data) == as_unpickled(data)


def test_an_event_where_none_belongs_is_no_segment_nor_setting():
    data = dumped(training(2), training(2), segments=training(2))
    assert as_columns(data) == as_unpickled(data) and "is missing" in str(as_columns(data))
    one = training(1)
    parts = dumped(one, one, allocator_settings={"a": one[0], "b": {"c": one[1]}}, external_annotations=one[:30])
    assert as_columns(parts) == as_unpickled(parts)


def test_columns_are_a_sequence_of_records():
    found = as_columns(dumped(training(2)))
    assert isinstance(found, Snapshot)
    events = found.traces[0]
    assert isinstance(events[0], SnapshotEvent) and events[:3] == list(events)[:3] and events[-1].time_us == 1
    kept, places = EventColumns.of(events).without(*range(1, 10))
    assert list(places) == [at for at, one in enumerate(events) if one.action is Action.ALLOC] and len(kept) == len(
        places
    )
    assert EventColumns.of(list(events)) == events and EventColumns.of(events) is events
    assert struct.calcsize("BQQQqII") >= 41
