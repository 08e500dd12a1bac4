"""Snapshot files: all forms are read, nothing in a file is run, and what is no snapshot is one clear error."""

from __future__ import annotations

import contextlib
import gzip
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.errors import UsageError
from memprof.trace.pickles import BrokenPickle, ForbiddenGlobal, load_plain
from memprof.trace.snapshot import Action, BlockState, Frame
from memprof.trace.snapshot_file import parse_snapshot, read_snapshot

MIB = 1 << 20
FRAME = {"filename": "train.py", "line": 7, "name": "step"}


def _snapshot() -> dict:
    return {
        "segments": [
            {
                "device": 0,
                "address": 0x1000,
                "total_size": 2 * MIB,
                "allocated_size": 512,
                "active_size": 512,
                "requested_size": 5,
                "stream": 0,
                "segment_type": "small",
                "segment_pool_id": (0, 1),
                "is_expandable": True,
                "frames": [FRAME],
                "blocks": [
                    {
                        "address": 0x1000,
                        "size": 512,
                        "requested_size": 5,
                        "state": "active_allocated",
                        "frames": [FRAME],
                    },
                    {"address": 0x1200, "size": 2 * MIB - 512, "requested_size": 0, "state": "inactive", "frames": []},
                ],
            }
        ],
        "device_traces": [
            [
                {"action": "segment_alloc", "addr": 0x1000, "size": 2 * MIB, "stream": 0, "time_us": 3, "frames": []},
                {"action": "alloc", "addr": 0x1000, "size": 5, "stream": 0, "time_us": 4, "frames": [FRAME], "new": 1},
                {"action": "oom", "device_free": 77, "size": 512, "stream": 0, "pool_id": (0, 1), "frames": []},
            ],
            [],
        ],
        "allocator_settings": {"expandable_segments": False, "max_split_size": -1},
        "external_annotations": [{"stage": "x", "device": 0, "time_us": 1}],
    }


def test_current_form():
    found = parse_snapshot(pickle.dumps(_snapshot()))
    (segment,) = found.segments
    assert (segment.address, segment.size, segment.is_small, segment.pool_id) == (0x1000, 2 * MIB, True, (0, 1))
    assert segment.expandable and segment.frames == (Frame("train.py", 7, "step"),)
    assert [(block.address, block.size, block.requested, block.state) for block in segment.blocks] == [
        (0x1000, 512, 5, BlockState.ALLOCATED),
        (0x1200, 2 * MIB - 512, 0, BlockState.INACTIVE),
    ]
    assert [event.action for event in found.traces[0]] == [Action.SEGMENT_ALLOC, Action.ALLOC, Action.OOM]
    assert found.traces[0][1].time_us == 4
    assert (found.traces[0][2].address, found.traces[0][2].pool_id, found.traces[0][2].time_us) == (77, (0, 1), None)
    assert found.settings["max_split_size"] == -1
    assert found.annotations == [{"stage": "x", "device": 0, "time_us": 1}]
    assert found.devices == [0]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol(protocol):
    assert parse_snapshot(pickle.dumps(_snapshot(), protocol)) == parse_snapshot(pickle.dumps(_snapshot()))


def test_forms_of_2_0():
    segment = _snapshot()["segments"][0]
    for block in segment["blocks"]:
        del block["address"], block["frames"], block["requested_size"]
    segment["blocks"][0]["history"] = [{"addr": 0x1000, "real_size": 5, "frames": [FRAME]}]
    for key in ("segment_pool_id", "is_expandable", "frames"):
        del segment[key]
    (found,) = parse_snapshot(pickle.dumps([segment])).segments
    assert [(block.address, block.requested) for block in found.blocks] == [(0x1000, 5), (0x1200, None)]
    assert found.blocks[0].frames == (Frame("train.py", 7, "step"),)
    assert (found.pool_id, found.expandable) == ((0, 0), False)


def test_documented_name_of_pending_blocks():
    raw = _snapshot()
    raw["segments"][0]["blocks"][0]["state"] = "active_awaiting_free"
    assert parse_snapshot(pickle.dumps(raw)).segments[0].blocks[0].state is BlockState.PENDING_FREE


