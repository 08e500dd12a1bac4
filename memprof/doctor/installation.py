"""`memprof doctor --env`: what in this installation costs memory or makes errors about it. It imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from memprof.allocator.config import UNLIMITED, VARIABLES, AllocatorConfig, parse_config
from memprof.allocator.releases import LATEST, Release, release_for
from memprof.device.cards import Reading
from memprof.device.environment import Environment, installed_release, read_environment
from memprof.device.host import available_bytes, memory_bytes
from memprof.device.nvml import read_cards
from memprof.errors import UsageError
from memprof.remedies.catalog import EXPANDABLE_SEGMENTS
from memprof.stand_ins.packages import PACKAGES
from memprof.units import GIB, MIB, format_bytes

_SMALL_SHM = GIB  # Docker gives 64 MiB; a few workers with batches of images need more than this.
_IN_USE = 512 * MIB  # Of a card: below it, a desktop or a driver.


@dataclass(frozen=True, slots=True)
class Check:
    """Something that is not as it should be. `severity` is error, warning or note."""

    severity: str
    problem: str
    hint: str = ""
    command: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Installation:
    """What is here, by name, and what is wrong with it."""

    facts: tuple[tuple[str, str], ...]
    findings: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Host:
    """Limits of this machine, bytes; None where there is none, or it is not known."""

    total: int | None = None
    available: int | None = None
    shm_total: int | None = None
    shm_free: int | None = None
    locked: int | None = None  # limit of locked memory (RLIMIT_MEMLOCK).
    cgroup: int | None = None  # limit of this container or job.


def read_host() -> Host:
    """The limits in force here."""
    shm_total = shm_free = locked = None
    with contextlib.suppress(OSError, AttributeError):
        shm = os.statvfs("/dev/shm")
        shm_total, shm_free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        locked = None if soft == resource.RLIM_INFINITY else soft
    return Host(memory_bytes(), available_bytes(), shm_total, shm_free, locked, _cgroup_limit())


@dataclass(frozen=True, slots=True)
class PrivateNames:
    """The private names of torch that memprof uses."""

    number: int = 0  # of all that a build of torch like the installed one may have.
    # those that the installed torch lacks -> what memprof does without; empty text: it refuses that torch.
    missing: Mapping[str, str] = field(default_factory=dict)
    error: str = ""  # why torch could not be asked; empty if it was.


def read_private_names() -> PrivateNames:
    """Ask the installed torch for the private names, in a process of its own: the doctor imports no torch."""
    command = [sys.executable, "-m", "memprof.torch_private"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return PrivateNames(error=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    return PrivateNames(found["number"], found["missing"])


def _cgroup_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        # Version 1 has no word for "unlimited" but a number larger than any machine.
        return int(text) if text.isdecimal() and int(text) < 1 << 60 else None
    return None


def check_installation(
    environment: Environment | None = None,
    cards: Reading | None = None,
    host: Host | None = None,
    version: Callable[[str], str | None] | None = None,
    names: PrivateNames | None = None,
) -> Installation:
    """Facts of this machine and what is wrong with them; what is given is taken instead of what is read here.

    `version` gives the release of an installed package by its name, None if it is not installed.
    """
    cards = read_cards() if cards is None else cards
    environment = read_environment(cards) if environment is None else environment
    host = read_host() if host is None else host
    version = installed_release if version is None else version
    findings = [Check("error", note) for note in environment.notes]
    if environment.torch_version is None:
        findings.append(Check("note", "torch is not installed in this Python", "run memprof where your training runs"))
    else:
        names = read_private_names() if names is None else names
        findings += _private_names(names, f"torch {environment.torch_version}")
    findings += check_settings(environment.variables, _release(environment))
    findings += _cards(cards)
    findings += _host(host)
    findings += _libraries(version)
    order = {"error": 0, "warning": 1, "note": 2}
    return Installation(
        tuple(_facts(environment, cards, host, version, names)),
        tuple(sorted(findings, key=lambda check: order[check.severity])),
    )


def _release(environment: Environment) -> Release:
    try:
        return release_for(environment.torch_version) if environment.torch_version else LATEST
    except UsageError:
        return LATEST


def _private_names(names: PrivateNames, torch: str) -> Iterator[Check]:
    if names.error:
        yield Check("error", f"{torch} cannot be imported: {names.error}", "mend or reinstall it")
    by_effect: dict[str, list[str]] = {}
    for name, without in names.missing.items():
        by_effect.setdefault(without, []).append(name)
    for without, missing in by_effect.items():
        if without:
            yield Check("note", f"{torch} lacks {', '.join(missing)}", f"without: {without}")
        else:
            yield Check(
                "error",
                f"{torch} lacks {', '.join(missing)}: memprof refuses it",
                "install a release that `memprof help releases` lists",
            )


def _facts(
    environment: Environment,
    cards: Reading,
    host: Host,
    version: Callable[[str], str | None],
    names: PrivateNames | None,
) -> list[tuple[str, str]]:
    build = environment.torch_cuda and f"CUDA {environment.torch_cuda}"
    build = build or (environment.torch_hip and f"ROCm {environment.torch_hip}") or "the CPU alone"
    facts = [
        ("torch", f"{environment.torch_version}, for {build}" if environment.torch_version else "not installed"),
        ("driver", environment.driver_version or "none"),
    ]
    if names is not None and names.number:
        facts.append(("private names of torch", f"{names.number - len(names.missing)} of {names.number} are there"))
    if environment.driver_cuda:
        facts.append(("newest CUDA it runs", environment.driver_cuda))
    for card in cards.cards:
        used = "" if card.used_bytes is None else f", {format_bytes(card.used_bytes)} used"
        total = "" if card.total_bytes is None else f", {format_bytes(card.total_bytes)}"
        facts.append((f"card {card.index}", f"{card.name}{total}{used}"))
    for name in ("transformers", "accelerate", "peft", "bitsandbytes", "deepspeed", "vllm", "flash-attn"):
        found = version(name)
        if found:
            facts.append((name, found))
    stood_for = [f"{one.name} {one.version}" for one in PACKAGES.values() if version(one.distribution) is None]
    if stood_for:
        facts.append(("stood in for", ", ".join(stood_for)))
    amounts = (
        ("host memory", host.total),
        ("of it available", host.available),
        ("limit of the job", host.cgroup),
        ("/dev/shm", host.shm_total),
        ("limit of locked memory", host.locked),
    )
    facts += [(name, format_bytes(amount)) for name, amount in amounts if amount is not None]
    return facts + [(name, value) for name, value in environment.variables.items() if "ALLOC" in name or "CUDA" in name]


def check_settings(variables: Mapping[str, str], release: Release) -> Iterator[Check]:
    """What is wrong with the allocator's settings: refused, contradicting each other, or ignored by `release`."""
    version = ".".join(map(str, release.version))
    older, newer = VARIABLES
    if newer in variables and not release.has_unified_settings:
        yield Check(
            "error",
            f"{newer} is not read by torch {version}",
            "it came with 2.9: use the older name",
            f"export {older}={variables[newer]}",
        )
    elif release.version == (2, 9) and older not in variables and "expandable_segments" in variables.get(newer, ""):
        yield Check(
            "warning",
            f"torch 2.9 does not take expandable_segments from {newer}",
            "use the older name",
            f"export {older}={variables[newer]}",
            "github.com/pytorch/pytorch/issues/183387",
        )
    name = next((name for name in VARIABLES if name in variables), None)
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in variables:
        settings = f" and {name} does nothing" if name else ""
        yield Check(
            "warning",
            f"PYTORCH_NO_CUDA_MEMORY_CACHING is set: every tensor is a cudaMalloc{settings}",
            "it is for debugging",
            "unset PYTORCH_NO_CUDA_MEMORY_CACHING",
        )
    if name is None or (name == newer and not release.has_unified_settings):
        return
    try:
        config = parse_config(variables[name], release, origin=name)
    except UsageError as error:
        hint = f"torch {version} refuses it at its first allocation; {error.hint}"
        yield Check("error", f"{name}: {error.problem}", hint)
    else:
        yield from _contradictions(config, name, variables[name])


