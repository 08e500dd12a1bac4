"""Layers that are repeated against the same layers run: every field of the trace is the same, or all are run."""

import dataclasses
import functools

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from memprof.catalog import find_gpu
from memprof.trace.events import PhaseKind
from memprof.virtual import VirtualGpu
from memprof.virtual.repeat import RunAgain
from memprof.virtual.values import Values

WIDTH, LAYERS, STEPS = 32, 9, 2
GROWN: list[torch.Tensor] = []


class Block(nn.Module):
    """A layer as most are: two residual branches."""

    def __init__(self, number=0, rate=0.0):
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = nn.Dropout(rate)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden, mask=None):
        inner = nn.functional.gelu(self.up(self.norm(hidden)))
        if mask is not None:
            inner = inner * mask
        return hidden + self.down(self.dropout(inner))


class LooksAtItsNumber(Block):
    def forward(self, hidden, mask=None):
        hidden = super().forward(hidden, mask)
        return hidden + hidden.new_ones(1) if self.number % 4 == 3 else hidden


class Counts(Block):
    calls = 0

    def forward(self, hidden, mask=None):
        self.calls += 1
        hidden = super().forward(hidden, mask)
        return hidden.clone() if self.calls > 1 else hidden


class Grows(Block):
    def forward(self, hidden, mask=None):
        hidden = super().forward(hidden, mask)
        GROWN.append(hidden)
        return hidden


class Decides(Block):
    """Does what its weights say, which are known and differ."""

    def __init__(self, number=0):
        super().__init__(number)
        self.register_buffer("wide", torch.tensor([number == 6, False]))

    def forward(self, hidden, mask=None):
        hidden = super().forward(hidden, mask)
        return hidden.clone() * 2 if self.wide.any().item() else hidden


class Narrow(Block):
    def forward(self, hidden, mask=None):
        return super().forward(hidden, mask[:, :1])


class InPlace(Block):
    def forward(self, hidden, mask=None):
        return super().forward(hidden, mask).relu_()


class Pair(Block):
    def forward(self, hidden, mask=None):
        return super().forward(hidden, mask), None


class Fails(Block):
    def forward(self, hidden, mask=None):
        hidden = super().forward(hidden, mask)
        if self.number == 5:
            raise ValueError("layer 5 is broken")
        return hidden


class Model(nn.Module):
    def __init__(self, blocks, *, checkpoint=False, keeps=False, normed=True):
        super().__init__()
        self.checkpoint, self.keeps = checkpoint, keeps
        self.embedding = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH) if normed else nn.Identity()
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, ids):
        hidden, kept = self.embedding(ids), []
        mask = hidden.new_ones(1, 3 * WIDTH)
        for block in self.blocks:
            kept.append(hidden)
            if self.checkpoint:
                hidden = torch.utils.checkpoint.checkpoint(block, hidden, mask, use_reentrant=self.checkpoint == "old")
            else:
                hidden = block(hidden, mask)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        loss = self.head(self.norm(hidden)).float().square().mean()
        return (loss, kept) if self.keeps else loss


def plain(kind=Block, **asked):
    return Model([kind(number) for number in range(LAYERS)], **asked)


def with_one(change):
    """A model with one layer in the middle that is changed."""
    model = plain()
    change(model.blocks[4])
    return model


def tied():
    model = plain()
    for block in model.blocks[1:]:
        block.down.weight = model.blocks[0].down.weight
    return model


def tied_in_pairs():
    model = plain()
    model.blocks[6].down.weight = model.blocks[4].down.weight
    return model


def alternating():
    return Model([Block(number) if number % 3 else Narrow(number) for number in range(19)])


def frozen():
    model = plain()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model


def frozen_below():
    model = plain()
    for parameter in (*model.embedding.parameters(), *model.blocks[:4].parameters()):
        parameter.requires_grad_(False)
    return model


def in_half():
    return plain().to(torch.bfloat16)


