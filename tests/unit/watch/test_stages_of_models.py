"""The stages of models of any kind: a language model's own words are said of no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import memprof


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(self.norm(x))


class Speaker(nn.Module):
    """Layers are lists of modules, and the head is a product with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.layers = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))
        self.norm = nn.LayerNorm(64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for attention, feedforward in self.layers:
            x = feedforward(attention(x))
        return torch.einsum("btd,vd->btv", self.norm(x), self.embed.weight)


class Painter(nn.Module):
    """Layers, then a Linear that is no head, and layers again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.down = nn.ModuleList(Block() for _ in range(2))
        self.middle = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
        self.up = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.down:
            x = block(x)
        x = self.middle(x)
        for block in self.up:
            x = block(x)
        return x * 2


class Gated(nn.Module):
    """A language model that has a Linear beside its head, called before its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head, self.gate = nn.LayerNorm(64), nn.Linear(64, 1000), nn.Linear(64, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x * self.gate(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Conditional(nn.Module):
    """Of images of a class: it has an embedding, and reads no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.labels, self.first = nn.Embedding(10, 64), nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.labels(torch.zeros(len(x), dtype=torch.int64, device=x.device))
        for block in self.blocks:
            x = block(x)
        return x * 2


class Detector(nn.Module):
    """Its parts are called one by one while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 64))
        for part in self.model:
            part(torch.zeros(1, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model[1](self.model[0](x))


def trained(model: nn.Module, *, tokens: bool) -> memprof.Report:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            if tokens:
                ids = torch.randint(0, 1000, (4, 32), device="cuda")
                loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            else:
                x = torch.randn(128, 64, device="cuda")
                loss = functional.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return gpu.report()


def forward_stages(model: nn.Module, *, tokens: bool) -> list[str]:
    stages = trained(model, tokens=tokens).stages
    return list(dict.fromkeys(s.name for s in stages if s.step == 2 and s.micro_batch and s.name != "backward"))


def test_lists_of_lists_are_layers_and_a_product_is_a_head() -> None:
    assert forward_stages(Speaker(), tokens=True) == ["embedding", "layer 0", "layer 1", "final norm", "loss"]
    categories = trained(Speaker(), tokens=True).peak.categories
    # At least the logits and their log-softmax.
    assert categories["logits and loss"] >= 2 * 4 * 32 * 1000 * 4


def test_a_model_of_images_has_its_own_modules_for_stages() -> None:
    assert forward_stages(Painter(), tokens=False) == [
        "first Linear", "down layer 0", "down layer 1", "middle Sequential", "up layer 0", "up layer 1", "own code",
        "loss",
    ]  # fmt: skip


def test_the_head_has_an_output_for_each_word() -> None:
    expected = ["embedding", "layer 0", "layer 1", "final norm", "logits", "loss"]
    assert forward_stages(Gated(), tokens=True) == expected


def test_an_embedding_of_labels_makes_no_language_model() -> None:
    expected = ["first Linear", "labels Embedding", "own code", "layer 0", "layer 1", "loss"]
    stages = forward_stages(Conditional(), tokens=False)
    assert sorted(set(stages)) == sorted(expected)


def test_parts_that_were_called_alone_are_parts_of_the_whole() -> None:
    assert forward_stages(Detector(), tokens=False) == ["model.0 Sequential", "model.1 Linear", "loss"]


def test_what_is_inside_a_wrapper_has_stages() -> None:
    wrapped = forward_stages(nn.DataParallel(Painter()), tokens=False)
    assert wrapped[:2] == ["module.first Linear", "down layer 0"]
    assert forward_stages(nn.DataParallel(Detector()), tokens=False)[:2] == [
        "module.model.0 Sequential",
        "module.model.1 Linear",
    ]


@pytest.mark.parametrize("moved", [True, False])
def test_weights_that_are_never_called_are_parameters(moved: bool) -> None:
    """Whether they are known by the move or by the optimizer."""

    def program() -> None:
        nonlocal model
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256, device=None if moved else "cuda"))
        model = model.cuda() if moved else model[1]
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            x = torch.randn(8, 256, device="cuda")
            model.forward(x).mean().backward()
            optimizer.step()

    model: nn.Module
    with memprof.virtual_gpu("h100-80gb") as gpu:
        program()
    size = sum(p.numel() * 4 for p in model.parameters())
    assert gpu.report().peak.categories["parameters"] == size


def test_weights_that_autocast_has_cast_are_no_logits() -> None:
    with memprof.virtual_gpu("h100-80gb") as gpu, torch.no_grad(), torch.amp.autocast("cuda", dtype=torch.bfloat16):
        model = Gated().cuda()
        ids = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
        for _ in range(2):
            model(ids)
    assert gpu.report().peak.categories["logits and loss"] < 1000 * 64 * 2
