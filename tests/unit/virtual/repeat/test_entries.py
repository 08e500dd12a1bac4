"""Layers that are given a cache: what they keep in it is what layers that are run keep, and the record is the same."""

import dataclasses

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from memprof.catalog import find_gpu
from memprof.remedies.compiled import Compiled
from memprof.trace.events import PhaseKind
from memprof.virtual import VirtualGpu
from memprof.virtual.repeat import RunAgain

WIDTH, HEADS, LAYERS, STEPS = 32, 4, 9, 4
MOST = STEPS * (LAYERS - 3)
"""All but the first three layers, in each step."""


class Attention(nn.Module):
    """A layer as in transformers: it finds its entry by its number."""

    def __init__(self, number):
        super().__init__()
        self.layer_idx = number
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def keep(self, cache, keys, values):
        return cache.update(keys, values, self.layer_idx)

    def forward(self, hidden, cache):
        queries, keys, values = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(hidden)).chunk(3, -1)
        )
        keys, values = self.keep(cache, keys, values)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values)
        return hidden + self.out(mixed.transpose(1, 2).flatten(-2))


class LooksAtItsNumber(Attention):
    def forward(self, hidden, cache):
        hidden = super().forward(hidden, cache)
        return hidden + 1 if self.layer_idx == 5 else hidden


class LooksAtAnother(Attention):
    def keep(self, cache, keys, values):
        return super().keep(cache, keys + 0 if cache.layers[0].is_initialized else keys, values)


class LooksAtTheNext(Attention):
    def keep(self, cache, keys, values):
        return super().keep(cache, keys, values) if cache.layers[(self.layer_idx + 1) % LAYERS] else None


class AsksHowMany(Attention):
    def keep(self, cache, keys, values):
        return super().keep(cache, keys, values) if len(cache.layers) else None


class GoesThroughAll(Attention):
    def keep(self, cache, keys, values):
        return super().keep(cache, keys, values) if all(one is not None for one in cache.layers) else None


class Replaces(Attention):
    """Puts a new entry in the place of the last one."""

    def keep(self, cache, keys, values):
        old = cache.layers[self.layer_idx]
        cache.layers[self.layer_idx] = new = DynamicLayer()
        if old.is_initialized:
            new.update(old.keys, old.values)
        return new.update(keys, values)


class Counts(Attention):
    """Changes what all layers are given."""

    def keep(self, cache, keys, values):
        cache.seen = getattr(cache, "seen", 0) + 1
        return super().keep(cache, keys, values)


class CountsItself(Attention):
    """Keeps a number in its entry, and does something else once it is high."""

    def keep(self, cache, keys, values):
        entry = cache.layers[self.layer_idx]
        entry.times = getattr(entry, "times", 0) + 1
        return super().keep(cache, keys + 0 if entry.times > 2 else keys, values)


class ChangesItsKeys(Attention):
    """Writes to what it keeps."""

    def keep(self, cache, keys, values):
        found = super().keep(cache, keys, values)
        cache.layers[self.layer_idx].keys.mul_(0.5).add_(1)
        return found


class KeepsItsNumber(Attention):
    def keep(self, cache, keys, values):
        cache.layers[self.layer_idx].number = self.layer_idx
        return super().keep(cache, keys, values)


class KeepsBoth(Attention):
    """One tensor has the keys and the values, of which the entry has views."""

    def keep(self, cache, keys, values):
        entry = cache.layers[self.layer_idx]
        both = torch.stack([keys, values])
        if entry.is_initialized:
            both = torch.cat([entry.both, both], -2)
        entry.both, entry.is_initialized = both, True
        entry.keys, entry.values = both.unbind()
        return entry.keys, entry.values


class KeepsOne(KeepsBoth):
    """The same, and the entry has no views."""

    def keep(self, cache, keys, values):
        found = super().keep(cache, keys, values)
        entry = cache.layers[self.layer_idx]
        entry.keys = entry.values = None
        return found


class KeepsAScale(Attention):
    """Leaves a number on the card that is known, and is not touched again."""

    def keep(self, cache, keys, values):
        entry = cache.layers[self.layer_idx]
        if not entry.is_initialized:
            entry.scale = torch.tensor(0.5, device=keys.device)
        return super().keep(cache, keys * entry.scale, values)


class KeepsPositions(Attention):
    """Leaves many numbers that are known."""

    def keep(self, cache, keys, values):
        cache.layers[self.layer_idx].positions = torch.arange(keys.shape[-2], device=keys.device)
        return super().keep(cache, keys, values)


