"""What engines keep of earlier tokens is found by what is done to it: written at a position, grown, released."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memprof
from memprof.trace.events import Role

WIDTH, HEADS, LENGTH, PROMPT, NEW = 64, 4, 32, 8, 4
ONE = WIDTH * 4  # Bytes of a token's keys in one layer.


class Attention(nn.Module):
    """Keys and values go through `keep`, which releases those of all tokens so far."""

    def __init__(self, keep: Callable[[Attention, Any, Any, int, Any], Any]) -> None:
        super().__init__()
        self.qkv, self.proj, self.keep = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), keep

    def forward(self, x: torch.Tensor, start: int = 0, past: Any = None) -> Any:
        shape = (*x.shape[:2], HEADS, -1)
        q, k, v = (part.view(shape) for part in self.qkv(x).split(WIDTH, dim=-1))
        k, v, present = self.keep(self, k, v, start, past)
        y = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
        return x + self.proj(y.transpose(1, 2).flatten(2)), present


class Model(nn.Module):
    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100)
        self.layers = nn.ModuleList(Attention(keep) for _ in range(2))

    def forward(self, ids: torch.Tensor, start: int = 0, past: Any = None) -> Any:
        x, presents = self.embed(ids), []
        for index, layer in enumerate(self.layers):
            x, present = layer(x, start, past[index] if past else None)
            presents.append(present)
        return self.head(x), presents


def filled(shape: tuple[int, ...] = (1, LENGTH, HEADS, WIDTH // HEADS)) -> torch.Tensor:
    return torch.zeros(shape, device="cuda")


def by_position(layer: Any, k: Any, v: Any, start: int, past: Any) -> Any:
    """Attributes of the layer, made with it."""
    end = start + k.shape[1]
    layer.cache_k[:, start:end], layer.cache_v[:, start:end] = k, v
    return layer.cache_k[:, :end], layer.cache_v[:, :end], None


def by_index(layer: Any, k: Any, v: Any, start: int, past: Any) -> Any:
    """Buffers, written at positions that are a tensor."""
    at = torch.arange(start, start + k.shape[1], device="cuda")
    layer.cache_k.index_copy_(1, at, k)
    layer.cache_v[:, at] = v
    return layer.cache_k, layer.cache_v, None


def by_page(layer: Any, k: Any, v: Any, start: int, past: Any) -> Any:
    """A pool of blocks for all, and a table that says which are whose."""
    slots = torch.arange(start, start + k.shape[1], device="cuda") + 4
    pool = layer.pool.view(2, LENGTH, HEADS, -1)
    pool[0, slots], pool[1, slots] = k[0], v[0]
    return pool[:1, 4 : start + 4 + k.shape[1]], pool[1:, 4 : start + 4 + k.shape[1]], None


def grown(layer: Any, k: Any, v: Any, start: int, past: Any) -> Any:
    """Tuples that are released, and given again."""
    if past is not None:
        k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
    return k, v, (k, v)


def held(layer: Any, k: Any, v: Any, start: int, past: Any) -> Any:
    """A dict that the layer keeps."""
    own = layer.__dict__.setdefault("own", {})
    if own:
        k, v = torch.cat([own["k"], k], dim=1), torch.cat([own["v"], v], dim=1)
    own.update(k=k, v=v)
    return k, v, None


def overwritten(layer: Any, k: Any, v: Any, start: int, past: Any) -> Any:
    """A state of fixed size, that is added to."""
    layer.cache_k.copy_(layer.cache_k * 0.5 + k.mean(1, keepdim=True))
    layer.cache_v.copy_(layer.cache_v * 0.5 + v.mean(1, keepdim=True))
    return k + layer.cache_k[:, :1], v, None


def given_back(layer: Any, k: Any, v: Any, start: int, past: Any) -> Any:
    """States of fixed size, new ones in each call."""
    states = tuple(one.mean(1) + (0 if past is None else past[i]) for i, one in enumerate((k, v)))
    return k, v, states


def setup(model: Model) -> None:
    """Memory that the engine has from the beginning."""
    keep = model.layers[0].keep
    for layer in model.layers:
        if keep is by_page:
            layer.pool = filled((2, LENGTH // 8, 8, WIDTH))
        for name in ("cache_k", "cache_v"):
            if keep is by_index:
                layer.register_buffer(name, filled())
            elif keep in (by_position, overwritten):
                setattr(layer, name, filled())


def generated(model: Model) -> memprof.Report:
    """A prompt and some tokens after it."""
    with memprof.virtual_gpu("h100-80gb") as gpu, torch.no_grad():
        model.cuda()
        setup(model)
        ids, past = torch.zeros(1, PROMPT, dtype=torch.long, device="cuda"), None
        start = 0
        for _ in range(1 + NEW):
            logits, past = model(ids, start, past if past and past[0] else None)
            start += ids.shape[1]
            ids = logits[:, -1:].argmax(-1)
    return gpu.report()


@pytest.mark.parametrize("keep", [by_position, by_index, by_page, overwritten])
def test_memory_that_is_written_into(keep: Any) -> None:
    assert generated(Model(keep)).peak.categories["KV cache"] == 2 * 2 * LENGTH * ONE


@pytest.mark.parametrize("keep", [grown, held])
def test_tensors_that_grow(keep: Any) -> None:
    report = generated(Model(keep))
    kept = {(t.shape, t.category) for t in report.peak.tensors if t.op == "aten.cat"}
    assert len(kept) == 1 and {category for _, category in kept} == {"KV cache"}
    # The prompt's are parts of what their projection made, which they keep.
    prompt = next(t for t in report.peak.tensors if t.shape == (PROMPT, 3 * WIDTH))
    assert prompt.category == "KV cache"
    # Of one token it is gone when the call returns.
    token = next(t for t in report.peak.tensors if t.shape == (1, 3 * WIDTH))
    assert token.category != "KV cache"


def test_states_that_are_given_back() -> None:
    report = generated(Model(given_back))
    states = {t.category for t in report.peak.tensors if t.shape == (1, HEADS, WIDTH // HEADS)}
    assert "KV cache" in states and states <= {"KV cache", "temporaries"}


class Other(nn.Module):
    """Keeps what is no cache of tokens: a queue of a training run, a join with another model's features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(WIDTH), Joins()

    def forward(self, x: torch.Tensor, others: Any = None) -> torch.Tensor:
        return self.inner(self.norm(x), others)


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("queue", torch.zeros(64, WIDTH))
        self.register_buffer("prompt", torch.zeros(2, WIDTH))

    def forward(self, x: torch.Tensor, others: Any) -> torch.Tensor:
        x = self.proj(torch.cat([self.prompt, x]))
        if others is not None:
            x = torch.cat([*others, x])
        if self.training:
            with torch.no_grad():
                self.queue[: x.shape[0]] = x
        return x


