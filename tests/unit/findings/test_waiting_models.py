"""Models that take turns on a GPU until it is full, and models that are trained together."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from memprof.findings import Finding, find_all
from memprof.units import MIB
from tests.unit.full_gpu import run_out_of_memory

WIDTH, NUM_CLIENTS = 2048, 12  # 16 MiB for each weight, as much for its gradient, and for momentum

pytestmark = pytest.mark.usefixtures("small_heap")


def make_clients() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    server = nn.Linear(WIDTH, WIDTH, bias=False).cuda()
    clients: list[nn.Module] = [copy.deepcopy(server) for _ in range(NUM_CLIENTS)]
    return clients, [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in clients]


def take_turns() -> None:
    for client, optimizer in zip(*make_clients(), strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            client(torch.randn(8, WIDTH, device="cuda")).sum().backward()
            optimizer.step()


def train_together() -> None:
    clients, optimizers = make_clients()
    for _ in range(3):
        for client in clients:
            client(torch.randn(8, WIDTH, device="cuda")).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def build_for_each_turn() -> None:
    models = []
    for _ in range(NUM_CLIENTS):
        models.append(model := nn.Linear(WIDTH, WIDTH, bias=False).cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, WIDTH, device="cuda")).sum().backward()
            optimizer.step()


def find(program: Callable[[], None], mib: int = 400) -> list[Finding]:
    findings = find_all(run_out_of_memory(program, mib * MIB))
    return [one for one in findings if "take turns" in one.title]


def test_one_computes_and_the_others_wait() -> None:
    (finding,) = find(take_turns)
    assert (
        finding.is_decisive and f"{NUM_CLIENTS} models alike made at findings/test_waiting_models.py:" in finding.title
    )
    assert finding.num_bytes is not None and finding.num_bytes > 200 * MIB


@pytest.mark.parametrize(("mib", "is_found"), [(352, False), (360, True)])
def test_from_the_third_turn_on(mib: int, is_found: bool) -> None:
    """13 weights take 208 MiB, and each client that has been trained 32 more, beside what a step needs."""
    assert bool(find(take_turns, mib)) is is_found


@pytest.mark.parametrize("program", [train_together, build_for_each_turn])
def test_models_that_compute_together_or_pile_up(program: Callable[[], None]) -> None:
    assert find(program) == []