class Slices(Attention):
    """Keeps a part of what it was given, and all of its memory."""

    def keep(self, cache, keys, values):
        found = super().keep(cache, keys, values)
        cache.layers[self.layer_idx].last = keys[:, :, -1:]
        return found


class OnTheHost(Attention):
    """Keeps its keys in host memory."""

    def keep(self, cache, keys, values):
        entry = cache.layers[self.layer_idx]
        if entry.is_initialized:
            entry.keys = entry.keys.to(keys.device)
        found = super().keep(cache, keys, values)
        entry.keys = entry.keys.to("cpu")
        return found


class Fails(Attention):
    def keep(self, cache, keys, values):
        if cache.layers[self.layer_idx].is_initialized:
            raise ValueError("the entry is broken")
        return super().keep(cache, keys, values)


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(kind(number) for number in range(LAYERS))
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, ids, cache):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden, cache)
        return self.head(hidden[:, -1:])


class Own:
    """A cache that knows nothing of transformers."""

    def __init__(self, entries):
        self.layers = entries

    def update(self, keys, values, number):
        return self.layers[number].update(keys, values)


class Entry:
    is_initialized = False

    def __init__(self):
        self.keys = self.values = None

    def update(self, keys, values):
        if self.is_initialized:
            keys, values = torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)
        self.keys, self.values, self.is_initialized = keys, values, True
        return keys, values


class Slotted(Own):
    """Its slots cannot be seen."""

    __slots__ = ("more",)


class Slots(Entry):
    __slots__ = ("more",)


class Two(Own):
    def __init__(self, entries):
        super().__init__(entries)
        self.others = list(entries)


def entries(kind, **asked):
    return [kind(**asked) for _ in range(LAYERS)]


def full():
    return Own(entries(DynamicLayer))


def views():
    return Own(entries(Entry))


def of_transformers():
    cache = DynamicCache()
    cache.layers, cache.layer_class_to_replicate = entries(DynamicLayer), None
    return cache


def sliding(window=12):
    return Own(entries(DynamicSlidingWindowLayer, sliding_window=window))


def alternating():
    return Own([DynamicSlidingWindowLayer(12) if number % 2 else DynamicLayer() for number in range(LAYERS)])


def recorded(kind, make, *, repeats, between=lambda cache, step: None, grad=False):
    """The trace of a run, how many layers were repeated in it, and what the cache was after each step."""
    torch.manual_seed(0)
    device = VirtualGpu(find_gpu("h100-80gb"), repeats=repeats)
    states = []
    with device:
        with device.phase(PhaseKind.MODEL), torch.device("cuda"):
            model = Model(kind).eval()
        device.adopt(model)
        with torch.set_grad_enabled(grad):
            with device.phase(PhaseKind.INPUTS, 1):
                cache, ids = make(), torch.arange(20, device="cuda").reshape(2, 10)
            for step in range(1, STEPS + 1):
                with device.phase(PhaseKind.FORWARD if step == 1 else PhaseKind.DECODE, step):
                    ids = model(ids, cache).argmax(-1)
                kept = between(cache, step)
                kinds = cache.layers.values() if isinstance(cache.layers, dict) else cache.layers
                states.append([described(entry, device) for entry in kinds])
                del kept
        del cache, ids
        if repeats:
            device.repeats.settle()
        del model
    return device.trace, device.repeats.times if repeats else 0, states


def described(entry, device):
    """Names and values of an entry, tensors by all that can be seen of them."""
    found = {}
    for name, value in vars(entry).items():
        if isinstance(value, torch.Tensor):
            index, base = device.recorder.index_of(value), value._base
            is_few = value.numel() < 9 and (index < 0 or device.recording.values.get(value) is not None)
            value = (
                index, value.device, value.size(), value.stride(), value.dtype, value.storage_offset(),
                value.untyped_storage().nbytes(), None if base is None else (base.size(), base.stride()),
                value._is_view(), value._version, value.requires_grad, value.tolist() if is_few else None,
            )  # fmt: skip
        found[name] = type(value), value
    return list(found.items())


def check_same(kind, make, **asked):
    """How many layers were repeated in a run that is in every field what it is without."""
    run, _, states = recorded(kind, make, repeats=False, **asked)
    trace, times, others = recorded(kind, make, repeats=True, **asked)
    for field in dataclasses.fields(run):
        assert getattr(trace, field.name) == getattr(run, field.name), field.name
    assert others == states
    return times


