"""Gradients of parameters that no optimizer has, and what autograd saves for these alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from memprof.device.catalog import find_gpu
from memprof.findings import Context, Finding, find_all
from memprof.ledger.ledger import build_ledger
from memprof.trace.events import Trace
from memprof.units import MIB
from memprof.virtual import VirtualGpu
from tests.unit.full_gpu import run_out_of_memory

# Tensors of 2 MiB, so that nothing is searched for idle memory (watch/idle.py).
WIDTH, ROWS, STEPS = 512, 1024, 3


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are worth a finding."""
    monkeypatch.setitem(globals(), "WIDTH", 4096)
    monkeypatch.setitem(globals(), "ROWS", 8192)


class Block(nn.Module):
    """A layer that autograd keeps the result of its nonlinearity for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, device="cuda")


def train(first: nn.Module, second: nn.Module) -> None:
    """A step of `first` towards what `second` says."""
    target = second(batch())
    mse_loss(first(batch()), target).backward()


def run(
    step: Callable[[nn.Module, nn.Module], object],
    trained: Callable[[nn.Module, nn.Module], list[nn.Parameter]] = lambda first, second: list(first.parameters()),
) -> Trace:
    """Return the trace of a program that makes steps with two models, of which an optimizer has `trained`."""
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        first = nn.Sequential(Block(), Block()).cuda()
        second = copy.deepcopy(first)
        optimizer = torch.optim.SGD(trained(first, second))
        for _ in range(STEPS):
            optimizer.zero_grad()
            step(first, second)
            optimizer.step()
    return gpu.trace


def told(trace: Trace) -> list[Finding]:
    findings = find_all(Context(build_ledger(trace), None))
    return [finding for finding in findings if finding.id == "untrained-gradients"]


@pytest.mark.usefixtures("large")
def test_a_target_network_that_is_called_with_gradients() -> None:
    trace = run(train)
    assert [trace.storages[index].num_bytes for index in trace.untrained_gradients] == [4096 * 4096 * 4] * 2
    first = trace.untrained_spans[0]
    # The result of the second block goes into the loss, which is trained.
    assert [trace.storages[index].num_bytes for index in first.storages] == [8192 * 4096 * 4]
    assert len(trace.untrained_spans) == STEPS
    (finding,) = told(trace)
    assert "2 parameters of Sequential" in finding.title and "torch.no_grad()" in finding.evidence[0].text
    assert finding.edit is not None and "train" in finding.edit.source


@pytest.mark.nightly
@pytest.mark.usefixtures("large")
def test_a_backbone_that_only_the_optimizer_leaves_out() -> None:
    def step(first: nn.Module, second: nn.Module) -> None:
        first(batch()).mean().backward()

    trace = run(step, lambda first, second: list(first[1].parameters()))  # type: ignore[index]
    assert [trace.storages[index].num_bytes for index in trace.untrained_gradients] == [4096 * 4096 * 4]
    assert not trace.untrained_spans  # what the first block saves, the second one reads
    (finding,) = told(trace)
    assert "requires_grad_(False) on `0`" in finding.evidence[0].text and finding.edit is None


def test_what_is_differentiated_for_an_input_is_kept() -> None:
    """A perceptual loss: the second model's gradients are for nothing, and what it saves is not."""

    def step(first: nn.Module, second: nn.Module) -> None:
        second(first(batch())).mean().backward()

    trace = run(step)
    assert len(trace.untrained_gradients) == 2 and not trace.untrained_spans


def test_another_loss_in_between_is_kept() -> None:
    def step(first: nn.Module, second: nn.Module) -> None:
        target = second(batch())
        other_loss = first(batch()).mean()
        mse_loss(first(batch()), target).backward()
        other_loss.backward()

    trace = run(step)
    (sizes,) = {len(span.storages) for span in trace.untrained_spans}
    assert sizes == 1 and len(trace.untrained_spans) == STEPS


@torch.no_grad()
def update_by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        p -= 0.1 * p.grad


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("read", [update_by_hand, clip])
def test_gradients_that_the_program_reads_are_not_told_of(read: Callable[[nn.Module], None]) -> None:
    def step(first: nn.Module, second: nn.Module) -> None:
        train(first, second)
        read(second)

    assert run(step).untrained_gradients and not told(run(step))


def freeze(first: nn.Module, second: nn.Module) -> None:
    train(first, second.requires_grad_(False))


def without_gradients(first: nn.Module, second: nn.Module) -> None:
    with torch.no_grad():
        target = second(batch())
    mse_loss(first(batch()), target).backward()


def with_own_optimizer(first: nn.Module, second: nn.Module) -> None:
    """The generator's step of a GAN, which leaves gradients in the discriminator."""
    second(first(batch())).mean().backward()


