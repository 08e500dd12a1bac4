"""Models of the truth cases that the catalog does not have, as factories for `--model models.py:NAME`."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn


def llama_with_chunked_loss() -> nn.Module:
    """Llama 3.2 1B whose loss never holds the logits (memprof.apply)."""
    import memprof
    from memprof.spec import TargetSpec
    from memprof.workload.models import find_source

    model = find_source(TargetSpec(model="llama-3.2-1b", dtype="bfloat16", attention="sdpa")).build()
    model.config.use_cache = False  # type: ignore[union-attr, assignment]
    memprof.apply(model, "chunked-loss", undoable=False)
    return _WithLabels(model)


def mixture_of_experts() -> nn.Module:
    """Mixtral's architecture with eight small experts, two to a token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return _WithLabels(MixtralForCausalLM(config))


def convolutional() -> nn.Module:
    """A residual network of four stages, with batch normalisation, for images of 224 x 224 and 1,000 classes."""
    return _Convolutional()


class _WithLabels(nn.Module):
    """Tokens are their own labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def memprof_inputs(self, batch_size: int, context_length: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.zeros(batch_size, context_length, dtype=torch.int64)}

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(input_ids=tokens, labels=tokens)


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norms[0](self.first(states)))
        return torch.relu(self.norms[1](self.second(inner)) + self.shortcut(states))


class _Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        widths = (64, 64, 128, 256, 512)
        self.stages = nn.ModuleList(
            nn.Sequential(_Residual(inputs, outputs, 1 if outputs == inputs else 2), _Residual(outputs, outputs, 1))
            for inputs, outputs in itertools.pairwise(widths)
        )
        self.head = nn.Linear(512, 1000)

    def memprof_inputs(self, batch_size: int, context_length: int) -> dict[str, torch.Tensor]:
        images = torch.zeros(batch_size, 3, 224, 224)
        return {"images": images, "labels": torch.zeros(batch_size, dtype=torch.int64)}

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        states = self.pool(self.stem(images))
        for stage in self.stages:
            states = stage(states)
        return nn.functional.cross_entropy(self.head(states.mean((2, 3))), labels)
