"""What a program has set on its models, as small programs set it, and what the findings say of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memprof.device.catalog import find_gpu
from memprof.findings import Context, Finding, find_all
from memprof.findings.evidence import is_applicable
from memprof.fixes.catalog import FIXES
from memprof.ledger.ledger import build_ledger
from memprof.units import MIB
from memprof.virtual import VirtualGpu
from tests.unit.full_gpu import run_out_of_memory

WIDTH, ROWS = 512, 32768  # 64 MiB for each activation


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.parts, x, use_reentrant=False) if self.training else self.parts(x)


class Model(nn.Module):
    """A model with a flag as transformers has, which works in training mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(8))

    @property
    def is_gradient_checkpointing(self) -> bool:
        return True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, device="cuda")


def train(between: Callable[[nn.Module], object]) -> None:
    """Train, do what `between` does, and train on, from one line."""
    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for epoch in range(2):
        for _ in range(2):
            model(batch()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not epoch:
            between(model)


def run(program: Callable[[], object]) -> Context:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        program()
    return Context(build_ledger(gpu.trace), None)


def told(context: Context, finding_id: str) -> list[Finding]:
    return [finding for finding in find_all(context) if finding.id == finding_id]


@torch.no_grad()
def evaluate(model: nn.Module) -> None:
    model.eval()
    model(batch())


def evaluate_and_return(model: nn.Module) -> None:
    evaluate(model)
    model.train()


def attack(model: nn.Module) -> None:
    """Gradients of inputs in eval mode, and no training after it in that mode."""
    evaluate(model)
    model(batch().requires_grad_()).mean().backward()
    model.train()


def test_a_model_that_an_evaluation_leaves_in_eval_mode() -> None:
    context = run(lambda: train(evaluate))
    trace, (finding,) = context.ledger.trace, told(context, "left-in-eval-mode")
    assert finding.title.startswith("Model is trained in eval mode from step 3 on: model.train() is missing after eval")
    (call,) = trace.eval_calls
    assert trace.sources[call.source].endswith(" evaluate") and finding.evidence[0].source == trace.sources[call.source]
    assert "for activation checkpointing works in training mode alone" in finding.title


def test_memory_runs_out_in_the_first_call_in_eval_mode() -> None:
    """Each layer keeps 128 MiB then, and 64 MiB with checkpointing."""
    context = run_out_of_memory(lambda: train(evaluate), 1000 * MIB)
    assert context.ledger.trace.failed_forward is not None
    (finding,) = told(context, "left-in-eval-mode")
    assert finding.is_decisive


@pytest.mark.parametrize("between", [evaluate_and_return, attack, lambda model: None, nn.Module.eval])
def test_models_that_are_trained_as_they_should_be(between: Callable[[nn.Module], object]) -> None:
    """The last one is without an evaluation: normalization may be frozen on purpose."""
    assert not told(run(lambda: train(between)), "left-in-eval-mode")


def test_checkpointing_of_the_program_is_not_proposed_to_it() -> None:
    context = run(lambda: train(lambda model: None))
    assert context.ledger.trace.checkpoints and not is_applicable(context, FIXES["activation-checkpointing"])
    context.ledger.trace.checkpoints = False
    assert is_applicable(context, FIXES["activation-checkpointing"])


def freeze(model: nn.Module) -> None:
    model.layers[0].requires_grad = False


def freeze_as_well(model: nn.Module) -> None:
    freeze(model)
    model.layers[0].requires_grad_(False)


def train_part(do: Callable[[nn.Module], object]) -> None:
    model = Model().cuda()
    do(model)
    model(batch()).mean().backward()


def test_a_module_that_is_frozen_by_an_attribute() -> None:
    context = run(lambda: train_part(freeze))
    (frozen,) = context.ledger.trace.frozen_in_vain
    assert len(frozen.parameters) == 4 and frozen.source is not None and frozen.source.endswith(" freeze")
    (finding,) = told(context, "frozen-in-vain")
    assert "on `layers.0` (Layer) sets an attribute" in finding.title
    assert finding.evidence[0].text.endswith("call the method: module.requires_grad_(False)")


@pytest.mark.parametrize("do", [freeze_as_well, lambda model: model.requires_grad_(True)])
def test_modules_that_are_frozen_by_the_method_or_not_at_all(do: Callable[[nn.Module], object]) -> None:
    assert not run(lambda: train_part(do)).ledger.trace.frozen_in_vain


def test_a_module_whose_parameters_get_no_gradients() -> None:
    def call(model: nn.Module) -> None:
        freeze(model)
        model(batch())
        model.requires_grad_(False)
        model.layers[1].requires_grad_(True)

    assert not told(run(lambda: train_part(call)), "frozen-in-vain")


def test_it_comes_before_gradients_that_the_optimizer_has_used() -> None:
    """1 GiB of a frozen layer's weights and 1 GiB of their gradients; the next call lacks 200 MiB of 2."""

    def program() -> None:
        model = nn.Sequential(nn.Linear(16384, 16384, bias=False), nn.Linear(16384, 1)).cuda()
        vars(model[0])["requires_grad"] = False
        model(torch.randn(64, 16384, device="cuda")).mean().backward()
        model(torch.randn(8192, 16384, device="cuda"))

    context = run_out_of_memory(program, 2200 * MIB)
    first, *_ = find_all(context)
    assert first.id == "frozen-in-vain" and first.is_decisive


class OwnFlag(nn.Module):
    """Its attribute is a setting of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        vars(self)["requires_grad"] = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).requires_grad_(self.requires_grad or x.is_leaf)


def test_a_flag_of_the_class_itself_freezes_nothing_in_vain() -> None:
    def program() -> None:
        OwnFlag().cuda()(torch.ones(8, 8, device="cuda")).sum().backward()

    assert not run(program).ledger.trace.frozen_in_vain