def by_reentrant_checkpoint(first: nn.Module, second: nn.Module) -> None:
    checkpoint(first, batch().requires_grad_(), use_reentrant=True).mean().backward()


def by_grad(first: nn.Module, second: nn.Module) -> None:
    """MAML, penalties: gradients that the program takes for itself."""
    torch.autograd.grad(second(batch()).mean(), list(second.parameters()))
    first(batch()).mean().backward()


class Scaled(torch.autograd.Function):
    """A Function with an attribute that autograd's own leaves have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.variable = x
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def by_function(first: nn.Module, second: nn.Module) -> None:
    Scaled.apply(first(batch())).mean().backward()  # type: ignore[no-untyped-call]


def of_inputs(first: nn.Module, second: nn.Module) -> None:
    loss = mse_loss(first(batch()), second(batch()))
    loss.backward(inputs=list(first.parameters()))


def hooked(first: nn.Module, second: nn.Module) -> None:
    for p in second.parameters():
        p.register_post_accumulate_grad_hook(lambda p: None)
    train(first, second)


@pytest.mark.parametrize(
    "step", [freeze, without_gradients, by_reentrant_checkpoint, by_grad, by_function, of_inputs, hooked]
)
def test_programs_without_such_gradients(step: Callable[[nn.Module, nn.Module], None]) -> None:
    trace = run(step)
    assert not trace.untrained_gradients and not trace.untrained_spans


def test_gradients_that_another_optimizer_has() -> None:
    def step(first: nn.Module, second: nn.Module) -> None:
        with_own_optimizer(first, second)
        others.append(torch.optim.SGD(second.parameters())) if not others else None

    others: list[torch.optim.Optimizer] = []
    trace = run(step)
    # The first step's are dropped once the second optimizer has them.
    assert others and not trace.untrained_gradients


def test_gradients_before_there_is_an_optimizer() -> None:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        model = Block().cuda()
        for _ in range(2):
            model(batch()).mean().backward()
    assert not gpu.trace.untrained_gradients


def follow(second: nn.Module, first: nn.Module) -> None:
    train(first, second)


def run_to_limit(step: Callable[[nn.Module, nn.Module], object], *, evaluates: bool = True) -> list[Finding]:
    """Return what is told of a program with an optimizer for one of two models, which runs out of memory in `step`."""

    def program() -> None:
        first, second = (nn.Sequential(*(Block() for _ in range(8))).cuda() for _ in range(2))
        optimizer = torch.optim.SGD(first.parameters())
        step(second.train(not evaluates), first)
        optimizer.step()

    context = run_out_of_memory(program, 2200 * MIB)
    return [finding for finding in find_all(context) if finding.id == "untrained-gradients"]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("step", [follow, lambda second, first: second(torch.cat([batch(), batch()]))])
def test_memory_runs_out_in_the_first_step_with_a_model_in_eval_mode(step: Callable[..., object]) -> None:
    """Behind its call, and in it."""
    (finding,) = run_to_limit(step)
    assert finding.title.startswith("Sequential is called in eval mode at watch/test_untrained.py:")
    assert "torch.no_grad()" in finding.evidence[0].text and finding.edit is not None and finding.is_decisive


def with_trained_inputs(second: nn.Module, first: nn.Module) -> None:
    """A perceptual loss."""
    second(first(batch()))


def with_adapter(second: nn.Module, first: nn.Module) -> None:
    second.requires_grad_(False)
    second[0] = first[0]  # type: ignore[index, operator]
    second(torch.cat([batch(), batch()]))


@torch.no_grad()
def label(second: nn.Module) -> torch.Tensor:
    result: torch.Tensor = second(batch())
    return result


def with_labels(second: nn.Module, first: nn.Module) -> None:
    target = label(second)
    sum(mse_loss(first(batch()), target) for _ in range(8)).backward()  # type: ignore[union-attr]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("step", [with_trained_inputs, with_adapter, with_labels])
def test_memory_runs_out_with_a_model_that_is_called_as_it_should_be(step: Callable[..., object]) -> None:
    assert not run_to_limit(step)


@pytest.mark.usefixtures("large")
def test_memory_runs_out_with_a_model_in_training_mode_that_has_no_optimizer_yet() -> None:
    assert not run_to_limit(follow, evaluates=False)


@pytest.mark.parametrize(("rows", "is_recorded"), [(512, True), (511, False)])
def test_tensors_of_a_mib_are_recorded(rows: int, is_recorded: bool) -> None:
    """Each row of 512 float32 values is 2 KiB."""
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        first = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
        second = copy.deepcopy(first)
        optimizer = torch.optim.SGD(first.parameters())
        for _ in range(2):
            x = torch.randn(rows, 512, device="cuda")
            mse_loss(first(x), second(x)).backward()
            optimizer.step()
    assert any(span.storages for span in gpu.trace.untrained_spans) is is_recorded
