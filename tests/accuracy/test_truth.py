"""Truth captures, recorded on a stub: torch.cuda's counters and history are replaced, tensors are on the CPU."""

from __future__ import annotations

import gzip
import json
import pickle
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.flows import profile as flow
from memprof.flows.account import analyze
from memprof.measured import MeasuredDevice, cuda
from memprof.spec import TargetSpec
from memprof.trace.events import CPU
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
