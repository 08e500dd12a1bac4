"""`memprof doctor --env`: settings that contradict each other, limits, GPUs in use, and libraries."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from memprof.allocator import parse_release
from memprof.device.environment import Environment
from memprof.device.gpus import GpuProcess, NvmlGpu, NvmlSample
from memprof.doctor.installation import (
    Check,
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


def test_vllm_without_the_packages_that_it_imports():
    def find_problems(missing: tuple[str, ...]) -> list[Check]:
        def find_version(name: str) -> str | None:
            return None if name in missing or name.startswith("nvidia-") else "0.33.0"

        found = check_installation(environment(), NvmlSample(), HostLimits(), find_version, PrivateNames())
        return [check for check in found.findings if check.problem.startswith("vllm")]

    assert find_problems(()) == find_problems(("vllm", "pyzmq")) == []
    (check,) = find_problems(("pyzmq", "xgrammar"))
    assert check.problem == "vllm 0.33.0 cannot start: it imports pyzmq, xgrammar"
    assert check.command == "pip install pyzmq && pip install --no-deps xgrammar"


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
    python.write_text('#!/bin/sh\necho "$*" >&2\nexit 1\n')
    assert read_private_names() == PrivateNames(error="-m memprof.torch_private")
    # What is said on the way is no error.
    python.write_text(
        """#!/bin/sh\necho warning >&2\necho a line\necho '{"number": 9, "missing": {"torch.a": ""}}'\n"""
    )
    assert read_private_names() == PrivateNames(9, {"torch.a": ""})


def test_a_torch_that_cannot_be_imported_is_said():
    names = PrivateNames(error="ImportError: libcudart.so.13: cannot open shared object file")
    (check,) = check_installation(environment(), NvmlSample(), HostLimits(), lambda name: None, names).findings
    assert "cannot be imported: ImportError: libcudart.so.13" in check.problem


def test_versions_are_compared_as_numbers():
    assert parse_version("4.46.0.dev0") == (4, 46, 0)
    assert parse_version("git") == ()


# -- thresholds and facts ----------------------------------------------------------------------------------------------


def found_on(host: HostLimits | None = None, gpu: NvmlGpu | None = None) -> list[str]:
    sample = NvmlSample(() if gpu is None else (gpu,))
    checked = check_installation(environment(), sample, host or HostLimits(), lambda name: None, PrivateNames())
    return [finding.problem for finding in checked.findings]


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (HostLimits(shm_total_bytes=GIB - 1, shm_free_bytes=GIB - 1), "/dev/shm has 1,024.00 MiB"),
        (HostLimits(shm_total_bytes=GIB, shm_free_bytes=GIB), None),
        (HostLimits(shm_total_bytes=10 * GIB, shm_free_bytes=GIB), None),
        (HostLimits(shm_total_bytes=10 * GIB, shm_free_bytes=GIB - 1), "nearly full: 1,024.00 MiB left"),
        (HostLimits(shm_total_bytes=10 * GIB), None),
        (HostLimits(total=80 * GIB, locked_limit_bytes=10 * GIB), None),
        (HostLimits(total=80 * GIB, locked_limit_bytes=10 * GIB - 1), "locked memory is limited to 10.00 GiB"),
        (HostLimits(locked_limit_bytes=1), None),
        (HostLimits(total=80 * GIB, cgroup_limit_bytes=80 * GIB), None),
        (HostLimits(total=80 * GIB, cgroup_limit_bytes=79 * GIB), "79.00 GiB of 80.00 GiB"),
        (HostLimits(cgroup_limit_bytes=1), None),
    ],
)
def test_limits_of_the_host(host: HostLimits, words: str | None):
    assert [words in problem for problem in found_on(host) if words] == ([True] if words else [])
    assert words or found_on(host) == []


