"""How fast a simulated profile is, and in how much memory.

    python -m tests.benchmarks.simulate [--quick]

Every line of the table is measured in this run, in processes of its own, and is the median of three repetitions (one
with --quick). Exit code 1 if a bar is missed.

The peer is torch's own MemTracker under FakeTensorMode, which follows the same training step of the same model. It runs
with fake *CPU* tensors: a build of torch without CUDA cannot run a backward pass on fake CUDA tensors at all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
STEP_MODEL, STEP_LENGTH = "qwen3-4b", 4096
LIMIT_SECONDS = 600

OURS = f"""
import time
import torch, transformers
from memprof.flows.capture import capture_virtual
from memprof.catalog import find_gpu
from memprof.spec import TargetSpec
from memprof.workload.models import find_source
from memprof.workload.step import Workload

spec = TargetSpec(model="{STEP_MODEL}", context_length={STEP_LENGTH}, steps=1)
source = find_source(spec)
import transformers.models.qwen3.modeling_qwen3
begin = time.perf_counter()
trace = capture_virtual(Workload(spec, source), find_gpu("h100-80gb"))
print(time.perf_counter() - begin)
"""

PEER = f"""
import time
import torch, transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from memprof.spec import TargetSpec
from memprof.workload.models import find_source

spec = TargetSpec(model="{STEP_MODEL}", context_length={STEP_LENGTH}, steps=1)
source = find_source(spec)
import transformers.models.qwen3.modeling_qwen3
begin = time.perf_counter()
with FakeTensorMode(), torch.device("cpu"):
    model = source.build().train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    ids = torch.zeros(1, {STEP_LENGTH}, dtype=torch.int64)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tracker.get_tracker_snapshot("peak")
print(time.perf_counter() - begin)
"""


@dataclass(frozen=True)
class Run:
    """One finished process."""

    seconds: float
    peak_bytes: int
    output: str


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    what: str
    measured: str
    bar: str
    passed: bool


def run(command: Sequence[str]) -> Run:
    """Run `command` from the checkout, and measure it from outside."""
    begin = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, error = process.communicate(timeout=LIMIT_SECONDS)
    seconds = time.perf_counter() - begin
    # 3: it ran, and the model does not fit the card.
    if process.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command[:6])} failed with {process.returncode}:\n{error[-2000:]}")
    return Run(seconds, 0, output)


def run_measured(command: Sequence[str]) -> Run:
    """The same, with the process's own peak of resident memory: a wrapper waits for it as its only child."""
    wrapper = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, text=True)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
        "print(done.stdout)\n"
        "sys.exit(done.returncode)"
    )
    result = run([sys.executable, "-c", wrapper, *command])
    kib, _, output = result.output.partition("\n")
    return Run(result.seconds, int(kib) * 1024, output)


def memprof(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "memprof", *arguments]


def profile_4b(repeat: int) -> list[Line]:
    runs = [
        run_measured(memprof("profile", "--model-size", "4B", "--context-length", "131072", "--json"))
        for _ in range(repeat)
    ]
    for each in runs:
        if json.loads(each.output)["peak"]["allocated_bytes"] <= 0:
            raise SystemExit("the profile reports no memory")
    what = "profile --model-size 4B --context-length 131072"
    seconds = statistics.median(each.seconds for each in runs)
    peak = statistics.median(each.peak_bytes for each in runs)
    return [
        Line(what, f"{seconds:.2f} s", "5 s", seconds < 5),
        Line("  its peak resident memory", f"{peak / GIB:.2f} GiB", "1 GiB", peak < GIB),
    ]


def against_mem_tracker(repeat: int) -> list[Line]:
    ours, peers = [], []
    for _ in range(repeat):  # side by side, so that both see the same load of the machine
        ours.append(float(run([sys.executable, "-c", OURS]).output))
        peers.append(float(run([sys.executable, "-c", PEER]).output))
    mine, peer = statistics.median(ours), statistics.median(peers)
    what = f"{STEP_MODEL} training step of {STEP_LENGTH:,} tokens"
    return [
        Line(f"{what}: memprof", f"{mine:.2f} s", "", True),
        Line(f"{what}: FakeTensorMode + MemTracker", f"{peer:.2f} s", "", True),
        Line("  times faster", f"{peer / mine:.1f} x", "10 x", peer / mine >= 10),
    ]


def deepseek(repeat: int) -> list[Line]:
    command = memprof("profile", "--model", "deepseek-v3", "--json")
    seconds = statistics.median(run(command).seconds for _ in range(repeat))
    return [Line("profile --model deepseek-v3", f"{seconds:.2f} s", "15 s", seconds < 15)]


def help_page(repeat: int) -> list[Line]:
    seconds = statistics.median(run(memprof("--help")).seconds for _ in range(repeat))
    return [Line("--help", f"{seconds:.2f} s", "0.3 s", seconds < 0.3)]


BENCHMARKS = {"profile": profile_4b, "step": against_mem_tracker, "deepseek": deepseek, "help": help_page}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Speed and memory of simulated profiles, beside their bars.")
    parser.add_argument("--quick", action="store_true", help="one repetition instead of three")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="just this benchmark (may be repeated)")
    options = parser.parse_args(arguments)
    repeat = 1 if options.quick else 3
    lines: list[Line] = []
    print(f"{os.cpu_count()} CPUs, median of {repeat}, python {sys.version.split()[0]}")
    for name in options.only or BENCHMARKS:
        for line in BENCHMARKS[name](repeat):
            lines.append(line)
            verdict = "" if not line.bar else "pass" if line.passed else "FAIL"
            print(f"{line.what:72} {line.measured:>12} {line.bar:>8}  {verdict}", flush=True)
    return 0 if all(line.passed for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
