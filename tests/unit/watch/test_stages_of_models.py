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
