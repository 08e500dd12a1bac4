"""Catalog of GPUs: values reported by CUDA or published by the vendors, for predictions without a GPU.

The capacity is the value that CUDA reports (`cudaDeviceProp.totalGlobalMem`; torch's "GPU 0 has a total capacity of"),
not the advertised size: the driver and ECC reserve a part, so an "80 GB" H100 has 79.1 GiB. The capacity varies by up
to 3% between driver versions, and recent drivers reserve more: the catalog has about the lowest value seen on Linux, so
that a run predicted to fit does fit. Nothing is read before the first call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from memprof.device.context import get_context_bytes
from memprof.errors import UsageError, unknown_name
from memprof.units import GIB, MIB, gib

DEFAULT_GPU = "h100-80gb"
CUSTOM_SIZE_HINT = "(--gpu-vram GIB takes any size)"

_BACKENDS = {"AMD": "hip", "Radeon": "hip", "Apple": "mps", "Intel(R)": "xpu"}  # by the first word of a GPU's name

# Share of a Mac's memory that Metal recommends as a process's working set (MTLDevice.recommendedMaxWorkingSetSize),
# below and from 36 GiB on, in logs of llama.cpp: 10922.67 MiB of 16 GiB (github.com/abetlen/llama-cpp-python, issue
# 687), 21845.34 MiB of 32 GiB (llama.cpp, pull request 2011), 28991.03 MB on an M4 Max with 36 GB, 51539.61 MB of 64
# GiB (llama.cpp, issue 9112), 73728 MiB of 96 GiB (llama.cpp, issue 3213). macOS 26 recommends more of 128 GiB: 107.52
# GiB (github.com/antirez/ds4, pull request 893). The lower value is taken.
_WORKING_SET_SHARES = (2 / 3, 3 / 4)
_FIRST_LARGE_MAC_BYTES = 36 * GIB

DTYPES = ("float32", "tf32", "float16", "bfloat16", "int8", "float8")


# `compare=False`: a mapping is not hashable, and the other fields tell two GPUs apart.
@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model."""

    key: str  # memprof's name, such as "h100-80gb".
    name: str  # the name by `torch.cuda.get_device_properties(0).name`.
    total_bytes: int  # the capacity that CUDA reports, in bytes.
    compute_capability: tuple[int, int]  # major and minor; (0, 0) for "mps" and "xpu", which have none.
    num_sms: int  # streaming multiprocessors (compute units on AMD, cores on Apple, XVEs on Intel).
    memory_bandwidth: int  # peak of the device memory, in bytes per second.
    host_bandwidth: int  # peak of the link to the CPU in one direction, in bytes per second.
    # dense operations per second by dtype (one of DTYPES), on the tensor cores where the GPU has them; float16 and
    # bfloat16 accumulate in float32. A dtype that the GPU lacks, or whose figure is not known, is absent.
    peak_flops: Mapping[str, int] = field(compare=False)
    l2_bytes: int | None  # size of the L2 cache, in bytes, or None if not known.
    # "reported" if a message of CUDA or torch with `total_bytes` was seen, "derived" if it comes from a sibling GPU
    # (`note` says how), "nominal" if it is the size on the box, which CUDA's is below, "given" for `custom_gpu`.
    capacity_kind: str
    sources: tuple[str, ...]  # sources of the figures.
    aliases: tuple[str, ...] = ()  # other names that `find_gpu` accepts.
    note: str = ""  # a remark on the figures; may be empty.
    # peak of all NVLinks of a GPU that a switch or a mesh joins to the machine's others, in one direction, in bytes
    # per second: half of what data sheets have, which add both. None without.
    nvlink_bandwidth: int | None = None
    is_suggested: bool = True  # whether memprof names the GPU where any would do, such as the smallest that fits
    unified_bytes: int | None = None  # memory of the machine, where GPU and CPU share it; None: the GPU has its own.
    gcn_arch: str = ""  # architecture of an AMD GPU, as torch's gcnArchName has it; empty for others.

    @property
    def backend(self) -> str:
        """Return the backend of torch that runs this GPU: "cuda", "hip" (ROCm), "mps" or "xpu"."""
        return _BACKENDS.get(self.name.partition(" ")[0], "cuda")

    @property
    def has_bfloat16(self) -> bool:
        """Return whether the GPU computes in bfloat16 at full speed: from compute capability 8.0 on, and Apple's and
        Intel's (M1 computes it in float32)."""
        return self.device_type != "cuda" or self.compute_capability >= (8, 0) or "bfloat16" in self.peak_flops

    @property
    def half_precision(self) -> str:
        """Return the half precision that the GPU computes in at full speed: bfloat16, else float16."""
        return "bfloat16" if self.has_bfloat16 else "float16"

    @property
    def device_type(self) -> str:
        """Return torch's type of the device, as programs name it: "cuda" (also with ROCm), "mps" or "xpu"."""
        return "cuda" if self.backend == "hip" else self.backend

    @property
    def context_bytes(self) -> int:
        """Return the bytes of a process on the GPU outside torch's allocator: CUDA's context and libraries. 0 for "mps"
        and "xpu", where they are not known."""
        return get_context_bytes(self.compute_capability) if self.device_type == "cuda" else 0

    @property
    def link_bandwidth(self) -> int:
        """Return bytes per second to other GPUs of the machine, in one direction: by NVLink, else by the host link."""
        return self.nvlink_bandwidth or self.host_bandwidth


