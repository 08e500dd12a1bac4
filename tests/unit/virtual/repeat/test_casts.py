"""Layers that are repeated under autocast, whose half copies of weights live until the region ends."""

import contextlib
import dataclasses
import functools
import itertools

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from memprof.catalog import find_gpu
from memprof.trace.events import PhaseKind
from memprof.virtual import VirtualGpu
from memprof.virtual.repeat import RunAgain, casts

WIDTH, LAYERS, STEPS = 32, 9, 2
MOST = STEPS * (LAYERS - 5)
"""Of two steps, all but the first three layers and the last two."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden):
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Recomputed(Block):
    def forward(self, hidden):
        return torch.utils.checkpoint.checkpoint(super().forward, hidden, use_reentrant=False)


class InFloat32(Block):
    """Has a part that is not cast."""

    def forward(self, hidden):
        with torch.autocast("cuda", enabled=False):
            hidden = hidden + self.norm(hidden.float())
        return super().forward(hidden)


class Clears(Block):
    def forward(self, hidden):
        hidden = super().forward(hidden)
        torch.clear_autocast_cache()
        return hidden


class Adapted(Block):
    """Small trained matrices beside frozen ones: the first has numbers that are known, the second is zeros."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.a = nn.Parameter(torch.arange(4.0 * WIDTH, device="cpu").reshape(4, WIDTH).to("cuda"))
        self.b = nn.Parameter(torch.zeros(WIDTH, 4))

    def forward(self, hidden):
        return super().forward(hidden) + nn.functional.linear(nn.functional.linear(hidden, self.a), self.b)


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, ids, settings=()):
        hidden = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            with torch.autocast("cuda", **settings[number % len(settings)]) if settings else contextlib.nullcontext():
                hidden = block(hidden)
        return self.head(self.norm(hidden)).float().square().mean()


def train(
    model, device, *, accumulate=1, set_to_none=True, caches=True, inside=False, call=lambda model, ids: model(ids)
):
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    for step in range(1, STEPS + 1):
        for batch in range(1, accumulate + 1):
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=caches):
                with device.phase(PhaseKind.FORWARD, step, batch):
                    loss = call(model, torch.arange(40, device="cuda").reshape(2, 20))
                if inside:
                    loss.backward()
            if not inside:
                with device.phase(PhaseKind.BACKWARD, step, batch):
                    loss.backward()
            del loss
        with device.phase(PhaseKind.OPTIMIZER, step):
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)


def recorded(kind, use, *, repeats):
    """The trace of a run, how many layers were repeated in it, and bytes of known numbers that it held at its end."""
    torch.manual_seed(0)
    device = VirtualGpu(find_gpu("h100-80gb"), repeats=repeats)
    with device:
        with device.phase(PhaseKind.MODEL), torch.device("cuda"):
            model = Model(kind)
        device.adopt(model)
        use(model, device)
        if repeats:
            device.repeats.settle()
        held = device.recording.values._held_bytes
        del model
    return device.trace, device.repeats.times if repeats else 0, held


def check_same(kind, use):
    """How many layers were repeated in a run that is in every field what it is without."""
    run, _, held = recorded(kind, use, repeats=False)
    trace, times, its = recorded(kind, use, repeats=True)
    for field in dataclasses.fields(run):
        assert getattr(trace, field.name) == getattr(run, field.name), field.name
    assert its == held
    return times


KINDS = (Block, Recomputed, InFloat32, Adapted)
USES = {
    "plain": train,
    "three micro-batches": functools.partial(train, accumulate=3),
    "gradients zeroed": functools.partial(train, accumulate=2, set_to_none=False),
    "no cache": functools.partial(train, caches=False),
}


def _kinds_and_uses():
    """Each kind and each use in every run, all pairs at night."""
    return [
        pytest.param(
            kind, use, marks=() if name == "plain" or at == other else pytest.mark.nightly, id=f"{name}-{kind.__name__}"
        )
        for (at, kind), (other, (name, use)) in itertools.product(enumerate(KINDS), enumerate(USES.items()))
    ]


@pytest.mark.parametrize(("kind", "use"), _kinds_and_uses())
def test_what_is_repeated_is_what_is_run(kind, use):
    accumulated = use.keywords.get("accumulate", 1) if isinstance(use, functools.partial) else 1
    assert check_same(kind, use) == MOST * accumulated


@pytest.mark.parametrize(
    "settings",
    [({"dtype": torch.bfloat16}, {"enabled": False}), ({"dtype": torch.float16}, {"dtype": torch.bfloat16})],
    ids=["off in every other layer", "two dtypes"],
)
def test_layers_in_regions_of_their_own_are_not_taken_for_the_others(settings):
    assert check_same(Block, functools.partial(train, call=lambda model, ids: model(ids, settings))) == 0


def test_without_gradients_every_layer_is_run():
    def use(model, device):
        with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            model(torch.arange(40, device="cuda").reshape(2, 20))

    assert check_same(Block, use) == 0


def test_where_a_layer_empties_the_cache_every_layer_is_run():
    assert check_same(Clears, train) == 0


def test_a_backward_within_the_region():
    """Copies that a graph held live on, until the region ends."""
    assert check_same(Recomputed, functools.partial(train, inside=True)) == MOST
    run_again(Block, functools.partial(train, inside=True))


def test_a_weight_that_is_used_once_more_in_the_region_is_run_again():
    def call(model, ids):
        return model(ids) + model.blocks[5](model.embedding(ids)).sum()

    run_again(Block, functools.partial(train, call=call))


@pytest.mark.parametrize("kind", [Block, Recomputed])
def test_a_copy_that_goes_at_another_time_than_was_thought_is_run_again(kind, monkeypatch):
    """As where something that is not a graph holds one."""
    cast = casts.Casts._cast

    def other(self, *args):
        found = cast(self, *args)
        return dataclasses.replace(found, is_kept=not found.is_kept)

    monkeypatch.setattr(casts.Casts, "_cast", other)
    run_again(kind, train)


def run_again(kind, use):
    with pytest.raises(RunAgain):
        recorded(kind, use, repeats=True)
    assert not torch.is_autocast_enabled("cuda")
