"""Functions of libraries that quantize one weight after another: what two calls did is written for those that follow.

They are given a tensor of unknown numbers and plain values, and look at nothing else that changes. Two calls behind
each other with the same layout must have done the same, beside which nothing else happened; what they returned is made
again around tensors that stand for what is written.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from memprof.trace.events import GPU, NONE
from memprof.virtual.recording import RecordingMode
from memprof.virtual.repeat.alike import has_slots, layout_of
from memprof.virtual.repeat.backward import RunAgain
from memprof.virtual.repeat.casts import OddError
from memprof.virtual.repeat.slices import Begun, Call, From, Slice, UnknownError, write
from memprof.virtual.repeat.uses import uses_of_new
from memprof.virtual.values import Known
from memprof.watch.forward import Place

QUANTIZING = (("bitsandbytes.functional", "quantize_4bit"),)
"""Module and name."""
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.Size, type(None))
_NoTorchFunction = torch._C.DisableTorchFunction
_storage_use_count = torch._C._storage_Use_Count
_forbid_data = torch._C._set_throw_on_mutable_data_ptr


@dataclass(frozen=True)
class _Tensor:
    """One in a result that the call has made."""

    storage: int
    """The number, of those that the call made, of its storage's, of which it is all."""
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int
    known: Known


@dataclass(frozen=True, eq=False)
class _Old:
    """One in a result that was there before: of each call the same."""

    tensor: weakref.ref[torch.Tensor]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Old) and self.tensor() is other.tensor()

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class _Object:
    """An object in a result, or a container."""

    kind: type
    parts: tuple[tuple[Any, Any], ...]


@dataclass
class _Did:
    """A call that was run. Equal to another if that one did the same."""

    slice: Slice
    result: Any
    is_clean: bool = field(compare=False)


