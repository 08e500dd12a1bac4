"""The GPU catalog: figures that can be true, names that lead to one GPU, sources for all."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from memprof.device.catalog import DEFAULT_GPU, DTYPES, Gpu, custom_gpu, find_gpu, list_gpus
from memprof.errors import UsageError
from memprof.flows.gpus import make_device_facts
from memprof.units import GIB

KEYS = [gpu.key for gpu in list_gpus() if gpu.device_type == "cuda"]  # the others: test_catalog_of_others.py

# What is printed on the box, in decimal GB for HBM as sold and in GiB for the rest; CUDA reports less in all cases. Of
# others a key or an alias has it.
MARKETING_GIB = {
    "b300": 288, "b200": 192, "gh200-96gb": 96, "h200-141gb": 141, "h100-80gb": 80, "h100-pcie": 80,
    "h100-nvl-94gb": 94, "h20-96gb": 96, "a100-80gb": 80, "a100-80gb-pcie": 80, "a100-40gb": 40, "a100-40gb-pcie": 40,
    "a800-80gb": 80, "a40": 48, "a30": 24, "a10": 24, "a10g": 24, "a16": 16, "a2": 16, "l40s": 48, "l40": 48, "l4": 24,
    "t4": 16, "v100-32gb": 32, "v100-16gb": 16, "p100-16gb": 16, "mi300x": 192, "rtx-pro-6000": 96, "rtx-6000-ada": 48,
    "rtx-a6000": 48, "rtx-a5000": 24, "rtx-a4000": 16, "rtx-5090": 32, "rtx-5080": 16, "rtx-5070-ti": 16,
    "rtx-4090": 24, "rtx-4080": 16, "rtx-4070-ti": 12, "rtx-4070": 12, "rtx-4060-ti-16gb": 16, "rtx-4060": 8,
    "rtx-3090-ti": 24, "rtx-3090": 24, "rtx-3080-ti": 12, "rtx-3080-10gb": 10, "rtx-3070": 8, "rtx-3060-ti": 8,
    "rtx-3060-12gb": 12, "rtx-2080-ti": 11, "gtx-1080-ti": 11,
}  # fmt: skip

# GiB in an out-of-memory message or a device query that a public page has; the catalog may not lose them.
REPORTED_GIB = {
    "h100-80gb": 79.10, "h200-141gb": 139.80, "b200": 178.35, "b300": 267.69, "h20-96gb": 95.00, "a100-40gb": 39.39,
    "l40s": 44.39, "l4": 22.03, "t4": 14.56, "rtx-pro-6000": 94.97, "rtx-5090": 31.34, "rtx-a6000": 47.40,
    "rtx-4060-ti-16gb": 15.55, "mi300x": 191.98, "p100-16gb": 15.89,
}  # fmt: skip


# One direction of all NVLinks, in GB/s: half of what data sheets have.
NVLINK_GB = {
    "b300": 900, "b200": 900, "gh200-96gb": 450, "h200-141gb": 450, "h100-80gb": 450, "h20-96gb": 450, "a100-80gb": 300,
    "a100-40gb": 300, "a800-80gb": 200, "v100-32gb": 150, "v100-16gb": 150,
}  # fmt: skip


# GPUs with the memory of the machine: the link is as fast as the memory; peaks of tensor cores are not published.
UNIFIED = {key for key in KEYS if key.startswith(("jetson", "gb10", "ryzen"))}


def test_capacity_is_below_the_size_on_the_box() -> None:
    for key in KEYS:
        gpu = find_gpu(key)
        sizes = (
            [MARKETING_GIB[key]] if key in MARKETING_GIB else re.findall(r"(\d+)gb\b", " ".join((key, *gpu.aliases)))
        )
        lowest = 0.48 if key.startswith("ryzen") else 0.90
        assert any(lowest < gpu.total_bytes / GIB / int(size) <= 1.0 for size in sizes)
        assert (gpu.capacity_kind == "nominal") == (gpu.total_bytes / GIB == int(sizes[-1]))


@pytest.mark.parametrize("key", REPORTED_GIB)
def test_capacity_is_the_one_that_cuda_reported(key: str) -> None:
    assert find_gpu(key).total_bytes / GIB == pytest.approx(REPORTED_GIB[key], abs=0.0101)
    assert find_gpu(key).capacity_kind == "reported"


def test_figures_are_plausible() -> None:
    for key in KEYS:
        gpu = find_gpu(key)
        major, minor = gpu.compute_capability
        assert 6 <= major <= 12
        assert 0 <= minor <= 9
        assert 8 <= gpu.num_sms <= 304
        assert 60e9 < gpu.memory_bandwidth < 9e12
        links = (15_750_000_000, 31_500_000_000, 63_000_000_000, 450_000_000_000)  # PCIe 3, 4, 5; C2C
        assert gpu.host_bandwidth == gpu.memory_bandwidth if key in UNIFIED else gpu.host_bandwidth in links
        assert (gpu.nvlink_bandwidth or 0) == NVLINK_GB.get(key, 0) * 10**9
        assert gpu.link_bandwidth == (gpu.nvlink_bandwidth if key in NVLINK_GB else gpu.host_bandwidth)
        assert gpu.l2_bytes is None or 1e6 <= gpu.l2_bytes < 200e6
        assert gpu.sources


def test_peaks_follow_the_architecture() -> None:
    for key in KEYS:
        gpu = find_gpu(key)
        peak = gpu.peak_flops
        assert set(peak) <= set(DTYPES)
        assert 1e12 < peak["float32"] < 200e12
        if key in UNIFIED or "gfx" in gpu.note:
            continue
        # Tensor cores came with 7.0, bfloat16 and tf32 with 8.0, float8 with 8.9.
        assert ("bfloat16" in peak) == ("tf32" in peak) == (gpu.compute_capability >= (8, 0))
        assert ("float8" in peak) == (gpu.compute_capability >= (8, 9))
        if "bfloat16" in peak:
            assert peak["bfloat16"] == peak["float16"]
            assert 1.9 < peak["bfloat16"] / peak["tf32"] < 2.1
        if "float8" in peak:
            assert 1.9 < peak["float8"] / peak["float16"] < 2.1


def test_a_derived_capacity_says_how() -> None:
    for key in KEYS:
        gpu = find_gpu(key)
        assert gpu.capacity_kind in ("reported", "derived", "nominal")
        if gpu.capacity_kind != "reported":
            assert "capacity" in gpu.note.lower()
        else:
            # A reported one quotes the figure: bytes, MiB, MB or GiB.
            assert any(re.search(r"\d(?:\.\d+)? ?(?:GiB|MiB|MB|bytes)|_bytes=\d", source) for source in gpu.sources)


def test_names_lead_to_one_gpu() -> None:
    from memprof.device.catalog import _fold_name

    owners: dict[str, str] = {}
    for gpu in list_gpus():
        for name in {_fold_name(name) for name in (gpu.key, *gpu.aliases)}:
            assert owners.setdefault(name, gpu.key) == gpu.key, name
            assert find_gpu(name) is gpu
        assert find_gpu(gpu.name) in (gpu, next(other for other in list_gpus() if other.name == gpu.name))


WRITTEN = [
    ("h100", "h100-80gb"),
    ("H100 80GB", "h100-80gb"),
    ("NVIDIA H100 80GB HBM3", "h100-80gb"),
    ("a100", "a100-80gb"),
    ("A100_40GB", "a100-40gb"),
    ("nvidia a100-sxm4-40gb", "a100-40gb"),
    ("4090", "rtx-4090"),
    ("RTX 4090", "rtx-4090"),
    ("GeForce RTX 4090", "rtx-4090"),
    ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ("Tesla T4", "t4"),
    ("A6000", "rtx-a6000"),
    ("3060", "rtx-3060-12gb"),
    ("MI300X", "mi300x"),
    ("NVIDIA GeForce RTX 5060 Ti", "rtx-5060-ti-16gb"),
    ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "a100-3g.40gb"),
    ("DGX Spark", "gb10"),
    ("4070 Ti Super", "rtx-4070-ti-super"),
    ("AMD Radeon RX 7900 XTX", "rx-7900-xtx"),
]


def test_find_gpu_knows_the_ways_people_write() -> None:
    for name, key in WRITTEN:
        assert find_gpu(name).key == key


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu("rtx-4091")
    assert caught.value.value == "'rtx-4091'"
    assert "'rtx-4090'" in str(caught.value)
    assert "--gpu-vram" in str(caught.value)


@pytest.mark.parametrize("name", ["", " ", "nvidia", "toaster"])
def test_what_is_no_gpu_is_an_error(name: str) -> None:
    with pytest.raises(UsageError):
        find_gpu(name)


def test_the_default_exists() -> None:
    assert find_gpu(DEFAULT_GPU).compute_capability == (9, 0)


def test_custom_gpu_takes_the_capacity_and_says_what_it_assumed() -> None:
    gpu = custom_gpu(10 * GIB)
    model = find_gpu("a100-80gb")
    assert gpu.key == "custom"
    assert gpu.total_bytes == 10 * GIB
    assert (gpu.compute_capability, gpu.memory_bandwidth) == (model.compute_capability, model.memory_bandwidth)
    assert (gpu.name, gpu.capacity_kind, gpu.sources) == ("custom GPU with 10.00 GiB", "given", ("given by the user",))
    assert not gpu.aliases and "A100" in gpu.note
    assert custom_gpu(1).total_bytes == 1
    with pytest.raises(UsageError):
        custom_gpu(0)


@pytest.mark.parametrize(
    ("gib", "smallest"),
    [(80, "h100-80gb: 79.10"), (8, "rtx-3070: 7.57"), (11, "rtx-2080-ti: 10.57"), (9.5, None), (0, None), (1, None)],
)
def test_custom_gpu_names_the_smallest_that_is_sold_with_so_many_gigabytes(gib: float, smallest: str | None) -> None:
    note = custom_gpu(int(gib * GIB) or 1).note
    assert re.findall(r"--gpu (.*?) GiB", note) == ([] if smallest is None else [smallest])


def test_a_gpu_cannot_be_changed() -> None:
    gpu = find_gpu("h100")
    assert isinstance(gpu, Gpu)
    assert len({gpu, find_gpu("H100")}) == 1
    with pytest.raises(AttributeError):
        gpu.total_bytes = 0  # type: ignore[misc]
    with pytest.raises(TypeError):
        gpu.peak_flops["float32"] = 0  # type: ignore[index]


def test_import_reads_nothing_and_imports_no_torch() -> None:
    program = (
        "import sys, memprof.device.catalog, memprof.workload.catalog as models\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'typer', 'tomllib', 'json'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "memprof.device.catalog.find_gpu('h100'); models.find_model('gpt2').load_config()\n"
        "models.resolve_size('1.2B')\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'typer'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(("name", "mib"), [("h100-80gb", 750), ("h200", 750), ("a100-80gb", 426), ("b200", 426)])
def test_context_is_that_of_the_compute_capability_where_it_was_measured(name, mib):
    assert find_gpu(name).context_bytes == mib << 20


@pytest.mark.parametrize(
    ("name", "has_bfloat16"),
    [
        ("v100-16gb", False),
        ("t4", False),
        ("a100-40gb", True),
        ("rtx-3060-12gb", True),
        ("mi250x", True),
        ("m1-8gb", True),
    ],
)
def test_who_computes_in_bfloat16(name: str, has_bfloat16: bool) -> None:
    assert find_gpu(name).has_bfloat16 == has_bfloat16
    facts = make_device_facts(find_gpu(name)).to_json()
    assert facts.get("has_bfloat16", True) == has_bfloat16
