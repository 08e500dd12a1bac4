"""Reference cycles that keep tensors alive, and the line that closes each; on the CPU, where torch is the same."""

from __future__ import annotations

import linecache
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from memprof.trace.events import CycleKind
from memprof.watch.cycles import find_cycle


class KeepsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x * 2
        ctx.out = out
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.out


class SavesOutput(KeepsOutput):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x * 2
        ctx.save_for_backward(out)
        return out


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.model.trainer = [self]  # type: ignore[assignment]
        self.buffer = torch.zeros(4)


def leaf() -> torch.Tensor:
    return torch.ones(4, requires_grad=True)


def through_grad() -> torch.Tensor:
    x = leaf()
    x.pow(3).sum().backward(create_graph=True)
    return x


def through_ctx() -> torch.Tensor:
    out: torch.Tensor = KeepsOutput.apply(leaf())  # type: ignore[no-untyped-call]
    return out


def through_a_hook() -> torch.Tensor:
    out = leaf() * 2
    out.register_hook(lambda grad, out=out: grad + out)  # type: ignore[no-untyped-call, misc]
    return out


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2))))
        self.seen = 0

        def count(*_: Any) -> None:
            self.seen += 1

        self.register_forward_hook(count)


def of_a_module_with_a_hook() -> torch.Tensor:
    """The parameter is eight references below the module that the cycle is of."""
    return next(Counted().parameters())


def of_objects() -> torch.Tensor:
    return Trainer().buffer


@pytest.mark.parametrize(
    ("make", "kind", "name", "line"),
    [
        (through_grad, CycleKind.GRAD, "tensor -> .grad", "x.pow(3).sum().backward(create_graph=True)"),
        (through_ctx, CycleKind.CTX, "ctx.out of KeepsOutput", "ctx.out = out"),
        (through_a_hook, CycleKind.FUNCTION, "through_a_hook.<locals>.<lambda>", "out.register_hook(lambda"),
        (
            of_a_module_with_a_hook,
            CycleKind.FUNCTION,
            "Counted.__init__.<locals>.count",
            "register_forward_hook(count)",
        ),
        (of_objects, CycleKind.OBJECTS, "Trainer.model", "self.model"),
    ],
)
def test_names_the_cycle_and_the_line_that_closes_it(make: Any, kind: CycleKind, name: str, line: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the first cycle
        tensor = make()
    cycle = find_cycle([tensor], [make.__code__, sys._getframe().f_code])
    assert cycle is not None and cycle.kind is kind and name in cycle.name
    file, _, number = (cycle.source or "").partition(" ")[0].rpartition(":")
    assert line in linecache.getline(file, int(number))


@pytest.mark.parametrize(
    "make",
    [
        leaf,
        lambda: SavesOutput.apply(leaf()),  # type: ignore[no-untyped-call]
        lambda: nn.Linear(2, 2)(torch.ones(2, 2)),
        lambda: torch.autograd.grad((x := leaf()).pow(3).sum(), x, create_graph=True)[0],
    ],
)
def test_there_is_no_cycle(make: Any) -> None:
    assert find_cycle([make()], []) is None
