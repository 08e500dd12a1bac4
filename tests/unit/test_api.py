"""`memprof.virtual_gpu`: what a program is told of its memory while it runs is what the report says afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import memprof
from memprof.allocator import Settings
from memprof.device.catalog import custom_gpu
from memprof.errors import UsageError
from memprof.flows.gpus import RunAllocator, resolve_settings
from memprof.trace.events import EventKind
from memprof.trace.snapshot_file import parse_snapshot
from memprof.virtual import VirtualGpu
from tests.unit.allocator.replaying import replay_trace

MIB = 1 << 20
GIB = 1 << 30


def train(steps: int = 2) -> None:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.empty(2048, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_program_sees_the_values_of_the_replay() -> None:
    with memprof.virtual_gpu("a100-40gb", alloc_conf="") as gpu:
        train()
        reserved, most_reserved = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
        most_allocated = torch.cuda.max_memory_allocated("cuda:0")
        stats = dict(torch.cuda.memory_stats())
        nested = torch.cuda.memory_stats_as_nested_dict()
        summary = torch.cuda.memory_summary()
        free, total = torch.cuda.mem_get_info()
        asked = len(gpu.trace.events)
    trace = gpu.trace
    del trace.events[asked:]
    whole = replay_trace(trace, release=Settings.resolve("", torch.__version__, environ={}).release)
    assert stats == whole.stats
    assert (reserved, most_reserved) == (whole.reserved[-1], whole.peak_reserved.num_bytes)
    assert most_allocated == max(whole.allocated) < most_reserved
    assert nested["reserved_bytes"]["all"]["peak"] == most_reserved and nested["num_ooms"] == 0
    assert "GPU reserved memory" in summary
    report = gpu.report().to_json()
    assert report["peak"]["reserved_bytes"] == most_reserved
    assert total - free == reserved + report["device"]["context_bytes"]


@pytest.mark.parametrize(
    ("release", "expected"),
    # After the result, workspaces: of cuBLASLt until 2.8 for the call, from 2.9 on for good, from 2.12 on none.
    [("2.8", [(MIB, True), (8_519_680, False)]), ("2.9.1+cu128", [(8_519_680, False), (MIB, False)]),
     ("2.12", [(32 * MIB, False)]), ("2.15", [(32 * MIB, True)])],
)  # fmt: skip
def test_another_release_has_other_workspaces(release: str, expected: list[tuple[int, bool]]) -> None:
    with memprof.virtual_gpu("rtx-5090", torch_release=release) as gpu:
        linear = nn.Linear(64, 64, device="cuda")
        inputs = torch.empty(64, 64, device="cuda")
        begin = len(gpu.trace.events)
        linear(inputs)
        events = gpu.trace.events[begin:]
    freed = {ref for kind, ref in events if kind is EventKind.FREE}
    allocated = [ref for kind, ref in events if kind is EventKind.ALLOC]
    sizes = [(gpu.trace.storages[ref].num_bytes, ref in freed) for ref in allocated]
    assert sizes == [(64 * 64 * 4, True), *expected]
    version = ".".join(release.split(".")[:2])
    is_said = any(f"are those of torch {version};" in text for text in gpu.trace.assumptions)
    assert is_said == (not torch.__version__.startswith(f"{version}."))


def test_a_program_takes_snapshots_of_its_memory(tmp_path: Path) -> None:
    with memprof.virtual_gpu("a100-40gb", alloc_conf=""):
        assert torch.cuda.memory_snapshot() == []
        torch.cuda.memory._record_memory_history()
        train()
        kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        segments = torch.cuda.memory_snapshot()
        assert sum(segment["total_size"] for segment in segments) == torch.cuda.memory_reserved()
        assert sum(segment["allocated_size"] for segment in segments) == torch.cuda.memory_allocated()
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    blocks = [block for segment in segments for block in segment["blocks"] if block["size"] == kept.nbytes]
    assert [Path(frame["filename"]).name for block in blocks for frame in block["frames"][1:]] == [Path(__file__).name]
    written = parse_snapshot((tmp_path / "snapshot.pickle").read_bytes())
    assert sum(segment.size for segment in written.segments) == sum(segment["total_size"] for segment in segments)
    assert len(written.traces[0]) > len(blocks)


def test_the_history_that_was_asked_for() -> None:
    def history() -> list[int]:
        (events,) = torch.cuda.memory._snapshot()["device_traces"]
        return [event["size"] for event in events if event["action"] == "alloc"]

    with memprof.virtual_gpu("a100-40gb", alloc_conf=""):
        kept = [torch.empty(MIB, dtype=torch.uint8, device="cuda")]
        assert history() == []
        torch.cuda.memory._record_memory_history(max_entries=2)
        kept += [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (2, 3, 4, 5)]
        assert history()[-1] == 5 * MIB and len(history()) <= 2
        torch.cuda.memory._record_memory_history(enabled=None)
        assert history() == []
        torch.cuda.memory._record_memory_history()
        kept.append(torch.empty(6 * MIB, dtype=torch.uint8, device="cuda"))
        assert history() == [6 * MIB]


def test_the_programs_own_workspace_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    with memprof.virtual_gpu("a100-40gb") as gpu:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")
    assert [s.num_bytes for s in gpu.trace.storages if s.hidden] == [16 * 8 * 1024]


def test_a_snapshot_after_a_request_that_was_refused() -> None:
    """The program has gone on without it, and so has its cache."""
    gpu = custom_gpu(GIB)
    settings = resolve_settings("")
    with VirtualGpu(gpu, memory=lambda trace: RunAllocator(trace, gpu, settings), raises_oom=True):
        torch.cuda.memory._record_memory_history()
        kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        assert kept.is_cuda
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
        snapshot = torch.cuda.memory._snapshot()
        assert sum(segment["total_size"] for segment in snapshot["segments"]) == torch.cuda.memory_reserved()
    assert [event["size"] for event in snapshot["device_traces"][0] if event["action"] == "oom"] == [2 * GIB]


def test_an_emptied_cache_lowers_what_is_reserved() -> None:
    with memprof.virtual_gpu("a100-40gb") as gpu:
        kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 130 * MIB and torch.cuda.memory_allocated() == 30 * MIB
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 30 * MIB and torch.cuda.max_memory_reserved() == 130 * MIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_reserved() == kept.nbytes
    assert [event.kind for event in gpu.trace.events].count(EventKind.EMPTY_CACHE) == 1
    assert gpu.report().stages[-1].reserved_bytes <= 130 * MIB


def test_settings_reach_program_and_report() -> None:
    with memprof.virtual_gpu("a100-40gb", alloc_conf="expandable_segments:True") as gpu:
        tensor = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        other = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 40 * MIB
        del tensor, other
    report = gpu.report().to_json()
    assert report["peak"]["reserved_bytes"] == 40 * MIB
    assert report["allocator"]["alloc_conf"] == "expandable_segments:True"


def test_the_environment_decides_where_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with memprof.virtual_gpu("a100-40gb") as gpu:
        torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    report = gpu.report().to_json()
    assert report["allocator"]["alloc_conf_from"] == "PYTORCH_CUDA_ALLOC_CONF"
    assert any("expandable_segments:True" in sentence for sentence in report["assumptions"])


def test_bad_settings_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="expandable_segments is 'true'"):
        memprof.virtual_gpu("a100-40gb", alloc_conf="expandable_segments:true")


def test_nothing_is_replayed_for_a_program_that_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr("memprof.api.RunAllocator", fail)
    with memprof.virtual_gpu("a100-40gb"):
        train(1)
        torch.cuda.empty_cache()
        with pytest.raises(AssertionError, match="asked"):
            torch.cuda.memory_reserved()


def test_what_a_program_feeds_its_models_is_input():
    """Made in the loop or kept beside the model; what a model makes and another is given is not."""
    with memprof.virtual_gpu("rtx-4090") as gpu:
        first, second = nn.Linear(64, 64, bias=False).cuda(), nn.Linear(64, 64, bias=False).cuda()
        kept = torch.zeros(1000, 64, device="cuda")
        for _ in range(2):
            batch = torch.randn(128, 64, device="cuda")
            between = first(batch).detach()
            (second(between).sum() + second(kept[:8]).sum()).backward()
    categories = gpu.report().peak.categories
    assert categories["inputs"] == (1000 + 128) * 64 * 4
    assert "unattributed" not in categories
