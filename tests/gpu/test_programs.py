"""The programs that measure, on the CPU; and what they read of CUDA, from a stub."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from tests.gpu import kineto, profiler_cost
from tests.gpu.history import AllocatorHistory, Entry
from tests.gpu.kineto import in_tree
from tests.gpu.operator_table import operators
from tests.gpu.outside import outside_bytes
from tests.gpu.patterns import PATTERNS

MIB = 1 << 20


def run(name: str, *arguments: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    importlib.import_module(f"tests.gpu.{name}").main()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stub of torch.cuda with 60 of 100 MiB free, of which the allocator has 10; what its history was told."""
    told: list[Any] = []
    history = [
        {"action": "alloc", "addr": 16, "size": 512, "stream": 7, "frames": []},
        {"action": "segment_alloc", "addr": 16, "size": 2 * MIB, "stream": 7},
        {"action": "free_requested", "addr": 16, "size": 512, "stream": 7},
    ]
    for name, value in (
        ("synchronize", None), ("current_device", 1), ("mem_get_info", (60 * MIB, 100 * MIB)),
        ("memory_reserved", 10 * MIB),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: told.append(options["enabled"]))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[], history]})
    return told


def test_the_history_is_that_of_the_block_and_of_the_current_gpu(cuda: list[Any]) -> None:
    with AllocatorHistory("cuda") as history:
        assert cuda == [None, "all"]
    assert cuda == [None, "all", None]
    assert history.entries[0] == Entry("alloc", 16, 512, 7)
    assert history.bytes_of("alloc") == history.bytes_of("free_requested") == [512]


def test_the_cpu_has_no_history_and_nothing_outside(cuda: list[Any]) -> None:
    with AllocatorHistory("cpu") as history:
        pass
    assert cuda == [] and history.entries == [] and outside_bytes("cpu") is None


def test_outside_is_what_is_used_and_not_reserved(cuda: list[Any]) -> None:
    assert outside_bytes("cuda") == 30 * MIB


def test_allocations_of_one_device_are_taken_from_the_tree_by_time() -> None:
    def node(time_ns: int, kind: str, device: str = "", num_bytes: int = 0, children: tuple[Any, ...] = ()) -> Any:
        fields = SimpleNamespace(device=device, ptr=16, alloc_size=num_bytes)
        typed = (SimpleNamespace(name=kind), None)
        return SimpleNamespace(typed=typed, extra_fields=fields, start_time_ns=time_ns, start_tid=3, children=children)

    inside = node(5, "Allocation", "cuda:0", 512)
    tree = [
        node(9, "Allocation", "cuda:0", -512),
        node(4, "TorchOp", children=(inside, node(6, "Allocation", "cpu", 64))),
    ]
    assert in_tree(tree, "cuda") == [(5, 16, 512, 3, True), (9, 16, -512, 3, False)]


def test_the_history_is_compared_by_address_and_bytes(cuda: list[Any]) -> None:
    with AllocatorHistory("cuda") as history:
        pass
    same = kineto.against_history(history, [(16, 512)], "cuda")
    assert same == {
        "history_allocations": 1, "history_frees": 1, "same_addresses_in_order": True, "other_bytes_than_requested": 0,
    }  # fmt: skip
    assert not kineto.against_history(history, [(32, 512)], "cuda")["same_addresses_in_order"]
    assert kineto.against_history(history, [(16, 1024)], "cuda")["other_bytes_than_requested"] == 1
    assert kineto.against_history(history, [], "cpu") == {}


@pytest.mark.nightly
def test_the_profiler_s_tree_has_as_much_with_a_root_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns = ("training", "inference", "ctx_attribute", "other_thread", "checkpointed")
    run("kineto", "--device", "cpu", "--out", tmp_path / "plain.json", *patterns, monkeypatch=monkeypatch)
    found = json.loads((tmp_path / "plain.json").read_text())
    assert set(found) == set(patterns)
    for ways in found.values():
        assert set(ways) == {"plain", "root", "stacks", "memprof"}
        assert not any(one.get("error") for one in ways.values())
        assert ways["plain"]["tree_allocations"] == ways["root"]["tree_allocations"] > 0


def test_the_line_of_a_pattern_has_counts_peaks_and_errors() -> None:
    found = {
        "plain": {"history_allocations": 3, "history_frees": 2, "tree_allocations": 3, "tree_frees": 1},
        "stacks": {"error": "RuntimeError: no"},
        "memprof": {"error": None, "peak_by_trace": 10, "peak_by_torch": 12},
    }
    assert kineto.line("training", found) == (
        "training: plain: history 3/2, tree 3/1; stacks: RuntimeError: no; memprof: peak 10, by torch 12"
    )


def test_the_probe_goes_on_after_what_a_device_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("probe", "--device", "cpu", "--out", tmp_path / "probe.json", monkeypatch=monkeypatch)
    found = json.loads((tmp_path / "probe.json").read_text())
    assert found["torch"] == torch.__version__
    rows = {row["after"]: row for row in found["rows"]}
    assert "No viable backend" in rows["sdpa cuDNN"]["error"]
    assert [name for name, row in rows.items() if row["error"]] == ["sdpa efficient", "sdpa cuDNN"]
    assert all(row["outside"] is None for row in rows.values())
    assert len(capsys.readouterr().out.splitlines()) == len(rows) >= 20