@pytest.mark.parametrize(("used", "is_in_use"), [(None, False), (512 * MIB, False), (512 * MIB + 1, True)])
def test_a_gpu_in_use(used: int | None, is_in_use: bool):
    problems_found = found_on(gpu=NvmlGpu(3, "NVIDIA A100", total_bytes=80 * GIB, used_bytes=used))
    assert ["GPU 3 is in use: 512.00 MiB, by processes that are not shown" in one for one in problems_found] == (
        [True] if is_in_use else []
    )


def test_four_processes_of_a_gpu_are_named():
    processes = tuple(GpuProcess(pid, "python", None if pid == 1 else pid * GIB, "compute") for pid in range(1, 6))
    (problem,) = found_on(gpu=NvmlGpu(0, "A", total_bytes=80 * GIB, used_bytes=70 * GIB, processes=processes))
    assert "python (pid 1), python (pid 2, 2.00 GiB)" in problem
    assert "(pid 4, 4.00 GiB)" in problem
    assert "pid 5" not in problem


def facts(host: HostLimits | None = None, gpu: NvmlGpu | None = None, **changes: object) -> dict[str, str]:
    sample = NvmlSample(() if gpu is None else (gpu,))
    versions = {"transformers": "4.57.1", "peft": "0.18.0"}
    checked = check_installation(
        environment(**changes), sample, host or HostLimits(), versions.get, PrivateNames(9, {"torch.a": ""})
    )
    return dict(checked.facts)


@pytest.mark.parametrize(
    ("changes", "torch"),
    [
        ({}, "2.13.0+cu130, for CUDA 13.0"),
        ({"torch_cuda": None, "torch_hip": "7.1"}, "2.13.0+cu130, for ROCm 7.1"),
        ({"torch_cuda": None}, "2.13.0+cu130, for the CPU alone"),
        ({"torch_version": None}, "not installed"),
    ],
)
def test_what_torch_is_for(changes: dict[str, object], torch: str):
    assert facts(**changes)["torch"] == torch


