"""The programs that measure, on the CPU, and on a virtual GPU what is written for CUDA."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memprof.device.catalog import find_gpu
from tests.gpu.history import AllocatorHistory
from tests.gpu.patterns import PATTERNS

MIB = 1 << 20


def run(name: str, *arguments: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    importlib.import_module(f"tests.gpu.{name}").main()


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


def test_opinfo_counts_what_it_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--out", tmp_path / "out", "--only", "tanh", "fft.fft"]
    run("opinfo", "--seconds", 60, *arguments, monkeypatch=monkeypatch)
    assert "not recorded" in capsys.readouterr().out
    run("opinfo", "--seconds", -1, *arguments, monkeypatch=monkeypatch)
    assert capsys.readouterr().out.startswith("2 operators not tried")


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
