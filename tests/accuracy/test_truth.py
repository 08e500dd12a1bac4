"""Truth captures, recorded on a stub: torch.cuda's counters and history are replaced, tensors are on the CPU."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import pickle
import subprocess
import textwrap
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.flows import profile as flow
from memprof.flows.account import analyze
from memprof.measured import MeasuredDevice, cuda
from memprof.spec import TargetSpec
from memprof.trace.events import CPU, GPU
from memprof.trace.io import load_trace
from memprof.trace.snapshot_file import parse_snapshot
from tests.accuracy.cases import CASES
from tests.accuracy.truth import __main__ as command
from tests.accuracy.truth import compare, record
from tests.benchmarks.accuracy import PAGE, TRUTH

MIB = 2**20
MODEL = """
import torch
class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
    def memprof_inputs(self, batch_size, context_length):
        return {"x": torch.zeros(batch_size, context_length, 64)}
    def forward(self, x):
        return self.second(torch.relu(self.first(x))).square().mean()
def fails():
    class Fails(Small):
        def forward(self, x):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return Fails()
"""
HISTORY = [
    {"action": "segment_alloc", "addr": 1, "size": 20 * MIB, "stream": 0, "time_us": 1, "frames": [{"name": "f"}]},
    {"action": "segment_alloc", "addr": 2, "size": 30 * MIB, "stream": 0, "time_us": 1, "frames": []},
    {"action": "segment_free", "addr": 1, "size": 20 * MIB, "stream": 0, "time_us": 1, "frames": []},
]


class OnCpu(MeasuredDevice):
    """Runs where there is no GPU, and reads the counters of one."""

    def __init__(self, name: str, outside: Any) -> None:
        super().__init__(name, outside)
        self.name = "cpu"
        self.trace.device = CPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, TargetSpec]:
    """A stub of a GPU, and two cases in place of the real ones."""
    properties = types.SimpleNamespace(name="NVIDIA Stand-In", total_memory=8 << 30, uuid="none")
    counters = {
        "init": None,
        "synchronize": None,
        "memory_allocated": 3 * MIB,
        "memory_reserved": 30 * MIB,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "is_current_stream_capturing": False,
        "mem_get_info": (7 << 30, 8 << 30),
    }
    for name, value in counters.items():
        monkeypatch.setattr(torch.cuda, name, lambda gpu=None, value=value: value)
    stats = {"allocated_bytes": {"all": {"peak": 5 * MIB}}, "requested_bytes": {"all": {"current": 0}}}
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda gpu: stats, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", lambda gpu: None, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: None)
    snapshot = {"device_traces": [HISTORY], "segments": [], "allocator_settings": {}}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    monkeypatch.setattr(cuda, "cuda_unavailable_reason", lambda: None)
    monkeypatch.setattr(record, "MeasuredDevice", OnCpu)
    file = tmp_path / "small.py"
    file.write_text(textwrap.dedent(MODEL))
    small = TargetSpec(model=f"{file}:Small", batch_size=2, context_length=16, dtype="float32")
    cases = {"small": small, "full": small.edit(model=f"{file}:fails")}
    monkeypatch.setattr(command, "CASES", cases)
    return cases


def test_a_case_is_recorded_and_compared(
    gpu: dict[str, TargetSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "stand-in"
    assert command.main(["--case", "small", "--out", str(folder)]) == 0
    index = json.loads((folder / "INDEX.json").read_text())
    assert (index["gpu"], index["total_bytes"], index["torch"]) == ("NVIDIA Stand-In", 8 << 30, torch.__version__)
    found = index["cases"]["small"]
    # Two segments were there at once, which no sample saw.
    assert (found["allocated"], found["reserved"], found["nvml"]) == (5 * MIB, 50 * MIB, None)
    trace = load_trace(folder / "small.capture")
    stream = compare.allocations(trace)
    weight = 64 * 256 * 4
    # Two weights of this size, their gradients, and AdamW's two moments; more is activations of it.
    assert sum(size == weight for size, _ in stream) >= 8
    assert {"aten.addmm", "aten.clamp_min"} <= {op for _, op in stream}
    assert analyze(trace).peak.allocated_bytes > 8 * weight
    plain = gzip.decompress((folder / "small.snapshot.pickle.gz").read_bytes())
    assert [entry["action"] for entry in pickle.loads(plain)["device_traces"][0]] == [e["action"] for e in HISTORY]
    assert b"frames" not in plain
    assert len(parse_snapshot(plain).traces[0]) == len(HISTORY)
    _, simulated = flow.profile(gpu["small"].edit(gpu_vram_bytes=8 << 30))
    line = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("| small |"))
    shown = simulated.peak.allocated_bytes / MIB
    assert line.startswith(f"| small | 5.0 | {shown:,.1f} | {shown / 5 - 1:+.3%} | 50.0 |")


def test_a_case_that_fails_is_skipped_with_the_reason(
    gpu: dict[str, TargetSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--case", "full", "--out", str(tmp_path / "out")]) == 1
    reason = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert capsys.readouterr().err == f"full: {reason}\n"
    assert compare.table(tmp_path / "out", gpu).endswith(f"* full was not recorded: {reason}")


def test_a_capture_that_disagrees_with_the_counters_is_kept_and_said_to_be_incomplete(
    gpu: dict[str, TargetSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disagrees(OnCpu):
        def __exit__(self, *exc: object) -> None:
            super().__exit__(*exc)
            self.error = RuntimeError("the history has 12 bytes less\nthan torch's counters")

    monkeypatch.setattr(record, "MeasuredDevice", Disagrees)
    folder = tmp_path / "out"
    assert command.main(["--case", "small", "--out", str(folder), "--quiet"]) == 0
    table = compare.table(folder, gpu)
    assert table.endswith("* small was not recorded completely: the history has 12 bytes less than torch's counters")
    assert "| small | 5.0 |" in table


@pytest.fixture
def recorder(gpu: dict[str, TargetSpec], monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """In place of the processes that record: each takes its `seconds` of a clock, and what was allowed is kept."""
    made = types.SimpleNamespace(now=0.0, seconds=30.0, limits=[], names=[])

    def run(arguments: list[str], timeout: float, **options: Any) -> Any:
        name, folder = (arguments[arguments.index(option) + 1] for option in ("--case", "--out"))
        made.limits.append(timeout)
        made.names.append(name)
        made.now += min(made.seconds, timeout)
        if made.seconds > timeout:
            raise subprocess.TimeoutExpired(arguments, timeout)
        index = record.read_index(Path(folder))
        index["cases"][name] = {"seconds": made.seconds}
        record.write_index(Path(folder), index)
        return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(command, "CASES", dict.fromkeys(("first", "second", "third")))
    return made


def test_all_cases_are_recorded_in_order_where_there_is_time(recorder: types.SimpleNamespace, tmp_path: Path) -> None:
    assert command.record_all(tmp_path, 10_000, lambda: recorder.now) == (3, [])
    assert recorder.names == ["first", "second", "third"]
    assert recorder.limits == [600, 600, 600]


def test_a_case_begins_with_the_least_time_and_not_with_less(recorder: types.SimpleNamespace, tmp_path: Path) -> None:
    recorder.seconds = 20
    assert command.record_all(tmp_path, 60, lambda: recorder.now) == (3, [])
    recorder.now = 0.0
    assert command.record_all(tmp_path, 59.9, lambda: recorder.now) == (2, ["third"])
    assert recorder.limits == pytest.approx([60, 40, 20, 59.9, 39.9])


def test_what_the_budget_ends_is_left_out_and_no_failed_case(recorder: types.SimpleNamespace, tmp_path: Path) -> None:
    recorder.seconds = 40
    assert command.record_all(tmp_path, 70, lambda: recorder.now) == (1, ["second", "third"])
    assert record.read_index(tmp_path)["cases"] == {"first": {"seconds": 40}}


def test_a_case_that_is_too_slow_by_itself_is_skipped(recorder: types.SimpleNamespace, tmp_path: Path) -> None:
    recorder.seconds = 601
    assert command.record_all(tmp_path, 10_000, lambda: recorder.now) == (0, [])
    assert record.read_index(tmp_path)["cases"]["third"] == {"skipped": "it ran longer than 600 s"}


def test_what_was_left_out_is_listed(
    recorder: types.SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--out", str(tmp_path), "--seconds", "19", "--quiet"]) == 1
    assert capsys.readouterr().out == "left out, for 19 s are not enough: first, second, third\n"


def test_a_difference_from_another_release_is_not_called_an_error(gpu: dict[str, TargetSpec], tmp_path: Path) -> None:
    folder = tmp_path / "stand-in"
    assert command.main(["--case", "small", "--out", str(folder), "--quiet"]) == 0
    index = record.read_index(folder)
    assert compare.other_releases(index) == []
    same = compare.table(folder, gpu)
    assert "Recorded with" not in same and "worst" in same
    here = torch.__version__.partition("+")[0]
    record.write_index(folder, {**index, "torch": "2.11.0+cu130"})
    other = compare.table(folder, gpu)
    assert f"Recorded with torch 2.11.0, and here {here}: where the simulation differs, the releases may be" in other
    line = next(text for text in other.splitlines() if text.startswith("| small |"))
    assert line.count("| other release |") == 2 and "%" not in line
    assert "1 cases; allocated: 0 are equal; reserved: 0 are equal; the streams of" in other and "worst" not in other


def test_what_is_equal_under_another_release_is_said_to_be(gpu: dict[str, TargetSpec], tmp_path: Path) -> None:
    folder = tmp_path / "stand-in"
    assert command.main(["--case", "small", "--out", str(folder), "--quiet"]) == 0
    index = record.read_index(folder)
    done = compare.compare(folder, "small", gpu["small"], index)
    index["cases"]["small"] |= {"allocated": done.allocated[1], "reserved": done.reserved[1]}
    record.write_index(folder, {**index, "transformers": "5.17.0"})
    other = compare.table(folder, gpu)
    here = importlib.metadata.version("transformers")
    assert f"Recorded with transformers 5.17.0, and here {here}:" in other
    assert "1 cases; allocated: 1 are equal; reserved: 1 are equal;" in other


def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert command.main([]) == command.main(["--case", "gpt2-float32"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.partition(":")[0] for line in said.err.splitlines()] == [
        "truth captures are recorded on a CUDA GPU"
    ] * 2


def test_an_unknown_case_is_refused(gpu: dict[str, TargetSpec], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--case", "none"]) == 2
    assert capsys.readouterr().err == "no such case: none; there are small, full\n"


def test_where_nothing_was_recorded_one_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--compare", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"nothing was recorded in {tmp_path}\n"


def test_streams_are_compared_in_bytes_and_order(gpu: dict[str, TargetSpec]) -> None:
    trace, _ = flow.profile(gpu["small"])
    count = len(compare.allocations(trace))
    assert compare.streams(trace, trace) == f"equal, {count:,}"
    on_gpu = (n for n, one in enumerate(trace.storages) if one.device == GPU and one.num_bytes == 64 * 256 * 4)
    number = next(on_gpu)
    changed = list(trace.storages)
    changed[number] = changed[number]._replace(num_bytes=12)
    said = compare.streams(replace(trace, storages=changed), trace)
    assert said.startswith(f"{count - 1:,} of {count:,} measured are among {count:,} simulated; the first difference")
    assert "12 `" in said and "65,536 `" in said


def test_a_folder_is_named_by_gpu_and_torch() -> None:
    assert command.folder_name("NVIDIA H200", "2.8.0+cu128") == "h200-2.8.0"
    assert command.folder_name("NVIDIA GeForce RTX 4090", "2.13.0") == "rtx-4090-2.13.0"


def test_the_page_says_what_was_recorded(tmp_path: Path) -> None:
    assert compare.section(CASES, tmp_path) == compare.NONE_YET
    shown = PAGE.read_text(encoding="utf-8").partition(TRUTH[0])[2].partition(TRUTH[1])[0]
    if not compare.folders():
        assert shown.strip() == compare.NONE_YET
    else:
        for index in map(record.read_index, compare.folders()):
            assert f"**{index['gpu']}, torch {index['torch']}**" in shown


def _recorded() -> list[tuple[Path, str]]:
    return [
        (folder, name)
        for folder in compare.folders()
        for name, case in record.read_index(folder)["cases"].items()
        if "skipped" not in case
    ]


@pytest.mark.parametrize(("folder", "name"), _recorded(), ids=lambda value: getattr(value, "name", value))
def test_the_replay_of_what_was_requested_has_the_gpus_peaks(folder: Path, name: str) -> None:
    """To the byte: what the allocator of a real GPU reserved, and allocated in blocks, for the same requests."""
    peaks = record.read_index(folder)["cases"][name]
    replayed = analyze(load_trace(folder / f"{name}.capture"))
    assert max(row.peak_allocated_bytes for row in replayed.stages) == peaks["allocated"]
    assert max(row.reserved_bytes for row in replayed.stages) == peaks["reserved"]
