"""The probe inside a command: it says what the allocator holds, and the command cannot tell that it is there."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import socket
import sys
import threading

import pytest

from memprof.monitor.probe.sitecustomize import _CounterSender
from tests.unit.monitor.command import MIB, environment, make_torch, run

BARE = """
import json, os, sys, threading
import warnings
print(json.dumps({
    "path": sys.path, "threads": threading.active_count(), "torch": "torch" in sys.modules,
    "modules": sorted(sys.modules), "customized": getattr(sys, "customized", None),
    "descriptors": len(os.listdir("/proc/self/fd")), "warnings": len(warnings.filters),
}))
"""

CUDA = """
import time
import torch
torch.cuda.hold(10 << 20)
time.sleep(1)
torch.cuda.hold(70 << 20)   # higher than any reading will see
torch.cuda.hold(20 << 20)
time.sleep(1)
torch.cuda.hold(30 << 20)
"""


def _samples(done) -> tuple[list[dict], dict]:
    """Samples and outcome of `--json`, which are on stderr."""
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    return lines[:-1], lines[-1]["outcome"]


def _allocators(sample):
    return [allocator for process in sample["processes"] for allocator in process["allocators"]]


@pytest.fixture
def env(tmp_path):
    return environment(make_torch(tmp_path))


@pytest.fixture
def script(tmp_path):
    def write(code, name="train.py"):
        file = tmp_path / name
        file.write_text(code)
        return file

    return write


@pytest.mark.nightly
def test_peaks_that_no_reading_saw(env, script):
    done = run("--json", "--interval", 0.2, "--", sys.executable, script(CUDA), env=env)
    samples, outcome = _samples(done)
    assert (done.returncode, done.stdout) == (0, "")
    assert outcome["peaks"]["allocated_bytes"] == 70 * MIB
    assert outcome["peaks"]["reserved_bytes"] == 140 * MIB
    seen = [allocator for sample in samples for allocator in _allocators(sample)]
    assert {(a["device"], a["name"], a["total_bytes"]) for a in seen} == {(0, "NVIDIA H100 80GB HBM3", 85 << 30)}
    peaks = [allocator["interval_peak_allocated_bytes"] for allocator in seen]
    # The second of the peak, those before and those after it are told apart.
    assert peaks[0] == 10 * MIB and 70 * MIB in peaks and peaks[-1] in (20 * MIB, 30 * MIB)
    # What was allocated after the last reading is told at the end.
    assert seen[-1]["allocated_bytes"] == 30 * MIB
    assert seen[-1]["requested_bytes"] == 30 * MIB - 1
    assert seen[-1]["max_allocated_bytes"] == 70 * MIB


@pytest.mark.nightly
def test_a_program_that_resets_its_peaks(env, script):
    code = CUDA + "torch.cuda.reset_peak_memory_stats()\ntime.sleep(0.3)\ntorch.cuda.hold(40 << 20)\n"
    samples, outcome = _samples(run("--json", "--interval", 0.2, "--", sys.executable, script(code), env=env))
    assert outcome["peaks"]["allocated_bytes"] == 70 * MIB
    # The last may have been taken while the program was ending.
    last = next(found for sample in reversed(samples) if (found := _allocators(sample)))[0]
    assert (last["interval_peak_allocated_bytes"], last["max_allocated_bytes"]) == (40 * MIB, 70 * MIB)


def test_the_program_cannot_tell(env, script):
    file = script(BARE)
    alone = json.loads(run_alone(file, env))
    watched = json.loads(run("--quiet", "--", sys.executable, file, env=env).stdout)
    assert watched == alone
    assert watched["threads"] == 1 and not watched["torch"]


def run_alone(file, env):
    import subprocess

    return subprocess.run([sys.executable, str(file)], env=env, capture_output=True, text=True, check=True).stdout


def test_no_warning_from_an_end_in_the_middle(env, script):
    code = "import torch, os; torch.cuda.hold(1 << 20); os.fork() or print('forked', flush=True); raise SystemExit(5)"
    done = run("--quiet", "--", sys.executable, "-X", "dev", "-W", "error", script(code), env=env)
    assert (done.returncode, done.stdout) == (5, "forked\n")
    assert all(line.startswith("memprof: ") for line in done.stderr.splitlines()), done.stderr


def test_torch_is_as_it_was(env, script):
    code = """
