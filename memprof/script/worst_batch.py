"""The largest batch of each data loader, fed first: a run of two steps then meets the worst of its dataset.

The first step has no optimizer state yet, and gradients that are accumulated are there from the second micro-batch on:
a loader that is trained on gives its largest batch again and again until the second step has ended.
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

MAX_SECONDS = 30.0  # For looking through one loader. What was not looked at is said.
STEPS = 2  # as many training steps are all of largest batches: the first makes the optimizer's state, the second has it


@dataclass(slots=True)
class _FedBatch:
    """The batch fed in place of one loader's."""

    worst: Any = None  # its largest batch, as long as it may be fed again

    def take(self) -> Any:
        """Return the batch, for the program to take apart; what cannot be copied is fed once."""
        try:
            return copy.deepcopy(self.worst)
        except Exception:
            batch, self.worst = self.worst, None
            return batch


class WorstBatch:
    """Feeds it; `assume` is told what was looked through, and what was fed."""

    def __init__(self, assume: Callable[[str], None], phases: Phases) -> None:
        self._assume = assume
        self._phases = phases
        self._begun: weakref.WeakKeyDictionary[DataLoader[Any], _FedBatch] = weakref.WeakKeyDictionary()
        self._looking = False

    def patches(self) -> Iterator[Patch]:
        """Yield the patches (owner, name, replacement)."""
        original = DataLoader.__iter__

        def __iter__(loader: DataLoader[Any]) -> Iterator[Any]:
            if self._looking:
                return original(loader)
            fed = self._begun.get(loader)
            if fed is None:
                fed = self._begun[loader] = _FedBatch()
                return self._worst_first(loader, fed, original)
            if self._is_fed_again(fed):
                return self._repeat_worst(original(loader), fed)
            return original(loader)

        yield DataLoader, "__iter__", __iter__

    def _worst_first(
        self, loader: DataLoader[Any], fed: _FedBatch, original: Callable[[Any], Iterator[Any]]
    ) -> Iterator[Any]:
        self._looking = True
        try:
            fed.worst, at, size, count, all_of_them = self._look(original(loader))
        finally:
            self._looking = False
        if not count:
            yield from original(loader)
            return
        seen = f"{count} batches" if all_of_them else f"the first {count} batches, in {MAX_SECONDS:.0f} s,"
        self._assume(
            f"--worst-batch: of {seen} of a data loader number {at + 1} is the largest ({size:,} bytes), and is "
            "fed first; where it is trained on, also in the place of others, until the second step has ended."
        )
        yield from self._watched(fed.take(), fed)
        # In its own place it is not fed again: as many batches are fed as there are.
        rest = (batch for number, batch in enumerate(original(loader)) if number != at)
        yield from self._repeat_worst(rest, fed)

    def _repeat_worst(self, batches: Iterator[Any], fed: _FedBatch) -> Iterator[Any]:
        """Yield the largest batch in the place of each that comes too early, and then the rest."""
        for batch in batches:
            if self._is_fed_again(fed):
                yield from self._watched(fed.take(), fed)
            else:
                yield batch

    def _is_fed_again(self, fed: _FedBatch) -> bool:
        if self._phases.completed >= STEPS:
            fed.worst = None
        # Without an optimizer there is no state that the first step lacks, and no step that could be counted.
        return fed.worst is not None and bool(self._phases.optimizers)

    def _watched(self, batch: Any, fed: _FedBatch) -> Iterator[Any]:
        """Yield `batch`, and see what it is for: loops that fetch ahead do nothing with it at first."""
        forwards, backwards = self._phases.forwards, self._phases.backwards
        yield batch
        if self._phases.forwards > forwards and self._phases.backwards == backwards:
            fed.worst = None  # a loader for evaluation

    @staticmethod
    def _look(batches: Iterator[Any]) -> tuple[Any, int, int, int, bool]:
        """Return the largest batch, its number, its bytes, how many there were, and whether these are all."""
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
    """Return bytes of the tensors in a batch, however they are nested."""
    leaves = tree_leaves(batch)
    # Batches of transformers are mappings of a class of their own, which torch takes for leaves.
    nested = sum(bytes_of(dict(leaf)) for leaf in leaves if isinstance(leaf, Mapping))
    return nested + sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))