@cache
def list_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs of the catalog, in the order of gpus.toml (data centre, workstation, desktop) and apple.toml."""
    # Imported here, because these imports would take most of this file's import time.
    import tomllib
    from importlib import resources

    folder = resources.files("memprof.device")
    gpus = tomllib.loads(folder.joinpath("gpus.toml").read_text(encoding="utf-8"))
    macs = tomllib.loads(folder.joinpath("apple.toml").read_text(encoding="utf-8"))
    return (
        *(_make_gpu(key, table) for key, table in gpus.items()),
        *(_make_apple_gpu(table, memory) for table in macs["gpus"] for memory in table["unified_gib"]),
    )


def list_suggested_gpus(device_type: str = "cuda") -> tuple[Gpu, ...]:
    """Return the GPUs of the catalog that memprof proposes by itself, to programs for devices of this type."""
    return tuple(gpu for gpu in list_gpus() if gpu.is_suggested and gpu.device_type == device_type)


def find_gpu(name: str) -> Gpu:
    """Return the GPU with this key, CUDA name or alias; raise UsageError if there is none.

    Case, spaces, underscores, hyphens and a leading "NVIDIA", "AMD", "Apple", "Intel", "Tesla", "Quadro" or "GeForce"
    do not matter.
    """
    gpu = _index_by_folded_name().get(_fold_name(name))
    if gpu is None:
        raise unknown_name("GPU", name, [gpu.key for gpu in list_gpus()], see=CUSTOM_SIZE_HINT)
    return gpu


def custom_gpu(total_bytes: int) -> Gpu:
    """Return a GPU with a capacity of `total_bytes`, otherwise like an A100 80GB SXM. Raises UsageError if below 1."""
    if total_bytes <= 0:
        raise UsageError("the GPU memory must be above zero", value=total_bytes, hint="give GiB, such as 80 or 23.6")
    base = find_gpu("a100-80gb")
    size_pattern = re.compile(rf"(?<![\d.]){re.escape(f'{total_bytes / GIB:g}')}gb\b")
    matching_gpus = [gpu for gpu in list_suggested_gpus() if size_pattern.search(" ".join((gpu.key, *gpu.aliases)))]
    smallest = min(matching_gpus, key=lambda gpu: gpu.total_bytes, default=None)
    remark = ""
    if smallest is not None:
        remark = f"a GPU sold with so many GB has less (--gpu {smallest.key}: {gib(smallest.total_bytes)} GiB); "
    return replace(
        base,
        key="custom",
        name=f"custom GPU with {gib(total_bytes)} GiB",
        total_bytes=total_bytes,
        capacity_kind="given",
        sources=("given by the user",),
        aliases=(),
        note=f"{remark}only the capacity was given; compute capability, speeds and caches are those of the {base.name}",
    )


def _fold_name(name: str) -> str:
    # Repeated, since a name such as "NVIDIA GeForce RTX 4090" has two such words.
    return re.sub(
        r"^(?:(?:nvidia|geforce|amd|apple|intel|tesla|quadro)(?=.))+", "", re.sub(r"[\s_-]+", "", name).lower()
    )


def _make_gpu(key: str, table: Mapping[str, Any]) -> Gpu:
    major, minor = table["compute_capability"]
    return Gpu(
        key=key,
        name=table["name"],
        total_bytes=_read_capacity(key, table),
        compute_capability=(major, minor),
        num_sms=table["num_sms"],
        memory_bandwidth=round(table["memory_gb_per_s"] * 10**9),
        host_bandwidth=round(table["host_gb_per_s"] * 10**9),
        peak_flops=MappingProxyType({dtype: round(peak * 10**12) for dtype, peak in table["peak_tflops"].items()}),
        l2_bytes=round(table["l2_mib"] * MIB) if "l2_mib" in table else None,
        capacity_kind=table["capacity_kind"],
        sources=tuple(table["sources"]),
        aliases=tuple(table.get("aliases", ())),
        note=table.get("note", ""),
        nvlink_bandwidth=round(table["nvlink_gb_per_s"] * 10**9) if "nvlink_gb_per_s" in table else None,
        is_suggested=table.get("suggested", True),
        unified_bytes=_read_unified_bytes(key, table),
        gcn_arch=table.get("gcn_arch", ""),
    )


def _make_apple_gpu(table: Mapping[str, Any], unified_gib: int) -> Gpu:
    """Return the GPU of a chip of apple.toml, in a machine with `unified_gib` of memory."""
    unified_bytes = unified_gib * GIB
    bandwidth = round(table["memory_gb_per_s"] * 10**9)
    return Gpu(
        key=f"{table['key']}-{unified_gib}gb",
        name=f"{table['name']} ({unified_gib} GB)",
        total_bytes=int(_WORKING_SET_SHARES[unified_bytes >= _FIRST_LARGE_MAC_BYTES] * unified_bytes),
        compute_capability=(0, 0),
        num_sms=table["cores"],
        memory_bandwidth=bandwidth,
        host_bandwidth=bandwidth,
        peak_flops=MappingProxyType({dtype: round(peak * 10**12) for dtype, peak in table["peak_tflops"].items()}),
        l2_bytes=None,
        capacity_kind="derived",
        sources=tuple(table["sources"]),
        note="capacity is the working set that Metal recommends: 2/3 of the memory, 3/4 from 36 GB on",
        unified_bytes=unified_bytes,
    )


def _read_unified_bytes(key: str, table: Mapping[str, Any]) -> int | None:
    """Return the memory that CPU and GPU share, in bytes; None if the GPU has its own."""
    if table.get("unified"):
        return _read_capacity(key, table)
    return round(table["unified_gib"] * GIB) if "unified_gib" in table else None


def _read_capacity(key: str, table: Mapping[str, Any]) -> int:
    """Return the capacity in bytes from `table`, which has one of the fields bytes, mib (torch's "total_memory=…MB")
    and gib."""
    units = {"bytes": 1, "mib": MIB, "gib": GIB}
    values: list[float] = [table[name] * unit for name, unit in units.items() if name in table]
    if len(values) != 1:
        raise ValueError(f"gpus.toml: {key} must have exactly one of bytes, mib and gib")
    return round(values[0])


@cache
def _index_by_folded_name() -> dict[str, Gpu]:
    # Sizes of one GPU have one name in CUDA: the first of the catalog is found by it.
    names = {_fold_name(gpu.name): gpu for gpu in reversed(list_gpus())}
    return names | {_fold_name(name): gpu for gpu in list_gpus() for name in (gpu.key, *gpu.aliases)}
