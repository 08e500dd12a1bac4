"""What a layer keeps for later tokens: its own entry in a cache that every layer is given.

A cache is an object with one list, in which each layer has an entry: an object of plain values and tensors. A layer
finds its own by its number. That it looks at nothing else of the list is seen while it runs (`_Watched`): what it does
depends on its own entry alone, and changes it alone. Entries are compared as everything else is that a layer is given;
of a layer that is repeated, the entry is left as the run of a layer like it has left its own, with tensors that stand
for what was written into the record.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes

from memprof.trace.events import GPU, NONE, Event, EventKind
from memprof.virtual.recording import RecordingMode
from memprof.virtual.repeat.alike import has_slots, layout_of
from memprof.virtual.repeat.backward import RunAgain
from memprof.virtual.repeat.casts import OddError
from memprof.virtual.repeat.slices import Call, From
from memprof.virtual.repeat.spies import Spies, Spy
from memprof.virtual.repeat.uses import uses_of_new

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
_FEW = 8
"""Numbers in host memory that are compared."""
_storage_use_count = torch._C._storage_Use_Count
_forbid_data = torch._C._set_throw_on_mutable_data_ptr


@dataclass(frozen=True)
class Made:
    """A tensor that a layer has made and left in its entry."""

    storage: int
    """The number, of those that the layer made, of its storage's."""
    num_bytes: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    version: int
    viewed: tuple[torch.Size, tuple[int, ...]] | None
    """Size and stride of the tensor that it is a view of."""
    value: Any
    """Of all elements, if that is known."""


@dataclass(frozen=True)
class Left:
    """What a layer has left in its entry."""

    values: tuple[tuple[str, Any], ...]
    """Name, and a `Made` tensor, or type and plain value, or nothing: it is what it was."""

    @property
    def storages(self) -> frozenset[int]:
        """Numbers of those that the layer made."""
        return frozenset(value.storage for _, value in self.values if isinstance(value, Made))


NOTHING = Left(())


