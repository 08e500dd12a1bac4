"""The contents of one storage of the virtual GPU, in host memory: at once, or computed when something reads it."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

MOST_STEPS = 64  # so many operators are put off one after the other; the next is computed at once
MOST_ALONE = 1 << 20  # elements that one thread has gone through before others are awake

# Pages that cost nothing until they are written to (MAP_NORESERVE, in Python's mmap from 3.13 on).
PAGES = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)
_MAPPED_BYTES = 1 << 16  # shadows of zeros from this size on are pages that the system makes when they are written


# Makes what a storage holds when it is read; None: it is not known after all.
Make = Callable[[], torch.Tensor | None]


@contextlib.contextmanager
def threads_for(num_elements: int) -> Iterator[None]:
    """Inside, torch computes on one thread if there are so few elements."""
    before = torch.get_num_threads()
    if num_elements <= MOST_ALONE:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class TensorLayout(NamedTuple):
    """The place of a tensor in its storage, which it does not keep alive."""

    num_elements: int  # of the whole storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        """Return where `tensor` lies."""
        num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(num_elements, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor that lies there, of the storage's elements in a row."""
        view = torch.empty(0, dtype=self.dtype)
        return view.set_(flat.untyped_storage(), self.offset, self.size, self.stride)

    def spread(self, value: torch.Tensor) -> torch.Tensor:
        """The storage's elements in a row, if the tensor, which owns all of it, holds `value` (of the same shape)."""
        flat = torch.empty(self.num_elements, dtype=self.dtype)
        # Each element of an expanded tensor is written once.
        sizes = [size if stride else 1 for size, stride in zip(self.size, self.stride, strict=True)]
        once = value[tuple(slice(size) for size in sizes)]
        with threads_for(self.num_elements):
            flat.as_strided(sizes, self.stride, self.offset).copy_(once)
        return flat


class Shadow:
    """The elements of one storage, in a row."""

    __slots__ = ("_flat", "_make", "has_pending_readers", "num_bytes", "steps")

    def __init__(self, num_bytes: int, flat: torch.Tensor | None, make: Make | None = None):
        self.num_bytes = num_bytes  # that count as held
        self._flat = flat
        self._make = make
        # Whether another that is to be made reads this one, which must not change before.
        self.has_pending_readers = False
        self.steps = 0  # how many are to be made for this one, one after the other

    def flat(self) -> torch.Tensor | None:
        """Return all elements, in memory of its own; None if they are not known."""
        if self._make is not None:
            self._flat, self._make, self.steps = self._make(), None, 0
        return self._flat


class Later(NamedTuple):
    """A tensor that an operator put off is given."""

    shadow: Shadow
    geometry: TensorLayout

    def read(self) -> torch.Tensor | None:
        """The real tensor; None if it is not known."""
        flat = self.shadow.flat()
        return None if flat is None else self.geometry.view(flat)


def untouched(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros; many of them are pages that the system makes when they are written."""
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < _MAPPED_BYTES:
        return torch.zeros(num_elements, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=PAGES), dtype=dtype)