def test_the_cost_of_the_profiler_is_a_ratio_of_medians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler_cost, "ROUNDS", 1)
    monkeypatch.setattr(profiler_cost, "STEPS", 2)
    run("profiler_cost", "--device", "cpu", "--out", tmp_path / "cost.json", monkeypatch=monkeypatch)
    found = json.loads((tmp_path / "cost.json").read_text())
    assert found["profiler_bytes"] is None and found["first_start_seconds"] > 0
    small = found["small"]
    assert small["plain_ratio"] == 1
    for name in ("profiler", "memprof"):
        assert small[f"{name}_ratio"] == small[f"{name}_seconds"] / small["plain_seconds"] > 0


def test_bytes_of_the_profiler_are_those_that_came_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    read = iter([100, 130, 120])
    monkeypatch.setattr(profiler_cost, "outside_bytes", lambda device: next(read))
    found = profiler_cost.measure_bytes("cpu")
    assert (found["outside_before"], found["outside_inside"], found["outside_after"]) == (100, 130, 120)
    assert found["profiler_bytes"] == 30


def test_operators_are_recorded_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, virtual = tmp_path / "real.jsonl", tmp_path / "virtual.jsonl"
    for where, out in (("cpu", real), ("virtual", virtual)):
        run("operators", where, "--out", out, "--only", "AdamW", "linalg.inv", monkeypatch=monkeypatch)
    assert [json.loads(line)["first"] for line in real.read_text().splitlines()] == [None, None]
    rows = {row["operator"]: row for row in map(json.loads, virtual.read_text().splitlines())}
    # A step of the foreach implementation takes one tensor of each of the eight parameters' 512 x 512 floats.
    assert rows["AdamW"]["again"] == [512 * 512 * 4] * 8
    run("compare_operators", real, virtual, monkeypatch=monkeypatch)
    assert capsys.readouterr().out == "virtual: 4 not recorded, 0 on one side alone\n"


def test_an_operator_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    from tests.gpu.operators import on_device, record

    def fails() -> Any:
        raise RuntimeError("no kernel")

    record({"fails": fails, "runs": lambda: lambda: None}, on_device("cpu"), tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert rows == [
        {"operator": "fails", "error": "RuntimeError: no kernel"},
        {"operator": "runs", "first": None, "again": None},
    ]


def test_the_table_has_every_family_in_both_dtypes() -> None:
    names = operators("cpu")
    assert len(names) > 150
    assert {"mm float32", "mm bfloat16", "LSTM bfloat16", "sort", "linalg.svd", "AdamW fused", "ctc_loss"} <= set(names)


def test_opinfo_counts_what_it_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--out", tmp_path / "out", "--only", "tanh", "fft.fft"]
    run("opinfo", "--seconds", 60, *arguments, monkeypatch=monkeypatch)
    assert "not recorded" in capsys.readouterr().out
    run("opinfo", "--seconds", -1, *arguments, monkeypatch=monkeypatch)
    assert capsys.readouterr().out.startswith("2 operators not tried")


def test_patterns_say_which_need_cuda() -> None:
    assert {name for name, pattern in PATTERNS.items() if "Needs CUDA." in (pattern.__doc__ or "")} == {
        "side_stream", "captured_forward", "captured_step",
    }  # fmt: skip


@pytest.fixture
def virtual_gpu() -> Iterator[None]:
    """A virtual GPU, on which what is written for CUDA runs."""
    import memprof

    with memprof.virtual_gpu("h100-80gb"):
        yield


def test_every_first_use_runs_on_cuda(virtual_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.probe.nvml_counters", dict)
    run("probe", "--device", "cuda", "--out", tmp_path / "probe.json", monkeypatch=monkeypatch)
    rows = {row["after"]: row for row in json.loads((tmp_path / "probe.json").read_text())["rows"]}
    assert [name for name, row in rows.items() if row["error"]] == []
    assert all(row["outside"] == find_gpu("h100-80gb").context_bytes for row in rows.values())
    # The first matrix product has the workspace of cuBLAS (32 MiB on an H100), beside two matrices.
    assert sorted(rows["mm float32"]["requests"]) == [MIB, MIB, 32 * MIB]
    assert rows["mm float32"]["reserved"] >= 32 * MIB


def test_every_pattern_runs_on_cuda(virtual_gpu: None) -> None:
    for name, pattern in PATTERNS.items():
        with AllocatorHistory("cuda") as history:
            pattern("cuda")
        assert history.bytes_of("alloc") and history.bytes_of("free_requested"), name


def test_a_gpu_that_does_what_the_virtual_one_does_is_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import memprof

    only = ["--only", "AdamW", "sort", "mm float32"]
    with memprof.virtual_gpu("h100-80gb"):
        run("operators", "cuda", "--out", tmp_path / "real.jsonl", *only, monkeypatch=monkeypatch)
    run("operators", "virtual", "--out", tmp_path / "virtual.jsonl", *only, monkeypatch=monkeypatch)
    run("compare_operators", tmp_path / "real.jsonl", tmp_path / "virtual.jsonl", monkeypatch=monkeypatch)
    assert capsys.readouterr().out == "virtual: 6 equal, 0 on one side alone\n"
