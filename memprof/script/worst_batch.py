"""Patches that make each data loader yield its largest batch first, so that two steps show the highest memory use.

The first step has no optimizer state yet, and accumulated gradients exist from the second micro-batch on. So a training
loader yields its largest batch repeatedly until the second step has ended.
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

MAX_SECONDS = 30.0  # For searching one loader. The report names an incomplete search.
STEPS = 2  # training steps with largest batches only: the first makes the optimizer's state, the second has it


@dataclass(slots=True)
class _FedBatch:
    """The largest batch of one loader, fed in place of others."""

    batch: Any = None  # the loader's largest batch, as long as it may be fed again

    def copy_batch(self) -> Any:
        """Return a copy of the batch, which the program may modify; a batch that cannot be copied is fed once."""
        try:
            return copy.deepcopy(self.batch)
        except Exception:
            batch, self.batch = self.batch, None
            return batch


class WorstBatch:
    """Patches that feed the largest batch; `assume` records the searched batches and the fed batch."""

    def __init__(self, assume: Callable[[str], None], phases: Phases) -> None:
        self._assume = assume
        self._phases = phases
        self._fed_batches: weakref.WeakKeyDictionary[DataLoader[Any], _FedBatch] = weakref.WeakKeyDictionary()
        self._is_searching = False

    def patches(self) -> Iterator[Patch]:
        """Yield the patches (owner, name, replacement)."""
        original = DataLoader.__iter__

        def __iter__(loader: DataLoader[Any]) -> Iterator[Any]:
            if self._is_searching:
                return original(loader)
            fed = self._fed_batches.get(loader)
            if fed is None:
                fed = self._fed_batches[loader] = _FedBatch()
                return self._iterate_worst_first(loader, fed, original)
            if self._is_fed_again(fed):
                return self._repeat_worst(original(loader), fed)
            return original(loader)

        yield DataLoader, "__iter__", __iter__

    def _iterate_worst_first(
        self, loader: DataLoader[Any], fed: _FedBatch, original: Callable[[Any], Iterator[Any]]
    ) -> Iterator[Any]:
        self._is_searching = True
        try:
            fed.batch, at, size, count, is_complete = self._find_largest(original(loader))
        finally:
            self._is_searching = False
        if not count:
            yield from original(loader)
            return
        seen = f"{count} batches" if is_complete else f"the first {count} batches, in {MAX_SECONDS:.0f} s,"
        self._assume(
            f"--worst-batch: of {seen} of a data loader number {at + 1} is the largest ({size:,} bytes), and is "
            "fed first; where it is trained on, also in the place of others, until the second step has ended."
        )
        yield from self._feed(fed.copy_batch(), fed)
        # The batch is skipped in its own place, so that the number of batches stays the same.
        rest = (batch for number, batch in enumerate(original(loader)) if number != at)
        yield from self._repeat_worst(rest, fed)

    def _repeat_worst(self, batches: Iterator[Any], fed: _FedBatch) -> Iterator[Any]:
        """Yield the largest batch in place of each batch of the first steps, and then the other batches."""
        for batch in batches:
            if self._is_fed_again(fed):
                yield from self._feed(fed.copy_batch(), fed)
            else:
                yield batch

    def _is_fed_again(self, fed: _FedBatch) -> bool:
        if self._phases.num_completed_steps >= STEPS:
            fed.batch = None
        # Without an optimizer there is no optimizer state, and steps cannot be counted.
        return fed.batch is not None and bool(self._phases.optimizers)

    def _feed(self, batch: Any, fed: _FedBatch) -> Iterator[Any]:
        """Yield `batch`; stop feeding if the loader is for evaluation: a forward and no backward followed."""
        forwards, backwards = self._phases.num_forwards, self._phases.num_backwards
        yield batch
        if self._phases.num_forwards > forwards and self._phases.num_backwards == backwards:
            fed.batch = None  # a loader for evaluation

    @staticmethod
    def _find_largest(batches: Iterator[Any]) -> tuple[Any, int, int, int, bool]:
        """Return the largest batch, its number, its bytes, the number of batches seen, and whether all were."""
        worst, at, max_size, count = None, 0, -1, 0
        end = time.monotonic() + MAX_SECONDS
        for batch in batches:
            size = count_tensor_bytes(batch)
            if size > max_size:
                worst, at, max_size = batch, count, size
            count += 1
            if time.monotonic() > end:
                return worst, at, max_size, count, False
        return worst, at, max_size, count, True


def count_tensor_bytes(batch: Any) -> int:
    """Return the bytes of the tensors in a batch, at any nesting."""
    leaves = tree_leaves(batch)
    # Batches of transformers are mappings of a special class, which torch treats as leaves.
    nested = sum(count_tensor_bytes(dict(leaf)) for leaf in leaves if isinstance(leaf, Mapping))
    return nested + sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))