def train(model, device, *, accumulate=1, set_to_none=True, clip=False, kind=torch.optim.AdamW):
    optimizer = kind([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    for step in range(1, STEPS + 1):
        for batch in range(1, accumulate + 1):
            with device.phase(PhaseKind.FORWARD, step, batch):
                ids = torch.arange(40, device="cuda").reshape(2, 20)
                loss = model(ids)
            with device.phase(PhaseKind.BACKWARD, step, batch):
                (loss[0] if isinstance(loss, tuple) else loss).backward()
            del loss
        with device.phase(PhaseKind.OPTIMIZER, step):
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)


def infer(model, device):
    for step in range(1, STEPS + 1):
        with device.phase(PhaseKind.FORWARD, step), torch.no_grad():
            model(torch.arange(40, device="cuda").reshape(2, 20))


def recorded(build, use, *, repeats):
    """The trace of a run, and how many layers were repeated in it."""
    torch.manual_seed(0)
    device = VirtualGpu(find_gpu("h100-80gb"), repeats=repeats)
    GROWN.clear()
    with device:
        with device.phase(PhaseKind.MODEL), torch.device("cuda"):
            model = build()
        device.adopt(model)
        use(model, device)
        if repeats:
            device.repeats.settle()
        del model
    GROWN.clear()
    return device.trace, device.repeats.times if repeats else 0


def check_same(build, use):
    """How many layers were repeated in a run that is in every field what it is without."""
    run, _ = recorded(build, use, repeats=False)
    trace, times = recorded(build, use, repeats=True)
    for field in dataclasses.fields(run):
        assert getattr(trace, field.name) == getattr(run, field.name), field.name
    return times


MOST = STEPS * (LAYERS - 5)
"""Of two steps, all but the first three layers and the last two."""


@pytest.mark.parametrize(
    ("build", "use"),
    [
        (plain, train),
        (in_half, train),
        (frozen, train),
        (functools.partial(plain, Pair), train),
        (lambda: Model([Block(number, 0.1) for number in range(LAYERS)]), train),
        (plain, functools.partial(train, set_to_none=False)),
        (plain, functools.partial(train, accumulate=3)),
        (plain, functools.partial(train, clip=True)),
        (plain, functools.partial(train, kind=torch.optim.SGD)),
    ],
    ids=[
        *("plain", "bfloat16", "most weights frozen", "a tuple", "dropout"),
        *("gradients zeroed", "three micro-batches", "clipping", "SGD"),
    ],
)
def test_what_is_repeated_is_what_is_run(build, use):
    times = check_same(build, use)
    accumulated = 3 if isinstance(use, functools.partial) and "accumulate" in use.keywords else 1
    assert times == MOST * accumulated


def test_a_forward_alone_runs_three_layers():
    assert check_same(plain, infer) == STEPS * (LAYERS - 3)


def test_kinds_that_alternate_are_repeated_each_from_its_own():
    assert check_same(alternating, train) == STEPS * (12 - 4 + 7 - 5)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.register_forward_hook(lambda *_: None),
        lambda layer: layer.up.register_forward_pre_hook(lambda module, args: (args[0].clone(),)),
        lambda layer: setattr(layer.dropout, "p", 0.5),
        lambda layer: layer.eval(),
        lambda layer: setattr(layer, "up", nn.Linear(WIDTH, 3 * WIDTH, bias=False)),
        lambda layer: setattr(layer, "forward", lambda hidden, mask: hidden * 1),
        lambda layer: layer.norm.requires_grad_(False),
        lambda layer: layer.down.weight.register_hook(lambda gradient: gradient.clone()),
        lambda layer: layer.to(torch.float64).forward,
    ],
    ids=["hook", "hook inside", "attribute", "mode", "bias", "forward", "frozen", "hook of a weight", "dtype"],
)
def test_a_layer_that_differs_is_run(change):
    def use(model, device):
        if model.blocks[4].up.weight.dtype is torch.float64:
            model.blocks[4].float()
        train(model, device)

    check_same(functools.partial(with_one, change), use)


