"""`--worst-batch`: each data loader yields its largest batch first, so that two steps show the highest memory use.

The first step has no optimizer state yet, and accumulated gradients exist from the second micro-batch on. So a training
loader yields only its largest batch until the second step has ended.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from memprof.patching import Patch
from memprof.torch_private.pytree import tree_leaves
from memprof.watch.phases import Phases

MAX_SECONDS = 30.0  # time limit for searching one data loader; the report says if the search was incomplete
NUM_STEPS = 2  # training steps on the largest batch only: optimizer state exists from the second on


@dataclass(slots=True)
class _LargestBatch:
    """Largest batch of one data loader, which the loader yields in place of others."""

    batch: Any = None  # the batch; None once it is not to be repeated

    def copy_batch(self) -> Any:
        """Return a copy that the program may modify; a batch that cannot be copied is returned itself, once."""
        try:
            return copy.deepcopy(self.batch)
        except Exception:
            batch, self.batch = self.batch, None
            return batch


class WorstBatch:
    """Patches by which data loaders yield their largest batch first; `assume` adds a sentence to the report."""

    def __init__(self, assume: Callable[[str], None], phases: Phases) -> None:
        self._assume = assume
        self._phases = phases
        self._largest_batches: weakref.WeakKeyDictionary[DataLoader[Any], _LargestBatch] = weakref.WeakKeyDictionary()
        self._is_searching = False

    def patches(self) -> Iterator[Patch]:
        """Yield the patch (owner, name, replacement) of `DataLoader.__iter__`."""
        original = DataLoader.__iter__

        def __iter__(loader: DataLoader[Any]) -> Iterator[Any]:
            if self._is_searching:
                return original(loader)
            largest = self._largest_batches.get(loader)
            if largest is None:
                largest = self._largest_batches[loader] = _LargestBatch()
                return self._iterate_worst_first(loader, largest, original)
            if self._is_repeated(largest):
                return self._repeat_worst(original(loader), largest)
            return original(loader)

        yield DataLoader, "__iter__", __iter__

    def _iterate_worst_first(
        self, loader: DataLoader[Any], largest: _LargestBatch, original: Callable[[Any], Iterator[Any]]
    ) -> Iterator[Any]:
        self._is_searching = True
        try:
            largest.batch, at, num_bytes, count, is_complete = self._find_largest(original(loader))
        finally:
            self._is_searching = False
        if not count:
            yield from original(loader)
            return
        scope = f"{count} batches" if is_complete else f"the first {count} batches, in {MAX_SECONDS:.0f} s,"
        self._assume(
            f"--worst-batch: of {scope} of a data loader number {at + 1} is the largest ({num_bytes:,} bytes), and is "
            "fed first; where it is trained on, also in the place of others, until the second step has ended."
        )
        yield from self._feed(largest.copy_batch(), largest)
        # The batch is skipped in its own place, so that the number of batches stays the same.
        other_batches = (batch for position, batch in enumerate(original(loader)) if position != at)
        yield from self._repeat_worst(other_batches, largest)

    def _repeat_worst(self, batches: Iterator[Any], largest: _LargestBatch) -> Iterator[Any]:
        """Yield the largest batch in place of each batch until two steps have ended, then the rest of `batches`."""
        for batch in batches:
            if self._is_repeated(largest):
                yield from self._feed(largest.copy_batch(), largest)
            else:
                yield batch

    def _is_repeated(self, largest: _LargestBatch) -> bool:
        if self._phases.num_completed_steps >= NUM_STEPS:
            largest.batch = None
        # Without an optimizer there is no optimizer state, and steps cannot be counted.
        return largest.batch is not None and bool(self._phases.optimizers)

    def _feed(self, batch: Any, largest: _LargestBatch) -> Iterator[Any]:
        """Yield `batch`; end the repetition if a forward and no backward followed, as in an evaluation loop."""
        forwards, backwards = self._phases.num_forwards, self._phases.num_backwards
        yield batch
        if self._phases.num_forwards > forwards and self._phases.num_backwards == backwards:
            largest.batch = None  # a loader for evaluation

    @staticmethod
    def _find_largest(batches: Iterator[Any]) -> tuple[Any, int, int, int, bool]:
        """Return (largest batch, its index, its bytes, number of batches searched, whether these were all batches)."""
        largest_batch, index, max_bytes, num_batches = None, 0, -1, 0
        deadline = time.monotonic() + MAX_SECONDS
        for batch in batches:
            num_bytes = count_tensor_bytes(batch)
            if num_bytes > max_bytes:
                largest_batch, index, max_bytes = batch, num_batches, num_bytes
            num_batches += 1
            if time.monotonic() > deadline:
                return largest_batch, index, max_bytes, num_batches, False
        return largest_batch, index, max_bytes, num_batches, True


def count_tensor_bytes(batch: Any) -> int:
    """Return the total bytes of the tensors in a batch, including nested ones."""
    leaves = tree_leaves(batch)
    # Batches of transformers are mappings of a special class, which torch treats as leaves.
    mapping_bytes = sum(count_tensor_bytes(dict(leaf)) for leaf in leaves if isinstance(leaf, Mapping))
    return mapping_bytes + sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))
