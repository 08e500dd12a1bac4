"""Gradients that are set to None before their optimizer makes a step, as of a GAN whose images are not detached."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.findings import Context, find_all
from memprof.ledger.ledger import build_ledger
from memprof.trace.events import Trace
from memprof.units import MIB
from memprof.virtual import VirtualGpu

# Tensors of 2 MiB, so that nothing is searched for idle memory (watch/idle.py).
WIDTH, ROWS = 512, 1024

Step = Callable[["Pair"], None]


class Pair:
    """A generator and a critic, each with an optimizer."""

    def __init__(self) -> None:
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH)).cuda()
        self.critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.Sigmoid(), nn.Linear(8, 1)).cuda()
        self.of_generator = torch.optim.SGD(self.generator.parameters())
        self.of_critic = torch.optim.SGD(self.critic.parameters())

    def zero_grad(self) -> None:
        self.of_generator.zero_grad()
        self.of_critic.zero_grad()


def noise(rows: int | None = None) -> torch.Tensor:
    return torch.randn(rows or ROWS, WIDTH, device="cuda")


def train_critic(pair: Pair) -> None:
    loss = pair.critic(noise()).mean() - pair.critic(pair.generator(noise())).mean()
    pair.zero_grad()
    loss.backward()
    pair.of_critic.step()


def train_generator(pair: Pair) -> None:
    loss = -pair.critic(pair.generator(noise(64))).mean()
    pair.zero_grad()
    loss.backward()
    pair.of_generator.step()


def train_detached(pair: Pair) -> None:
    loss = pair.critic(noise()).mean() - pair.critic(pair.generator(noise()).detach()).mean()
    pair.zero_grad()
    loss.backward()
    pair.of_critic.step()


def train_both(pair: Pair) -> None:
    loss = pair.critic(noise()).mean() - pair.critic(pair.generator(noise())).mean()
    pair.zero_grad()
    loss.backward()
    pair.of_critic.step()
    pair.of_generator.step()


def train_twice(pair: Pair) -> None:
    """Both losses are of the same images: the second backward uses what the first has kept."""
    fake = pair.generator(noise())
    loss = pair.critic(noise()).mean() - pair.critic(fake).mean()
    pair.zero_grad()
    loss.backward(retain_graph=True)
    pair.of_critic.step()
    pair.zero_grad()
    (-pair.critic(fake).mean()).backward()
    pair.of_generator.step()


def accumulate(pair: Pair) -> None:
    """A step of the critic alone, whose gradients of the generator are kept for the generator's."""
    loss = pair.critic(noise()).mean() - pair.critic(pair.generator(noise())).mean()
    pair.of_critic.zero_grad()
    loss.backward()
    pair.of_critic.step()


def step_of_generator(pair: Pair) -> None:
    pair.of_generator.step()
    pair.of_generator.zero_grad()


def run(*steps: Step) -> Trace:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        pair = Pair()
        for _ in range(3):
            for step in steps:
                step(pair)
    return gpu.trace


@pytest.mark.nightly
def test_the_finding_names_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "WIDTH", 4096)
    monkeypatch.setitem(globals(), "ROWS", 8192)
    trace = run(train_critic, train_generator)
    context = Context(build_ledger(trace), None)
    (finding,) = (one for one in find_all(context) if one.id == "untrained-gradients")
    assert "that are set to None before their optimizer makes a step" in finding.title
    assert "call it under torch.no_grad() at watch/test_discarded_gradients.py:" in finding.evidence[0].text
    assert finding.num_bytes is not None and finding.num_bytes >= 128 * MIB


def test_a_critic_that_differentiates_the_generator() -> None:
    trace = run(train_critic, train_generator)
    assert trace.discarded_gradients and len(trace.untrained_spans) == 3


@pytest.mark.parametrize(
    "steps",
    [
        (train_detached, train_generator),
        (train_both,),
        (train_twice,),
        (accumulate, step_of_generator),
        (train_generator,),
    ],
    ids=["detached", "both step", "two losses", "kept for a step", "the generator alone"],
)
def test_gradients_that_are_used(steps: tuple[Step, ...]) -> None:
    trace = run(*steps)
    assert not trace.discarded_gradients and not trace.untrained_spans


def test_the_last_step_is_taken_for_one_like_those_before() -> None:
    """No backward follows, at which the gradients would be seen to be gone."""
    assert len(run(train_critic, train_generator, train_critic).untrained_spans) == 6
    assert len(run(train_critic).untrained_spans) == 3
