"""Compiled layers that are repeated against the same layers run: every field but the seconds that torch took."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

from memprof.remedies.compiled import Compiled
from memprof.virtual.repeat import backward
from memprof.virtual.repeat.slices import From
from tests.unit.virtual.repeat.test_stacks import (
    LAYERS,
    MOST,
    WIDTH,
    Block,
    LooksAtItsNumber,
    Model,
    recorded,
    train,
)

TOKENS = 40
"""In what `train` gives."""


class Breaks(Block):
    """Its number is looked at between two graphs."""

    def forward(self, hidden, mask=None):
        hidden = super().forward(hidden, mask)
        torch._dynamo.graph_break()
        return hidden + hidden.new_ones(1) if self.number == 6 else hidden


class Reuses(nn.Module):
    """Inductor makes the gradient of a weight in memory of as many bytes that the forward has kept."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.first, self.second = nn.Linear(WIDTH, 80, bias=False), nn.Linear(80, 8, bias=False)
        self.gate, self.up = (nn.Linear(8, WIDTH * 80 // TOKENS, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDTH * 80 // TOKENS, WIDTH, bias=False)

    def forward(self, hidden, mask=None):
        inner = self.second(self.first(hidden))
        return hidden + self.down(nn.functional.silu(self.gate(inner)) * self.up(inner))


def compiled(kind, number=LAYERS):
    model = Model([kind(place) for place in range(number)])
    for block in model.blocks:
        block.forward = Compiled(block)
    return model


def check_same(build):
    """How many layers were repeated."""
    run, _ = recorded(build, train, repeats=False)
    trace, times = recorded(build, train, repeats=True)
    for field in dataclasses.fields(run):
        if field.name == "compiling":
            assert trace.compiling.kernels == run.compiling.kernels
        else:
            assert getattr(trace, field.name) == getattr(run, field.name), field.name
    return times


@pytest.mark.parametrize("kind", [Block, Reuses])
def test_compiled_layers_are_repeated(kind, monkeypatch):
    memory, find = set(), backward.Backwards._backward

    def found(*args):
        done, is_clean = find(*args)
        memory.update(origin for origin, _ in done.made)
        return done, is_clean

    monkeypatch.setattr(backward.Backwards, "_backward", found)
    assert check_same(functools.partial(compiled, kind)) == MOST
    assert (From.FORWARD in memory) == (kind is Reuses)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LooksAtItsNumber, Breaks])
def test_layers_whose_code_holds_for_one_number_alone_are_run(kind):
    """Dynamo compiles them again for each number, up to its limit, and what follows runs eagerly."""
    assert check_same(functools.partial(compiled, kind, 10)) == 0
