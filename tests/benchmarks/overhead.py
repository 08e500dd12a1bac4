"""What simulating a training step costs, beside torch's own means on the same step.

    python -m tests.benchmarks.overhead [--repeat 3]

* Beside torch's MemTracker under FakeTensorMode: one step of a 4B model. MemTracker runs with fake *CPU* tensors,
  because a build of torch without CUDA cannot run a backward on fake CUDA tensors. Exit code 1 if memprof is less than
  ten times faster.
* Beside plain meta tensors, where torch runs the same operators and nothing watches: steps of an 8B model. The overhead
  is negative where output layouts are cached: torch's meta kernels then do not run.

Both sides run in turn, and medians are compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL, TOKENS = "qwen3-4b", 4096
LENGTH, STEPS = 2048, 4
LEAST_TIMES_FASTER = 10

_PREPARE = f"""
import time
import torch, transformers
from memprof.spec import TargetSpec
from memprof.workload.models import find_source

spec = TargetSpec(model="{MODEL}", context_length={TOKENS}, steps=1)
source = find_source(spec)
import transformers.models.qwen3.modeling_qwen3
"""
MEMPROF = f"""{_PREPARE}
from memprof.device.catalog import find_gpu
from memprof.flows.capture import capture_virtual
from memprof.workload.step import Workload

begin = time.perf_counter()
capture_virtual(Workload(spec, source), find_gpu("h100-80gb"))
print(time.perf_counter() - begin)
"""
MEM_TRACKER = f"""{_PREPARE}
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

begin = time.perf_counter()
with FakeTensorMode(), torch.device("cpu"):
    model = source.build().train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    ids = torch.zeros(1, {TOKENS}, dtype=torch.int64)
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


def output_of(*arguments: str) -> str:
    """Run Python from the checkout, and return what it prints."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{arguments[0]} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def compare_with_mem_tracker(repeat: int) -> bool:
    """Print both medians and their ratio; whether the bar is met."""
    seconds: dict[str, list[float]] = {"memprof": [], "FakeTensorMode + MemTracker": []}
    for _ in range(repeat):
        for name, code in zip(seconds, (MEMPROF, MEM_TRACKER), strict=True):
            seconds[name].append(float(output_of("-c", code)))
    ours, theirs = map(statistics.median, seconds.values())
    print(f"one step of {MODEL}, {TOKENS:,} tokens: {ours:.2f} s; FakeTensorMode + MemTracker: {theirs:.2f} s")
    print(f"  times faster: {theirs / ours:.1f} (at least {LEAST_TIMES_FASTER})", flush=True)
    return theirs / ours >= LEAST_TIMES_FASTER


def compare_with_meta(repeat: int) -> None:
    told = json.loads(output_of("-m", "tests.benchmarks.overhead", "--in-process", str(repeat)))
    for step, (operators, meta, virtual) in told.items():
        print(f"{step} step of an 8B model, {operators:,} operators: {virtual:.2f} s; on meta tensors: {meta:.2f} s")
        print(f"  overhead: {1e6 * (virtual - meta) / operators:.1f} us an operator, {virtual / meta:.2f} times meta's")


# -- in process -------------------------------------------------------------------------------------------------------


def _steps(device: str, count: int) -> list[float]:
    """Seconds of each of `count` training steps of a fresh model."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5,
    )  # fmt: skip
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        # As CUDA chooses it; on meta it would be one tensor at a time.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
        ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return seconds


def _operators() -> tuple[int, int]:
    """Operators below autograd of the first step and of a later one, counted where they run without memprof."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Counting.count += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for steps in (0, 1, 2):
        Counting.count = 0
        with Counting():
            _steps("meta", steps)
        counts.append(Counting.count)
    return counts[1] - counts[0], counts[2] - counts[1]


def measure(repeat: int) -> None:
    """Print operators, seconds on meta and seconds on the virtual GPU, of the first and of later steps, as JSON."""
    from memprof.device.catalog import find_gpu
    from memprof.virtual import VirtualGpu
    from memprof.watch.collection import disable_garbage_collection

    first, later = _operators()
    plain: list[list[float]] = []
    virtual: list[list[float]] = []
    for _ in range(repeat):
        gc.collect()
        with disable_garbage_collection():
            plain.append(_steps("meta", STEPS))
        gc.collect()
        with disable_garbage_collection(), VirtualGpu(find_gpu("h100-80gb")):
            virtual.append(_steps("cuda", STEPS))

    def medians(steps: slice) -> list[float]:
        return [statistics.median(s for run in runs for s in run[steps]) for runs in (plain, virtual)]

    print(json.dumps({"first": [first, *medians(slice(0, 1))], "later": [later, *medians(slice(1, None))]}))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.overhead")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--in-process", type=int, metavar="REPEAT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_process:
        measure(options.in_process)
        return 0
    print(f"{os.cpu_count()} CPUs, medians of {options.repeat}, python {sys.version.split()[0]}")
    is_fast = compare_with_mem_tracker(options.repeat)
    compare_with_meta(options.repeat)
    return 0 if is_fast else 1


if __name__ == "__main__":
    sys.exit(main())