@pytest.mark.parametrize("training", [True, False])
def test_what_is_no_cache(training: bool) -> None:
    with memprof.virtual_gpu("h100-80gb") as gpu, torch.set_grad_enabled(training):
        encoder, model = Other().cuda().train(training), Other().cuda().train(training)
        for _ in range(3):
            x = torch.zeros(8, WIDTH, device="cuda")
            for _ in range(2):
                x = model(x[:8], [encoder(x[:8])])
            if training:
                x.mean().backward()
    assert "KV cache" not in gpu.report().peak.categories
    assert not any(t.category == "KV cache" for t in gpu.report().peak.tensors)


def test_states_of_the_last_call_are_a_cache_before_they_are_given_back() -> None:
    shape = (1, HEADS, WIDTH // HEADS)
    with memprof.virtual_gpu("h100-80gb") as gpu, torch.no_grad():
        model, past = Model(given_back).cuda(), None
        ids = torch.zeros(1, 1, dtype=torch.long, device="cuda")
        for _ in range(3):
            _, past = model(ids, 0, past)
        made = [i for i, one in enumerate(gpu.trace.storages) if gpu.trace.op(one) == "aten.add"]
        states = [index for index in made if gpu.trace.storages[index].shape == shape][-4:]
        assert {gpu.trace.owners[index].role for index in states} == {Role.KV_CACHE}
