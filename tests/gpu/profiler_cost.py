"""Measure what torch's profiler costs that memprof measures with: bytes of the GPU, and how much slower steps get.

python -m tests.gpu.profiler_cost --device cuda --out FILE.json

The profiler is given CPU activity alone. On CUDA it may load CUPTI all the same, which takes memory of the GPU outside
torch's allocator. The same training steps run without it, with it, and under memprof without and with
details, in turn; medians are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from memprof.measured import MeasuredDevice
from tests.gpu.outside import outside_bytes

ROUNDS = 5
# Of which the first is not counted.
STEPS = 4


class Size(NamedTuple):
    """A Llama, and how many tokens it is trained on at once."""

    layers: int
    hidden: int
    tokens: int


SIZES = {
    "cpu": {"small": Size(2, 128, 64)},
    # Of the small one launching the kernels takes longest, of the large one their work.
    "cuda": {"small": Size(4, 512, 512), "large": Size(8, 2048, 2048)},
}


def as_memprof_profiles() -> profile:
    """Make a profiler with the settings of memprof/measured."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True)


def measure_bytes(device: str) -> dict[str, float | int | None]:
    """Start the profiler for the first time: bytes outside the allocator before, inside and after, and seconds."""
    matrix = torch.randn(512, 512, device=device)
    matrix @ matrix
    found: dict[str, float | int | None] = {"outside_before": outside_bytes(device)}
    began = time.perf_counter()
    with as_memprof_profiles():
        found["first_start_seconds"] = time.perf_counter() - began
        matrix @ matrix
        found["outside_inside"] = outside_bytes(device)
    found["outside_after"] = outside_bytes(device)
    before, inside = found["outside_before"], found["outside_inside"]
    found["profiler_bytes"] = None if before is None or inside is None else inside - before
    return found


def build(layers: int, hidden: int, device: str) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        vocab_size=8000,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(device)


def steps(model: torch.nn.Module, count: int, tokens: int, device: str) -> list[float]:
    """Seconds of each of `count` training steps."""
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure_seconds(device: str, size: Size) -> dict[str, float]:
    """Time training steps plain, under the profiler and under memprof: median seconds, and the ratios to plain."""
    model = build(size.layers, size.hidden, device)
    ways: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
        "plain": contextlib.nullcontext,
        "profiler": as_memprof_profiles,
        "memprof": lambda: MeasuredDevice(device),
        "memprof_detail": lambda: MeasuredDevice(device, detail=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            with way():
                seconds[name] += steps(model, STEPS, size.tokens, device)[1:]
    medians = {f"{name}_seconds": statistics.median(values) for name, values in seconds.items()}
    ratios = {f"{name}_ratio": medians[f"{name}_seconds"] / medians["plain_seconds"] for name in ways}
    return {**medians, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    found: dict[str, Any] = {"torch": torch.__version__, **measure_bytes(asked.device)}
    print(json.dumps(found), flush=True)
    for name, size in SIZES[asked.device].items():
        found[name] = {"model": size._asdict(), **measure_seconds(asked.device, size)}
        print(name, json.dumps(found[name]), flush=True)
        asked.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
