"""What the first steps of optimizers still make, where memory runs out before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from memprof.device.catalog import custom_gpu
from memprof.flows.gpus import RunAllocator, resolve_settings
from memprof.trace.events import NONE, FirstStep, MovedModel, Trace
from memprof.units import GIB
from memprof.virtual import VirtualGpu


class Own(SGD):
    """An optimizer of the program's."""


def full_gpu() -> VirtualGpu:
    gpu, settings = custom_gpu(GIB), resolve_settings("")
    return VirtualGpu(gpu, memory=lambda trace: RunAllocator(trace, gpu, settings), raises_oom=True)


def run(make: Callable[[list[nn.Parameter]], Optimizer], num_steps: int = 0) -> Trace:
    """Return the trace of a program that runs out of memory, after steps of an optimizer of a weight."""
    with contextlib.suppress(torch.OutOfMemoryError), full_gpu() as gpu:
        model = nn.Linear(64, 64).cuda()
        model.bias.requires_grad_(False)
        optimizer = make(list(model.parameters()))
        for _ in range(num_steps):
            model(torch.ones(1, 64, device="cuda")).sum().backward()
            optimizer.step()
        model.weight.grad = torch.ones_like(model.weight)
        torch.empty(1 << 40, device="cuda")
    return gpu.trace


@pytest.mark.parametrize(
    ("make", "num_states"),
    [
        (Adam, 2),
        (AdamW, 2),
        (SGD, 0),
        (lambda parameters: SGD(parameters, momentum=0.9), 1),
        (lambda parameters: Own(parameters, momentum=0.9), 0),
        (Adagrad, 0),  # it makes its state at once
    ],
)
def test_state_is_expected_of_optimizers_of_torch(
    make: Callable[[list[nn.Parameter]], Optimizer], num_states: int
) -> None:
    trace = run(make)
    (step,) = trace.first_steps
    assert step.states == (num_states,) and trace.storages[step.parameters[0]].shape == (64, 64)
    assert trace.op(trace.storages[step.gradients[0]]) == "aten.ones_like"


def test_after_a_step_nothing_more_is_expected() -> None:
    assert run(Adam, num_steps=1).first_steps == []


def test_a_parameter_may_have_no_gradient_yet() -> None:
    with contextlib.suppress(torch.OutOfMemoryError), full_gpu() as gpu:
        weight = nn.Parameter(torch.ones(64, 64, device="cuda"))
        optimizer = Adam([weight])
        torch.empty(1 << 40, device="cuda")
    assert optimizer and gpu.trace.first_steps == [FirstStep((0,), (NONE,), (2,))]


def test_the_model_that_was_being_moved_is_known() -> None:
    large = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(1 << 14, 1 << 14, bias=False, device="meta"))
    large = large.to_empty(device="cpu")
    with contextlib.suppress(torch.OutOfMemoryError), full_gpu() as gpu:
        nn.Linear(64, 64).cuda()
        large.cuda()
    numbers = 8 * 8 + 8 + 2 * 8 + (1 << 28)
    num_bytes, side = 4 * (numbers + 2 * 8) + 8, 1 << 14
    largest = "2.weight", (side, side), 1 << 30
    assert gpu.trace.moved_model == MovedModel("Sequential", numbers, num_bytes, "float32", *largest)


def test_a_model_that_was_not_moved_is_none_of_what_ended_the_run() -> None:
    """The program has caught that error, and met another."""
    with contextlib.suppress(torch.OutOfMemoryError), full_gpu() as gpu:
        with contextlib.suppress(torch.OutOfMemoryError):
            nn.Linear(1 << 14, 1 << 14, bias=False).cuda()
        torch.empty(1 << 40, device="cuda")
    assert gpu.trace.ended_out_of_memory and gpu.trace.moved_model is None
