"""Replacements of `torch.Generator` for the virtual GPU, which store a seed and draw no random numbers."""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.gpus import Gpus

_RNG_STATE_BYTES = 16  # seed and offset of the Philox generator (CUDAGeneratorImpl.cpp, get_state)
_Generator = torch.Generator


def make_rng_state() -> torch.Tensor:
    """Return the state of a GPU's random generator: zeros, as no random numbers are drawn."""
    return torch.zeros(_RNG_STATE_BYTES, dtype=torch.uint8)


class _GeneratorMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Generator)


class GpuGenerator(_Generator):
    """A replacement of `torch.Generator("cuda")`, or of another GPU."""

    gpu = "cuda:0"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the GPU that the generator belongs to."""
        return torch.device(self.gpu)

    def get_state(self) -> torch.Tensor:
        """Return zeros, with the size of a real generator's state."""
        return make_rng_state()

    def set_state(self, state: torch.Tensor) -> GpuGenerator:  # type: ignore[override]
        """Do nothing: no random numbers are drawn."""
        return self

    def clone_state(self) -> GpuGenerator:
        """Return another generator of the same GPU."""
        return make_gpu_generator(self.gpu)

    graphsafe_get_state = clone_state  # type: ignore[assignment]
    graphsafe_set_state = set_state  # type: ignore[assignment]

    def get_offset(self) -> int:
        """Return 0."""
        return 0

    def set_offset(self, offset: int) -> GpuGenerator:  # type: ignore[override]
        """Do nothing."""
        return self


def make_gpu_generator(gpu: str) -> GpuGenerator:
    """Return a generator of the GPU with this name, such as "cuda:0"."""
    generator = GpuGenerator()
    generator.gpu = gpu
    return generator


def make_generator_class(gpus: Gpus) -> type:
    """Return a replacement of `torch.Generator` that makes the generators of `gpus`, and torch's of other devices."""

    class Generator(metaclass=_GeneratorMeta):
        def __new__(cls, device: Any = None) -> Any:
            if isinstance(device, int) or (device is not None and torch.device(device).type == gpus.type):
                return make_gpu_generator(gpus.get_name(device))
            return _Generator() if device is None else _Generator(device)

    return Generator
