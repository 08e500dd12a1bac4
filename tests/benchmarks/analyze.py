"""How fast, and in how much memory, `memprof analyze` reads a large snapshot.

    python -m tests.benchmarks.analyze [--megabytes 100] [--keep FILE]

A training run of as many steps as fill the file is recorded by our own allocator, with stacks of the depth that torch
records, and analysed in a process of its own. The exit code is 1 below the bars: 30 seconds and 2 GiB for 100 MB, and
in proportion.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from memprof.report.export.memory_viz import as_plain
from memprof.trace.snapshot import Frame, Snapshot, Stack
from tests.unit.recording.builder import CALL, MAIN, MIB, Program

SECONDS_PER_100_MB = 30
MEMORY_PER_100_MB = 2 << 30
LAYERS = 24
DEPTH = 60
"""Frames of a stack: torch keeps about so many with stacks="all"."""


def made(layer: int, line: int) -> Stack:
    """A stack of DEPTH frames."""
    native = [Frame("RegisterCUDA.cpp", 0, f"at::_ops::op{line}_Tensor::call(at::Tensor const&)")]
    native += [
        Frame("??", 0, f"c10::impl::wrap_kernel_functor_unboxed_{i}(at::Tensor const&)") for i in range(DEPTH // 2)
    ]
    python = [Frame("/home/me/model.py", 100 + line, "forward"), CALL]
    python += [Frame(f"/home/me/wrapper{i}.py", 10 + layer, "call") for i in range(DEPTH // 2 - 3)]
    return (*native, *python, MAIN)


def training(steps: int) -> Snapshot:
    """Steps of LAYERS layers, eight activations each, and their backward."""
    program = Program(total_bytes=64 << 30)
    stacks = [[made(layer, line) for line in range(8)] for layer in range(LAYERS)]
    for _ in range(steps):
        live = []
        for layer in range(LAYERS):
            for line in range(8):
                block = program.malloc((1 + line) * MIB + 512 * layer, stacks[layer][line])
                if line % 4 == 3:
                    program.free(block)
                else:
                    live.append(block)
        for number, block in enumerate(reversed(live)):
            gradient = program.malloc(3 * MIB + 512 * number, stacks[number % LAYERS][0])
            program.free(block, gradient)
    return program.snapshot()


def as_torch_writes(snapshot: Snapshot) -> bytes:
    """The pickle with a list of frames of its own for every event, as torch's has; frames are shared."""
    data = as_plain(snapshot)
    for trace in data["device_traces"]:
        for event in trace:
            event["frames"] = list(event["frames"])
    return pickle.dumps(data, protocol=4)


def main() -> int:
    """Make the file, analyse it, and print what it took; 1 below the bars."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.analyze")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--keep", type=Path, help="leave the snapshot here")
    options = parser.parse_args()
    one = len(as_torch_writes(training(1)))
    two = len(as_torch_writes(training(3)))
    steps = max(1, round(options.megabytes * 1e6 / ((two - one) / 2)))
    snapshot = training(steps)
    with tempfile.TemporaryDirectory() as folder:
        file = options.keep or Path(folder) / "large.pickle"
        file.write_bytes(as_torch_writes(snapshot))
        size, events = file.stat().st_size, len(snapshot.traces[0])
        del snapshot
        begin = time.monotonic()
        subprocess.run([sys.executable, "-m", "memprof", "analyze", str(file)], check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - begin
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    share = size / 1e8
    print(
        f"{size / 1e6:.1f} MB, {events:,} events: {seconds:.1f} s ({events / seconds:,.0f} events a second), "
        f"{used / 2**30:.2f} GiB at most, {used / size:.1f} bytes of memory per byte of the file"
    )
    return int(seconds > SECONDS_PER_100_MB * share or used > MEMORY_PER_100_MB * share)


if __name__ == "__main__":
    sys.exit(main())
