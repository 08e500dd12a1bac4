"""Which arguments of a model's call are inputs: tensors that require gradients too, if no parameter is among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.trace.events import Role
from memprof.virtual import VirtualGpu

Make = Callable[[torch.Tensor, nn.Module], torch.Tensor]


def is_input(make: Make) -> bool:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        first, model = nn.Linear(8, 8).cuda(), nn.Linear(16, 1).cuda()
        given = make(torch.rand(4, 8, device="cuda", requires_grad=True), first)
        model(given).sum().backward()
        owner = gpu.trace.owners.get(gpu.recorder.storages.get_index(given))
    return owner is not None and owner.role is Role.INPUT


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x, first: torch.cat([x, x * 2], 1), True),  # coordinates of a physics-informed network
        (lambda x, first: torch.cat([x, first(x)], 1), False),
        (lambda x, first: torch.cat([x, x + first.weight.mean()], 1), False),
    ],
)
def test_what_is_computed_before_the_call(make: Make, expected: bool) -> None:
    assert is_input(make) is expected


@pytest.mark.parametrize(("num_operators", "expected"), [(13, True), (14, False)])
def test_a_long_graph_may_lead_to_parameters(num_operators: int, expected: bool) -> None:
    def make(x: torch.Tensor, first: nn.Module) -> torch.Tensor:
        for _ in range(num_operators):
            x = x + 1
        return torch.cat([x, x], 1)  # the graph ends in a node for the leaf

    assert is_input(make) is expected
