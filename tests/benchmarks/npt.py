"""128 NPT components in a layer of Llama-3.1-8B (case study 4): how fast they are made and applied, in how much memory.

    python -m tests.benchmarks.npt [--quick]

Times are wall-clock on this CPU, the fastest of three repetitions taken in turn (one with --quick). Initialisation is
the filling of one component's parameters, which have been allocated before: that is the same for both. Memory is what
the virtual GPU says of a forward, and of a forward and a backward, beside parameters and inputs. Exit code 1 if a bar
is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

import torch

from memprof import virtual_gpu
from memprof.spec import NPT_COMBINES, NPT_INITS
from memprof.units import format_bytes
from memprof.workload.npt import RankOneDeltas

D_MODEL, D_FFN, RANK, NUM_RANKS = 4096, 14336, 64, 128
BATCH, TOKENS = 2, 128
INITIALISATION_BAR = 20.0
FORWARD_BAR = 1.0


def component(combine: str = "merged") -> RankOneDeltas:
    return RankOneDeltas(D_MODEL, D_FFN, RANK, NUM_RANKS, combine=combine, init="fast")


def fastest(actions: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Seconds of each, taken in turn so that a busy moment does not hit one alone."""
    seconds = dict.fromkeys(actions, float("inf"))
    for _ in range(repeat):
        for name, action in actions.items():
            begin = time.perf_counter()
            action()
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
    return seconds


def initialisation(made: RankOneDeltas, repeat: int) -> dict[str, float]:
    return fastest({init: lambda init=init: made.reset_parameters(init) for init in NPT_INITS}, repeat)


@torch.no_grad()
def forward(made: RankOneDeltas, repeat: int) -> dict[str, float]:
    hidden, attention = torch.randn(BATCH, TOKENS, D_MODEL), torch.randn(BATCH, TOKENS, D_MODEL)

    def run(combine: str) -> None:
        made.combine = combine
        made(hidden, attention)

    return fastest({combine: lambda combine=combine: run(combine) for combine in NPT_COMBINES}, repeat)


def extra_bytes(combine: str, train: bool) -> int:
    with virtual_gpu("h100-80gb") as gpu:
        made = component(combine).to("cuda").requires_grad_(train)
        hidden, attention = (torch.randn(BATCH, TOKENS, D_MODEL, device="cuda", requires_grad=train) for _ in range(2))
        before = gpu.allocated_bytes
        result = made(hidden, attention)
        if train:
            result.sum().backward()
    return gpu.report().peak.allocated_bytes - before


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one repetition instead of three")
    repeat = 1 if parser.parse_args(arguments).quick else 3
    print(f"{os.cpu_count()} CPUs, {torch.get_num_threads()} threads, fastest of {repeat}, torch {torch.__version__}")
    passed = True

    made = component()
    for title, seconds, bar in (
        ("initialisation", initialisation(made, repeat), INITIALISATION_BAR),
        ("forward", forward(made, repeat), FORWARD_BAR),
    ):
        slowest = next(iter(seconds.values()))
        for number, (name, taken) in enumerate(seconds.items()):
            line = f"{title + ', ' + name:<30}{taken:9.2f} s"
            if number:
                ok = slowest / taken >= bar
                passed &= ok
                line += f"{slowest / taken:9.1f} times as fast, at least {bar:g}: {'pass' if ok else 'FAIL'}"
            print(line, flush=True)
    for combine in NPT_COMBINES:
        alone, both = (format_bytes(extra_bytes(combine, train)) for train in (False, True))
        print(f"{'memory, ' + combine:<30}{alone:>11} forward, {both:>11} forward and backward")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
