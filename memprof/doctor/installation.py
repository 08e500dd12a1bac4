"""`memprof doctor --env`: problems of this installation that cost memory or cause errors (without importing torch)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from memprof.allocator.config import HIP_VARIABLE, UNLIMITED, VARIABLES, AllocatorConfig, parse_config
from memprof.allocator.releases import LATEST, Release, parse_release
from memprof.device.environment import Environment, find_installed_version, read_environment
from memprof.device.gpus import NvmlSample
from memprof.device.host import available_bytes, memory_bytes
from memprof.device.nvml import read_gpus
from memprof.errors import UsageError
from memprof.fixes.catalog import EXPANDABLE_SEGMENTS
from memprof.serving.packages import VLLM_PACKAGES, make_install_command
from memprof.stubs.packages import PACKAGES
from memprof.units import GIB, MIB, format_bytes

_MIN_SHM_BYTES = GIB  # Docker's default is 64 MiB; data loader workers need more.
_MIN_USED_BYTES = 512 * MIB  # Used memory of a GPU below which it is not in use: a desktop or the driver.


@dataclass(frozen=True, slots=True)
class Check:
    """A problem of the installation; `severity` is error, warning or note."""

    severity: str
    problem: str
    hint: str = ""
    command: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Installation:
    """Facts about the installation, as pairs of name and value (packages, GPUs, memory), and its problems."""

    facts: tuple[tuple[str, str], ...]
    findings: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Memory and memory limits of this machine in bytes; None: no limit, or unknown."""

    total: int | None = None
    available: int | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    locked_limit_bytes: int | None = None  # limit of locked memory (RLIMIT_MEMLOCK).
    cgroup_limit_bytes: int | None = None  # limit of this container or job.


def read_host_limits() -> HostLimits:
    """Return this machine's memory and memory limits, in bytes."""
    shm_total = shm_free = locked = None
    with contextlib.suppress(OSError, AttributeError):
        shm = os.statvfs("/dev/shm")
        shm_total, shm_free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        locked = None if soft == resource.RLIM_INFINITY else soft
    return HostLimits(memory_bytes(), available_bytes(), shm_total, shm_free, locked, _read_cgroup_limit())


@dataclass(frozen=True, slots=True)
class PrivateNames:
    """The private names of torch that memprof uses, and those that the installed torch lacks."""

    count: int = 0  # All private names for a build of torch like the installed one.
    # Missing name -> what memprof does without it; "": memprof refuses this torch.
    missing: Mapping[str, str] = field(default_factory=dict)
    error: str = ""  # Error of importing torch.


