"""Runs exported: the snapshot replays into itself and torch's viewer reads it; Perfetto's format holds."""

from __future__ import annotations

import json
import pickle
import pickletools
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.allocator import AllocatorConfig, GpuMemory, parse_config, replay_snapshot
from memprof.errors import MemprofError, UsageError
from memprof.flows.compare import open_run
from memprof.flows.recordings import export_file, open_file
from memprof.report.export.memory_viz import convert_snapshot, write_snapshot
from memprof.report.export.perfetto import build_trace_events
from memprof.snapshots.from_trace import convert_to_snapshot
from memprof.snapshots.recording import build_recordings
from memprof.snapshots.slices import build_slices, list_event_times
from memprof.trace.events import Trace
from memprof.trace.facts import DeviceFacts, Facts
from memprof.trace.io import save_trace
from memprof.trace.snapshot import Action
from memprof.trace.snapshot_file import parse_snapshot, read_snapshot
from tests.golden.test_report import training_run
from tests.lanes import at_night, examples
from tests.unit.allocator.traces import StreamScript
from tests.unit.snapshots.builder import MIB, training

SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:40", "roundup_power2_divisions:4")


def plain_trace(requests: list[tuple[int, int]]) -> Trace:
    """A trace of (name, bytes) requests; 0 bytes frees the name. From the tenth name on they are another stream's."""
    b = StreamScript()
    live: dict[int, int] = {}
    for name, num_bytes in requests:
        if num_bytes and name not in live:
            live[name] = b.alloc(num_bytes, stream=33 if name > 9 else 0)
        elif not num_bytes and name in live:
            b.free(live.pop(name))
    return b.trace


@pytest.mark.parametrize("conf", SETTINGS)
@settings(max_examples=examples(40), deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 12),
            st.sampled_from([0, 0, 0, 1, 700, 300_000, MIB, 3 * MIB, 11 * MIB, 21 * MIB + 5, 45 * MIB + 7, 90 * MIB]),
        ),
        max_size=60,
    ),
    usable=st.sampled_from([None, 120 * MIB, 260 * MIB]),
)
def test_a_replayed_export_reproduces_itself(conf, requests, usable):
    made = convert_to_snapshot(plain_trace(requests), parse_config(conf), usable and GpuMemory(usable, 0)).snapshot
    again = parse_snapshot(pickle.dumps(convert_snapshot(made), protocol=4))
    assert again.traces == made.traces
    assert again.segments == made.segments
    refused = any(event.action is Action.OOM for event in made.traces[0])
    for device in replay_snapshot(again, total_bytes=None if refused else usable):
        assert device.exact, device.first_difference
    # ... and once more, from what was read.
    assert convert_snapshot(again) == convert_snapshot(made)


def test_out_of_memory_is_written_down():
    made = convert_to_snapshot(
        plain_trace([(1, 60 * MIB), (2, 90 * MIB), (1, 0)]), AllocatorConfig(), GpuMemory(100 * MIB, 0)
    ).snapshot
    actions = [event.action.value for event in made.traces[0]]
    assert actions == ["segment_alloc", "alloc", "oom", "segment_alloc", "alloc", "free_requested", "free_completed"]
    (found,) = build_recordings(made)
    assert found.at(2) == (60 * MIB, 60 * MIB, 60 * MIB)


def test_only_types_that_the_viewer_knows():
    data = pickle.dumps(convert_snapshot(training().snapshot()), protocol=4)
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert not opcodes & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ", "INST", "OBJ", "BYTEARRAY8"}
    addresses = [segment["address"] for segment in pickle.loads(data)["segments"]]
    assert addresses and all(address < 1 << 53 for address in addresses)


def test_frames_categories_and_stages_of_a_trace():
    trace = training_run()
    made = convert_to_snapshot(trace, AllocatorConfig(), None)
    (found,) = build_recordings(made.snapshot, made.origins)
    assert {life.category for life in found.lives} >= {"parameters", "gradients", "optimizer state", "activations"}
    names = [note["name"] for note in made.snapshot.annotations if note["stage"] == "START"]
    assert "loss (step 1)" in names and "layer 2 (step 2)" in names
    stacks = {life.stack for life in found.lives}
    frames = {(frame.filename, frame.line, frame.name) for stack in stacks for frame in stack}
    assert ("/src/tiny/model.py", 20, "forward") in frames
    assert ("layers.1", 0, "Layer") in frames


def test_torch_reads_what_is_written(tmp_path):
    """A step as `memprof profile` runs it; at night that of a published model of 4B."""
    viz = pytest.importorskip("torch.cuda._memory_viz")
    import memprof
    from memprof.cli.main import run

    file, size = tmp_path / "run.memprof", "4B" if at_night() else "1M"
    with pytest.raises(SystemExit):
        run(["profile", "--model-size", size, "--context-length", "4096", "--json", "--save", str(file)])
    to = tmp_path / "run.pickle"
    assert "memory_viz" in export_file(file, to)
    data = pickle.loads(to.read_bytes())
    held = sum(segment["total_size"] for segment in data["segments"])
    (found,) = open_file(file).recordings
    assert held == found.at(found.end)[2]
    assert f"segments: {len(data['segments'])}" in viz.segsum(data)
    text = viz.trace(data)
    assert text.count("cudaMalloc") == sum(event["action"] == "segment_alloc" for event in data["device_traces"][0])
    assert "base64" in viz.trace_plot(data) and "base64" in viz.segment_plot(data)
    for device in replay_snapshot(read_snapshot(to)):
        assert device.exact
        assert device.allocations > (10_000 if at_night() else 1_000)
    assert memprof.__version__