import sys, threading, torch, importlib.util
before = threading.active_count()
spec = importlib.util.find_spec("torch.cuda")
print(vars(torch.cuda.__loader__).keys(), before, [type(f).__module__ for f in sys.meta_path])
"""
    file = script(code)
    assert run("--quiet", "--", sys.executable, file, env=env).stdout == run_alone(file, env)


@pytest.mark.nightly
def test_a_look_for_torch_without_an_import_does_not_blind_it(env, script):
    code = 'import importlib.util; assert importlib.util.find_spec("torch.cuda")\n' + CUDA
    _, outcome = _samples(run("--json", "--interval", 0.2, "--", sys.executable, script(code), env=env))
    assert (outcome["exit_code"], outcome["peaks"]["allocated_bytes"]) == (0, 70 * MIB)


def test_cuda_that_is_never_initialised_is_not(env, script):
    code = "import torch, time; time.sleep(0.3); assert not torch.cuda.is_initialized(); print('untouched')"
    done = run("--json", "--interval", 0.1, "--", sys.executable, script(code), env=env)
    samples, _ = _samples(done)
    assert done.stdout == "untouched\n"
    assert not any(_allocators(sample) for sample in samples)


def test_a_sitecustomize_of_the_user_runs(tmp_path, env, script):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text("import sys; sys.customized = __file__")
    env["PYTHONPATH"] = f"{tmp_path / 'mine'}{os.pathsep}{env['PYTHONPATH']}"
    file = script(BARE)
    watched = run("--quiet", "--", sys.executable, file, env=env).stdout
    assert json.loads(watched)["customized"] == str(tmp_path / "mine" / "sitecustomize.py")
    assert watched == run_alone(file, env)


def test_a_sitecustomize_that_fails_says_what_it_says_alone(tmp_path, env, script):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text("raise ValueError('mine')")
    env["PYTHONPATH"] = f"{tmp_path / 'mine'}{os.pathsep}{env['PYTHONPATH']}"
    done = run("--quiet", "--", sys.executable, script("print(1)"), env={**env})
    assert done.stdout == "1\n"
    assert "Error in sitecustomize" in done.stderr and "ValueError: mine" in done.stderr
    assert "probe" not in done.stderr


@pytest.mark.nightly
def test_forked_workers_tell_nothing_and_started_ones_do(env, script):
    code = """
import multiprocessing, os, subprocess, sys, time
import torch

def work(done):
    if torch.cuda.is_initialized():
        raise SystemExit("CUDA after a fork")
    done.wait()

def start(rank, size):
    code = f"import time, torch; torch.cuda.hold({size} << 20, device={rank}); time.sleep(1.5)"
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RANK": str(rank)})

if __name__ == "__main__":
    torch.cuda.hold(5 << 20)
    fork = multiprocessing.get_context("fork")
    done = fork.Event()
    workers = [fork.Process(target=work, args=(done,)) for _ in range(2)]
    [worker.start() for worker in workers]
    ranks = [start(0, 100), start(1, 200)]
    [rank.wait() for rank in ranks]
    done.set()
    [worker.join() for worker in workers]
    sys.exit(max(worker.exitcode for worker in workers))
"""
    done = run("--json", "--interval", 0.2, "--", sys.executable, "-W", "error", script(code), env=env)
    samples, outcome = _samples(done)
    assert done.returncode == 0, done.stderr
    fullest = max(samples, key=lambda sample: sum(a["allocated_bytes"] for a in _allocators(sample)))
    told = {process["rank"]: process["allocators"] for process in fullest["processes"] if process["allocators"]}
    assert {rank: (a[0]["device"], a[0]["allocated_bytes"] // MIB) for rank, a in told.items()} == {
        None: (0, 5),
        0: (0, 100),
        1: (1, 200),
    }
    assert len(fullest["processes"]) >= 5
    assert outcome["peaks"]["allocated_bytes"] == 305 * MIB


def test_spawned_workers_are_watched(env, script):
    code = """
import multiprocessing, time
import torch

def work():
    torch.cuda.hold(50 << 20)
    time.sleep(0.5)

if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    worker.join()
"""
    _, outcome = _samples(run("--json", "--interval", 0.2, "--", sys.executable, script(code), env=env))
    assert outcome["peaks"]["allocated_bytes"] == 50 * MIB


@pytest.mark.nightly
def test_a_program_that_replaces_itself(env, script):
    second = script("import torch, time; torch.cuda.hold(30 << 20); time.sleep(1)", "second.py")
    code = f"""
