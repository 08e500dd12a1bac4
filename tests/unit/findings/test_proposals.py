"""What is suggested to programs that need much memory for different reasons, and that it does what it says: the figure
beside each suggestion is compared with a run of the program with this change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import pytest
import torch

import memprof
import memprof.findings.rules
from memprof.allocator import GpuMemory, replay_on_gpu
from memprof.findings import Context, Suggestion
from memprof.findings.suggestions import suggest
from memprof.ledger.ledger import build_ledger
from memprof.trace.events import Trace
from memprof.units import GIB
from tests.lanes import by_day
from tests.unit.findings import programs

pytestmark = pytest.mark.usefixtures("small_heap")

TOLERANCE = 0.15  # of what the changed program needs

Program = Callable[[], None]


def record(program: Program) -> Trace:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        program()
    return gpu.trace


def context(trace: Trace, usable_gib: float) -> Context:
    usable_bytes = int(usable_gib * GIB)
    return Context(build_ledger(trace, replay_on_gpu(trace, GpuMemory(usable_bytes, 0))), usable_bytes)


def label(suggestion: Suggestion) -> str:
    """A fix, or the first words of what is to be changed in the program."""
    return suggestion.fix or " ".join(suggestion.text.split()[:4])


fused = partial(torch.optim.AdamW, fused=True)

# A program; GiB that are too few; all that is suggested then, best first; some of it, done.
CASES: dict[str, tuple[Program, float, list[str], dict[str, Program]]] = {
    "convolutions": (
        programs.convnet,
        5,
        ["use batches of 128", "activation-checkpointing", "amp-bfloat16"],
        {
            "activation-checkpointing": partial(programs.convnet, "activation-checkpointing"),
            "amp-bfloat16": partial(programs.convnet, "amp-bfloat16"),
            "use batches of 128": partial(programs.convnet, parts=2),
        },
    ),
    "words": (
        programs.language_model,
        10,
        ["chunked-loss", "micro-batch=16"],
        {
            "chunked-loss": partial(programs.language_model, "chunked-loss"),
            "micro-batch=16": partial(programs.language_model, parts=2),
        },
    ),
    "words, with a loss of the program's own": (
        partial(programs.language_model, outside=True),
        10,
        ["compute the loss in", "micro-batch=16"],
        {},
    ),
    "scores": (
        partial(programs.language_model, eager=True, rows=8, layers=24),
        12,
        ["use scaled_dot_product_attention instead of", "chunked-loss"],
        {
            "use scaled_dot_product_attention instead of": partial(programs.language_model, rows=8, layers=24),
            "chunked-loss": partial(programs.language_model, "chunked-loss", eager=True, rows=8, layers=24),
        },
    ),
    "noise": (
        programs.unet,
        7,
        ["micro-batch=32", "activation-checkpointing"],
        {
            "activation-checkpointing": partial(programs.unet, "activation-checkpointing"),
            "micro-batch=32": partial(programs.unet, parts=2),
        },
    ),
    "rows": (
        programs.perceptron,
        32,
        ["micro-batch=500000", "amp-bfloat16"],
        {
            "amp-bfloat16": partial(programs.perceptron, "amp-bfloat16"),
            "micro-batch=500000": partial(programs.perceptron, parts=2),
        },
    ),
    "state": (
        programs.wide_layers,
        13,
        ["fused-optimizer", "8-bit-optimizer", "cpu-offload-optimizer"],
        {"fused-optimizer": partial(programs.wide_layers, fused)},
    ),
    "state of more than the GPU can ever hold": (
        programs.wide_layers,
        5,
        ["cpu-offload-optimizer and bfloat16 together:", "cpu-offload-optimizer", "bfloat16", "8-bit-optimizer"],
        {"bfloat16": partial(programs.wide_layers, dtype="bfloat16")},
    ),
    "a history": (
        programs.lbfgs,
        9,
        ["set history_size=10 in torch.optim.LBFGS,", "bfloat16"],
        {"set history_size=10 in torch.optim.LBFGS,": partial(programs.lbfgs, 10)},
    ),
    "a table": (
        programs.table_of_items,
        15,
        ["use nn.Embedding(..., sparse=True) for", "8-bit-optimizer", "cpu-offload-optimizer"],
        {"use nn.Embedding(..., sparse=True) for": partial(programs.table_of_items, programs.sparse_adam)},
    ),
    "points": (
        programs.point_cloud,
        31,
        ["compute in chunks of"],
        {"compute in chunks of": partial(programs.point_cloud, 1024)},
    ),
    "pairs of a batch": (
        programs.contrastive,
        15,
        ["compute in chunks of"],
        {"compute in chunks of": partial(programs.contrastive, 8192)},
    ),
    "a kernel": (
        programs.kernel_matrix,
        20,
        ["compute in chunks of"],
        {"compute in chunks of": partial(programs.kernel_matrix, 6667)},
    ),
    "gradients of samples": (
        programs.gradients_of_samples,
        10,
        ["pass chunk_size=1024 to torch.func.vmap", "amp-bfloat16"],
        {"pass chunk_size=1024 to torch.func.vmap": partial(programs.gradients_of_samples, 1024)},
    ),
    "a Jacobian": (
        programs.jacobian,
        39,
        ["pass chunk_size=500 to torch.func.jacrev"],
        {"pass chunk_size=500 to torch.func.jacrev": partial(programs.jacobian, 500)},
    ),
    "a Jacobian of forward mode": (
        programs.forward_jacobian,
        8,
        ["pass chunk_size=750 to torch.func.vmap"],
        {"pass chunk_size=750 to torch.func.vmap": partial(programs.forward_jacobian, 750)},
    ),
    "a gradient of torch.func": (
        programs.slope_of_waves,
        11,
        ["use torch.autograd.grad instead of"],
        {"use torch.autograd.grad instead of": partial(programs.slope_of_waves, autograd=True)},
    ),
    "a sparse matrix": (programs.sparse_graph, 23, ["use a CSR matrix,"], {}),
    "calls of a cell": (
        programs.recurrence,
        1,
        ["train on shorter sequences:", "micro-batch=1024", "amp-bfloat16"],
        {"train on shorter sequences:": partial(programs.recurrence, 8)},
    ),
}


@functools.cache
def suggestions_for(name: str) -> tuple[Suggestion, ...]:
    program, usable_gib, _, _ = CASES[name]
    return suggest(context(record(program), usable_gib))


@pytest.mark.parametrize("name", CASES)
def test_what_is_suggested(name: str) -> None:
    found = suggestions_for(name)
    assert [label(one) for one in found if one.fix != "expandable-segments"] == CASES[name][2]
    assert [one.fits for one in found] == sorted((one.fits for one in found), reverse=True)


SHOWN = (
    ("words", "chunked-loss"),
    ("scores", "use scaled_dot_product_attention instead of"),
    ("points", "compute in chunks of"),
)


@pytest.mark.parametrize(
    ("name", "change"), by_day(((name, change) for name in CASES for change in CASES[name][3]), *SHOWN)
)
def test_it_does_what_it_says(name: str, change: str) -> None:
    (suggestion,) = [one for one in suggestions_for(name) if label(one) == change]
    needed = replay_on_gpu(record(CASES[name][3][change]), None).required_reserved_bytes
    assert suggestion.required_bytes == pytest.approx(needed, rel=TOLERANCE)
