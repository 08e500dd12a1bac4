"""Ground truth for compiled code without a GPU: Inductor's code for the CPU, really compiled and run there.

Two training steps of compiled models: the virtual GPU traces and partitions as for its GPU, has Inductor write code
for the CPU (compiled_events.py), and takes and releases what torch's profiler sees on the CPU, in bytes and in order.
What is left out is that of test_against_cpu.py, and blocks of at most 8 bytes on both sides: single numbers, which
Inductor makes by no operator that could be named.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch

from tests.accuracy.compiled_events import for_the_cpu
from tests.accuracy.cpu_events import Change
from tests.accuracy.cpu_models import MODELS
from tests.accuracy.cpu_temporaries import NUMBER_BYTES, compared
from tests.accuracy.test_against_cpu import plain

pytest.importorskip("triton", reason="Inductor writes no kernels for a GPU without it")
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor's C++ needs a compiler"),
    pytest.mark.nightly,  # half a minute of it for each model; tests/unit/virtual/compiled is in every run
]
# Equal to the end. deberta, mixtral, vit, mixer and convolutions are not: docs/accuracy-tables.md says how.
COMPILED = ("perceptron", "gpt2", "llama", "qwen3", "gemma2", "bert", "lora", "t5", "bart", "rnn", "gru", "lstm")


def without_numbers(changes: list[Change]) -> list[tuple[bool, int, int]]:
    """Each change as (free, block, bytes), blocks counted again."""
    numbers: dict[int, int] = {}
    kept = [change for change in changes if change.num_bytes > NUMBER_BYTES]
    return [(one.free, numbers.setdefault(one.block, len(numbers)), one.num_bytes) for one in kept]


def both(name: str) -> tuple[list[tuple[bool, int, int]], list[tuple[bool, int, int]], list[int]]:
    """What the virtual GPU and the CPU take and release, and how many nodes each graph that was compiled has."""
    model = MODELS[name]

    def make(device: str) -> Callable[[], None]:
        torch._dynamo.reset()
        with torch.device(device):
            built = model.build().train()
        step = plain(torch.compile(built), {key: value.to(device) for key, value in model.batch().items()})
        step()  # compiles
        return step

    with for_the_cpu() as graphs:
        found = compared(make)
    return without_numbers(found.virtual), without_numbers(found.cpu), graphs


@pytest.mark.parametrize("name", COMPILED)
def test_two_steps_of_compiled_models(name: str) -> None:
    virtual, cpu, graphs = both(name)
    assert sum(graphs) > 50, "little was compiled"
    assert virtual == cpu
