"""`memprof analyze` and `memprof export` as a user runs them; wrong files and usage error give one clear error."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys

import pytest

from memprof.report.export.memory_viz import convert_snapshot, write_snapshot
from tests.cli.test_errors import assert_refused
from tests.unit.snapshots.builder import MIB, Program, stack, training


@pytest.fixture
def snapshot(tmp_path):
    file = tmp_path / "training.pickle"
    write_snapshot(training(steps=6, leak=True).snapshot(), file)
    return file


@pytest.fixture
def refused(tmp_path):
    program = Program(total_bytes=100 * MIB)
    program.malloc(60 * MIB, stack("a.py:1 keep"))
    program.malloc(90 * MIB, stack("a.py:2 more"))
    file = tmp_path / "oom.pickle"
    write_snapshot(program.snapshot(), file)
    return file


def test_text(memprof, snapshot):
    result = memprof("analyze", snapshot, "--full")
    assert result.exit_code == 0
    for part in ("At the peak", "180.00 MiB", "me/train.py:50 train", "3.00 MiB per step", "Fragmentation"):
        assert part in result.stdout
    assert "Replay" not in result.stdout
    assert "33 of 33 addresses identical" in memprof("analyze", snapshot, "--replay").stdout


def test_json(memprof, snapshot):
    result = memprof("analyze", snapshot, "--json", "--replay", "--top", 2, "--alloc-conf", "expandable_segments:True")
    found = result.json
    assert found["replay"] == {
        "allocations": 33,
        "identical_addresses": 33,
        "final_layout_identical": True,
        "first_difference": None,
    }
    (device,) = found["devices"]
    assert device["peak"]["allocated_bytes"] == 180 * MIB
    assert len(device["moment"]["groups"]) == 2
    assert device["leaks"][0]["per_step_bytes"] == 3 * MIB
    assert device["what_if"]["after"]["settings"] == "expandable_segments:True"
    assert device["what_if"]["saved_bytes"] == -20 * MIB


def test_a_difference_is_reported(memprof, tmp_path):
    """A recording whose addresses our allocator would not have chosen."""
    data = convert_snapshot(training(steps=6).snapshot())
    trace = data["device_traces"][0]
    moved = next(event for event in trace if event["action"] == "alloc" and event["size"] == 2 * MIB)
    moved["addr"] += 512
    file = tmp_path / "other.pickle"
    file.write_bytes(pickle.dumps(data, protocol=4))
    found = memprof("analyze", file, "--json").json["replay"]
    assert found["identical_addresses"] < found["allocations"]
    assert found["first_difference"]["reason"]


@pytest.mark.parametrize("at", ["peak", "end", "oom", "1", "-1"])
def test_moments_and_exit_code_of_an_out_of_memory_error(memprof, refused, at):
    result = memprof("analyze", refused, "--at", at, "--json")
    assert result.exit_code == 3
    (device,) = result.json["devices"]
    assert device["moment"]["what"] == ("event" if at.lstrip("-").isdigit() else at)
    assert device["moment"]["amounts"]["allocated_bytes"] == (0 if at == "-1" else 60 * MIB)
    (oom,) = device["ooms"]
    assert (oom["requested_bytes"], oom["device_free_bytes"], oom["fragmented"]) == (90 * MIB, 40 * MIB, False)


def test_several_devices(memprof, tmp_path):
    data = convert_snapshot(training(steps=3).snapshot())
    other = convert_snapshot(training(steps=4).snapshot())
    for segment in other["segments"]:
        segment["device"] = 2
    data["segments"] += other["segments"]
    data["device_traces"] += [[], other["device_traces"][0]]
    file = tmp_path / "two.pickle"
    file.write_bytes(pickle.dumps(data))
    assert [device["device"] for device in memprof("analyze", file, "--json").json["devices"]] == [0, 2]
    (device,) = memprof("analyze", file, "--json", "--gpu-index", 2).json["devices"]
    assert device["allocations"] == 4 * 4 + 3
    assert "Device 2" in memprof("analyze", file).stdout
    assert_refused(memprof("analyze", file, "--gpu-index", 1), "nothing of this GPU", "known: 0, 2")
    assert memprof("export", file, "--to", tmp_path / "two.json").exit_code == 0


def test_state_only(memprof, tmp_path):
    """What torch.cuda.memory_snapshot() returns: a list of segments."""
    file = tmp_path / "state.pickle"
    file.write_bytes(pickle.dumps(convert_snapshot(training().snapshot())["segments"]))
    result = memprof("analyze", file, "--full")
    assert result.exit_code == 0
    assert "No events were recorded" in result.stdout and "90.00 MiB" in result.stdout
    assert_refused(memprof("analyze", file, "--at", "oom"), "no out-of-memory error")


def test_a_cut_recording_says_so(memprof, tmp_path):
    file = tmp_path / "cut.pickle"
    write_snapshot(training(steps=6).snapshot(last=20), file)
    missing = memprof("analyze", file, "--json").json["devices"][0]["missing_frames"]
    assert any("the ring buffer was full (raise max_entries)" in reason for reason in missing["reasons"])


def test_a_capture(memprof, tmp_path):
    file, to = tmp_path / "run.memprof", tmp_path / "run.pickle"
    shown = memprof("profile", "--model", "pythia-70m", "--context-length", 64, "--steps", 3, "--json", "--save", file)
    found = memprof("analyze", file, "--json").json
    assert found["source"] == "simulated"
    (device,) = found["devices"]
    assert device["steps"]["count"] == 3 and device["leaks"] == []
    assert found["replay"]["identical_addresses"] == found["replay"]["allocations"] > 1000
    # Blocks hold at least what is requested, rounded to 512 bytes, and at most 1 MiB more each.
    least = shown.json["peak"]["allocated_bytes"]
    assert least <= device["peak"]["allocated_bytes"] < least * 1.1
    groups = memprof("analyze", file, "--json", "--by", "category").json["devices"][0]["moment"]["groups"]
    assert {row["key"] for row in groups} >= {"parameters", "optimizer state"}
    assert memprof("export", file, "--to", to).exit_code == 0
    again = memprof("analyze", to, "--json").json
    assert again["devices"][0]["peak"]["allocated_bytes"] == device["peak"]["allocated_bytes"]


# -- bad input ---------------------------------------------------------------------------------------------------------


class _Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("command", ["analyze", "export"])
@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"", ("empty",)),
        (b"hello, world", ("not a memory snapshot",)),
        (b"{}", ("not a memory snapshot",)),
        (pickle.dumps({"segments": [], "device_traces": []}), ("the snapshot is empty",)),
        (pickle.dumps({"weights": [1, 2]}), ("not a memory snapshot", "no 'segments'")),
        (pickle.dumps([1, 2, 3]), ("not a memory snapshot",)),
        (pickle.dumps(_Evil()), ("mkdir", "it was not run")),
        (gzip.compress(b"not a capture", mtime=0), ("not a memprof capture",)),
        (gzip.compress(json.dumps({"format": "memprof capture", "schema": 99}).encode(), mtime=0), ("newer memprof",)),
        (b"PK\x03\x04rest", ("compressed (zip)",)),
        (gzip.compress(pickle.dumps({"segments": []}), mtime=0), ("compressed (gzip)", "unpack it first")),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.", ("not a memory snapshot",)),
    ],
)  # fmt: skip
def test_files_that_are_none(memprof, tmp_path, monkeypatch, command, data, parts):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file"
    file.write_bytes(data)
    to = ("--to", tmp_path / "out.pickle") if command == "export" else ()
    assert_refused(memprof(command, file, *to), *parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_truncated_snapshots(memprof, snapshot):
    whole = snapshot.read_bytes()
    for length in (1, 10, len(whole) // 3, len(whole) - 1):
        snapshot.write_bytes(whole[:length])
        assert_refused(memprof("analyze", snapshot), "value: ")


def test_a_file_that_memory_does_not_hold(memprof, snapshot, monkeypatch):
    assert_refused(
        memprof("analyze", snapshot, "--max-memory", "1000b"),
        "of memory to be read", "it may take 1000 bytes", "max_entries", "--max-memory 1\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--at", "noon"), ("no such moment", "peak, end, oom")),
        (("--at", "99999"), ("no such event",)),
        (("--at", "oom"), ("no out-of-memory error",)),
        (("--gpu-index", "3"), ("nothing of this GPU",)),
        (("--alloc-conf", "expandable:True"), ("unknown allocator setting", "expandable_segments")),
        (("--alloc-conf", "backend:cudaMallocAsync"), ("only torch's native allocator",)),
        (("--by", "line"), ("frame",)),
        (("--top", "0"), ("--top",)),
    ],
)
def test_wrong_use(memprof, snapshot, arguments, parts):
    assert_refused(memprof("analyze", snapshot, *arguments), *parts)


def test_wrong_export(memprof, snapshot, tmp_path):
    assert_refused(memprof("export", snapshot, "--to", tmp_path / "run.html"), "not a kind of file", "memory_viz")
    assert_refused(memprof("export", snapshot, "--to", tmp_path / "none" / "run.json"), "no such folder")
    assert_refused(memprof("export", snapshot, "--to", snapshot), "would replace the file")
    assert_refused(memprof("export", tmp_path / "none", "--to", tmp_path / "a.json"), "cannot read")
    assert_refused(memprof("analyze", tmp_path), "cannot read")
    (tmp_path / "folder.json").mkdir()
    assert_refused(memprof("export", snapshot, "--to", tmp_path / "folder.json"), "this is a folder")


def test_neither_torch_nor_rich_is_needed_for_json(snapshot):
    code = (
        "import sys\n"
        "from memprof.cli.main import run\n"
        "try:\n"
        f"    run(['analyze', {str(snapshot)!r}, '--json'])\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        "assert not {'torch', 'transformers', 'pandas'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