class Entries:
    """The cache that the layers of one pass are given.

    Args:
        machine: it runs on this.
        spies: of the run.
    """

    def __init__(self, machine: RecordingMode, spies: Spies) -> None:
        self._machine = machine
        self._spies = spies
        self._cache: Any = None
        self._name = ""
        """Of the list."""
        self._entry: Callable[[], Any] = lambda: None
        """Neither it nor what is in it is kept alive: a layer may let go of it."""
        self._place = 0
        self._others: Any = ()
        """What the cache has beside the list."""
        self._before: dict[str, tuple[weakref.ref[torch.Tensor], int] | None] = {}
        """Names in the entry; of a tensor, that and its version."""
        self.held: tuple[int, ...] = ()
        """Storages of the tensors in the entry, as they were before the layer."""

    def forget(self) -> None:
        """The layer has returned: no more is kept of the cache than the program keeps."""
        self._cache, self._entry = None, lambda: None
        self._others, self._before, self.held = (), {}, ()

    @property
    def is_given(self) -> bool:
        """Whether the layer is given one."""
        return self._cache is not None

    # -- before a layer ---------------------------------------------------------------------------------------------

    def described(self, cache: Any, place: int, known: int) -> Any:
        """What a cache is to the layer at `place`, to be compared: its entry, and what is no entry.

        Args:
            cache: an object of which nothing is known yet.
            place: of the layer.
            known: the storage of the layer's input.

        Raises:
            OddError: it is no such object.
        """
        if self._cache is not None:
            if cache is not self._cache:
                raise OddError
            return "the cache"
        # Compiled code asks of which type the list is, before it is run.
        if not _is_seen(cache) or self._spies.have_compiled:
            raise OddError
        lists = [name for name, value in vars(cache).items() if type(value) is list]
        entries = vars(cache)[lists[0]] if len(lists) == 1 else []
        if len(entries) <= place or not _is_seen(entries[place]):
            raise OddError
        entry = entries[place]
        if sum(one is entry for one in entries) != 1:
            raise OddError
        self._cache, self._name, self._place = cache, lists[0], place
        self._entry = weakref.ref(entry)
        self._others = self._beside_the_list()
        held: dict[int, int] = {}
        values = [self._value(value, held) for value in vars(entry).values()]
        self._before = {name: _named(value) for name, value in vars(entry).items()}
        if known in held:
            raise OddError
        self.held = tuple(held)
        return type(cache), self._others, type(entry), list(vars(entry)), values

    def _beside_the_list(self) -> Any:
        found = [(name, type(value), value) for name, value in vars(self._cache).items() if name != self._name]
        if any(kind not in _PLAIN and not issubclass(kind, type) for _, kind, _ in found):
            raise OddError
        return found

    def _value(self, value: Any, held: dict[int, int]) -> Any:
        """What is in an entry, to be compared; `held`: storages of the entry, and their numbers."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if not _is_ordinary(value):
            raise OddError
        if not value.is_meta:
            if value.numel() > _FEW:
                raise OddError
            with _disable_current_modes():
                return layout_of(value), value.tolist()
        machine, index = self._machine, self._machine.recorder.index_of(value)
        if index == NONE:
            raise OddError
        number = held.setdefault(index, len(held))
        known = self._known(value) if machine.values.knows(value.untyped_storage()._cdata) else None
        if known is _UNEQUAL:
            known = object()
        joins = machine.caches.is_older(index)
        return number, layout_of(value), machine.device_of(value), value._is_view(), known, joins

    def _known(self, tensor: torch.Tensor) -> Any:
        """What is known of all elements; `_UNEQUAL`: more than that they are alike."""
        uniform = self._machine.values.uniform_of(tensor)
        if uniform is None:
            return _UNEQUAL
        with _disable_current_modes():
            return uniform.dtype, uniform.item()

    # -- around a layer that is run ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self) -> Iterator[Callable[[], bool]]:
        """Inside, what is given says whether anything of the list is looked at but the layer's own entry."""
        if self._cache is None:
            yield lambda: False
            return
        parts, name = vars(self._cache), self._name
        entries = parts[name]
        parts[name] = watched = _Watched(entries)
        watched.place, watched.original = self._place, entries

        def withdraw() -> None:
            watched.is_used = True
            if parts.get(name) is watched:
                parts[name] = entries

        self._spies.before_compiling, before = withdraw, self._spies.before_compiling
        try:
            yield lambda: watched.is_used
        finally:
            self._spies.before_compiling = before
            if parts.get(name) is watched:
                parts[name] = entries
            entry = self._entry()
            for held in (parts, {} if entry is None else vars(entry)):
                for key in [key for key, value in held.items() if type(value) is Spy]:
                    held[key] = held[key].value
                    watched.is_used = True

    def end(self, call: Call) -> Left:
        """What the layer has left in its entry.

        Raises:
            OddError: it has done more than that.
        """
        if self._cache is None:
            return NOTHING
        entries, entry = vars(self._cache).get(self._name), self._entry()
        names = [] if entry is None else list(vars(entry))
        if (
            entry is None
            or type(entries) is not list
            or len(entries) <= self._place
            or entries[self._place] is not entry
            or self._beside_the_list() != self._others
            or names[: len(self._before)] != list(self._before)
        ):
            raise OddError
        left = Left(tuple((name, self._left(name, value, call)) for name, value in vars(entry).items()))
        if len(left.storages) != sum(isinstance(value, Made) for _, value in left.values):
            raise OddError
        return left

    def _left(self, name: str, value: Any, call: Call) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if not _is_ordinary(value):
            raise OddError
        before = self._before.get(name)
        is_kept = before is not None and before[0]() is value
        if before is not None and is_kept:
            if before[1] != value._version:
                raise OddError
            return None
        storage, viewed = value.untyped_storage(), value._base
        number = self._machine.recorder.index_of(value) - call.first_storage if value.is_meta else NONE
        whole = value if viewed is None else viewed
        known = self._known(value) if self._machine.values.knows(storage._cdata) else None
        if (
            not 0 <= number < call.storages
            or known is _UNEQUAL
            or not (_is_ordinary(whole) and _is_whole(whole) and whole.dtype is value.dtype)
            or self._machine.device_of(value) != GPU
            # What keeps it beside the entry would not be seen.
            or _storage_use_count(storage._cdata) > uses_of_new() + (viewed is not None)
        ):
            raise OddError
        of_view = None if viewed is None else (viewed.size(), viewed.stride())
        return Made(
            number, storage.nbytes(), value.size(), value.stride(), value.storage_offset(), value.dtype, value._version,
            of_view, known,
        )  # fmt: skip

    # -- of a layer that is repeated --------------------------------------------------------------------------------

    def let_go(self, origin: From, number: int) -> None:
        """The layer lets go of the entry's storage of this number, as the one did that was run.

        Raises:
            RunAgain: somebody else has it, too.
        """
        recorder, index, parts = self._machine.recorder, self.held[number], vars(self._entry())
        for name in self._before:
            if isinstance(parts[name], torch.Tensor) and recorder.index_of(parts[name]) == index:
                parts[name] = None
        if recorder.trace.events[-1] != Event(EventKind.FREE, index):
            raise RunAgain("an entry of a cache is kept that others let go of")

    def repeat(self, left: Left, base: int) -> None:
        """The entry is what the layer leaves, whose first storage is `base`.

        Raises:
            RunAgain: it would not be.
        """
        if self._cache is None:
            return
        events, parts = self._machine.recorder.trace.events, vars(self._entry())
        count = len(events)
        for name, value in left.values:
            if isinstance(value, Made):
                parts[name] = self._made(value, base + value.storage)
            elif value is not None:
                parts[name] = value[1]
        if len(events) != count:
            raise RunAgain("an entry of a cache died that others keep")

    def _made(self, one: Made, index: int) -> torch.Tensor:
        size, stride = one.viewed or (one.size, one.stride)
        tensor = torch.empty_strided(size, stride, dtype=one.dtype, device="meta")
        storage = tensor.untyped_storage()
        if storage.nbytes() != one.num_bytes:
            raise RunAgain("an entry of a cache is part of more")
        _forbid_data(tensor)
        self._machine.recorder.attach(storage, index)
        if one.value is not None:
            self._machine.values.set_uniform(tensor, one.value[1])
        for _ in range(one.version):
            increment_version(tensor)
        return tensor if one.viewed is None else tensor.as_strided(one.size, one.stride, one.offset)


