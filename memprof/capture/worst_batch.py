"""The largest batch of each data loader, fed first: a run of two steps then meets the worst of its dataset."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

MAX_SECONDS = 30.0
"""For looking through one loader. What was not looked at is said."""


class WorstBatch:
    """Feeds it.

    Args:
        assume: told what was looked through, and what was fed.
    """

    def __init__(self, assume: Callable[[str], None]) -> None:
        self._assume = assume
        self._begun: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        self._looking = False

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """The patches (owner, name, replacement)."""
        original = DataLoader.__iter__

        def __iter__(loader: DataLoader[Any]) -> Iterator[Any]:
            if self._looking or loader in self._begun:
                return original(loader)
            self._begun.add(loader)
            return self._worst_first(loader, original)

        yield DataLoader, "__iter__", __iter__

    def _worst_first(self, loader: DataLoader[Any], original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        self._looking = True
        try:
            worst, at, size, count, all_of_them = self._look(original(loader))
        finally:
            self._looking = False
        if count:
            seen = f"{count} batches" if all_of_them else f"the first {count} batches, in {MAX_SECONDS:.0f} s,"
            self._assume(
                f"--worst-batch: of {seen} of a data loader number {at + 1} is the largest ({size:,} bytes), and is "
                "fed first."
            )
            yield worst
            del worst
        for number, batch in enumerate(original(loader)):
            # In its own place it is not fed again: as many batches are fed as there are.
            if not (number == at and count):
                yield batch

    @staticmethod
    def _look(batches: Iterator[Any]) -> tuple[Any, int, int, int, bool]:
        """The largest batch, its number, its bytes, how many there were, and whether these are all."""
        worst, at, most, count = None, 0, -1, 0
        end = time.monotonic() + MAX_SECONDS
        for batch in batches:
            size = bytes_of(batch)
            if size > most:
                worst, at, most = batch, count, size
            count += 1
            if time.monotonic() > end:
                return worst, at, most, count, False
        return worst, at, most, count, True


def bytes_of(batch: Any) -> int:
    """Bytes of the tensors in a batch, however they are nested."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
