"""Cards through the real pynvml, above a driver that is made up: amounts, processes, slices, and what it may refuse."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pynvml
import pytest

from memprof.device.nvml import Nvml, card_use, read_cards
from tests.unit.device.driver import GIB, MIB, FakeCard, FakeProcess


def test_a_card(driver):
    fake = driver(FakeCard())
    reading = read_cards()
    (card,) = reading.cards
    assert (reading.driver_version, reading.cuda_version, reading.notes) == ("580.65.06", "13.0", ())
    assert (card.index, card.name, card.uuid) == (0, "NVIDIA H100 80GB HBM3", FakeCard().uuid)
    assert (card.total_bytes, card.used_bytes, card.reserved_bytes) == (81559 * MIB, 2 * GIB, 551 * MIB)
    assert card.used_bytes + card.free_bytes + card.reserved_bytes == card.total_bytes
    assert (card.utilisation_percent, card.temperature_celsius, card.power_watts) == (87, 65, 412.3)
    assert card.compute_capability == (9, 0)
    # Two gigabytes and nobody on it: they are somebody's who cannot be seen.
    assert len(card.notes) == 1 and "no process is listed" in card.notes[0]
    assert fake.opened == 0


def test_a_driver_without_version_two_counts_what_it_keeps_as_used(driver):
    driver(FakeCard(), missing=("nvmlDeviceGetMemoryInfo_v2",))
    (card,) = read_cards().cards
    assert (card.used_bytes, card.reserved_bytes) == (2 * GIB + 551 * MIB, None)
    assert card.used_bytes + card.free_bytes == card.total_bytes


def test_processes_largest_first_and_each_once(driver):
    both = FakeProcess(4_000_001, 1 * GIB, b"/opt/game")
    driver(
        FakeCard(
            compute=[both, FakeProcess(4_000_002, 5 * GIB, b"python3")],
            graphics=[both, FakeProcess(4_000_003, 100 * MIB, b"/usr/lib/xorg/Xorg -core")],
        )
    )
    (card,) = read_cards().cards
    assert [(p.pid, p.name, p.used_bytes, p.kind) for p in card.processes] == [
        (4_000_002, "python3", 5 * GIB, "compute"),
        (4_000_001, "game", 1 * GIB, "compute"),
        (4_000_003, "Xorg", 100 * MIB, "graphics"),
    ]
    assert card.notes == ()


def test_this_process_is_named_by_its_script(driver):
    program = os.path.basename(Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode())
    driver(FakeCard(compute=[FakeProcess(os.getpid(), 3 * GIB, program.encode())]))
    (process,) = read_cards().cards[0].processes
    assert process.name.startswith(f"{program} ")


def test_a_number_of_another_container_does_not_take_our_name(driver):
    driver(FakeCard(compute=[FakeProcess(os.getpid(), 3 * GIB, b"/usr/bin/ollama")]))
    (process,) = read_cards().cards[0].processes
    assert process.name == "ollama"


def test_nothing_names_a_process(driver):
    driver(FakeCard(compute=[FakeProcess(4_000_001, GIB, None), FakeProcess(4_000_002, GIB, b"caf\xe9")]))
    assert [process.name for process in read_cards().cards[0].processes] == ["process 4000001", "process 4000002"]


def test_an_old_driver_lists_processes_too(driver):
    driver(
        FakeCard(compute=[FakeProcess(4_000_001, GIB)]),
        missing=("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3"),
    )
    (card,) = read_cards().cards
    assert [process.used_bytes for process in card.processes] == [GIB]
    assert card.notes == ()


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
    driver(FakeCard(), errors={"nvmlInitWithFlags": code})
    reading = read_cards()
    assert reading.cards == ()
    (note,) = reading.notes
    assert said in note and "\n" not in note


def test_no_driver(monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlLib", None)

    def refuse(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "CDLL", refuse)
    assert read_cards().notes == (
        "cards cannot be seen: no NVIDIA driver is installed here (libnvidia-ml.so.1 is not found)",
    )


def test_no_pynvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (note,) = read_cards().notes
    assert "pip install nvidia-ml-py" in note


def test_a_driver_without_cards(driver):
    driver()
    assert read_cards().notes == ("the driver lists no card",)


def test_a_card_that_is_lost_leaves_the_others(driver):
    lost = pynvml.NVML_ERROR_GPU_IS_LOST
    driver(FakeCard(errors={"*": lost}), FakeCard(uuid="GPU-2"), errors={})
    first, second = read_cards().cards
    assert first.notes == ("card 0 cannot be read: GPU is lost",)
    assert first.total_bytes is None
    assert second.total_bytes == 81559 * MIB


def test_a_card_that_is_lost_while_it_is_read(driver):
    lost = pynvml.NVML_ERROR_GPU_IS_LOST
    calls = ("MemoryInfo_v2", "MemoryInfo", "UtilizationRates", "PowerUsage", "CudaComputeCapability", "Temperature")
    driver(FakeCard(errors={f"nvmlDeviceGet{call}": lost for call in calls}))
    (card,) = read_cards().cards
    assert card.notes == ("card 0 cannot be read: GPU is lost",)


def test_handle_refused(driver):
    driver(FakeCard(), errors={"nvmlDeviceGetHandleByIndex_v2": pynvml.NVML_ERROR_NO_PERMISSION})
    (card,) = read_cards().cards
    assert card.notes == ("card 0 cannot be read: Insufficient Permissions",)


def test_memory_that_is_not_available(driver):
    refused = pynvml.NVML_ERROR_NOT_SUPPORTED
    driver(FakeCard(errors={"nvmlDeviceGetMemoryInfo": refused, "nvmlDeviceGetMemoryInfo_v2": refused}))
    (card,) = read_cards().cards
    assert (card.total_bytes, card.used_bytes, card.free_bytes) == (None, None, None)
    assert card.notes == ("memory of card 0 cannot be read: Not Supported",)
    assert card.utilisation_percent == 87


def test_processes_that_may_not_be_listed(driver):
    driver(FakeCard(errors={"nvmlDeviceGetComputeRunningProcesses_v3": pynvml.NVML_ERROR_NO_PERMISSION}))
    (card,) = read_cards().cards
    assert card.notes == ("processes on card 0 cannot be listed: Insufficient Permissions",)


def test_a_card_without_a_display_misses_nothing(driver):
    refused = {"nvmlDeviceGetGraphicsRunningProcesses_v3": pynvml.NVML_ERROR_NOT_SUPPORTED}
    driver(FakeCard(compute=[FakeProcess(4_000_001, GIB)], errors=refused))
    assert read_cards().cards[0].notes == ()


def _sliced() -> FakeCard:
    refused = pynvml.NVML_ERROR_NO_PERMISSION
    return FakeCard(
        mig=True,
        slices=[
            FakeCard("NVIDIA H100 MIG 3g.40gb", "MIG-aaaa", 40448 * MIB, 3 * GIB, 30 * MIB, gpu_instance=2),
            FakeCard("NVIDIA H100 MIG 1g.10gb", "MIG-bbbb", 9984 * MIB, 15 * MIB, 10 * MIB, gpu_instance=9),
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
    (card,) = read_cards().cards
    assert [(piece.name, piece.total_bytes, piece.used_bytes) for piece in card.slices] == [
        ("NVIDIA H100 MIG 3g.40gb", 40448 * MIB, 3 * GIB),
        ("NVIDIA H100 MIG 1g.10gb", 9984 * MIB, 15 * MIB),
    ]
    assert card.utilisation_percent is None
    (note,) = card.notes
    assert note == "card 0 is sliced (MIG), and its memory as a whole cannot be read: Insufficient Permissions"


def test_use_of_a_slice_is_of_its_processes(driver):
    driver(_sliced())
    use = card_use("mig-AAAA")
    assert (use.total_bytes, use.used_bytes, use.own_bytes) == (40448 * MIB, 3 * GIB, GIB)
    assert [process.pid for process in use.by_process] == [os.getpid()]


def test_use_of_a_card(driver):
    driver(
        FakeCard(uuid="GPU-one"),
        FakeCard(uuid="GPU-two", compute=[FakeProcess(os.getpid(), 512 * MIB), FakeProcess(4_000_001, GIB)]),
    )
    for name in (1, "GPU-two", "two"):
        use = card_use(name)
        assert (use.total_bytes, use.used_bytes, use.own_bytes, use.note) == (81559 * MIB, 2 * GIB, 512 * MIB, "")
        assert sum(process.used_bytes for process in use.by_process) == 512 * MIB + GIB
    assert card_use(0).own_bytes is None
    assert "does not list this process" in card_use(0).note
    assert card_use(7).note == "NVML lists no card 7: it has 2"


def test_use_that_the_driver_does_not_tell(driver):
    driver(FakeCard(compute=[FakeProcess(os.getpid())]))
    use = card_use(0)
    assert use.by_process[0].used_bytes is None
    assert use.own_bytes is None
    assert use.note == "the driver does not say how much each process uses"


def test_use_without_a_driver(driver):
    driver(errors={"nvmlInitWithFlags": pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
    assert card_use(0).note == "cards cannot be seen: the NVIDIA driver is installed and not loaded"


def test_a_driver_that_goes_away_and_comes_back(driver):
    fake = driver(FakeCard())
    with Nvml() as nvml:
        assert nvml.read().cards
        fake.errors["nvmlDeviceGetCount_v2"] = pynvml.NVML_ERROR_UNKNOWN
        assert nvml.read().notes == ("NVML does not list the cards: Unknown Error",)
        fake.errors.clear()
        assert len(nvml.read().cards) == 1
    assert fake.opened == 0