_UNEQUAL = object()


def _named(value: Any) -> tuple[weakref.ref[torch.Tensor], int] | None:
    return (weakref.ref(value), value._version) if isinstance(value, torch.Tensor) else None


def _is_ordinary(value: Any) -> bool:
    """Whether it is a tensor that holds nothing but its numbers, and comes from no graph."""
    return (
        type(value) is torch.Tensor
        and not vars(value)
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.is_inference()
        and not value.is_conj()
        and not value.is_neg()
    )


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether its memory is what a new tensor like it would have."""
    most = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    return not tensor.storage_offset() and tensor.untyped_storage().nbytes() == most * tensor.itemsize


def _is_seen(value: Any) -> bool:
    """Whether an object holds nothing but what is in its dictionary."""
    return hasattr(value, "__dict__") and not isinstance(value, type) and not has_slots(type(value))


class _Watched(list[Any]):
    """The list of a cache, while a layer runs; notes whether it is used for more than to get the layer's own entry."""

    place = 0
    is_used = False
    original: list[Any]

    def __getitem__(self, key: Any) -> Any:
        if type(key) is Spy and key.value == self.place:
            return list.__getitem__(self, self.place)
        self.is_used = True
        return list.__getitem__(self, key)


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: _Watched, *args: Any, **kwargs: Any) -> Any:
        self.is_used = True
        result = getattr(self.original, name)(*args, **kwargs)
        if result is self.original or name in _WRITTEN:
            list.__init__(self, self.original)
        return self if result is self.original else result

    return method


_READ = (
    "__iter__", "__len__", "__contains__", "__reversed__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
    "__add__", "__mul__", "__rmul__", "__repr__", "copy", "index", "count",
)  # fmt: skip
_WRITTEN = (
    "__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "extend", "insert", "pop", "remove", "clear",
    "reverse", "sort",
)  # fmt: skip
for _name in (*_READ, *_WRITTEN):
    setattr(_Watched, _name, _passed_on(_name))
del _name