# Settings of torch's own allocator.
_NATIVE = (
    "max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions", "expandable_segments",
    "max_non_split_rounding_mb",
)  # fmt: skip


def _contradictions(config: AllocatorConfig, name: str, text: str) -> Iterator[Check]:
    """Settings that cancel each other. Source: c10/cuda/CUDACachingAllocator.cpp (docs/allocator.md)."""
    native = [key for key in _NATIVE if key in text]
    if config.backend != "native" and native:
        yield Check(
            "warning",
            f"{name}: backend:{config.backend} ignores {', '.join(native)}",
            "they belong to torch's own allocator: leave out one or the other",
        )
    if config.expandable_segments and config.max_split_size != UNLIMITED:
        yield Check(
            "warning",
            f"{name}: max_split_size_mb beside {EXPANDABLE_SEGMENTS}",
            "expandable segments are split at any size; all that the limit does is keep large free blocks from "
            "smaller requests: leave max_split_size_mb out",
            f"export {name}={EXPANDABLE_SEGMENTS}",
        )
    if config.garbage_collection_threshold and config.expandable_segments:
        yield Check(
            "warning",
            f"{name}: garbage_collection_threshold does nothing for expandable segments",
            "collection skips them: leave it out",
        )
    elif config.garbage_collection_threshold and config.per_process_memory_fraction >= 1:
        yield Check(
            "note",
            f"{name}: garbage_collection_threshold acts only under a memory limit",
            "without torch.cuda.set_per_process_memory_fraction, or per_process_memory_fraction, it does nothing",
        )