def test_facts_of_the_machine():
    host = HostLimits(64 * GIB, 32 * GIB, 2 * GIB, GIB, 8 * MIB, 16 * GIB)
    variables = {"PYTORCH_ALLOC_CONF": "", "CUDA_VISIBLE_DEVICES": "1", "HOME": "/"}
    gpu = NvmlGpu(1, "NVIDIA A100", total_bytes=80 * GIB, used_bytes=2 * GIB)
    found = facts(host, gpu, variables=variables)
    expected = {
        "driver": "580.1",
        "newest CUDA it runs": "13.0",
        "private names of torch": "8 of 9 are there",
        "GPU 1": "NVIDIA A100, 80.00 GiB, 2.00 GiB used",
        "transformers": "4.57.1",
        "peft": "0.18.0",
        "host memory": "64.00 GiB",
        "of it available": "32.00 GiB",
        "limit of the job": "16.00 GiB",
        "/dev/shm": "2.00 GiB",
        "limit of locked memory": "8.00 MiB",
        "PYTORCH_ALLOC_CONF": "",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert not found.keys() & {"HOME", "accelerate"}


def test_facts_that_are_not_known():
    found = facts(
        gpu=NvmlGpu(0, "NVIDIA A100", total_bytes=None, used_bytes=None), driver_version=None, driver_cuda=None
    )
    assert (found["driver"], found["GPU 0"]) == ("none", "NVIDIA A100")
    assert not found.keys() & {"newest CUDA it runs", "host memory", "/dev/shm"}


@pytest.mark.parametrize(
    ("versions", "is_affected"),
    [
        ({"torch": "2.9.0"}, True),
        ({"torch": "2.10.0"}, False),
        ({"torch": "2.9.1", "nvidia-cudnn-cu13": "9.14.0"}, True),
        ({"torch": "2.9.1", "nvidia-cudnn-cu13": "9.15"}, False),
        ({"torch": "2.9.1", "nvidia-cudnn": "9.15.1"}, False),
        ({"transformers": "4.45.0", "nvidia-cudnn": "9.15.1"}, True),
        ({"transformers": "git"}, False),
    ],
)
def test_releases_that_are_affected(versions: dict[str, str], is_affected: bool):
    checked = check_installation(environment(), NvmlSample(), HostLimits(), versions.get, PrivateNames())
    assert len([finding for finding in checked.findings if finding.source]) == is_affected


@pytest.mark.parametrize(
    ("text", "release", "name", "command"),
    [
        ("max_split_size_mb:64", "2.8", "PYTORCH_ALLOC_CONF", "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64"),
        (
            "expandable_segments:True", "2.9", "PYTORCH_ALLOC_CONF",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        (
            "expandable_segments:True,max_split_size_mb:64", "2.13", "PYTORCH_ALLOC_CONF",
            "export PYTORCH_ALLOC_CONF=expandable_segments:True",
        ),
    ],
)  # fmt: skip
def test_the_setting_that_mends_another(text: str, release: str, name: str, command: str):
    (check,) = check_allocator_settings({name: text}, parse_release(release))
    assert check.command == command


def test_expandable_segments_are_not_advised_with_rocm():
    """Where two settings cancel each other, the same variables with CUDA have the advice to set them alone."""
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"}
    by_build = {}
    for hip in (None, "7.1"):
        place = environment(torch_hip=hip, variables=variables)
        found = check_installation(place, NvmlSample(), HostLimits(), {}.get, PrivateNames()).findings
        by_build[hip] = [check.command for check in found if "ALLOC_CONF" in check.problem]
    assert by_build == {
        None: ["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"], "7.1": ["unset PYTORCH_CUDA_ALLOC_CONF"],
    }  # fmt: skip


def test_settings_that_are_fine_in_their_release():
    assert problems("max_split_size_mb:64", "2.9", "PYTORCH_ALLOC_CONF") == []
    both = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert problems("expandable_segments:True", "2.9", "PYTORCH_ALLOC_CONF", **both) == []
    assert problems("garbage_collection_threshold:0.8,per_process_memory_fraction:1.0") != []


def test_caching_switched_off_without_settings():
    (check,) = check_allocator_settings({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, parse_release("2.13"))
    assert "does nothing" not in check.problem
    assert check.command == "unset PYTORCH_NO_CUDA_MEMORY_CACHING"


@pytest.mark.parametrize(
    ("new", "old", "limit"),
    [
        ("1024\n", None, 1024),
        ("max\n", "2048", None),
        (None, "2048\n", 2048),
        (None, str((1 << 60) - 1), (1 << 60) - 1),
        (None, str(1 << 60), None),
        (None, None, None),
    ],
)
def test_the_limit_of_a_control_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, new: str | None, old: str | None, limit: int | None
):
    files = {"/sys/fs/cgroup/memory.max": new, "/sys/fs/cgroup/memory/memory.limit_in_bytes": old}
    for path, text in files.items():
        if text is not None:
            (tmp_path / path.replace("/", "_")).write_text(text)
    monkeypatch.setattr("memprof.doctor.installation.Path", lambda path: tmp_path / path.replace("/", "_"))
    assert read_host_limits().cgroup_limit_bytes == limit


OLD, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
SEGMENTS = "expandable_segments:True"


@pytest.mark.parametrize(
    ("variables", "release", "severity", "words", "hint", "command", "source"),
    [
        ({OLD: f"{SEGMENTS},max_split_size_mb:128"}, "2.13", "warning",
         f"{OLD}: max_split_size_mb beside {SEGMENTS}", "leave max_split_size_mb out", f"export {OLD}={SEGMENTS}", ""),
        ({OLD: f"{SEGMENTS},garbage_collection_threshold:0.8"}, "2.13", "warning",
         f"{OLD}: garbage_collection_threshold does nothing", "leave it out", "", ""),
        ({NEW: "garbage_collection_threshold:0.8"}, "2.13", "note", f"{NEW}: garbage_collection_threshold acts only",
         "per_process_memory_fraction", "", ""),
        *(
            ({OLD: f"backend:cudaMallocAsync,{name}:{value}"}, "2.13", "warning",
             f"{OLD}: backend:cudaMallocAsync ignores {name}", "leave out one or the other", "", "")
            for name, value in (("max_split_size_mb", 128), ("roundup_power2_divisions", 4),
                                ("max_non_split_rounding_mb", 128))
        ),
        ({OLD: "backend:cudaMallocAsync,max_split_size_mb:64,roundup_power2_divisions:4"}, "2.13", "warning",
         f"{OLD}: backend:cudaMallocAsync ignores max_split_size_mb, roundup_power2_divisions", "", "", ""),
        ({OLD: "expandable_segment:True"}, "2.12", "error", f"{OLD}: unknown allocator setting 'expandable_segment'",
         "torch 2.12 refuses it at its first allocation; did you mean 'expandable_segments'?", "", ""),
        ({NEW: SEGMENTS}, "2.6", "error", f"{NEW} is not read by torch 2.6", "it came with 2.9",
         f"export {OLD}={SEGMENTS}", ""),
        ({NEW: SEGMENTS}, "2.9", "warning", f"torch 2.9 does not take expandable_segments from {NEW}", "older name",
         f"export {OLD}={SEGMENTS}", "github.com/pytorch/pytorch/issues/183387"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", NEW: SEGMENTS}, "2.13", "warning",
         f"PYTORCH_NO_CUDA_MEMORY_CACHING is set: every tensor is a cudaMalloc and {NEW} does nothing", "debugging",
         "unset PYTORCH_NO_CUDA_MEMORY_CACHING", ""),
    ],
)  # fmt: skip
def test_a_check_of_settings(variables, release, severity, words, hint, command, source):
    (check,) = check_allocator_settings(variables, parse_release(release))
    assert (check.severity, check.command, check.source) == (severity, command, source)
    assert words in check.problem and hint in check.hint


def check_all(
    gpus: NvmlSample | None = None,
    host: HostLimits | None = None,
    names: PrivateNames | None = None,
    versions: dict[str, str] | None = None,
    **changes: object,
) -> list[Check]:
    found = check_installation(
        environment(**changes),
        gpus or NvmlSample(),
        host or HostLimits(),
        (versions or {}).get,
        names or PrivateNames(),
    )
    return list(found.findings)


@pytest.mark.parametrize(
    ("known", "severity", "words", "hint", "command"),
    [
        ({"torch_version": None}, "note", "torch is not installed", "where your training runs", ""),
        ({"notes": ("a note",)}, "error", "a note", "", ""),
        ({"gpus": NvmlSample(notes=("no driver",))}, "note", "no driver", "", ""),
        ({"gpus": NvmlSample((NvmlGpu(5, "A", total_bytes=None, used_bytes=None, notes=("MIG",)),))}, "note",
         "GPU 5: MIG", "", ""),
        ({"gpus": NvmlSample((NvmlGpu(3, "A", total_bytes=None, used_bytes=GIB),))}, "warning",
         "GPU 3 is in use: 1.00 GiB, by processes that are not shown", "missing to you", "memprof monitor --once"),
        ({"host": HostLimits(shm_total_bytes=64 * MIB)}, "warning", "/dev/shm has 64.00 MiB: DataLoader", "64 MiB",
         "docker run --shm-size=16g ...  # or --ipc=host"),
        ({"host": HostLimits(shm_total_bytes=10 * GIB, shm_free_bytes=2 * MIB)}, "warning",
         "/dev/shm is nearly full: 2.00 MiB left", "killed runs", "ls -l /dev/shm"),
        ({"host": HostLimits(total=80 * GIB, locked_limit_bytes=8 * MIB)}, "note", "limited to 8.00 MiB", "NCCL",
         "ulimit -l unlimited"),
        ({"host": HostLimits(total=80 * GIB, cgroup_limit_bytes=9 * GIB)}, "note", "9.00 GiB of 80.00 GiB",
         "exit code 137", ""),
        ({"names": PrivateNames(error="ImportError: x")}, "error",
         "torch 2.13.0+cu130 cannot be imported: ImportError: x", "reinstall", ""),
        ({"names": PrivateNames(9, {"torch.a": "", "torch.b": ""})}, "error",
         "torch 2.13.0+cu130 lacks torch.a, torch.b: memprof refuses it", "memprof help releases", ""),
        ({"names": PrivateNames(9, {"torch.a": "eager"})}, "note", "lacks torch.a", "without: eager", ""),
        ({"versions": {"transformers": "4.44.2"}}, "warning", "transformers 4.44.2: ", "4.45", ""),
        ({"versions": {"transformers": "4.45.0"}}, "warning", "transformers 4.45.0: ", "4.46", ""),
        ({"versions": {"torch": "2.9.1"}}, "warning", "torch 2.9.1: conv3d", "9.15", ""),
    ],
)  # fmt: skip
def test_a_check_of_the_installation(known, severity, words, hint, command):
    (check,) = check_all(**known)
    assert (check.severity, check.command) == (severity, command)
    assert words in check.problem and hint in check.hint


def test_errors_come_before_warnings_and_notes():
    gpu = NvmlGpu(3, "A", total_bytes=None, used_bytes=GIB)
    found = check_all(NvmlSample((gpu,), notes=("no driver",)), HostLimits(), PrivateNames(9, {"torch.a": ""}))
    assert [check.severity for check in found] == ["error", "warning", "note"]
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", OLD: "expandable_segment:True"}
    assert [check.severity for check in check_all(variables=variables)] == ["error", "warning"]


def test_releases_that_cannot_be_told_are_taken_for_the_newest():
    variables = {NEW: SEGMENTS}
    assert check_all(torch_version="git", variables=variables) == []
    assert [check.severity for check in check_all(torch_version="2.6", variables=variables)] == ["error"]


def test_stubs_are_of_packages_that_are_not_installed():
    checked = check_installation(environment(), NvmlSample(), HostLimits(), {"flash-attn": "2.8.3"}.get, PrivateNames())
    stubs = dict(checked.facts)["replaced by a stub"].split(", ")
    assert {"apex 0.1", "causal_conv1d 1.6.1"} <= set(stubs) and "flash_attn 2.8.3" not in stubs
    everything = check_installation(environment(), NvmlSample(), HostLimits(), lambda name: "1", PrivateNames())
    assert "replaced by a stub" not in dict(everything.facts)
    libraries = ("transformers", "accelerate", "peft", "bitsandbytes", "deepspeed", "vllm", "flash-attn")
    assert dict.fromkeys(libraries, "1").items() <= dict(everything.facts).items()


@pytest.mark.parametrize(("soft", "limit"), [(resource.RLIM_INFINITY, None), (65_536, 65_536)])
def test_limits_of_this_machine(monkeypatch: pytest.MonkeyPatch, soft: int, limit: int | None):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=7, f_frsize=512, f_bavail=5, f_bsize=1))
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: asked.append(kind) or (soft, 1))
    monkeypatch.setattr("memprof.doctor.installation.memory_bytes", lambda: 10)
    monkeypatch.setattr("memprof.doctor.installation.available_bytes", lambda: 9)
    monkeypatch.setattr("memprof.doctor.installation._read_cgroup_limit", lambda: 8)
    assert read_host_limits() == HostLimits(10, 9, 7 * 512, 5 * 512, limit, 8)
    assert asked == [resource.RLIMIT_MEMLOCK]


@pytest.mark.parametrize(
    ("versions", "is_affected"),
    [
        ({"torch": "2.8.9"}, False), ({"torch": "2.9"}, True), ({"torch": "2.10"}, False),
        ({"torch": "2.9", "nvidia-cudnn-cu12": "9.14.9"}, True), ({"torch": "2.9", "nvidia-cudnn-cu12": "9.15"}, False),
        ({"transformers": "4.44.9"}, True), ({"transformers": "4.45"}, True), ({"transformers": "4.46"}, False),
    ],
)  # fmt: skip
def test_the_first_and_the_last_release_with_a_problem(versions: dict[str, str], is_affected: bool):
    assert len(check_all(versions=versions)) == is_affected
