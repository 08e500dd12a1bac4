"""What measuring costs a step: `python -m tests.benchmarks.measure [--device cpu] [--layers 8] [--repeat 5]`.

Training steps of one model, plain and measured, in turn in one process; medians of the steps after the first. With
`--detail` the lines of allocations are recorded as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from memprof.measured import MeasuredDevice


def build(layers: int, hidden: int, device: str) -> torch.nn.Module:
    """A small Llama."""
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


def main() -> None:
    """Print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    model = build(options.layers, options.hidden, options.device)

    def plain() -> list[float]:
        return steps(model, 3, options.tokens, options.device)

    def measured(detail: bool) -> Callable[[], list[float]]:
        def run() -> list[float]:
            with MeasuredDevice(options.device, detail=detail) as device:
                device.adopt(model)
                return steps(model, 3, options.tokens, options.device)

        return run

    ways = {"plain": plain, "measured": measured(False), "measured --detail": measured(True)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    plain()  # the first steps of a process are slower
    for _ in range(options.repeat):
        for name, way in ways.items():
            found[name] += way()[1:]
    base = statistics.median(found["plain"])
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        print(f"{name:<20}{1000 * middle:>10.1f} ms a step{100 * (middle / base - 1):>+8.1f}%")


if __name__ == "__main__":
    main()
