"""How much is outside the allocator in a training step of a kind of model, by NVML's count for this process.

python -m tests.gpu.questions.context KIND
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable

import torch
from torch import nn

from tests.gpu.outside import nvml_counters

Loss = Callable[[], torch.Tensor]
_DEVICE = "cuda"


def _perceptron(dtype: torch.dtype, *, compiled: bool = False) -> tuple[nn.Module, Loss]:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(_DEVICE, dtype)
    called = torch.compile(model) if compiled else model
    data = torch.randn(64, 1024, device=_DEVICE, dtype=dtype)
    return model, lambda: called(data).square().mean()


def _convolutions() -> tuple[nn.Module, Loss]:
    ends = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    first = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU())
    model = nn.Sequential(first, nn.Conv2d(64, 128, 3), nn.BatchNorm2d(128), nn.ReLU(), ends).to(_DEVICE)
    images = torch.randn(16, 3, 224, 224, device=_DEVICE)
    return model, lambda: model(images).square().mean()


def _recurrence() -> tuple[nn.Module, Loss]:
    model = nn.LSTM(256, 512, 2, device=_DEVICE)
    data = torch.randn(64, 16, 256, device=_DEVICE)
    return model, lambda: model(data)[0].square().mean()


def _llama(dtype: torch.dtype, attention: str = "sdpa", *, autocast: bool = False) -> tuple[nn.Module, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).to(_DEVICE, dtype)
    tokens = torch.randint(0, config.vocab_size, (2, 512), device=_DEVICE)

    def loss() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            found: torch.Tensor = model(tokens, labels=tokens).loss
            return found

    return model, loss


KINDS: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "perceptron": lambda: _perceptron(torch.float32),
    "perceptron-bfloat16": lambda: _perceptron(torch.bfloat16),
    "perceptron-compiled": lambda: _perceptron(torch.float32, compiled=True),
    "convolutions": _convolutions,
    "recurrence": _recurrence,
    "llama": lambda: _llama(torch.bfloat16),
    "llama-eager": lambda: _llama(torch.bfloat16, "eager"),
    "llama-float32": lambda: _llama(torch.float32),
    "llama-autocast": lambda: _llama(torch.float32, autocast=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    kind = parser.parse_args().kind
    torch.cuda.init()
    found: list[tuple[str, int | None]] = []

    def note(after: str) -> None:
        torch.cuda.synchronize()
        used = dict(nvml_counters().get("processes", ())).get(os.getpid())
        found.append((after, None if used is None else used - torch.cuda.memory_reserved()))

    note("init")
    model, loss = KINDS[kind]()
    note("model")
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        result = loss()
        note(f"forward {step}")
        result.backward()
        note(f"backward {step}")
        optimizer.step()
        note(f"optimizer {step}")
        optimizer.zero_grad()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
