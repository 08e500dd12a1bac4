"""`memprof monitor` and `memprof gpus --present` where there are GPUs, which are made up."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial

import pytest

from memprof.device.gpus import GpuProcess, NvmlGpu
from memprof.monitor.run import monitor
from memprof.monitor.sample import MonitorSample
from memprof.report.terminal.monitor import make_view
from memprof.report.terminal.monitor_text import format_sample
from tests.cli.terminal import Terminal
from tests.unit.monitor.command import environment

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux's /proc")


GPU = NvmlGpu(
    index=0, name="NVIDIA L4", uuid="GPU-1", total_bytes=24 << 30, used_bytes=6 << 30, free_bytes=18 << 30,
    utilisation_percent=87, temperature_celsius=65, power_watts=70.4,
    processes=(
        GpuProcess(1_000_001, "python train.py", 5 << 30, "compute"),
        GpuProcess(1_000_002, "Xorg", None, "graphics"),
    ),
)  # fmt: skip


class _Gpus:
    """In the place of `Nvml`: a GPU that fills."""

    def __init__(self, readings):
        self._readings = list(readings)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self):
        from memprof.device.gpus import NvmlSample

        return NvmlSample((self._readings.pop(0) if len(self._readings) > 1 else self._readings[0],))


def test_gpus_until_a_signal(tmp_path, capsys, request):
    import dataclasses
    import threading

    gpus = [dataclasses.replace(GPU, used_bytes=n << 30) for n in (1, 9, 2)]
    log = tmp_path / "log.csv"
    # Whoever runs the tests may ignore it, as nohup does, and monitor would too.
    request.addfinalizer(
        partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
    )
    # To this thread: any other that an earlier test has left could take what is sent to the process.
    timer = threading.Timer(0.6, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()
    view = make_view(sys.stdout, has_command=False)
    outcome = monitor((), view, interval=0.1, log=log, open_nvml=lambda: _Gpus(gpus))
    timer.join()
    assert outcome.exit_code == 0
    assert outcome.peaks.gpus == {0: 9 << 30}
    lines = capsys.readouterr().out.splitlines()
    assert "GPU 0 NVIDIA L4: 9.00 of 24.00 GiB, 87%, 65 °C, 70 W, python train.py 5.00, Xorg ?" in lines[1]
    rows = log.read_text().splitlines()
    assert len(rows) == len(lines) + 1
    assert f",{9 << 30},{24 << 30},," in rows[2]


def test_once(capsys):
    view = make_view(sys.stdout, has_command=False, as_json=True)
    monitor((), view, once=True, open_nvml=lambda: _Gpus([GPU]))
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["gpus"][0]["used_bytes"] == 6 << 30


def test_others_on_the_gpu_are_told_from_the_command():
    from memprof.monitor.sample import WatchedProcess

    sample = MonitorSample(0.0, 1.0, (GPU,), (WatchedProcess(1_000_001, "python train.py", 1 << 30, None),))
    line = format_sample(sample)
    assert "6.00 of 24.00 GiB, 5.00 by the command, 87%" in line
    assert line.endswith("others: Xorg ?")


def test_the_table_of_gpus(tmp_path):
    """Live, on a terminal, with the made-up driver below pynvml."""
    program = tmp_path / "live.py"
    program.write_text(
        "import sys\n"
        "import pynvml\n"
        "from tests.unit.device.driver import FakeGpu, FakeDriver, FakeProcess, GIB\n"
        "slices = [FakeGpu('MIG 1g.10gb', 'MIG-1', 10 * GIB, 1 * GIB, 0)]\n"
        "pynvml.nvmlLib = FakeDriver(FakeGpu(compute=[FakeProcess(4_000_001, GIB, b'ollama')]),"
        " FakeGpu('NVIDIA A100', mig=True, slices=slices))\n"
        "from memprof.cli.main import run\n"
        "run(['monitor', '--interval', '0.1'])\n"
    )
    shown = Terminal([sys.executable, str(program)], environment())
    try:
        shown.wait_for("ollama")
        shown.read(0.5)
        shown.type("\x03")
        assert shown.wait() == 0
        text = "\n".join(line.rstrip() for line in shown.screen.lines)
        assert text.count("0 NVIDIA H100 80GB HBM3") == 1
        assert "slice 0 MIG 1g.10gb" in text
        assert "ollama (4000001)" in text
        assert "87% 65 °C 412 W" in text
        assert "GPU 1 is in use, and no process is listed" in text.replace("\n", " ")
    finally:
        shown.end()


def test_present_gpus(memprof, monkeypatch):
    from memprof.device.gpus import NvmlSample

    mine = NvmlGpu(0, "NVIDIA H100 80GB HBM3", total_bytes=81559 << 20, used_bytes=2 << 30, reserved_bytes=551 << 20)
    odd = NvmlGpu(1, "NVIDIA Z9", total_bytes=10 << 30, used_bytes=0)
    lost = NvmlGpu(2, "GPU 2", notes=("GPU 2 cannot be read: GPU is lost",))
    monkeypatch.setattr("memprof.device.nvml.read_gpus", lambda: NvmlSample((mine, odd, lost), "570.1", "12.8"))
    monkeypatch.setattr(
        "memprof.device.environment._read_torch_version", lambda: {"__version__": "2.13.0+cu130", "cuda": "13.0"}
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    head, *lines = memprof("gpus", "--present").stdout.splitlines()
    assert head == "driver 570.1, CUDA 12.8 at most; torch 2.13.0+cu130"
    assert lines[0] == "0  NVIDIA H100 80GB HBM3: 79.11 GiB, 2.00 used; --gpu h100-80gb (79.10 GiB)"
    assert lines[1] == "1  NVIDIA Z9: 10.00 GiB, 0.00 used; not in the catalog: --gpu-vram 10.00 has its size"
    assert lines[2:] == [
        "2  GPU 2: memory not known; not in the catalog",
        "   GPU 2 cannot be read: GPU is lost",
        "torch is built for CUDA 13.0, and the driver runs CUDA 12.8 at most",
        "CUDA_VISIBLE_DEVICES hides every GPU",
    ]
    found = memprof("gpus", "--present", "--json").json
    assert [(gpu["name"], gpu["gpu"]) for gpu in found["gpus"]] == [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("NVIDIA Z9", None), ("GPU 2", None),
    ]  # fmt: skip
    assert found["gpus"][0]["used_bytes"] == 2 << 30 and found["driver_version"] == "570.1"
    assert found["environment"]["notes"] == lines[4:]


def test_lists_as_json(memprof):
    """Every row of the text, with all that the catalog knows."""
    for command in ("gpus", "models"):
        rows = memprof(command, "--json").json[command]
        lines = memprof(command).stdout.splitlines()
        keys = [line.split()[0] for line in lines if line.startswith(" ") or command == "gpus"]  # models by family
        assert [row["key"] for row in rows] == keys and len(rows) > 20
        assert all(row["sources"] for row in rows)
    assert next(row for row in rows if row["key"] == "gpt2")["num_parameters"] == 124_439_808
    h100 = next(row for row in memprof("gpus", "--json").json["gpus"] if row["key"] == "h100-80gb")
    assert h100["compute_capability"] == [9, 0] and h100["peak_flops"]["bfloat16"] > 9e14