def check_perfetto(data) -> None:
    """Chrome's trace event format, as far as we use it: what Perfetto's importer asks for."""
    assert set(data) == {"traceEvents", "displayTimeUnit", "otherData"}
    open_until: dict[tuple[int, int], list[int]] = {}
    last: dict[tuple[int, str], int] = {}
    for event in data["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["ts"], int) and isinstance(event["name"], str)
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
            case "C":
                assert set(event["args"]) == {"bytes"} and event["args"]["bytes"] >= 0
                key = (event["pid"], event["name"])
                assert last.get(key, 0) <= event["ts"]
                last[key] = event["ts"]
            case "X":
                assert event["dur"] >= 0 and event["name"]
                # Slices of a track nest, or the viewer drops them.
                ends = open_until.setdefault((event["pid"], event["tid"]), [])
                while ends and ends[-1] <= event["ts"]:
                    ends.pop()
                assert not ends or event["ts"] + event["dur"] <= ends[-1]
                ends.append(event["ts"] + event["dur"])
            case other:
                raise AssertionError(other)


def test_perfetto_of_a_trace(tmp_path):
    file, to = tmp_path / "run.memprof", tmp_path / "run.json"
    trace = training_run()
    trace.facts = Facts(device=DeviceFacts("GPU", 8192 * MIB, 7766 * MIB))
    save_trace(trace, file)
    assert "perfetto" in export_file(file, to)
    data = json.loads(to.read_text())
    check_perfetto(data)
    events = data["traceEvents"]
    assert {event["name"] for event in events if event.get("cat") == "stages"} >= {
        "loss (step 2)",
        "optimizer step (step 1)",
    }
    assert "layers.2 (Layer)" in {event["name"] for event in events if event.get("cat") == "modules"}
    (found,) = open_file(file).recordings
    for name, values in (("allocated", found.allocated), ("reserved", found.reserved)):
        counter = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["name"] == name]
        assert max(counter) == max(values) and counter[-1] == values[-1]


def test_perfetto_of_a_snapshot():
    (found,) = build_recordings(training().snapshot())
    data = build_trace_events([(found, list_event_times(found), build_slices(found))])
    check_perfetto(json.loads(json.dumps(data)))
    stages = [event["name"] for event in data["traceEvents"] if event.get("cat") == "stages"]
    assert stages[:3] == ["forward", "backward", "optimizer step"]


def test_written_whole_or_not_at_all(tmp_path, monkeypatch):
    to = tmp_path / "run.pickle"
    to.write_bytes(b"old")

    make = tempfile.NamedTemporaryFile

    def full(**options):
        file = make(**options)
        write = file.write

        def half(data):
            write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")

        file.write = half
        return file

    monkeypatch.setattr("memprof.trace.files.tempfile.NamedTemporaryFile", full)
    with pytest.raises(MemprofError, match="could not be saved"):
        write_snapshot(training().snapshot(), to, force=True)
    assert to.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["run.pickle"]


@pytest.mark.parametrize("name", ["run.pickle", "run.json"])
def test_an_export_replaces_an_earlier_one_and_nothing_else(tmp_path, name):
    trace, file, to = training_run(), tmp_path / "run.memprof", tmp_path / name
    trace.facts = Facts(device=DeviceFacts("GPU", 8192 * MIB, 7766 * MIB))
    save_trace(trace, file)
    for other in (b'{"mine": 1}', pickle.dumps({"weights": [1]}), file.read_bytes()):
        to.write_bytes(other)
        with pytest.raises(UsageError, match="is there already"):
            export_file(file, to)
        assert to.read_bytes() == other
    export_file(file, to, force=True)
    written = to.read_bytes()
    export_file(file, to)
    assert to.read_bytes() == written


def test_an_export_says_whose_run_it_is(tmp_path):
    trace, file, to = training_run(), tmp_path / "run.memprof", tmp_path / "run.pickle"
    trace.facts = Facts(device=DeviceFacts("GPU", 8192 * MIB, 7766 * MIB))
    for source in ("simulated", "measured"):
        trace.source = source
        save_trace(trace, file)
        export_file(file, to)
        assert pickle.loads(to.read_bytes())["memprof"]["source"] == source
        opened = open_file(to)
        assert (opened.snapshot.source, opened.origin.source) == (source, source)
        run = open_run(to)
        assert (run.summary.source, run.settings["source"]) == (source, source)


def test_torchs_own_files_are_of_measured_runs():
    assert parse_snapshot(pickle.dumps({"segments": []})).source == "measured"
    with pytest.raises(MemprofError, match="not a memory snapshot"):
        parse_snapshot(pickle.dumps({"segments": [], "memprof": 3}))
