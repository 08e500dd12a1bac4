"""Random numbers are drawn with the program's generator, in place: torch's meta kernels refuse one."""

from __future__ import annotations

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu

GPU = find_gpu("a100-80gb")


@pytest.mark.parametrize(
    ("name", "arguments"), [("cauchy_", ()), ("exponential_", ()), ("geometric_", (0.5,)), ("log_normal_", ())]
)
def test_drawing_with_a_generator_allocates_nothing(name: str, arguments: tuple[float, ...]) -> None:
    with VirtualGpu(GPU) as gpu:
        generator = torch.Generator(device="cuda")
        tensor = torch.empty(1000, 3, device="cuda")
        getattr(tensor.t(), name)(*arguments, generator=generator)
    assert [storage.num_bytes for storage in gpu.trace.storages] == [12000]


def test_what_cannot_be_drawn_is_refused_as_without_a_generator() -> None:
    with VirtualGpu(GPU), pytest.raises(RuntimeError, match=r"floating|lambda|Exponential"):
        torch.ones(2, device="cuda", dtype=torch.int64).exponential_(generator=torch.Generator(device="cuda"))


def test_binomial_has_the_shape_of_its_counts() -> None:
    with VirtualGpu(GPU):
        counts = torch.full((1000,), 9.0, device="cuda")
        drawn = torch.binomial(counts, torch.full_like(counts, 0.5))
        assert (drawn.shape, drawn.dtype, drawn.device.type) == (counts.shape, torch.float32, "cuda")
