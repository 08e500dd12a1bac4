"""How fast the dry run of a script is, in how much memory, and what an operator costs beside plain meta execution.

    python -m tests.benchmarks.dry_run [--quick]

The script is tests/scripts/programs/llama_8b.py: two training steps of an 8B model, as `memprof run` executes it. The
overhead is that of the same model's training steps on the virtual card over those on plain meta tensors, where torch
runs the same operators and nothing watches: both in turn in one process, medians of the first steps and
of those after them, divided by the number of operators below autograd. It is less than nothing where output layouts are
remembered: torch's meta kernels, many of them in Python, then do not run. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

from tests.benchmarks.simulate import GIB, ROOT, Line, memprof, run, run_measured

SCRIPT = str(ROOT / "tests" / "scripts" / "programs" / "llama_8b.py")
LENGTH, STEPS = 2048, 4


def dry_run(repeat: int) -> list[Line]:
    runs = [run_measured(memprof("run", "--json", "--gpu", "h100-80gb", SCRIPT)) for _ in range(repeat)]
    for each in runs:
        report = json.loads(each.output)
        if not report["verdict"]["fits"] or report["program"]["steps"] != 2:
            raise SystemExit("the 8B model's two steps are to fit an H100")
    seconds = statistics.median(each.seconds for each in runs)
    peak = statistics.median(each.peak_bytes for each in runs)
    return [
        Line("run llama_8b.py, 2 steps of 1 x 2048", f"{seconds:.2f} s", "20 s", seconds < 20),
        Line("  its peak resident memory", f"{peak / GIB:.2f} GiB", "2 GiB", peak < 2 * GIB),
    ]


def overhead(repeat: int) -> list[Line]:
    """In a process of its own: others' imports and caches are not to count."""
    told = json.loads(run([sys.executable, "-m", "tests.benchmarks.dry_run", "--in-process", str(repeat)]).output)
    lines = []
    for step in ("first", "later"):
        operators, meta, virtual = told[step]
        per_operator = (virtual - meta) / operators
        lines += [
            Line(f"{step} step on plain meta tensors, {operators:,} operators", f"{meta:.3f} s", "", True),
            Line(f"{step} step on the virtual card", f"{virtual:.3f} s", "", True),
            Line("  overhead per operator", f"{1e6 * per_operator:.1f} us", "30 us", per_operator < 30e-6),
        ]
    return lines


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
    """Of the first step and of a later one, below autograd, counted where they run without memprof."""
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


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(repeat: int) -> None:
    from memprof.catalog import find_gpu
    from memprof.virtual import VirtualGpu

    first, later = _operators()
    plain: list[list[float]] = []
    virtual: list[list[float]] = []
    for _ in range(repeat):
        with _collector_off():
            plain.append(_steps("meta", STEPS))
        with _collector_off(), VirtualGpu(find_gpu("h100-80gb")):
            virtual.append(_steps("cuda", STEPS))

    def medians(steps: slice) -> list[float]:
        return [statistics.median(s for run in runs for s in run[steps]) for runs in (plain, virtual)]

    print(json.dumps({"first": [first, *medians(slice(0, 1))], "later": [later, *medians(slice(1, None))]}))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Speed and memory of dry runs, beside their bars.")
    parser.add_argument("--quick", action="store_true", help="one repetition instead of three")
    parser.add_argument("--in-process", type=int, metavar="REPEAT", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_process:
        measure(options.in_process)
        return 0
    repeat = 1 if options.quick else 3
    passed = True
    print(f"{os.cpu_count()} CPUs, median of {repeat}, python {sys.version.split()[0]}")
    for benchmark in (dry_run, overhead):
        for line in benchmark(repeat):
            passed = passed and line.passed
            verdict = "" if not line.bar else "pass" if line.passed else "FAIL"
            print(f"{line.what:72} {line.measured:>12} {line.bar:>8}  {verdict}", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
