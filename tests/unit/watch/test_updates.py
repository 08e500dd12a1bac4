"""Optimizers that are no torch.optim.Optimizer, and what is none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.findings import Context, find_all
from memprof.ledger.ledger import build_ledger
from memprof.trace.events import PhaseKind, Role, Trace
from memprof.virtual import VirtualGpu

WIDTH = 64
STEPS = 3
Step = Callable[[nn.Module, dict[Any, Any]], None]


@torch.no_grad()
def sgd(net: nn.Module, state: dict[Any, Any]) -> None:
    for p in net.parameters():
        p -= 0.1 * p.grad


def new_data(net: nn.Module, state: dict[Any, Any]) -> None:
    for p in net.parameters():
        p.data = p.data - 0.1 * p.grad.data


@torch.no_grad()
def momentum(net: nn.Module, state: dict[Any, Any]) -> None:
    for p in net.parameters():
        m = state.setdefault(p, torch.zeros_like(p))
        p.sub_((0.9 * m + p.grad).sign(), alpha=0.1)
        m.mul_(0.9).add_(p.grad)


@torch.no_grad()
def momentum_made_anew(net: nn.Module, state: dict[Any, Any]) -> None:
    for p in net.parameters():
        state[p] = 0.9 * state.get(p, torch.zeros_like(p)) + p.grad
        p.sub_(state[p], alpha=0.1)


@torch.no_grad()
def foreach(net: nn.Module, state: dict[Any, Any]) -> None:
    weights = list(net.parameters())
    m = state.setdefault("m", [torch.zeros_like(p) for p in weights])
    torch._foreach_lerp_(m, [p.grad for p in weights], 0.1)
    torch._foreach_add_(weights, m, alpha=-0.1)


@torch.no_grad()
def accumulated(net: nn.Module, state: dict[Any, Any]) -> None:
    for p in net.parameters():
        total = state.setdefault(p, torch.zeros_like(p)).add_(p.grad)
        p.sub_(total, alpha=0.1)
        total.zero_()


@torch.no_grad()
def masked(net: nn.Module, state: dict[Any, Any]) -> None:
    for p in net.parameters():
        p.sub_(state.setdefault(p, torch.ones_like(p)) * p.grad, alpha=0.1)


@torch.no_grad()
def averaged(net: nn.Module, state: dict[Any, Any]) -> None:
    """And the average is in the weights' place for a while."""
    for p in net.parameters():
        p.sub_(p.grad, alpha=0.1)
        average = state.setdefault(p, p.clone()).lerp_(p, 0.01)
        own = p.clone()
        p.copy_(average)
        p.copy_(own)


@torch.no_grad()
def clipped(net: nn.Module, state: dict[Any, Any]) -> None:
    for p in net.parameters():
        p.clamp_(-0.1, 0.1)


@torch.no_grad()
def drawn_anew(net: nn.Module, state: dict[Any, Any]) -> None:
    for p in net.parameters():
        p.normal_()


@torch.no_grad()
def clipped_gradients(net: nn.Module, state: dict[Any, Any]) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)


@torch.no_grad()
def momentum_encoder(net: nn.Module, state: dict[Any, Any]) -> None:
    encoder = state.setdefault("encoder", copy.deepcopy(net).requires_grad_(False))
    encoder(torch.ones(1, WIDTH, device="cuda"))
    for p, own in zip(encoder.parameters(), net.parameters(), strict=True):
        p.mul_(0.9).add_(own, alpha=0.1)


def run(step: Step, optimizer: Callable[..., torch.optim.Optimizer] | None = None) -> Trace:
    state: dict[Any, Any] = {}
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)).cuda()
        made = None if optimizer is None else optimizer(net.parameters())
        for _ in range(STEPS):
            net.zero_grad()
            net(torch.randn(8, WIDTH, device="cuda")).mean().backward()
            step(net, state)
            if made is not None:
                made.step()
        net(torch.randn(8, WIDTH, device="cuda"))
    return gpu.trace


def state_of(trace: Trace) -> list[tuple[int, ...]]:
    return [trace.storages[i].shape for i, owner in trace.owners.items() if owner.role is Role.OPTIMIZER_STATE]


WEIGHTS = [(WIDTH, WIDTH)] * 2


@pytest.mark.parametrize(
    ("step", "state"),
    [
        (sgd, []),
        (new_data, []),
        (momentum, WEIGHTS),
        (foreach, WEIGHTS),
        (momentum_made_anew, WEIGHTS * STEPS),
        (accumulated, []),
        (masked, []),
        (averaged, []),
    ],
)
def test_a_step_by_no_optimizer_of_torch(step: Step, state: list[tuple[int, ...]]) -> None:
    trace = run(step)
    steps = [phase.step for phase in trace.phases if phase.kind is PhaseKind.OPTIMIZER_STEP]
    assert steps == list(range(1, STEPS + 1))
    assert state_of(trace) == state
    assert trace.updates_parameters_manually


@pytest.mark.parametrize("step", [clipped, drawn_anew, clipped_gradients, momentum_encoder])
def test_what_no_gradient_goes_into_is_no_step(step: Step) -> None:
    trace = run(step)
    assert not [phase for phase in trace.phases if phase.kind is PhaseKind.OPTIMIZER_STEP]
    assert not state_of(trace) and not trace.updates_parameters_manually


def test_weights_that_an_optimizer_of_torch_steps_on_are_its_own() -> None:
    """As sharpness-aware minimization does: it moves the weights along their gradient, and then steps."""
    trace = run(sgd, torch.optim.SGD)
    steps = [phase.step for phase in trace.phases if phase.kind is PhaseKind.OPTIMIZER_STEP]
    assert steps == list(range(1, STEPS + 1)) and not trace.updates_parameters_manually


def test_a_step_ends_where_the_next_batch_is_made() -> None:
    trace = run(momentum)
    batches = [one for one in trace.storages if one.shape == (8, WIDTH) and trace.op(one) == "aten.randn"]
    kinds = {trace.phases[one.phase].kind for one in batches[1:]}
    assert batches[1:] and kinds == {PhaseKind.OTHER}


def test_a_program_without_modules_has_steps() -> None:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        weight = torch.randn(WIDTH, WIDTH, device="cuda", requires_grad=True)
        for _ in range(STEPS):
            (torch.randn(8, WIDTH, device="cuda") @ weight).mean().backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad
                weight.grad = None
    begun = [phase for phase in gpu.trace.phases if phase.kind is PhaseKind.OPTIMIZER_STEP]
    assert [phase.step for phase in begun] == list(range(1, STEPS + 1))


def test_temporaries_of_such_a_step_are_told_of_without_fixes_of_optimizers_of_torch() -> None:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        net = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)]).cuda()
        for _ in range(2):
            net.zero_grad()
            net(torch.randn(8, 2048, device="cuda")).mean().backward()
            with torch.no_grad():
                gradients = [p.grad for p in net.parameters()]
                made = torch._foreach_mul(torch._foreach_mul(gradients, 0.1), 0.1)
                torch._foreach_sub_(list(net.parameters()), made)
                del made
    findings = find_all(Context(build_ledger(gpu.trace), None))
    (found,) = [one for one in findings if one.id == "optimizer-step-temporaries"]
    assert found.num_bytes == 2 * 4 * 2048 * 2048 * 4
    assert "fused-optimizer" not in found.fixes and found.evidence[-1].text.startswith("fix: update one parameter")
