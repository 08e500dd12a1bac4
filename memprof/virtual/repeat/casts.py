"""What a layer leaves behind under autocast: half copies of its weights, which the region's cache has until its end.

A copy that the layer's graph holds too goes in its backward, as the slice of that says. One that it does not hold, as
where a checkpointed layer is run again, goes when the cache is emptied: of a layer that was repeated, a tensor without
contents stands there for it until then. Whether the copies of the layers that were run go as was thought is seen when
the cache is emptied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from memprof.virtual.autocast import Autocast
from memprof.virtual.recording import RecordingMode
from memprof.virtual.repeat.backward import RunAgain
from memprof.virtual.repeat.slices import Call
from memprof.virtual.repeat.uses import uses_of_new

_use_count = torch.Tensor._use_count  # type: ignore[attr-defined]
"""Python has one, which is the cache's."""
_storage_use_count = torch._C._storage_Use_Count
_forbid_data = torch._C._set_throw_on_mutable_data_ptr


class OddError(Exception):
    """A layer is given, returns or leaves something that is not looked into."""


@dataclass(frozen=True, slots=True)
class Cast:
    """A copy that a layer made of one of its weights."""

    parameter: int
    """Its number, of the layer's."""
    storage: int
    """The number, of those that the layer made, of the copy's."""
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_kept: bool
    """Whether the layer's graph holds it, too."""
    held_bytes: int
    """Of what is known of its numbers."""


class Casts:
    """The copies of one pass.

    Args:
        machine: it runs on this.
    """

    def __init__(self, machine: RecordingMode) -> None:
        self._machine = machine
        self._checked: set[int] = set()
        """First storages of the calls that are looked at when the cache is emptied."""
        self.is_wrong = False
        """Whether a copy of a layer that was run went at another time than was thought."""

    def setting(self) -> tuple[object, ...] | None:
        """What decides how a layer's weights are cast; None: they are not."""
        if not torch.is_autocast_enabled("cuda"):
            return None
        return torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled(), torch.is_grad_enabled()

    @property
    def _cache(self) -> Autocast:
        mode: Any = self._machine.function_mode
        cache: Autocast = mode.autocast
        return cache

    def begin(self) -> tuple[int, int]:
        """Where the cache is before a layer."""
        return self._cache.regions, len(self._cache)

    def end(self, begun: tuple[int, int], layer: nn.Module, call: Call) -> tuple[Cast, ...]:
        """What the layer has added to it.

        Raises:
            OddError: it did more than that.
        """
        regions, count = begun
        if self._cache.regions != regions:
            raise OddError
        added = self._cache.cast_since(count)
        if not added:
            return ()
        numbers = {id(parameter): number for number, parameter in enumerate(layer.parameters())}
        return tuple(self._cast(numbers.get(id(weight)), half, call) for weight, half in added)

    def _cast(self, parameter: int | None, half: torch.Tensor | None, call: Call) -> Cast:
        if parameter is None or half is None or half.storage_offset():
            raise OddError
        storage = half.untyped_storage()
        number = self._machine.recorder.index_of(half) - call.first_storage
        held_bytes = self._machine.values.held_for(storage._cdata)
        whole = storage.nbytes() == half.numel() * half.element_size()
        if not whole or not 0 <= number < call.storages:
            raise OddError
        is_kept = _use_count(half) > 1 or _storage_use_count(storage._cdata) > uses_of_new()
        return Cast(parameter, number, half.size(), half.stride(), half.dtype, is_kept, held_bytes)

    def repeat(self, casts: tuple[Cast, ...], run: Call, layer: nn.Module, base: int) -> None:
        """The same of a layer that is repeated, whose first storage is `base`; `run` is the call that it is like."""
        parameters = list(layer.parameters())
        for cast in casts:
            half = None
            if not cast.is_kept:
                half = torch.empty_strided(cast.size, cast.stride, dtype=cast.dtype, device="meta")
                _forbid_data(half)
                storage = half.untyped_storage()
                self._machine.recorder.attach(storage, base + cast.storage)
                self._machine.values.hold_until_it_dies(storage._cdata, cast.held_bytes)
            self._cache.stand_in(parameters[cast.parameter], half, _refuse)
        if run.first_storage not in self._checked:
            self._checked.add(run.first_storage)
            self._cache.after_region.append(partial(self._check, casts, run))

    def _check(self, casts: tuple[Cast, ...], run: Call) -> None:
        """The cache is emptied. Nothing may be raised here: torch is about to leave the region."""
        self._checked.discard(run.first_storage)
        is_alive = self._machine.recorder.is_alive
        self.is_wrong |= any(is_alive(run.first_storage + cast.storage) != cast.is_kept for cast in casts)


def _refuse() -> NoReturn:
    raise RunAgain("a weight is used again whose layer was repeated")