def _cards(cards: Reading) -> Iterator[Check]:
    yield from (Check("note", note) for note in cards.notes)
    for card in cards.cards:
        if card.used_bytes is not None and card.used_bytes > _IN_USE:
            names = ", ".join(
                f"{process.name} (pid {process.pid}"
                + (f", {format_bytes(process.used_bytes)})" if process.used_bytes else ")")
                for process in card.processes[:4]
            )
            yield Check(
                "warning",
                f"card {card.index} is in use: {format_bytes(card.used_bytes)}"
                + (f" by {names}" if names else ", by processes that are not shown (another container?)"),
                "what others have is missing to you",
                "memprof monitor --once",
            )
        yield from (Check("note", f"card {card.index}: {note}") for note in card.notes)


def _host(host: Host) -> Iterator[Check]:
    if host.shm_total is not None and host.shm_total < _SMALL_SHM:
        yield Check(
            "warning",
            f"/dev/shm has {format_bytes(host.shm_total)}: DataLoader workers pass their batches there",
            "a container has 64 MiB unless told otherwise",
            "docker run --shm-size=16g ...  # or --ipc=host",
        )
    elif host.shm_total and host.shm_free is not None and host.shm_free < host.shm_total // 10:
        yield Check(
            "warning",
            f"/dev/shm is nearly full: {format_bytes(host.shm_free)} left",
            "killed runs leave their files behind",
            "ls -l /dev/shm",
        )
    if host.locked is not None and host.total is not None and host.locked < host.total // 8:
        yield Check(
            "note",
            f"locked memory is limited to {format_bytes(host.locked)}",
            "CUDA pins memory past this limit, through its driver; RDMA (NCCL over InfiniBand) meets it",
            "ulimit -l unlimited",
        )
    limit = host.cgroup
    if limit is not None and host.total is not None and limit < host.total:
        yield Check(
            "note",
            f"this job may take {format_bytes(limit)} of {format_bytes(host.total)} host memory",
            "past it the kernel kills the process without a message: exit code 137",
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """A release of a library that takes more memory than it should, with where that is said.

    `since` is the first release concerned, `until` the first that is not.
    """

    package: str
    since: tuple[int, ...]
    until: tuple[int, ...]
    problem: str
    hint: str
    source: str


_KNOWN = (
    _Known(
        "torch",
        (2, 9),
        (2, 10),
        "conv3d in half precision does not use cuDNN below 9.15, and takes several times the memory",
        "install nvidia-cudnn 9.15 or newer beside torch 2.9.1, or torch 2.10",
        "github.com/pytorch/pytorch/issues/166643",
    ),
    _Known(
        "transformers",
        (0,),
        (4, 45),
        "causal models turn all logits into float32, in inference too",
        "4.45 computes and casts in generate() only what it needs",
        "github.com/huggingface/transformers/pull/31292",
    ),
    _Known(
        "transformers",
        (4, 45),
        (4, 46),
        "a forward without labels still turns logits into float32",
        "4.46 leaves them in the model's dtype",
        "github.com/huggingface/transformers/pull/33902",
    ),
)


def version_tuple(text: str) -> tuple[int, ...]:
    """The numbers at the front of a release such as "4.46.0.dev0"."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _libraries(version: Callable[[str], str | None]) -> Iterator[Check]:
    for known in _KNOWN:
        installed = version(known.package)
        numbers = version_tuple(installed or "")
        if not numbers or not known.since <= numbers < known.until:
            continue
        if known.package == "torch" and _has_cudnn(version, (9, 15)):
            continue
        yield Check("warning", f"{known.package} {installed}: {known.problem}", known.hint, "", known.source)


def _has_cudnn(version: Callable[[str], str | None], least: tuple[int, ...]) -> bool:
    names = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn")
    return any(version_tuple(found) >= least for name in names if (found := version(name)))