class Functions:
    """Repeats calls of `QUANTIZING` in one run.

    Args:
        machine: it runs on this.
        assumptions: how many there are.
        is_ordinary: whether nothing is going on that has effects which are not looked at.
    """

    def __init__(self, machine: RecordingMode, assumptions: Callable[[], int], is_ordinary: Callable[[], bool]) -> None:
        self._machine = machine
        self._assumptions = assumptions
        self._is_ordinary = is_ordinary
        self._done: dict[Any, _Did | None] = {}
        """By what they were given: the last that was run, until two are the same..."""
        self._patterns: dict[Any, _Did] = {}
        """... and what is repeated."""
        self.times = 0
        """How often a call was repeated."""

    def patches(self, modules: dict[str, Any]) -> Iterator[tuple[Any, str, Any]]:
        """What is put in the place of those that are loaded: owner, name, replacement."""
        for module, name in QUANTIZING:
            owner = modules.get(module)
            if hasattr(owner, name):
                yield owner, name, self._wrapped(getattr(owner, name))

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _NoTorchFunction():
                tensor, key = self._key(signature, args, kwargs) if self._is_ordinary() else (None, None)
                if key in self._patterns:
                    return self._repeat(self._patterns[key])
            if tensor is None:
                return original(*args, **kwargs)
            return self._run(key, tensor, lambda: original(*args, **kwargs))

        return call

    def _key(self, signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[torch.Tensor | None, Any]:
        """The tensor that a call is given, and all that decides what it does; None: it is not known."""
        machine, recorder = self._machine, self._machine.recorder
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return None, None
        tensor, *others = given.args
        plain = [*others, *given.kwargs.values()]
        if not _is_plain_tensor(tensor) or any(type(one) not in _PLAIN for one in plain) or machine.caches.looks:
            return None, None
        address = tensor.untyped_storage()._cdata
        if machine.device_of(tensor) != GPU or recorder.index_of(tensor) == NONE or machine.values.knows(address):
            return None, None
        modes = [mode for mode in _get_current_function_mode_stack() if type(mode) is not type(machine.function_mode)]
        if any(type(mode) is not DeviceContext for mode in modes):
            return None, None
        return tensor, (
            signature, layout_of(tensor), tuple(given.arguments), tuple((type(one), one) for one in plain),
            tuple(str(mode.device) for mode in modes), recorder.modules.current, recorder.phase_index,
            recorder.is_noted, torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cuda"),
            torch._C._current_graph_task_id(),
        )  # fmt: skip

    def _run(self, key: Any, tensor: torch.Tensor, original: Callable[[], Any]) -> Any:
        machine, recorder = self._machine, self._machine.recorder
        with _NoTorchFunction():
            call = Call(range(0), recorder.index_of(tensor))
            version = tensor._version
            begun = Begun(machine, self._assumptions)
            call.first_event, call.first_storage = begun.first_event, begun.first_storage
        result = original()
        with _NoTorchFunction():
            call.storages = len(recorder.trace.storages) - call.first_storage
            try:
                made, is_clean = begun.end(call)
                described = self._described(result, call, made)
            except (UnknownError, OddError):
                self._done[key] = None
                return result
            left = {one.storage for one in _tensors_in(described)}
            is_own = all(origin is From.HERE for _, origin, _ in made.events) and set(made.alive) == left
            done = _Did(made, described, is_clean and is_own and tensor._version == version)
            before, self._done[key] = self._done.get(key), done
            with _disable_current_modes():
                if before is not None and before == done and done.is_clean:
                    self._patterns[key] = done
        return result

    def _described(self, value: Any, call: Call, made: Slice) -> Any:
        """What is returned, to be compared and made again.

        Raises:
            OddError: more than is looked into.
        """
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in (tuple, list):
            return _Object(kind, tuple((None, self._described(part, call, made)) for part in value))
        if kind is not torch.Tensor:
            if not hasattr(value, "__dict__") or isinstance(value, type) or has_slots(kind):
                raise OddError
            parts = vars(value).items()
            return _Object(kind, tuple((name, self._described(part, call, made)) for name, part in parts))
        index = self._machine.recorder.index_of(value) if value.is_meta else NONE
        number = index - call.first_storage
        if not _is_plain_tensor(value) or number >= call.storages or index in (NONE, call.input):
            raise OddError
        if number < 0:
            return _Old(weakref.ref(value))
        storage = value.untyped_storage()
        known = self._machine.values.taken_down(storage._cdata)
        if (
            known is None
            or value._is_view()
            or value.storage_offset()
            or self._machine.device_of(value) != GPU
            or _storage_use_count(storage._cdata) > uses_of_new()
            or storage.nbytes() != self._machine.recorder.trace.storages[index].num_bytes
        ):
            raise OddError
        return _Tensor(number, value.size(), value.stride(), value.dtype, value._version, known)

    def _repeat(self, pattern: _Did) -> Any:
        machine, recorder = self._machine, self._machine.recorder
        call = Call(range(0), NONE, first_event=len(recorder.trace.events), first_storage=len(recorder.trace.storages))
        try:
            base = write(pattern.slice, machine, call)
        except UnknownError as error:
            raise RunAgain(str(error)) from None
        machine.values.looks += pattern.slice.looks
        self.times += 1
        if pattern.slice.first_place is not None:
            (_, module), source, event = pattern.slice.first_place
            recorder.note_repeated(Place(module, source, call.first_event + event))
        with _disable_current_modes():
            return self._made(pattern.result, base)

    def _made(self, described: Any, base: int) -> Any:
        if isinstance(described, _Old):
            tensor = described.tensor()
            if tensor is None:
                raise RunAgain("what a function has returned is gone")
            return tensor
        if isinstance(described, _Tensor):
            tensor = torch.empty_strided(described.size, described.stride, dtype=described.dtype, device="meta")
            storage, index = tensor.untyped_storage(), base + described.storage
            if storage.nbytes() != self._machine.recorder.trace.storages[index].num_bytes:
                raise RunAgain("what a function has returned is part of more")
            _forbid_data(tensor)
            self._machine.recorder.attach(storage, index)
            self._machine.values.hold_like(storage._cdata, described.known)
            for _ in range(described.version):
                increment_version(tensor)
            return tensor
        if not isinstance(described, _Object):
            return described
        parts = {place: self._made(part, base) for place, (_, part) in enumerate(described.parts)}
        if described.kind in (tuple, list):
            return described.kind(parts.values())
        made: Any = object.__new__(described.kind)
        vars(made).update((name, parts[place]) for place, (name, _) in enumerate(described.parts))
        return made


def _is_plain_tensor(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.is_meta
        and not vars(value)
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.is_inference()
    )


def _tensors_in(described: Any) -> Iterator[_Tensor]:
    if isinstance(described, _Tensor):
        yield described
    elif isinstance(described, _Object):
        for _, part in described.parts:
            yield from _tensors_in(part)
