"""Models that take turns on a GPU until it is full, and models that are trained together."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from memprof.findings import Finding, find_all
from memprof.findings.waiting_models import find_waiting_models
from memprof.trace.events import PhaseKind
from memprof.units import MIB
from tests.unit.findings.idle import UsesBuilder
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


@pytest.mark.nightly
def test_one_computes_and_the_others_wait() -> None:
    """13 weights take 208 MiB, and each client that has been trained 32 more: here the third one is."""
    (finding,) = find(take_turns, 360)
    assert (
        finding.is_decisive and f"{NUM_CLIENTS} models alike made at findings/test_waiting_models.py:" in finding.title
    )
    assert finding.num_bytes is not None and finding.num_bytes > 200 * MIB


@pytest.mark.nightly
def test_of_two_turns_nobody_knows() -> None:
    assert not find(take_turns, 352)


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([1, 2, 3], (3, [0, 1])),
        ([0, 1, 2, 3], (4, [0, 1, 2])),
        ([1], None),
        ([1, 2], None),
        ([0, 1, 2], None),
        ([1, 2, 2], None),
        ([1, 2, 3, 3, 3], (5, [0, 1])),
        ([1, 2, 3, 3, 3, 3], None),
    ],
)
def test_three_turns_of_most_models_that_were_trained(steps: list[int], found: tuple[int, list[int]] | None) -> None:
    """Each of several models computes last in a step, 0: in none; memory runs out in the last step."""
    b = UsesBuilder(PhaseKind.MODEL)
    weights = [b.parameter("weight", 4 * MIB) for _ in steps]
    for step in range(1, max(steps) + 1):
        b.phase(PhaseKind.FORWARD, step)
        b.use(*(weight for weight, last in zip(weights, steps, strict=True) if last == step))
        b.alloc(MIB)
    b.alloc(300 * MIB)
    b.use()
    b.trace.ended_out_of_memory = True
    waiting = find_waiting_models(b.context(300 * MIB))
    assert (waiting and (waiting.num_models, waiting.storages)) == found


@pytest.mark.parametrize("program", [train_together, build_for_each_turn])
def test_models_that_compute_together_or_pile_up(program: Callable[[], None]) -> None:
    assert find(program) == []
