"""GPUs through the real pynvml, above a driver that is made up: amounts, processes, slices, and what it may refuse."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pynvml
import pytest

from memprof.device.nvml import Nvml, read_gpu_usage, read_gpus
from tests.unit.device.driver import GIB, MIB, FakeGpu, FakeProcess


@pytest.mark.parametrize("counts_reserved", [False, True])
def test_a_gpu(driver, counts_reserved):
    fake = driver(FakeGpu(counts_reserved=counts_reserved))
    reading = read_gpus()
    (gpu,) = reading.gpus
    assert (reading.driver_version, reading.cuda_version, reading.notes) == ("580.65.06", "12.8", ())
    assert (gpu.index, gpu.name, gpu.uuid) == (0, "NVIDIA H100 80GB HBM3", FakeGpu().uuid)
    assert (gpu.total_bytes, gpu.used_bytes, gpu.reserved_bytes) == (81559 * MIB, 2 * GIB, 551 * MIB)
    assert gpu.used_bytes + gpu.free_bytes + gpu.reserved_bytes == gpu.total_bytes
    assert (gpu.utilisation_percent, gpu.temperature_celsius, gpu.power_watts) == (87, 65, 412.3)
    assert gpu.compute_capability == (9, 0)
    # Two gigabytes and nobody on it: they are somebody's who cannot be seen.
    assert len(gpu.notes) == 1 and "no process is listed" in gpu.notes[0]
    assert fake.opened == 0


def test_a_gpu_of_which_the_driver_alone_uses_a_gibibyte(driver):
    driver(FakeGpu(used=GIB))
    assert read_gpus().gpus[0].notes == ()


def test_a_driver_without_version_two_counts_what_it_keeps_as_used(driver):
    driver(FakeGpu(), missing=("nvmlDeviceGetMemoryInfo_v2",))
    (gpu,) = read_gpus().gpus
    assert (gpu.used_bytes, gpu.reserved_bytes) == (2 * GIB + 551 * MIB, None)
    assert gpu.used_bytes + gpu.free_bytes == gpu.total_bytes


def test_processes_largest_first_and_each_once(driver):
    both = FakeProcess(4_000_001, 1 * GIB, b"/opt/game")
    driver(
        FakeGpu(
            compute=[both, FakeProcess(4_000_005, GIB, b"late"), FakeProcess(4_000_002, 5 * GIB, b"python3")],
            graphics=[
                FakeProcess(4_000_004, GIB, b"early"),
                both,
                FakeProcess(4_000_003, MIB, b"/usr/lib/xorg/Xorg -core"),
            ],
        )
    )
    (gpu,) = read_gpus().gpus
    assert [(p.pid, p.name, p.used_bytes, p.kind) for p in gpu.processes] == [
        (4_000_002, "python3", 5 * GIB, "compute"),
        (4_000_001, "game", 1 * GIB, "compute"),
        (4_000_004, "early", 1 * GIB, "graphics"),
        (4_000_005, "late", 1 * GIB, "compute"),
        (4_000_003, "Xorg", MIB, "graphics"),
    ]
    assert gpu.notes == ()


def test_this_process_is_named_by_its_script(driver):
    program = os.path.basename(Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode())
    driver(FakeGpu(compute=[FakeProcess(os.getpid(), 3 * GIB, program.encode())]))
    (process,) = read_gpus().gpus[0].processes
    assert process.name.startswith(f"{program} ")


def test_a_number_of_another_container_does_not_take_our_name(driver):
    driver(FakeGpu(compute=[FakeProcess(os.getpid(), 3 * GIB, b"/usr/bin/ollama")]))
    (process,) = read_gpus().gpus[0].processes
    assert process.name == "ollama"


def test_nothing_names_a_process(driver):
    driver(FakeGpu(compute=[FakeProcess(4_000_001, GIB, None), FakeProcess(4_000_002, GIB, b"caf\xe9")]))
    assert [process.name for process in read_gpus().gpus[0].processes] == ["process 4000001", "process 4000002"]


def test_an_old_driver_lists_processes_too(driver):
    driver(
        FakeGpu(compute=[FakeProcess(4_000_001, GIB)]),
        missing=("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3"),
    )
    (gpu,) = read_gpus().gpus
    assert [process.used_bytes for process in gpu.processes] == [GIB]
    assert gpu.notes == ()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "installed and not loaded"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no permission"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "restart the machine"),
        (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error"),
    ],
)
def test_a_driver_that_cannot_be_opened(driver, code, said):
    driver(FakeGpu(), errors={"nvmlInitWithFlags": code})
    reading = read_gpus()
    assert reading.gpus == ()
    (note,) = reading.notes
    assert said in note and "\n" not in note


def test_no_driver(monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlLib", None)

    def refuse(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "CDLL", refuse)
    assert read_gpus().notes == (
        "GPUs cannot be seen: no NVIDIA driver is installed here (libnvidia-ml.so.1 is not found)",
    )


def test_no_pynvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (note,) = read_gpus().notes
    assert "pip install nvidia-ml-py" in note


def test_a_driver_without_gpus(driver):
    driver()
    assert read_gpus().notes == ("the driver lists no GPU",)


def test_a_gpu_that_is_lost_leaves_the_others(driver):
    lost = pynvml.NVML_ERROR_GPU_IS_LOST
    driver(FakeGpu(errors={"*": lost}), FakeGpu(uuid="GPU-2"), errors={})
    first, second = read_gpus().gpus
    assert first.notes == ("GPU 0 cannot be read: GPU is lost",)
    assert first.total_bytes is None
    assert second.total_bytes == 81559 * MIB


def test_a_gpu_that_is_lost_while_it_is_read(driver):
    lost = pynvml.NVML_ERROR_GPU_IS_LOST
    calls = ("MemoryInfo_v2", "MemoryInfo", "UtilizationRates", "PowerUsage", "CudaComputeCapability", "Temperature")
    driver(FakeGpu(errors={f"nvmlDeviceGet{call}": lost for call in calls}))
    (gpu,) = read_gpus().gpus
    assert gpu.notes == ("GPU 0 cannot be read: GPU is lost",)


def test_handle_refused(driver):
    driver(FakeGpu(), errors={"nvmlDeviceGetHandleByIndex_v2": pynvml.NVML_ERROR_NO_PERMISSION})
    (gpu,) = read_gpus().gpus
    assert gpu.notes == ("GPU 0 cannot be read: Insufficient Permissions",)


def test_memory_that_is_not_available(driver):
    refused = pynvml.NVML_ERROR_NOT_SUPPORTED
    driver(FakeGpu(errors={"nvmlDeviceGetMemoryInfo": refused, "nvmlDeviceGetMemoryInfo_v2": refused}))
    (gpu,) = read_gpus().gpus
    assert (gpu.total_bytes, gpu.used_bytes, gpu.free_bytes) == (None, None, None)
    assert gpu.notes == ("memory of GPU 0 cannot be read: Not Supported",)
    assert gpu.utilisation_percent == 87


def test_processes_that_may_not_be_listed(driver):
    driver(FakeGpu(errors={"nvmlDeviceGetComputeRunningProcesses_v3": pynvml.NVML_ERROR_NO_PERMISSION}))
    (gpu,) = read_gpus().gpus
    assert gpu.notes == ("processes on GPU 0 cannot be listed: Insufficient Permissions",)


def test_a_gpu_without_a_display_misses_nothing(driver):
    refused = {"nvmlDeviceGetGraphicsRunningProcesses_v3": pynvml.NVML_ERROR_NOT_SUPPORTED}
    driver(FakeGpu(compute=[FakeProcess(4_000_001, GIB)], errors=refused))
    assert read_gpus().gpus[0].notes == ()


def _sliced() -> FakeGpu:
    refused = pynvml.NVML_ERROR_NO_PERMISSION
    return FakeGpu(
        mig=True,
        slices=[
            FakeGpu("NVIDIA H100 MIG 3g.40gb", "MIG-aaaa", 40448 * MIB, 3 * GIB, 30 * MIB, gpu_instance=2),
            FakeGpu("NVIDIA H100 MIG 1g.10gb", "MIG-bbbb", 9984 * MIB, 15 * MIB, 10 * MIB, gpu_instance=9),
        ],
        compute=[FakeProcess(os.getpid(), GIB, gpu_instance=2), FakeProcess(4_000_002, MIB, gpu_instance=9)],
        errors={
            "nvmlDeviceGetMemoryInfo": refused,
            "nvmlDeviceGetMemoryInfo_v2": refused,
            "nvmlDeviceGetUtilizationRates": pynvml.NVML_ERROR_NOT_SUPPORTED,
        },
    )


def test_slices(driver):
    driver(_sliced())
    (gpu,) = read_gpus().gpus
    assert [(piece.name, piece.total_bytes, piece.used_bytes) for piece in gpu.slices] == [
        ("NVIDIA H100 MIG 3g.40gb", 40448 * MIB, 3 * GIB),
        ("NVIDIA H100 MIG 1g.10gb", 9984 * MIB, 15 * MIB),
    ]
    assert gpu.utilisation_percent is None
    (note,) = gpu.notes
    assert note == "GPU 0 is sliced (MIG), and its memory as a whole cannot be read: Insufficient Permissions"


def test_use_of_a_slice_is_of_its_processes(driver):
    driver(_sliced())
    use = read_gpu_usage("mig-AAAA")
    assert (use.total_bytes, use.used_bytes, use.own_bytes) == (40448 * MIB, 3 * GIB, GIB)
    assert [process.pid for process in use.by_process] == [os.getpid()]
    assert [process.pid for process in read_gpu_usage("MIG-bbbb").by_process] == [4_000_002]


def test_use_of_a_gpu(driver):
    driver(
        FakeGpu(uuid="GPU-one"),
        FakeGpu(uuid="GPU-two", compute=[FakeProcess(os.getpid(), 512 * MIB), FakeProcess(4_000_001, GIB)]),
    )
    for name in (1, "GPU-two", "two"):
        use = read_gpu_usage(name)
        assert (use.total_bytes, use.used_bytes, use.own_bytes, use.note) == (81559 * MIB, 2 * GIB, 512 * MIB, "")
        assert sum(process.used_bytes for process in use.by_process) == 512 * MIB + GIB
    assert read_gpu_usage(0).own_bytes is None
    assert "does not list this process" in read_gpu_usage(0).note
    assert read_gpu_usage(7).note == "NVML lists no GPU 7: it has 2"


def test_use_that_the_driver_does_not_tell(driver):
    driver(FakeGpu(compute=[FakeProcess(os.getpid())]))
    use = read_gpu_usage(0)
    assert use.by_process[0].used_bytes is None
    assert use.own_bytes is None
    assert use.note == "the driver does not say how much each process uses"


def test_use_without_a_driver(driver):
    driver(errors={"nvmlInitWithFlags": pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
    assert read_gpu_usage(0).note == "GPUs cannot be seen: the NVIDIA driver is installed and not loaded"


def test_a_driver_that_goes_away_and_comes_back(driver):
    fake = driver(FakeGpu())
    with Nvml() as nvml:
        assert nvml.read().gpus
        fake.errors["nvmlDeviceGetCount_v2"] = pynvml.NVML_ERROR_UNKNOWN
        assert nvml.read().notes == ("NVML does not list the GPUs: Unknown Error",)
        fake.errors.clear()
        assert len(nvml.read().gpus) == 1
    assert fake.opened == 0
