"""Programs that leak in the ways that people's programs do, and programs that only look like it: one finding a cause,
with the container and the line that fills it, or none.

What keeps tensors is made while a program runs, not when this file is imported: pytest's process freezes what it has
imported, and Python's collector does not tell of frozen objects.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import memprof
from memprof.findings import Finding

pytestmark = pytest.mark.usefixtures("small_heap")

RULES = ("evaluation-accumulates", "evaluation-with-gradients", "memory-growth")
ROWS, WIDTH = 512, 256


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)).cuda()
    return model, torch.optim.AdamW(model.parameters())


def batches(number: int = 6, rows: int = ROWS) -> Iterator[torch.Tensor]:
    return (torch.randn(rows, WIDTH).cuda() for _ in range(number))


def learn(loss: torch.Tensor, optimizer: torch.optim.Optimizer, *, retain: bool = False) -> None:
    optimizer.zero_grad()
    loss.backward(retain_graph=retain)
    optimizer.step()


def found(program: Callable[[], Any]) -> list[Finding]:
    with memprof.virtual_gpu(vram=1) as gpu:  # small: findings replay steps until it is full
        program()
    return [finding for finding in gpu.report().findings if finding.id in RULES]


# -- programs that leak, at the line that ends with "kept" ----------------------------------------------------------


def losses_with_their_graph() -> None:
    model, optimizer = parts()
    losses = []
    for x in batches():
        loss = model(x).square().mean()
        learn(loss, optimizer, retain=True)
        losses.append(loss)  # kept


def in_a_class() -> None:
    class Tracker:
        seen: list[torch.Tensor] = []  # noqa: RUF012

        def add(self, value: torch.Tensor) -> None:
            self.seen.append(value)  # kept

    model, optimizer = parts()
    tracker = Tracker()
    for x in batches():
        out = model(x)
        learn(out.mean(), optimizer)
        tracker.add(out.detach())


def of_hooks() -> None:
    model, optimizer = parts()
    activations: dict[int, list[torch.Tensor]] = {}
    for number, module in enumerate(model):  # type: ignore[arg-type]
        module.register_forward_hook(
            lambda module, args, output, number=number: activations.setdefault(number, []).append(output)  # kept
        )
    for x in batches():
        learn(model(x).mean(), optimizer)


def in_an_lru_cache() -> None:
    @functools.lru_cache(maxsize=None)  # kept  # noqa: UP033
    def features(number: int) -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, device="cuda") * number

    model, optimizer = parts()
    for number in range(6):
        learn(model(features(number)).mean(), optimizer)


def copies_of_the_weights() -> None:
    model, optimizer = parts()
    snapshots = []
    for x in batches():
        learn(model(x).mean(), optimizer)
        snapshots.append(copy.deepcopy(model.state_dict()))  # kept


def copies_of_the_model() -> None:
    model, optimizer = parts()
    averages = []
    for x in batches():
        learn(model(x).mean(), optimizer)
        averages.append(copy.deepcopy(model))  # kept


def gradients() -> None:
    model, optimizer = parts()
    kept = []
    for x in batches():
        learn(model(x).mean(), optimizer)
        kept.append([parameter.grad for parameter in model.parameters()])  # kept


def frames_of_exceptions() -> None:
    model, optimizer = parts()
    errors = []

    def fail(x: torch.Tensor) -> None:
        squares = x.square()
        raise ValueError(f"bad batch: {squares.shape}")

    for x in batches():
        try:
            fail(x)
        except ValueError as error:
            errors.append(error)  # kept
        learn(model(x).mean(), optimizer)


def hidden_state() -> None:
    cell = nn.GRUCell(WIDTH, WIDTH).cuda()
    head = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.SGD([head.weight])
    hidden = torch.zeros(ROWS, WIDTH, device="cuda")
    for x in batches():
        hidden = cell(x, hidden)  # kept
        learn(head(hidden).mean(), optimizer, retain=True)


def without_an_optimizer() -> None:
    model, _ = parts()
    scores = []
    for x in batches():
        loss = model(x).square()
        loss.mean().backward()
        scores.append(loss.detach())  # kept


def hidden_state_of_micro_batches() -> None:
    model = nn.LSTM(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        hidden = None
        for x in batches():
            out, hidden = model(x[None], hidden)  # kept
            out.square().mean().backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def inside_of_modules() -> None:
    model, _ = parts()
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output))  # kept
    for x in batches():
        model(x)


class Mean:
    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []

    @torch.no_grad()
    def update(self, value: torch.Tensor) -> None:
        self.values.append(value)  # kept


def metric() -> None:
    model, optimizer = parts()
    mean = Mean()
    for x in batches():
        out = model(x)
        learn(out.mean(), optimizer)
        mean.update(out)


class Logger:
    def __init__(self) -> None:
        self.history: dict[str, list[Any]] = defaultdict(list)

    def log(self, **values: Any) -> None:
        for name, value in values.items():
            self.history[name].append(value)  # kept


def logger() -> None:
    model, optimizer = parts()
    logger = Logger()
    for x in batches():
        out = model(x)
        learn(out.mean(), optimizer)
        logger.log(output=out, batch=x)


@dataclass
class State:
    gradients: list[Any] = field(default_factory=list)


def filled_from_outside() -> None:
    model, optimizer = parts()
    state = State()
    for x in batches():
        learn(model(x).mean(), optimizer)
        state.gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])  # kept


class Task:
    """Steps as Lightning does, by a closure: when it runs, the batch is there and not yet in the list."""

    def __init__(self) -> None:
        self.model, self.optimizer = parts()
        self.seen: list[Any] = []

    def closure(self) -> torch.Tensor:
        out = self.model(self.batch)
        self.seen.append({"batch": self.batch, "out": out.detach()})  # kept
        self.optimizer.zero_grad()
        loss = out.square().mean()
        loss.backward()
        return loss

    def run(self) -> None:
        for self.batch in batches():
            self.optimizer.step(self.closure)


def in_a_closure_of_the_optimizer() -> None:
    Task().run()


def callbacks() -> None:
    model, optimizer = parts()
    pending = []
    for x in batches():
        out = model(x).detach()
        learn(model(x).mean(), optimizer)
        pending.append(lambda out=out: out.mean())  # kept


def predictions_with_gradients() -> None:
    model, _ = parts()
    model.eval()
    predictions = []
    for x in batches():
        predictions.append(model(x))  # kept  # noqa: PERF401


def predictions_without_gradients() -> None:
    model, optimizer = parts()
    for _ in range(2):
        learn(model(torch.randn(ROWS, WIDTH, device="cuda")).mean(), optimizer)
        predictions = []
        with torch.no_grad():
            for x in batches():
                predictions.append(model(x))  # kept  # noqa: PERF401


GROWTH, KEPT, GRADIENTS = "memory-growth", "evaluation-accumulates", "evaluation-with-gradients"


@pytest.mark.parametrize(
    ("program", "finding", "holder", "filled_in"),
    [
        (losses_with_their_graph, GROWTH, "list `losses`", losses_with_their_graph),
        (in_a_class, GROWTH, "list `Tracker.seen`", in_a_class),
        (of_hooks, GROWTH, "dict `activations`", of_hooks),
        (in_an_lru_cache, GROWTH, "lru_cache `features`", in_an_lru_cache),
        (copies_of_the_weights, GROWTH, "list `snapshots`", copies_of_the_weights),
        (copies_of_the_model, GROWTH, "list `averages`", copies_of_the_model),
        (gradients, GROWTH, "list `kept`", gradients),
        (frames_of_exceptions, GROWTH, "list `errors`", frames_of_exceptions),
        (hidden_state, GROWTH, "variable `hidden`", hidden_state),
        (without_an_optimizer, GROWTH, "list `scores`", without_an_optimizer),
        (hidden_state_of_micro_batches, GROWTH, "variable `hidden[0]`", hidden_state_of_micro_batches),
        (inside_of_modules, KEPT, "list `seen`", inside_of_modules),
        (metric, GROWTH, "list `Mean.values`", Mean.update),
        (logger, GROWTH, "defaultdict `Logger.history`", Logger.log),
        (filled_from_outside, GROWTH, "list `State.gradients`", filled_from_outside),
        (in_a_closure_of_the_optimizer, GROWTH, "list `Task.seen`", Task.closure),
        (callbacks, GROWTH, "list `pending`", callbacks),
        (predictions_with_gradients, GRADIENTS, "list `predictions`", predictions_with_gradients),
        (predictions_without_gradients, KEPT, "list `predictions`", predictions_without_gradients),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_one_finding_with_the_container_and_its_line(
    program: Callable[[], None], finding: str, holder: str, filled_in: Any
) -> None:
    (only,) = found(program)
    lines, first = inspect.getsourcelines(inspect.unwrap(filled_in))
    at = first + next(number for number, line in enumerate(lines) if "# kept" in line)
    assert only.id == finding
    assert f"kept by {holder} (findings/test_leaks.py:{at})" in only.title


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        out, state = self.lstm(x, state)  # a variable of the same name as the program's
        return out, state


def carried_state(every: int = 100) -> None:
    model, state = Recurrent().cuda(), None
    optimizer = torch.optim.AdamW(model.parameters())
    for number, x in enumerate(batches(8)):
        if number % every == 0 and state is not None:
            state = tuple(part.detach() for part in state)
        out, state = model(x, state)  # kept
        learn(out.mean(), optimizer, retain=True)


@pytest.mark.parametrize(("every", "when"), [(100, "before the next step"), (5, "after each step, or after fewer")])
def test_a_state_that_is_carried_is_to_be_detached(every: int, when: str) -> None:
    (finding,) = found(lambda: carried_state(every))
    lines, first = inspect.getsourcelines(carried_state)
    line = first + next(number for number, line in enumerate(lines) if "# kept" in line)
    fix = finding.evidence[-1].text
    assert fix.startswith(f"fix at findings/test_leaks.py:{line}: detach it {when}")
    assert "state = tuple(part.detach() for part in state), and leave out retain_graph=True" in fix


def carried_in_a_dict() -> None:
    model, states = nn.Linear(WIDTH, WIDTH).cuda(), {"first": torch.zeros(1, WIDTH, device="cuda")}
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches(8):
        states["first"] = model(x).mean(0, keepdim=True) * torch.tanh(states["first"] + x)  # kept
        learn(states["first"].mean(), optimizer, retain=True)


def test_a_state_of_a_dict_is_detached_by_its_key() -> None:
    (finding,) = found(carried_in_a_dict)
    assert "states['first'] = states['first'].detach()" in finding.evidence[-1].text


def test_hooks_of_a_model_in_training_mode_keep_less_in_eval_mode() -> None:
    (finding,) = found(inside_of_modules)
    assert finding.title.startswith("Tensors of 6 calls of Sequential")
    assert "call eval() before findings/test_leaks.py:" in finding.evidence[-1].text


# -- programs that do not ---------------------------------------------------------------------------------------------


def bounded_deque() -> None:
    model, optimizer = parts()
    window: deque[torch.Tensor] = deque(maxlen=100)
    for x in batches():
        out = model(x)
        learn(out.mean(), optimizer)
        window.append(out.detach())


def bounded_lru_cache() -> None:
    @functools.lru_cache(maxsize=100)
    def features(number: int) -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, device="cuda") * number

    model, optimizer = parts()
    for number in range(6):
        learn(model(features(number)).mean(), optimizer)


def window_of_slices() -> None:
    model, optimizer = parts()
    recent: list[torch.Tensor] = []
    for x in batches(8):
        out = model(x)
        learn(out.mean(), optimizer)
        recent.append(out.detach())
        recent = recent[-3:]


def cache_that_fills() -> None:
    model, optimizer = parts()
    cache: dict[int, torch.Tensor] = {}
    for number in range(6):
        if number % 4 not in cache:
            cache[number % 4] = torch.randn(ROWS, WIDTH).cuda()
        learn(model(cache[number % 4]).mean(), optimizer)


def micro_batches() -> None:
    model, optimizer = parts()
    losses = []
    for number, x in enumerate(batches(8)):
        losses.append(model(x).mean())
        if number % 2:
            learn(torch.stack(losses).mean(), optimizer)
            losses.clear()


def detached_state() -> None:
    cell = nn.GRUCell(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.AdamW(cell.parameters())
    hidden = torch.zeros(ROWS, WIDTH, device="cuda")
    for x in batches():
        hidden = cell(x, hidden.detach())
        learn(hidden.mean(), optimizer)


def hooks_that_overwrite() -> None:
    model, optimizer = parts()
    seen: dict[int, torch.Tensor] = {}
    for number, module in enumerate(model):  # type: ignore[arg-type]
        module.register_forward_hook(lambda m, args, output, number=number: seen.update({number: output}))
    for x in batches():
        learn(model(x).mean(), optimizer)


def prefetched() -> None:
    model, optimizer = parts()
    ahead: list[torch.Tensor] = []
    for x in batches(8):
        ahead.append(x)
        if len(ahead) == 3:
            learn(model(ahead.pop(0)).mean(), optimizer)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.past: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.past is not None:
            k, v = torch.cat([self.past[0], k], 1), torch.cat([self.past[1], v], 1)
        self.past = (k, v)
        return nn.functional.scaled_dot_product_attention(q, k, v)


@torch.no_grad()
def keys_and_values() -> None:
    model = Decoder().cuda().eval()
    x = torch.randn(16, 64, WIDTH, device="cuda")
    for _ in range(8):
        x = model(x)[:, -1:]


class Streaming(nn.Module):
    """Attends to what it has made in all calls before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.layer(x) * 2)
        return torch.stack(self.seen).mean(0)


@torch.no_grad()
def cache_of_a_model_in_eval_mode() -> None:
    model = Streaming().cuda().eval()
    for x in batches():
        model(x).sum()


@pytest.mark.parametrize(
    "program",
    [
        bounded_deque, bounded_lru_cache, window_of_slices, cache_that_fills, micro_batches,
        detached_state, hooks_that_overwrite, prefetched,
        keys_and_values, cache_of_a_model_in_eval_mode,
    ],
    ids=lambda program: program.__name__,
)  # fmt: skip
def test_innocent(program: Callable[[], None]) -> None:
    assert [finding.title for finding in found(program)] == []
