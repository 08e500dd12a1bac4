"""What being able to compile costs programs that compile nothing: seconds of a processor, side by side in one process.

    python -m tests.benchmarks.compile_support [--rounds N]

A model is built and trained for two steps on a virtual GPU, in turns: where torch.compile is off (`compiles=False`),
where it is on and nothing uses it, and where the program has compiled a small function before. Of each the least of all
rounds counts. Exit code 1 if either takes more than 3% over the first.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable

import torch
import transformers

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.watch.collection import disable_garbage_collection

BAR = 1.03
CONFIG = transformers.LlamaConfig(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=8,
    vocab_size=32_000,
)  # fmt: skip


def _train() -> None:
    model = transformers.LlamaForCausalLM(CONFIG).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(2, 1024, dtype=torch.int64, device="cuda")
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _seconds(*, compiles: bool, before: Callable[[], object] = lambda: None) -> float:
    """Of a processor, for the training alone."""
    with VirtualGpu(find_gpu("h100-80gb"), compiles=compiles):
        before()
        gc.collect()
        with (
            disable_garbage_collection()
        ):  # one falls into one way or another by chance, and takes half as long as a run
            begin = time.process_time()
            _train()
            return time.process_time() - begin


def _compile_something() -> None:
    torch.compile(lambda x: x * 2 + 1)(torch.ones(1024, device="cuda"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    ways: dict[str, Callable[[], float]] = {
        "torch.compile off": lambda: _seconds(compiles=False),
        "on, and not used": lambda: _seconds(compiles=True),
        "on, and used before": lambda: _seconds(compiles=True, before=_compile_something),
    }
    for way in ways.values():
        way()  # imports, and what is made once for a process
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            least[name] = min(least[name], way())
    base = least["torch.compile off"]
    print(f"{'two training steps, 24 layers':32}{'seconds':>10}{'ratio':>8}")
    for name, seconds in least.items():
        print(f"{name:32}{seconds:>10.2f}{seconds / base:>8.3f}")
    sys.exit(int(max(least.values()) > BAR * base))


if __name__ == "__main__":
    main()
