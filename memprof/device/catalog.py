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
CUSTOM_SIZE_HINT = "('memprof profile --gpu-vram GIB' takes any size)"

DTYPES = ("float32", "tf32", "float16", "bfloat16", "int8", "float8")


# `compare=False`: a mapping is not hashable, and the other fields tell two GPUs apart.
@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model."""

    key: str  # memprof's name, such as "h100-80gb".
    name: str  # the name by `torch.cuda.get_device_properties(0).name`.
    total_bytes: int  # the capacity that CUDA reports, in bytes.
    compute_capability: tuple[int, int]  # major and minor.
    num_sms: int  # streaming multiprocessors (compute units on AMD).
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

    @property
    def context_bytes(self) -> int:
        """Return the bytes of a process on the GPU outside torch's allocator: CUDA's context and libraries."""
        return get_context_bytes(self.compute_capability)

    @property
    def link_bandwidth(self) -> int:
        """Return bytes per second to other GPUs of the machine, in one direction: by NVLink, else by the host link."""
        return self.nvlink_bandwidth or self.host_bandwidth


@cache
def list_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs of the catalog, in the order of gpus.toml (data centre, workstation, desktop)."""
    # Imported here, because these imports would take most of this file's import time.
    import tomllib
    from importlib import resources

    text = resources.files("memprof.device").joinpath("gpus.toml").read_text(encoding="utf-8")
    return tuple(_make_gpu(key, table) for key, table in tomllib.loads(text).items())


def list_suggested_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of the catalog that memprof proposes by itself."""
    return tuple(gpu for gpu in list_gpus() if gpu.is_suggested)


def find_gpu(name: str) -> Gpu:
    """Return the GPU with this key, CUDA name or alias; raise UsageError if there is none.

    Case, spaces, underscores, hyphens and a leading "NVIDIA", "AMD", "Tesla", "Quadro" or "GeForce" do not matter.
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
    return re.sub(r"^(?:(?:nvidia|geforce|amd|tesla|quadro)(?=.))+", "", re.sub(r"[\s_-]+", "", name).lower())


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
    )


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