def read_private_names() -> PrivateNames:
    """Return which of the private names that memprof uses the installed torch lacks; a subprocess imports torch."""
    command = [sys.executable, "-m", "memprof.torch_private"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        return PrivateNames(error=(process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    result = json.loads(process.stdout.splitlines()[-1])
    return PrivateNames(result["number"], result["missing"])


def _read_cgroup_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        # cgroup version 1 reports "unlimited" as a huge number.
        return int(text) if text.isdecimal() and int(text) < 1 << 60 else None
    return None


def check_installation(
    environment: Environment | None = None,
    gpus: NvmlSample | None = None,
    host: HostLimits | None = None,
    find_version: Callable[[str], str | None] | None = None,
    names: PrivateNames | None = None,
) -> Installation:
    """Return facts about this machine and its problems; arguments that are None are read from the machine.

    `find_version` returns the release of the package with a name, or None if it is not installed.
    """
    gpus = read_gpus() if gpus is None else gpus
    environment = read_environment(gpus) if environment is None else environment
    host = read_host_limits() if host is None else host
    find_version = find_installed_version if find_version is None else find_version
    findings = [Check("error", note) for note in environment.notes]
    if environment.torch_version is None:
        findings.append(Check("note", "torch is not installed in this Python", "run memprof where your training runs"))
    else:
        names = read_private_names() if names is None else names
        findings += _check_private_names(names, f"torch {environment.torch_version}")
    settings = check_allocator_settings(environment.variables, _find_torch_release(environment))
    findings += _check_rocm_settings(environment.variables, settings) if environment.torch_hip else settings
    findings += _check_gpus(gpus)
    findings += _check_host(host)
    findings += _check_libraries(find_version)
    findings += _check_vllm(find_version)
    severity_order = {"error": 0, "warning": 1, "note": 2}
    return Installation(
        tuple(_list_facts(environment, gpus, host, find_version, names)),
        tuple(sorted(findings, key=lambda check: severity_order[check.severity])),
    )


def _find_torch_release(environment: Environment) -> Release:
    try:
        return parse_release(environment.torch_version) if environment.torch_version else LATEST
    except UsageError:
        return LATEST


def _check_private_names(names: PrivateNames, torch: str) -> Iterator[Check]:
    if names.error:
        yield Check("error", f"{torch} cannot be imported: {names.error}", "mend or reinstall it")
    missing_by_effect: dict[str, list[str]] = {}
    for name, effect in names.missing.items():
        missing_by_effect.setdefault(effect, []).append(name)
    for effect, missing in missing_by_effect.items():
        problem = f"{torch} lacks {', '.join(missing)}"
        if effect:
            yield Check("note", problem, f"without: {effect}")
        else:
            hint = "install a release that `memprof help releases` lists"
            yield Check("error", f"{problem}: memprof refuses it", hint)


def _list_facts(
    environment: Environment,
    gpus: NvmlSample,
    host: HostLimits,
    find_version: Callable[[str], str | None],
    names: PrivateNames | None,
) -> list[tuple[str, str]]:
    platform = environment.torch_cuda and f"CUDA {environment.torch_cuda}"
    platform = platform or (environment.torch_hip and f"ROCm {environment.torch_hip}") or "the CPU alone"
    torch = f"{environment.torch_version}, for {platform}" if environment.torch_version else "not installed"
    facts = [("torch", torch), ("driver", environment.driver_version or "none")]
    if names is not None and names.count:
        facts.append(("private names of torch", f"{names.count - len(names.missing)} of {names.count} are there"))
    facts += [("newest CUDA it runs", environment.driver_cuda)] if environment.driver_cuda else []
    for gpu in gpus.gpus:
        used = "" if gpu.used_bytes is None else f", {format_bytes(gpu.used_bytes)} used"
        total = "" if gpu.total_bytes is None else f", {format_bytes(gpu.total_bytes)}"
        facts.append((f"GPU {gpu.index}", f"{gpu.name}{total}{used}"))
    libraries = ("transformers", "accelerate", "peft", "bitsandbytes", "deepspeed", "vllm", "flash-attn")
    facts += [(name, found) for name in libraries if (found := find_version(name))]
    stubs = [f"{p.name} {p.version}" for p in PACKAGES.values() if find_version(p.distribution) is None]
    facts += [("replaced by a stub", ", ".join(stubs))] if stubs else []
    sizes = (
        ("host memory", host.total), ("of it available", host.available), ("limit of the job", host.cgroup_limit_bytes),
        ("/dev/shm", host.shm_total_bytes), ("limit of locked memory", host.locked_limit_bytes),
    )  # fmt: skip
    facts += [(name, format_bytes(size)) for name, size in sizes if size is not None]
    return facts + [(name, value) for name, value in environment.variables.items() if "ALLOC" in name or "CUDA" in name]


def check_allocator_settings(variables: Mapping[str, str], release: Release) -> Iterator[Check]:
    """Yield problems of the allocator's environment variables: rejected, contradictory, or ignored by `release`."""
    version = ".".join(map(str, release.version))
    old_var, new_var = VARIABLES
    rename = f"export {old_var}={variables.get(new_var)}"
    if new_var in variables and not release.has_unified_settings:
        problem = f"{new_var} is not read by torch {version}"
        yield Check("error", problem, "it came with 2.9: use the older name", rename)
    elif release.version == (2, 9) and old_var not in variables and "expandable_segments" in variables.get(new_var, ""):
        problem = f"torch 2.9 does not take expandable_segments from {new_var}"
        yield Check("warning", problem, "use the older name", rename, "github.com/pytorch/pytorch/issues/183387")
    name = next((name for name in VARIABLES if name in variables), None)
    if (switch := "PYTORCH_NO_CUDA_MEMORY_CACHING") in variables:
        consequence = f" and {name} does nothing" if name else ""
        problem = f"{switch} is set: every tensor is a cudaMalloc{consequence}"
        yield Check("warning", problem, "it is for debugging", f"unset {switch}")
    if name is None or (name == new_var and not release.has_unified_settings):
        return
    try:
        config = parse_config(variables[name], release, origin=name)
    except UsageError as error:
        hint = f"torch {version} refuses it at its first allocation; {error.hint}"
        yield Check("error", f"{name}: {error.problem}", hint)
    else:
        yield from _check_contradictions(config, name, variables[name])


def _check_rocm_settings(variables: Mapping[str, str], settings: Iterable[Check]) -> Iterator[Check]:
    """Yield the problems `settings` without advice to use expandable segments, which may hang with ROCm, and a problem
    for each variable that sets them."""
    for name in (HIP_VARIABLE, *VARIABLES):
        if EXPANDABLE_SEGMENTS in variables.get(name, ""):
            problem = f"{name}: with ROCm, {EXPANDABLE_SEGMENTS} is new, and a copy to the GPU may hang"
            yield Check("warning", problem, "leave it out", f"unset {name}", "github.com/pytorch/pytorch/issues/192259")
    yield from (check for check in settings if EXPANDABLE_SEGMENTS not in check.command)


# Settings of the native allocator.
_NATIVE_SETTINGS = (
    "max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions", "expandable_segments",
    "max_non_split_rounding_mb",
)  # fmt: skip


def _check_contradictions(config: AllocatorConfig, name: str, value: str) -> Iterator[Check]:
    """Yield a problem for settings that cancel each other. Source: c10/cuda/CUDACachingAllocator.cpp."""
    native_settings = [key for key in _NATIVE_SETTINGS if key in value]
    if config.backend != "native" and native_settings:
        problem = f"{name}: backend:{config.backend} ignores {', '.join(native_settings)}"
        yield Check("warning", problem, "they belong to torch's own allocator: leave out one or the other")
    if config.expandable_segments and config.max_split_size != UNLIMITED:
        hint = (
            "expandable segments are split at any size; all that the limit does is keep large free blocks from "
            "smaller requests: leave max_split_size_mb out"
        )
        problem = f"{name}: max_split_size_mb beside {EXPANDABLE_SEGMENTS}"
        yield Check("warning", problem, hint, f"export {name}={EXPANDABLE_SEGMENTS}")
    if config.garbage_collection_threshold and config.expandable_segments:
        problem = f"{name}: garbage_collection_threshold does nothing for expandable segments"
        yield Check("warning", problem, "collection skips them: leave it out")
    elif config.garbage_collection_threshold and config.per_process_memory_fraction >= 1:
        hint = "without torch.cuda.set_per_process_memory_fraction, or per_process_memory_fraction, it does nothing"
        yield Check("note", f"{name}: garbage_collection_threshold acts only under a memory limit", hint)


def _check_gpus(gpus: NvmlSample) -> Iterator[Check]:
    yield from (Check("note", note) for note in gpus.notes)
    for gpu in gpus.gpus:
        if gpu.used_bytes is not None and gpu.used_bytes > _MIN_USED_BYTES:
            sizes = (f", {format_bytes(p.used_bytes)}" if p.used_bytes else "" for p in gpu.processes)
            names = [f"{p.name} (pid {p.pid}{size})" for p, size in zip(gpu.processes, sizes, strict=True)]
            owner = f" by {', '.join(names[:4])}" if names else ", by processes that are not shown (another container?)"
            problem = f"GPU {gpu.index} is in use: {format_bytes(gpu.used_bytes)}{owner}"
            yield Check("warning", problem, "what others have is missing to you", "memprof monitor --once")
        yield from (Check("note", f"GPU {gpu.index}: {note}") for note in gpu.notes)


def _check_host(host: HostLimits) -> Iterator[Check]:
    if host.shm_total_bytes is not None and host.shm_total_bytes < _MIN_SHM_BYTES:
        problem = f"/dev/shm has {format_bytes(host.shm_total_bytes)}: DataLoader workers pass their batches there"
        command = "docker run --shm-size=16g ...  # or --ipc=host"
        yield Check("warning", problem, "a container has 64 MiB unless told otherwise", command)
    elif host.shm_total_bytes and host.shm_free_bytes is not None and host.shm_free_bytes < host.shm_total_bytes // 10:
        problem = f"/dev/shm is nearly full: {format_bytes(host.shm_free_bytes)} left"
        yield Check("warning", problem, "killed runs leave their files behind", "ls -l /dev/shm")
    if host.locked_limit_bytes is not None and host.total is not None and host.locked_limit_bytes < host.total // 8:
        hint = "CUDA pins memory past this limit, through its driver; RDMA (NCCL over InfiniBand) meets it"
        yield Check(
            "note", f"locked memory is limited to {format_bytes(host.locked_limit_bytes)}", hint, "ulimit -l unlimited"
        )
    if host.cgroup_limit_bytes is not None and host.total is not None and host.cgroup_limit_bytes < host.total:
        problem = f"this job may take {format_bytes(host.cgroup_limit_bytes)} of {format_bytes(host.total)} host memory"
        yield Check("note", problem, "past it the kernel kills the process without a message: exit code 137")


# Releases with known memory problems: package, first affected and first fixed release, problem, hint, and source.
_KNOWN_ISSUES = (
    (
        "torch", (2, 9), (2, 10),
        "conv3d in half precision does not use cuDNN below 9.15, and takes several times the memory",
        "install nvidia-cudnn 9.15 or newer beside torch 2.9.1, or torch 2.10",
        "github.com/pytorch/pytorch/issues/166643",
    ),
    (
        "transformers", (0,), (4, 45), "causal models turn all logits into float32, in inference too",
        "4.45 computes and casts in generate() only what it needs", "github.com/huggingface/transformers/pull/31292",
    ),
    (
        "transformers", (4, 45), (4, 46), "a forward without labels still turns logits into float32",
        "4.46 leaves them in the model's dtype", "github.com/huggingface/transformers/pull/33902",
    ),
)  # fmt: skip


def parse_version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version string: (4, 46, 0) for "4.46.0.dev0"."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _check_vllm(find_version: Callable[[str], str | None]) -> Iterator[Check]:
    """Yield a note if vLLM is installed without packages that it imports, as after `pip install --no-deps vllm`."""
    release = find_version("vllm")
    missing = () if release is None else tuple(name for name in VLLM_PACKAGES if find_version(name) is None)
    if missing:
        problem = f"vllm {release} cannot start: it imports {', '.join(missing)}"
        hint = "install what is missing, to run it on the virtual GPU (memprof help serving)"
        yield Check("warning", problem, hint, make_install_command(missing))


def _check_libraries(find_version: Callable[[str], str | None]) -> Iterator[Check]:
    cudnn = [find_version(name) for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn")]
    has_new_cudnn = any(parse_version(text) >= (9, 15) for text in cudnn if text)
    for package, since, until, problem, hint, source in _KNOWN_ISSUES:
        installed = find_version(package)
        release = parse_version(installed or "")
        if release and since <= release < until and not (package == "torch" and has_new_cudnn):
            yield Check("warning", f"{package} {installed}: {problem}", hint, "", source)