import os, sys, torch, time
torch.cuda.hold(90 << 20)
time.sleep(1)
os.execv(sys.executable, [sys.executable, {str(second)!r}])
"""
    samples, outcome = _samples(run("--json", "--interval", 0.1, "--", sys.executable, script(code), env=env))
    assert outcome["peaks"]["allocated_bytes"] == 90 * MIB
    last = [allocator for sample in samples for allocator in _allocators(sample)][-1]
    assert last["max_allocated_bytes"] == 30 * MIB


@pytest.mark.nightly
def test_an_allocator_without_counters_is_said_once(tmp_path, env, script):
    """As torch's own `CUDAPluggableAllocator` has none; the program does not suffer."""
    cuda = tmp_path / "site" / "torch" / "cuda" / "__init__.py"
    refusal = "\ndef memory_stats_as_nested_dict(device):\n    raise RuntimeError('no getDeviceStats')\n"
    cuda.write_text(cuda.read_text() + refusal)
    done = run("--interval", 0.1, "--", sys.executable, "-W", "error", script(CUDA), env=env)
    assert done.returncode == 0
    assert done.stderr.count("RuntimeError: no getDeviceStats") == 1
    lines = [line for line in done.stderr.splitlines() if "resident" not in line]
    assert all(line.startswith("memprof: ") for line in lines), done.stderr


@pytest.mark.nightly
def test_a_torch_that_cannot_defer(tmp_path, env, script):
    cuda = tmp_path / "site" / "torch" / "cuda" / "__init__.py"
    cuda.write_text(cuda.read_text().replace("def _lazy_call", "def _other_name"))
    _, outcome = _samples(run("--json", "--interval", 0.2, "--", sys.executable, script(CUDA), env=env))
    assert outcome["peaks"]["allocated_bytes"] == 70 * MIB


@pytest.mark.nightly
def test_the_log_has_the_sums(tmp_path, env, script):
    log = tmp_path / "log.csv"
    run("--quiet", "--interval", 0.2, "--log", log, "--", sys.executable, script(CUDA), env=env)
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert len(rows) >= 4
    told = [row for row in rows if row["cuda_processes"] == "1"]
    assert max(int(row["interval_peak_allocated_bytes"]) for row in told) == 70 * MIB
    assert int(rows[-1]["peak_reserved_bytes"]) == 140 * MIB
    assert [float(row["elapsed_seconds"]) for row in rows] == sorted(float(row["elapsed_seconds"]) for row in rows)


def test_the_last_word_waits_for_a_reading_that_has_begun(tmp_path):
    class Cuda:
        def __init__(self):
            self.held, self.reading, self.go_on = 1, threading.Event(), threading.Event()

        def is_initialized(self):
            return True

        def device_count(self):
            return 1

        def memory_stats_as_nested_dict(self, device):
            held = {"all": {"current": self.held, "peak": self.held}}
            if not self.reading.is_set():
                self.reading.set()
                self.go_on.wait(10)
            return {"allocated_bytes": held, "reserved_bytes": held}

    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.settimeout(10)
    listening.bind(str(tmp_path / "socket"))
    cuda = Cuda()
    sender = _CounterSender(cuda, str(tmp_path / "socket"))
    thread = threading.Thread(target=sender.run, daemon=True)
    thread.start()
    assert cuda.reading.wait(10)
    cuda.held = 2
    last = threading.Thread(target=sender.finish)
    last.start()
    last.join(0.3)  # without taking turns it is done by now
    cuda.go_on.set()
    last.join(10)  # the sender's thread goes on: it is a daemon
    listening.setblocking(False)
    told = []
    with contextlib.suppress(BlockingIOError):
        while True:
            told.append(json.loads(listening.recv(1 << 16))["devices"]["0"]["allocated_bytes"][0])
    listening.close()
    assert told == [1, 2]


REAL = """
import sys, time
import torch
assert not torch.cuda.is_initialized()
counters = {name: {"all": {"current": 3 << 20, "peak": 9 << 20}} for name in ("allocated_bytes", "reserved_bytes")}
torch._C._cuda_getDeviceCount = lambda: 1
torch._C._cuda_memoryStats = lambda device: counters
torch._C._cuda_init = lambda: None
torch.cuda._cudart = object()
torch.cuda.init()
assert torch.cuda.is_initialized()
time.sleep(0.4)
"""


def test_the_real_torch_initialises_and_tells(script):
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch would ask the GPU itself")
    done = run("--json", "--interval", 0.2, "--", sys.executable, script(REAL), env=environment())
    _, outcome = _samples(done)
    assert outcome["exit_code"] == 0, done.stderr
    assert (outcome["peaks"]["allocated_bytes"], outcome["peaks"]["reserved_bytes"]) == (9 * MIB, 9 * MIB)
