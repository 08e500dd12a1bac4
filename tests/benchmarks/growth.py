"""How a command's time and host memory grow with what is asked of it: length, layers, GPUs, events.

    python -m tests.benchmarks.growth [--repeat 3] [--only SERIES ...] [--plot FILE.svg]

Each point is a command in a process of its own, from an empty cache, and the median of its repetitions: seconds of a
processor (with what it forked) and the most resident memory of its largest process. `--plot` draws what was measured.

What is asserted is the shape and not the machine: between neighbouring points the cost may at most grow with what is
requested (`LINEAR`, with room for noise), and where nothing more has to be computed (`FLAT`) it may not grow at all.
Exit code 1 where it does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.commands import ROOT, Command, Took, took

NOISE = 1.25  # How much a figure of a shared machine may be off.
FLAT, LINEAR = "flat", "linear"

# A narrow Llama, whose number of layers is what varies.
_SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Series:
    what: str
    unit: str
    points: Sequence[int]
    command: Callable[[int, Path], str]  # The words after `memprof` for a point; may write files into the folder.
    shape: str


@dataclass(frozen=True)
class Point:
    at: int
    processor_seconds: float
    peak_bytes: int


def _length(tokens: int, folder: Path) -> str:
    return f"profile --model-size 4B --context-length {tokens}"


def _layers(layers: int, folder: Path) -> str:
    path = folder / f"layers-{layers}.json"
    path.write_text(json.dumps({**_SMALL, "num_hidden_layers": layers}), encoding="utf-8")
    return f"profile --model {path} --context-length 2048"


def _ranks(gpus: int, folder: Path) -> str:
    return f"profile --model qwen3-0.6b --context-length 2048 --gpus {gpus} --parallel fsdp"


def _events(events: int, folder: Path) -> str:
    from memprof.report.export.memory_viz import convert_snapshot
    from tests.benchmarks.analyze import STEP_EVENTS, training

    path = folder / f"events-{events}.pickle"
    with path.open("wb") as file:
        pickle.dump(convert_snapshot(training(max(1, round(events / STEP_EVENTS)))), file, protocol=4)
    return f"analyze {path}"


SERIES = {
    "length": Series("4B, one sequence", "tokens", [4096 << i for i in range(0, 9, 2)], _length, FLAT),
    "layers": Series("a narrow Llama", "layers", [8, 24, 80, 240, 800], _layers, LINEAR),
    "ranks": Series("Qwen3-0.6B with fsdp", "gpus", [2, 8, 32, 128, 512, 2048], _ranks, FLAT),
    "events": Series("a snapshot, analyzed", "events", [10_000, 40_000, 160_000, 640_000], _events, LINEAR),
}


def measured(series: Series, repeat: int) -> Iterator[Point]:
    with tempfile.TemporaryDirectory() as folder:
        for at in series.points:
            command = Command(series.command(at, Path(folder)))
            runs: list[Took] = [took(command, ROOT, "off") for _ in range(repeat)]
            seconds = statistics.median(run.processor_seconds for run in runs)
            yield Point(at, seconds, max(run.peak_bytes for run in runs))


def steps(points: Sequence[Point], shape: str) -> list[str]:
    """Where the cost grows more than its shape allows, a line each."""
    found = []
    for before, after in itertools.pairwise(points):
        allowed = NOISE * (after.at / before.at if shape == LINEAR else 1)
        grown = after.processor_seconds / before.processor_seconds
        if grown > allowed:
            found.append(f"from {before.at:,} to {after.at:,}: {grown:.2f} times the seconds, {allowed:.2f} allowed")
    return found


def main() -> int:
    """Print the points; 1 if a cost has another shape than is said of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.growth")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", choices=SERIES, nargs="+", default=list(SERIES))
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, median of {options.repeat}, python {sys.version.split()[0]}")
    curves, wrong = {}, False
    for name in options.only:
        series, points = SERIES[name], []
        print(f"{series.what}, by {series.unit} ({series.shape})")
        for point in measured(series, options.repeat):
            points.append(point)
            gib = point.peak_bytes / (1 << 30)
            print(f"{point.at:>12,}{point.processor_seconds:>9.2f} s{gib:>8.2f} GiB", flush=True)
        for line in steps(points, series.shape):
            wrong = True
            print(f"  FAIL {line}")
        curves[name] = points
    if options.plot is not None:
        from tests.benchmarks.plot import drawn

        options.plot.write_text(drawn([(SERIES[name], points) for name, points in curves.items()]), encoding="utf-8")
        print(f"wrote {options.plot}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
