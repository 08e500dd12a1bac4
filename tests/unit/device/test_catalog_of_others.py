"""The GPUs of the catalog that CUDA does not run: those of Apple (MPS) and Intel (XPU), and AMD's (ROCm)."""

import pytest

from memprof.device.catalog import find_gpu, list_gpus
from memprof.units import GIB


@pytest.mark.parametrize(
    ("name", "backend", "device_type"),
    [
        ("h100", "cuda", "cuda"), ("mi300x", "hip", "cuda"), ("m4-max-64gb", "mps", "mps"), ("arc-b580", "xpu", "xpu"),
        ("Apple M1 (8 GB)", "mps", "mps"), ("B580", "xpu", "xpu"), ("rx-7900-xtx", "hip", "cuda"),
    ],
)  # fmt: skip
def test_the_vendor_decides_the_backend(name, backend, device_type):
    gpu = find_gpu(name)
    assert (gpu.backend, gpu.device_type) == (backend, device_type)


@pytest.mark.parametrize(
    ("name", "mib"),
    # What MTLDevice.recommendedMaxWorkingSetSize is in public logs; catalog.py has the addresses.
    [("m4-16gb", 10_922.67), ("m1-max-32gb", 21_845.34), ("m4-max-36gb", 27_648), ("m2-max-96gb", 73_728)],
)
def test_the_capacity_of_a_mac_is_its_recommended_working_set(name, mib):
    assert find_gpu(name).total_bytes / 2**20 == pytest.approx(mib, abs=0.01)


def test_memory_of_the_machine():
    """What CUDA reports of GB10 and Jetson is all that Linux has; of Strix Halo a GPU gets half."""
    shared = {gpu.key: gpu for gpu in list_gpus() if gpu.unified_bytes is not None and gpu.device_type == "cuda"}
    assert {key for key, gpu in shared.items() if gpu.unified_bytes == gpu.total_bytes} == {
        "gb10", "jetson-thor-128gb", "jetson-agx-orin-64gb", "jetson-agx-orin-32gb", "jetson-orin-nx-16gb",
        "jetson-orin-nano-8gb",
    }  # fmt: skip
    assert {key for key, gpu in shared.items() if gpu.unified_bytes > gpu.total_bytes} == {"ryzen-ai-max-128gb"}
    assert find_gpu("strix-halo").unified_bytes == pytest.approx(2 * find_gpu("strix-halo").total_bytes, rel=1e-4)


def test_amds_gpus_have_the_architecture_that_torch_reports():
    assert {gpu.key for gpu in list_gpus() if gpu.gcn_arch} == {gpu.key for gpu in list_gpus() if gpu.backend == "hip"}
    assert find_gpu("mi250x").gcn_arch == "gfx90a:sramecc+:xnack-" and find_gpu("rx-9070-xt").gcn_arch == "gfx1201"


def test_a_mac_has_less_for_its_gpu_than_memory():
    macs = [gpu for gpu in list_gpus() if gpu.device_type == "mps"]
    assert {gpu.key for gpu in macs} >= {"m1-8gb", "m3-pro-18gb", "m4-max-64gb", "m5-max-128gb"}
    for gpu in macs:
        assert gpu.key.endswith(f"-{gpu.unified_bytes // GIB}gb")
        assert 0.66 < gpu.total_bytes / gpu.unified_bytes <= 0.75
        assert gpu.context_bytes == 0
    assert all(gpu.unified_bytes is None for gpu in list_gpus() if gpu.device_type == "xpu")


def test_a_chip_that_is_sold_with_fewer_cores_has_them_at_its_sizes():
    assert [find_gpu(f"m5-max-{size}gb").num_sms for size in (36, 48, 128)] == [32, 40, 40]
    assert [find_gpu(f"m6-{size}gb").memory_bandwidth // 10**9 for size in (16, 24, 32)] == [153, 170, 170]
    assert find_gpu("m5-ultra-512gb").memory_bandwidth == 1200 * 10**9
