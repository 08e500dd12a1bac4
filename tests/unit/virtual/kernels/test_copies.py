"""Copies that CUDA kernels make of inputs and numbers, which no tensor shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu


def hidden(gpu: VirtualGpu) -> list[int]:
    return [storage.num_bytes for storage in gpu.trace.storages if storage.hidden]


def volume() -> torch.Tensor:
    return torch.ones(1, 4, 4, 4, 8, device="cuda").transpose(1, 4)


def images() -> torch.Tensor:
    return torch.ones(1, 8, 8, 4, device="cuda").transpose(2, 3)


COPIES: dict[str, tuple[Callable[[], Any], list[int]]] = {
    "reflection of a volume": (lambda: F.pad(volume(), (1,) * 6, mode="reflect"), [2048]),
    "reflection of what is contiguous": (lambda: F.pad(volume().contiguous(), (1,) * 6, mode="reflect"), []),
    "upsampling a volume": (lambda: F.interpolate(volume(), scale_factor=2), [2048]),
    "replication of a volume": (lambda: F.pad(volume(), (1,) * 6, mode="replicate"), []),
    "average": (lambda: F.avg_pool2d(images(), 2), [1024]),
    "average of channels-last images": (lambda: F.avg_pool2d(images().to(memory_format=torch.channels_last), 2), []),
    "average of a volume": (lambda: F.avg_pool3d(volume(), 2), [2048]),
    "maximum": (lambda: F.max_pool2d(images(), 2), [1024]),
    "maximum of a volume": (lambda: F.max_pool3d(volume(), 2), [2048]),
    "to a size": (lambda: F.adaptive_avg_pool2d(images(), 2), [1024]),
    "one image to a size": (lambda: F.adaptive_avg_pool2d(images()[0], 2), []),
    "maximum to a size": (lambda: F.adaptive_max_pool2d(images(), 2), [1024]),
    "a volume to a size": (lambda: F.adaptive_avg_pool3d(volume(), 2), [2048]),
    "windows": (lambda: F.unfold(images(), 2), [1024, 1024]),
    "a sample of a grid": (lambda: F.grid_sample(images(), torch.zeros(1, 2, 2, 2, device="cuda")), []),
    "bilinear": (lambda: F.interpolate(images(), scale_factor=2, mode="bilinear"), []),
    "places of what is not zero": (lambda: images().nonzero(), [1024, 4, 1, 1023]),
    "running maximum": (lambda: images().cummax(1), [1024]),
    "running logarithm of a sum": (lambda: images().logcumsumexp(1), [1024]),
    "commonest": (lambda: images().mode(-1), [1024]),
    "place among boundaries": (lambda: torch.searchsorted(*2 * [images()[0, 0]]), [128, 128]),
    "distances": (lambda: torch.cdist(images()[0], images()[0], p=1), [512 * 2, 512 * 2]),
    "a number's power": (lambda: 2.0 ** torch.ones(100, device="cuda"), [8]),
    "a power": (lambda: torch.ones(100, device="cuda") ** 2.0, []),
}


@pytest.mark.usefixtures("recorded_release")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("call", "expected"), COPIES.values(), ids=COPIES)
def test_copies(gpu: VirtualGpu, call: Callable[[], Any], expected: list[int]) -> None:
    call()
    assert hidden(gpu) == expected


def test_adding_at_indices_of_two_places(gpu: VirtualGpu) -> None:
    """The bounds of the one on the GPU, three for the linear index, the values made contiguous, three for the sort."""
    places = (torch.arange(4, device="cuda"), torch.arange(4))
    torch.zeros(10, 6, device="cuda").index_put_(places, torch.ones(8, device="cuda")[::2], accumulate=True)
    assert hidden(gpu)[:-1] == [8, 1, 8, 1, 32, 32, 32, 16, 32, 32, 32]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: F.avg_pool2d(x, 2), [1024, 256]),
        (lambda x: F.max_pool2d(x, 2), [1024, 256]),
        (lambda x: F.adaptive_avg_pool2d(x, 2), [128]),
        (lambda x: F.adaptive_max_pool2d(x, 2), [128]),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [4096]),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), []),
    ],
    ids=["average", "maximum", "average to a size", "maximum to a size", "bilinear", "replication"],
)
def test_gradients_that_are_not_contiguous(
    gpu: VirtualGpu, call: Callable[[torch.Tensor], torch.Tensor], expected: list[int]
) -> None:
    """An expanded gradient is copied, and so is the input where its values are looked at again."""
    result = call(images().requires_grad_())
    gradient = torch.ones((), device="cuda").expand(result.shape)
    before = len(gpu.trace.storages)
    result.backward(gradient)
    assert [storage.num_bytes for storage in gpu.trace.storages[before:] if storage.hidden] == expected


def test_a_shifted_target_is_copied_for_the_loss(gpu: VirtualGpu) -> None:
    scores = torch.ones(1, 5, 4, 4, device="cuda", requires_grad=True)
    target = torch.zeros(1, 8, 4, dtype=torch.int64, device="cuda")[:, ::2]
    F.nll_loss(scores, target).backward()
    assert hidden(gpu) == [8 * 16, 8 * 16]


def test_products_in_place_take_cublas_workspace() -> None:
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        torch.zeros(8, 8, device="cuda").addmm_(torch.ones(8, 8, device="cuda"), torch.ones(8, 8, device="cuda"))
    assert 8320 << 10 in [storage.num_bytes for storage in gpu.trace.storages if storage.hidden]


def test_values_of_patches_are_known(gpu):
    """Those of a small tensor, where the patches have more numbers than it."""
    patches = F.unfold(torch.arange(9.0, device="cuda").view(1, 1, 3, 3), 2)
    assert patches[0, :, 0].tolist() == [0.0, 1.0, 3.0, 4.0]