@pytest.mark.parametrize(
    ("make", "times"),
    [(of_transformers, MOST), (full, MOST), (sliding, MOST), (alternating, 0), (views, MOST - 6)],
    ids=["theirs", "own", "sliding", "alternating", "views at first"],
)
def test_layers_that_grow_a_cache_are_repeated(make, times):
    """A window of 12 tokens is full from the third step on. Layers that are alike with entries that are not are run,
    and those that leave keys and values that are views of one tensor."""
    assert check_same(Attention, make) == times


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        (CountsItself, MOST),
        (ChangesItsKeys, MOST),
        (KeepsAScale, MOST),
        (KeepsOne, MOST),
        (Slices, MOST),
        (KeepsBoth, 0),
    ],
)
def test_what_else_is_in_an_entry(kind, times):
    assert check_same(kind, full) == times


@pytest.mark.parametrize(
    "kind", [LooksAtItsNumber, LooksAtAnother, LooksAtTheNext, AsksHowMany, GoesThroughAll, Replaces, Counts]
)
def test_layers_that_look_at_more_than_their_entry_are_run(kind):
    assert check_same(kind, full) == 0


@pytest.mark.parametrize(("kind", "times"), [(KeepsItsNumber, 0), (OnTheHost, 0), (KeepsPositions, MOST // 2)])
def test_layers_that_keep_what_is_not_understood_are_run(kind, times):
    """Of positions many are known in the first step, and one from the second on."""
    assert check_same(kind, full) == times


@pytest.mark.parametrize(
    "make",
    [
        lambda: Own(entries(StaticLayer, max_cache_len=16)),
        lambda: Own([DynamicLayer()] * LAYERS),
        lambda: Own(tuple(entries(DynamicLayer))),
        lambda: Own(dict(enumerate(entries(DynamicLayer)))),
        lambda: Slotted(entries(DynamicLayer)),
        lambda: Two(entries(DynamicLayer)),
        lambda: Own(entries(Slots)),
        DynamicCache,
    ],
    ids=[
        "written in place",
        "one entry",
        "a tuple",
        "a dictionary",
        "slots",
        "two lists",
        "entries' slots",
        "appended",
    ],
)
def test_caches_that_are_not_understood_have_every_layer_run(make):
    assert check_same(Attention, make) == 0


def test_a_cache_with_gradients_has_every_layer_run():
    assert check_same(Attention, full, grad=True) == 0


def longer(cache, step):
    """One entry is longer than the others from the second step on."""
    if step == 1:
        entry = cache.layers[6]
        entry.keys, entry.values = (torch.cat([one, one], -2) for one in (entry.keys, entry.values))


def reordered(cache, step):
    """As a beam search does it."""
    for entry in cache.layers:
        entry.reorder_cache(torch.tensor([1, 0], device="cuda"))


def cropped(cache, step):
    if step == 2:
        for entry in cache.layers:
            entry.crop(-3)


@pytest.mark.parametrize(
    ("between", "times"), [(longer, MOST - 3), (reordered, MOST), (cropped, MOST)], ids=["longer", "beams", "cropped"]
)
def test_what_the_program_does_between_two_steps(between, times):
    assert check_same(Attention, full, between=between) == times


@pytest.mark.slow
def test_layers_that_are_compiled_have_every_one_run():
    """What torch compiles of them asks of which type the cache's list is."""

    def compiled(number):
        layer = Attention(number)
        layer.forward = Compiled(layer)
        return layer

    run, _, states = recorded(compiled, of_transformers, repeats=False)
    trace, times, others = recorded(compiled, of_transformers, repeats=True)
    for field in dataclasses.fields(run):
        if field.name != "compiling":
            assert getattr(trace, field.name) == getattr(run, field.name), field.name
    assert trace.compiling.kernels == run.compiling.kernels
    assert (others, times) == (states, 0)


def test_keys_that_somebody_keeps_are_run_again():
    """They do not die where those of the others do."""
    kept = []

    def keep(cache, step):
        kept.append(cache.layers[6].keys)

    with pytest.raises(RunAgain):
        recorded(Attention, full, repeats=True, between=keep)


def test_a_layer_that_fails_while_its_entry_is_watched_is_run_again():
    with pytest.raises(RunAgain):
        recorded(Fails, full, repeats=True)


def test_the_list_is_the_programs_own_again():
    cache = of_transformers()
    layers, first = cache.layers, cache.layers[0]
    recorded(Attention, lambda: cache, repeats=True)
    assert cache.layers is layers
    assert type(layers) is list
    assert layers[0] is first