@pytest.mark.parametrize("build", [tied, tied_in_pairs, frozen_below], ids=["all tied", "two tied", "frozen below"])
def test_models_whose_layers_share_or_differ(build):
    check_same(build, train)


@pytest.mark.parametrize("kind", [LooksAtItsNumber, Counts])
def test_layers_that_are_not_what_they_seem_are_run(kind):
    assert check_same(functools.partial(plain, kind), train) == 0


@pytest.mark.parametrize("kind", [Grows, Decides, InPlace])
def test_what_is_seen_too_late_is_run_again(kind):
    run_again(functools.partial(plain, kind), train)


def test_numbers_that_differ_and_are_looked_at_are_those_of_a_layer_that_is_run():
    assert check_same(functools.partial(plain, Decides), infer) == STEPS * (LAYERS - 4)


@pytest.mark.parametrize(("kind", "times"), [("old", STEPS * (LAYERS - 3)), ("new", 0)])
def test_checkpointing_repeats_forwards_unless_tensors_are_saved_by_hooks(kind, times):
    """Recomputed in the backward every layer is run."""
    assert check_same(functools.partial(plain, checkpoint=kind), train) == times


def test_hidden_states_that_are_returned_live_as_long():
    check_same(functools.partial(plain, keeps=True), train)


def test_a_last_layer_whose_backward_is_another_is_run_again():
    """What arrives there is a view of what the head's product made: the engine adds to it in memory of its own."""
    run_again(functools.partial(plain, normed=False), train)


def run_again(build, use):
    with pytest.raises(RunAgain):
        recorded(build, use, repeats=True)


def test_a_graph_that_is_not_differentiated_is_run_again():
    def use(model, device):
        model(torch.arange(40, device="cuda").reshape(2, 20))

    run_again(plain, use)


def test_a_gradient_asked_for_twice_is_run_again():
    def use(model, device):
        loss = model(torch.arange(40, device="cuda").reshape(2, 20))
        loss.backward(retain_graph=True)
        loss.backward()

    run_again(plain, use)


def test_no_graph_is_looked_through_for_layers_of_which_none_is_like_another(monkeypatch):
    """What is given is not kept for it, either."""
    monkeypatch.setattr("memprof.virtual.repeat.passes.ends_in_leaf", lambda *_: pytest.fail("looked through"))

    def hooked():
        model = plain()
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: None)
        return model

    assert check_same(hooked, train) == 0


class TakesMore(nn.Module):
    """Layers that are given a list of objects, which is not looked into."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(Given(number) for number in range(LAYERS))

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden, [object()])
        return hidden.float().square().mean()


class Given(Block):
    def forward(self, hidden, more):
        return super().forward(hidden)


def test_what_is_not_looked_into_is_not_kept():
    assert check_same(TakesMore, train) == 0


class Knows(Block):
    """Computes numbers that are known."""

    def forward(self, hidden, mask=None):
        places = torch.arange(3 * WIDTH, device=hidden.device)
        return super().forward(hidden, (places % 7 > 2).to(hidden.dtype))


@pytest.mark.parametrize(("kind", "times"), [(Block, STEPS * (LAYERS - 3)), (Knows, 0)])
def test_layers_for_whose_numbers_there_is_no_room_are_run(kind, times, monkeypatch):
    """Others need none."""
    has_room = Values.has_room
    monkeypatch.setattr(Values, "has_room", lambda self, work, rise: not (work or rise) and has_room(self, work, rise))
    assert check_same(functools.partial(plain, kind), infer) == times


def test_nothing_has_room_where_no_more_may_be_computed_and_held(monkeypatch):
    monkeypatch.setattr("memprof.virtual.budget.MAX_WORK", -1)
    monkeypatch.setattr("memprof.virtual.budget.MAX_SHADOW_BYTES", -1)
    values = Values(lambda sentence: None)
    assert values.has_room(0, 0)
    assert not values.has_room(1, 0)
    assert not values.has_room(0, 1)
