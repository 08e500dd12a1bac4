"""Copies that CUDA kernels make of inputs and numbers, which no tensor shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from memprof.catalog import find_gpu
from memprof.virtual import VirtualGpu


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        yield gpu


def hidden(gpu: VirtualGpu) -> list[int]:
    return [storage.num_bytes for storage in gpu.trace.storages if storage.hidden]


def volume() -> torch.Tensor:
    return torch.ones(1, 4, 4, 4, 8, device="cuda").transpose(1, 4)


COPIES: dict[str, tuple[Callable[[], Any], list[int]]] = {
    "reflection of a volume": (lambda: F.pad(volume(), (1,) * 6, mode="reflect"), [2048]),
    "reflection of what is contiguous": (lambda: F.pad(volume().contiguous(), (1,) * 6, mode="reflect"), []),
    "upsampling a volume": (lambda: F.interpolate(volume(), scale_factor=2), [2048]),
    "a number's power": (lambda: 2.0 ** torch.ones(100, device="cuda"), [8]),
    "a power": (lambda: torch.ones(100, device="cuda") ** 2.0, []),
}


@pytest.mark.parametrize(("call", "expected"), COPIES.values(), ids=COPIES)
def test_copies(gpu: VirtualGpu, call: Callable[[], Any], expected: list[int]) -> None:
    call()
    assert hidden(gpu) == expected


def test_adding_at_indices_of_two_places(gpu: VirtualGpu) -> None:
    """Three for the linear index, the values made contiguous, three for the sort."""
    places = (torch.arange(4, device="cuda"), torch.arange(4))
    torch.zeros(10, 6, device="cuda").index_put_(places, torch.ones(8, device="cuda")[::2], accumulate=True)
    assert hidden(gpu)[:7] == [32, 32, 32, 16, 32, 32, 32]