def _changed(path: list, value: object) -> dict:
    raw = _snapshot()
    at = raw
    for key in path[:-1]:
        at = at[key]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return raw


SEGMENT, BLOCK, EVENT = ["segments", 0], ["segments", 0, "blocks", 0], ["device_traces", 0, 1]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        pytest.param({}, "no 'segments'", id="empty"),
        pytest.param(7, "top level is no dictionary", id="number"),
        pytest.param([1], "a segment is no dictionary", id="list of numbers"),
        pytest.param({"segments": "x"}, "segments is no list", id="segments"),
        pytest.param(_changed([*SEGMENT, "address"], KeyError), "'address' is missing", id="no address"),
        pytest.param(_changed([*SEGMENT, "address"], -1), "'address' is -1", id="negative"),
        pytest.param(_changed([*SEGMENT, "address"], True), "'address' is True", id="boolean"),
        pytest.param(_changed([*SEGMENT, "address"], 1 << 65), "'address' is 3689", id="huge"),
        pytest.param(_changed([*SEGMENT, "segment_type"], "medium"), "segment_type is 'medium'", id="type"),
        pytest.param(_changed([*SEGMENT, "segment_pool_id"], 5), "a pool id is 5", id="pool id"),
        pytest.param(_changed([*SEGMENT, "blocks"], None), "blocks is no list", id="blocks"),
        pytest.param(_changed([*SEGMENT, "total_size"], 4 * MIB), "do not fill", id="not filled"),
        pytest.param(_changed([*BLOCK, "size"], 1024), "do not tile", id="not tiled"),
        pytest.param(_changed([*BLOCK, "size"], 0), "do not tile", id="empty block"),
        pytest.param(_changed([*BLOCK, "state"], "dead"), "state is 'dead'", id="state"),
        pytest.param(_changed([*BLOCK, "frames"], [1]), "a frame is no dictionary", id="frame"),
        pytest.param(_changed([*BLOCK, "frames"], [{"filename": 1}]), "filename or name is no text", id="filename"),
        pytest.param(_changed([*EVENT, "action"], "jump"), "action is 'jump'", id="action"),
        pytest.param(_changed([*EVENT, "size"], 1.5), "'size' is 1.5", id="fraction"),
        pytest.param(_changed(["device_traces"], {}), "device_traces is no list", id="traces"),
        pytest.param(_changed(["allocator_settings"], []), "allocator_settings is no dictionary", id="settings"),
        pytest.param(_changed(["segments"], _snapshot()["segments"] * 2), "overlap", id="overlap"),
    ],
)
def test_wrong_structure(raw, said):
    with pytest.raises(UsageError) as caught:
        parse_snapshot(pickle.dumps(raw), "x.pickle")
    assert caught.value.problem.startswith("not a memory snapshot: ") and said in caught.value.problem
    assert caught.value.value == "x.pickle"


class Evil:
    def __reduce__(self):
        return os.system, ("echo pwned > /tmp/memprof-pwned",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_in_a_file_is_run(protocol, tmp_path):
    marker = tmp_path / "ran"

    class Touch:
        def __reduce__(self):
            return Path.touch, (marker,)

    with pytest.raises(UsageError, match=r"asks for .* to be imported.*it was not run"):
        parse_snapshot(pickle.dumps({"segments": [Touch()]}, protocol))
    assert not marker.exists()


def test_the_refused_name_is_given():
    with pytest.raises(UsageError, match=r"asks for posix\.system|asks for nt\.system"):
        parse_snapshot(pickle.dumps({"segments": Evil()}))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"Ppersistent\n.", id="persistent id"),
        pytest.param(b"(ios\nsystem\n.", id="INST"),
        pytest.param(b"\x82\x01.", id="extension"),
    ],
)
def test_other_ways_to_name_things(data):
    with pytest.raises(UsageError):
        parse_snapshot(data)


def test_truncated_at_every_byte():
    data = pickle.dumps(_snapshot())
    for end in range(len(data)):
        with pytest.raises(UsageError, match="not a memory snapshot"):
            parse_snapshot(data[:end])


