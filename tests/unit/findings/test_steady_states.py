"""Programs whose memory is steady, or bounded: nothing is told of them, however many steps they run."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import memprof
from tests.lanes import by_day

pytestmark = pytest.mark.usefixtures("small_heap")

Train = Callable[[int], None]


class Experts(nn.Module):
    """One of its layers per call: gradients and optimizer state appear step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 1000) for _ in range(8))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.experts[self.calls % 8](x)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 1000)
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(512, 1000, device=x.device)
        return self.proj(x) * self.mask


def batch(rows: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 64, device="cuda"), torch.zeros(rows, dtype=torch.long, device="cuda")


def plain(steps: int, model: nn.Module | None = None, rows: Callable[[int], int] = lambda step: 512) -> None:
    model = nn.Linear(64, 1000).cuda() if model is None else model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    total = torch.zeros((), device="cuda")
    for step in range(steps):
        x, y = batch(rows(step))
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()


def longer_batches(steps: int) -> None:
    plain(steps, rows=lambda step: 500 + 20 * step)


def accumulation(steps: int) -> None:
    model = nn.Linear(64, 1000).cuda()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for _ in range(steps):
        for _ in range(4):
            x, y = batch()
            (functional.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def averaged_weights(steps: int) -> None:
    model = nn.Linear(64, 1000).cuda()
    average = None
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        x, y = batch()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if average is None:
            average = copy.deepcopy(model)
        with torch.no_grad():
            for mine, other in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.1)


def mixed_precision(steps: int) -> None:
    model = nn.Linear(64, 1000).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(steps):
        x, y = batch()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def second_order(steps: int) -> None:
    model = nn.Linear(640, 1000).cuda()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    x, y = torch.randn(512, 640, device="cuda"), torch.zeros(512, dtype=torch.long, device="cuda")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def window(steps: int) -> None:
    model = nn.Linear(64, 1000).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    last: collections.deque[torch.Tensor] = collections.deque(maxlen=4)
    for _ in range(steps):
        x, y = batch()
        out = model(x)
        functional.cross_entropy(out, y).backward()
        optimizer.step()
        last.append(out.detach())


def adversarial(steps: int) -> None:
    """The step of the one optimizer lies between `fake` and its use by the other."""
    maker, judge = nn.Linear(64, 1000).cuda(), nn.Linear(1000, 1).cuda()
    first, second = torch.optim.Adam(judge.parameters()), torch.optim.Adam(maker.parameters())
    for _ in range(steps):
        fake = maker(batch()[0])
        output = judge(fake.detach())
        output.mean().backward()
        first.step()
        output = judge(fake)
        output.mean().backward()
        second.step()


def judged_after_the_step(steps: int) -> None:
    model = nn.Linear(64, 1000).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        x, y = batch()
        out = model(x)
        functional.cross_entropy(out, y).backward()
        optimizer.step()
        _, predicted = out.max(1)  # kept until the next step's  # noqa: RUF059


@pytest.mark.parametrize("steps", by_day([2, 3, 4, 8], 3, 8))
@pytest.mark.parametrize(
    "train",
    [
        plain, longer_batches, accumulation, averaged_weights, mixed_precision, second_order, window,
        adversarial, judged_after_the_step,
        pytest.param(lambda steps: plain(steps, Experts()), id="experts"),
        pytest.param(lambda steps: plain(steps, Lazy()), id="lazy"),
    ],
)  # fmt: skip
def test_nothing_grows(train: Train, steps: int) -> None:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        train(steps)
    wrong = [finding for finding in gpu.report().findings if finding.id in ("memory-growth", "evaluation-accumulates")]
    assert not wrong, wrong
