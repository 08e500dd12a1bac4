"""`memprof doctor --env`: settings that contradict each other, limits, GPUs in use, and libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.allocator import parse_release
from memprof.device.environment import Environment
from memprof.device.gpus import GpuProcess, NvmlGpu, NvmlSample
from memprof.doctor.installation import (
    HostLimits,
    PrivateNames,
    check_allocator_settings,
    check_installation,
    parse_version,
    read_host_limits,
    read_private_names,
)

GIB, MIB = 1 << 30, 1 << 20


def environment(**changes: object) -> Environment:
    values: dict[str, object] = {
        "torch_version": "2.13.0+cu130", "torch_cuda": "13.0", "torch_hip": None,
        "driver_version": "580.1", "driver_cuda": "13.0", "variables": {}, "notes": (),
    }  # fmt: skip
    return Environment(**{**values, **changes})  # type: ignore[arg-type]


def problems(text: str, release: str = "2.13", name: str = "PYTORCH_CUDA_ALLOC_CONF", **others: str) -> list[str]:
    return [check.problem for check in check_allocator_settings({name: text, **others}, parse_release(release))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("expandable_segments:True,max_split_size_mb:128", "max_split_size_mb beside expandable_segments"),
        ("expandable_segments:True,garbage_collection_threshold:0.8", "does nothing for expandable segments"),
        ("garbage_collection_threshold:0.8", "acts only under a memory limit"),
        ("backend:cudaMallocAsync,max_split_size_mb:128", "ignores max_split_size_mb"),
        ("expandable_segment:True", "unknown allocator setting"),
        ("max_split_size_mb:1", "max_split_size_mb is 1"),
    ],
)
def test_settings_that_do_not_do_what_they_seem_to(text: str, words: str):
    (problem,) = problems(text)
    assert words in problem


def test_good_settings_are_left_alone():
    assert problems("expandable_segments:True") == []
    assert problems("garbage_collection_threshold:0.8,per_process_memory_fraction:0.9") == []
    assert not list(check_allocator_settings({}, parse_release("2.13")))


def test_the_new_name_in_an_old_release():
    assert "not read by torch 2.6" in problems("expandable_segments:True", "2.6", "PYTORCH_ALLOC_CONF")[0]
    assert "does not take expandable_segments" in problems("expandable_segments:True", "2.9", "PYTORCH_ALLOC_CONF")[0]
    assert problems("expandable_segments:True", "2.13", "PYTORCH_ALLOC_CONF") == []


def test_no_caching_makes_settings_idle():
    found = problems("expandable_segments:True", PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert "PYTORCH_CUDA_ALLOC_CONF does nothing" in found[0]


def test_gpus_in_use_small_shared_memory_and_a_job_limit():
    gpu = NvmlGpu(
        0, "NVIDIA A100", total_bytes=80 * GIB, used_bytes=70 * GIB,
        processes=(GpuProcess(42, "python old.py", 69 * GIB, "compute"),),
    )  # fmt: skip
    host = HostLimits(
        total=128 * GIB,
        available=64 * GIB,
        shm_total_bytes=64 * MIB,
        shm_free_bytes=64 * MIB,
        locked_limit_bytes=None,
        cgroup_limit_bytes=16 * GIB,
    )
    checked = check_installation(environment(), NvmlSample((gpu,)), host, lambda name: None, PrivateNames())
    text = " | ".join(finding.problem for finding in checked.findings)
    assert "python old.py (pid 42, 69.00 GiB)" in text
    assert "/dev/shm has 64.00 MiB" in text
    assert "16.00 GiB of 128.00 GiB" in text
    severities = [finding.severity for finding in checked.findings]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)


def test_a_build_that_does_not_fit_the_driver_is_an_error():
    note = "torch is built for CUDA 13.0, and the driver runs CUDA 12.4 at most"
    checked = check_installation(
        environment(notes=(note,)), NvmlSample(), HostLimits(), lambda name: None, PrivateNames()
    )
    assert (checked.findings[0].severity, checked.findings[0].problem) == ("error", note)


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"transformers": "4.44.2"}, "float32, in inference too"),
        ({"transformers": "4.45.1"}, "forward without labels"),
        ({"transformers": "4.46.0"}, None),
        ({"torch": "2.9.1+cu128", "nvidia-cudnn-cu12": "9.10.2.21"}, "conv3d"),
        ({"torch": "2.9.1+cu128", "nvidia-cudnn-cu12": "9.15.0.57"}, None),
        ({"torch": "2.8.0"}, None),
    ],
)
def test_libraries_known_to_take_more_than_they_should(versions: dict[str, str], words: str | None):
    checked = check_installation(environment(), NvmlSample(), HostLimits(), versions.get, PrivateNames())
    found = [finding for finding in checked.findings if finding.source]
    assert [words in finding.problem for finding in found] == ([] if words is None else [True])
    assert all(finding.source.startswith("github.com/") for finding in found)


def test_this_machine_can_be_looked_at():
    host = read_host_limits()
    assert host.total is None or host.total > 0
    checked = check_installation(names=PrivateNames())
    assert dict(checked.facts)["torch"]


def test_private_names_that_torch_lacks():
    names = PrivateNames(9, {"torch._C._a": "", "torch._dynamo.b": "it runs eagerly", "torch._C._c": ""})
    checked = check_installation(environment(), NvmlSample(), HostLimits(), lambda name: None, names)
    assert ("private names of torch", "6 of 9 are there") in checked.facts
    refused, without = checked.findings
    assert (refused.severity, refused.problem) == (
        "error", "torch 2.13.0+cu130 lacks torch._C._a, torch._C._c: memprof refuses it",
    )  # fmt: skip
    assert (without.severity, without.hint) == ("note", "without: it runs eagerly")


def test_a_torch_that_ends_while_it_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Traceback >&2\necho 'OSError: libcudart.so.13' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    assert read_private_names() == PrivateNames(error="OSError: libcudart.so.13")
    python.write_text("#!/bin/sh\nexit 9\n")
    assert read_private_names() == PrivateNames(error="exit code 9")


def test_a_torch_that_cannot_be_imported_is_said():
    names = PrivateNames(error="ImportError: libcudart.so.13: cannot open shared object file")
    (check,) = check_installation(environment(), NvmlSample(), HostLimits(), lambda name: None, names).findings
    assert "cannot be imported: ImportError: libcudart.so.13" in check.problem


def test_versions_are_compared_as_numbers():
    assert parse_version("4.46.0.dev0") == (4, 46, 0)
    assert parse_version("git") == ()