@given(st.binary(max_size=200))
def test_random_bytes_never_make_a_traceback(data):
    with pytest.raises(UsageError):
        parse_snapshot(data)


@given(st.integers(0, 5000), st.integers(0, 255))
def test_damaged_bytes_never_make_a_traceback(at, value):
    data = bytearray(pickle.dumps(_snapshot()))
    data[at % len(data)] = value
    with contextlib.suppress(UsageError):
        parse_snapshot(bytes(data))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x80\x02]r\xff\xff\xff\x7f.", id="memo index"),
        pytest.param(b"]p2147483647\n.", id="memo index as text"),
        pytest.param(b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", id="bytearray"),
        pytest.param(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".", id="bytes"),
        pytest.param(b"\x80\x02X" + struct.pack("<I", 0xFFFFFFF0) + b".", id="text"),
    ],
)
def test_sizes_that_lie_take_no_memory(data):
    with pytest.raises(BrokenPickle):
        load_plain(data)


def test_a_list_named_again_and_again_is_bounded():
    event = _snapshot()["device_traces"][0][0]
    trace = [event] * 100
    with pytest.raises(UsageError, match="over and over"):
        parse_snapshot(pickle.dumps({"segments": [], "device_traces": [trace] * 100}))


def test_settings_and_annotations_are_plain_and_cut():
    raw = _snapshot()
    raw["allocator_settings"] = {"conf": "x" * 20_000, "deep": {"a": {"b": 1}, "c": [1], "d": 2}, "list": [[1]] * 9}
    raw["allocator_settings"]["self"] = raw["allocator_settings"]
    raw["external_annotations"] = [{"name": [raw], "stage": "START"}]
    found = parse_snapshot(pickle.dumps(raw))
    assert len(found.settings.pop("conf")) < 10_010
    assert found.settings == {"deep": {"d": 2}, "self": {"conf": found.settings["self"]["conf"]}}
    assert found.annotations == [{"stage": "START"}]


def test_pairs_of_short_numbers_are_pools_and_any_number_of_them():
    raw = _snapshot()
    raw["other"] = [(0, number) for number in range(300)] * 50
    for protocol in (1, 2, 4):
        data = pickle.dumps([tuple(pair) for pair in raw["other"]], protocol)
        assert len(load_plain(data)) == 15_000


@pytest.mark.parametrize("number", [1 << 64, (1 << 64) - 1, -(1 << 63), 255, 0, 10**18])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_numbers_of_64_bits_are_read(number, protocol):
    assert load_plain(pickle.dumps([number], protocol)) == [number]


@pytest.mark.parametrize("value", [1 << 80, {1, 2}, frozenset([1])])
@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
def test_what_no_snapshot_holds_is_not_built(value, protocol):
    with pytest.raises((BrokenPickle, ForbiddenGlobal)):
        load_plain(pickle.dumps([value], protocol))


def test_nested_lists_are_no_problem():
    with pytest.raises(UsageError):
        parse_snapshot(b"\x80\x02" + b"](" * 100_000 + b"e" * 100_000 + b".")


def test_compressed_files_are_named():
    data = pickle.dumps(_snapshot())
    with pytest.raises(UsageError, match="compressed \\(gzip\\)"):
        parse_snapshot(gzip.compress(data))
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("snapshot.pickle", data)
    with pytest.raises(UsageError, match="compressed \\(zip\\)"):
        parse_snapshot(packed.getvalue())


def test_a_report_in_json_is_named():
    with pytest.raises(UsageError, match="the file is JSON") as error:
        parse_snapshot(b' {"memprof_version": "0.1.0"}')
    assert "memprof show" in str(error.value.hint)


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "none.pickle", tmp_path):
        with pytest.raises(UsageError, match="cannot read the snapshot"):
            read_snapshot(path)


def test_needs_no_torch(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(_snapshot()))
    code = (
        "import sys; from pathlib import Path; from memprof.trace.snapshot_file import read_snapshot;"
        "from memprof.allocator import replay_snapshot; replay_snapshot(read_snapshot(Path(sys.argv[1])));"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
