"""Shadows: the elements of virtual storages, in host memory or to be computed when the program reads them."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

MAX_DEFERRED_STEPS = 64  # limit of operators in a chain of deferred operators; the next one is computed immediately
MAX_SINGLE_THREAD_ELEMENTS = 1 << 20  # elements that one thread visits before other threads have started

# Pages that take no memory until they are written (MAP_NORESERVE, in Python's mmap from 3.13 on).
PAGES = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)
_MIN_MMAP_BYTES = 1 << 16  # shadows of zeros from this size on are pages that the kernel allocates on the first write


# Function that computes the elements of a storage, [num_elements]; returns None if they are unknown.
ComputeElements = Callable[[], torch.Tensor | None]


@contextlib.contextmanager
def limit_threads(num_elements: int) -> Iterator[None]:
    """Context manager: torch computes on one thread if `num_elements` is small."""
    num_threads = torch.get_num_threads()
    if num_elements <= MAX_SINGLE_THREAD_ELEMENTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class TensorLayout(NamedTuple):
    """Size, strides and offset of a tensor in its storage, without a reference to the storage."""

    num_elements: int  # of the whole storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorLayout:
        """Return the layout of `tensor`."""
        num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(num_elements, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def view_elements(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of `flat`, all elements of the storage [num_elements], that has this layout."""
        view = torch.empty(0, dtype=self.dtype)
        return view.set_(flat.untyped_storage(), self.offset, self.size, self.stride)

    def fill_storage(self, value: torch.Tensor) -> torch.Tensor:
        """Return the elements, [num_elements], of the storage of a tensor with this layout and the values `value`."""
        flat = torch.empty(self.num_elements, dtype=self.dtype)
        # An expanded tensor repeats elements: each element is written once.
        sizes = [size if stride else 1 for size, stride in zip(self.size, self.stride, strict=True)]
        unexpanded = value[tuple(slice(size) for size in sizes)]
        with limit_threads(self.num_elements):
            flat.as_strided(sizes, self.stride, self.offset).copy_(unexpanded)
        return flat


class Shadow:
    """The elements of one storage, in host memory or to be computed on the first read."""

    __slots__ = ("_compute", "_flat", "has_pending_readers", "num_bytes", "num_deferred_steps")

    def __init__(self, num_bytes: int, flat: torch.Tensor | None, compute: ComputeElements | None = None):
        self.num_bytes = num_bytes  # host memory that the shadow counts for
        self._flat = flat
        self._compute = compute
        # Whether a deferred operator reads this shadow, which must not change before.
        self.has_pending_readers = False
        self.num_deferred_steps = 0  # length of the chain of deferred operators behind this shadow

    def read(self) -> torch.Tensor | None:
        """Return all elements, [num_elements], computed if needed; None if they are unknown."""
        if self._compute is not None:
            self._flat, self._compute, self.num_deferred_steps = self._compute(), None, 0
        return self._flat


class DeferredTensor(NamedTuple):
    """Argument of a deferred operator: a tensor's shadow and layout."""

    shadow: Shadow
    layout: TensorLayout

    def read(self) -> torch.Tensor | None:
        """Return the CPU tensor; None if its values are unknown."""
        flat = self.shadow.read()
        return None if flat is None else self.layout.view_elements(flat)


def make_zeros(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros, [num_elements]; large ones are pages that the kernel allocates on the first write."""
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < _MIN_MMAP_BYTES:
        return torch.zeros(num_elements, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=PAGES), dtype=dtype)
