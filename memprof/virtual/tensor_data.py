"""Tensors that the program creates from Python data (numbers, lists, arrays), on the requested device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memprof.torch_private import dispatch
from memprof.trace.events import HOST
from memprof.virtual.device_answers import DeviceAnswers
from memprof.virtual.device_state import DeviceState
from memprof.virtual.mixed import MixedDevices
from memprof.virtual.moves import Moves
from memprof.virtual.operator_call import find_tensors

_META = torch.device("meta")
_CPU = torch.device("cpu")
_default: Any = dispatch.default_device.get()
_MAKE_SPARSE = (
    *(torch.sparse_coo_tensor, torch.sparse_csr_tensor, torch.sparse_csc_tensor),
    *(torch.sparse_bsr_tensor, torch.sparse_bsc_tensor, torch.sparse_compressed_tensor),
)


class TensorsFromData:
    """Constructors of tensors from data, which make the tensor on the host and then move it."""

    def __init__(
        self,
        device_state: DeviceState,
        answers: DeviceAnswers,
        moves: Moves,
        mixed: MixedDevices,
        run: Callable[..., Any],
        read: Callable[[torch.Tensor], torch.Tensor],
        note_pinned: Callable[[torch.Tensor], None],
    ) -> None:
        self._device_state = device_state
        self._device = answers.device
        self._to = moves.to
        self._kinds = moves.kinds
        self._mixed = mixed
        self._run = run
        self._read = read
        self._note_pinned = note_pinned

    def handlers(self) -> dict[Any, Callable[..., Any]]:
        """Return the handlers of the function mode: torch function -> replacement."""
        return {
            torch.device: _make_device,
            **{func: functools.partial(self._make_sparse, func) for func in _MAKE_SPARSE},
            torch.tensor: self._tensor,
            torch.as_tensor: self._as_tensor,
            torch.asarray: self._as_tensor,
            torch.Tensor.new_tensor: self._new_tensor,
            torch.Tensor.new: self._new,
        }

    def _tensor(
        self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False
    ) -> torch.Tensor:
        if isinstance(data, torch.Tensor):
            target = self._device(data) if device is None else device
            result = self._to(data.detach(), target, dtype, copy=True)
            return result.requires_grad_() if requires_grad else result
        try:
            result = torch.tensor(data, dtype=dtype, device=_CPU)
        except (RuntimeError, TypeError):
            result = torch.tensor(self._to_numbers(data), dtype=dtype, device=_CPU)  # of a list that holds tensors
        result = self._move_to_requested(result, device)
        if pin_memory:
            self._note_pinned(result)
        # Functions transformed by torch.func may make tensors, but not call requires_grad_.
        return result.requires_grad_() if requires_grad else result

    def _to_numbers(self, data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            return self._read(data).tolist()
        return [self._to_numbers(part) for part in data] if isinstance(data, (list, tuple)) else data

    def _as_tensor(self, data: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, torch.Tensor):
            return self._to(data, self._device(data) if device is None else device, dtype)
        return self._move_to_requested(torch.as_tensor(data, dtype=dtype, device=_CPU), device)

    def _new_tensor(
        self, tensor: torch.Tensor, data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> torch.Tensor:
        target = self._device(tensor) if device is None else device
        return self._tensor(data, dtype=dtype or tensor.dtype, device=target, requires_grad=requires_grad)

    def _new(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a new tensor: from numbers, if given; from indices and values, if sparse; else by shape."""
        if tensor.layout is torch.sparse_coo and args:
            return torch.sparse_coo_tensor(*args, dtype=tensor.dtype, check_invariants=False)
        if args and isinstance(args[0], (list, tuple)) and not isinstance(args[0], torch.Size):
            return self._new_tensor(tensor, args[0], **kwargs)
        return self._mixed.inside(torch.Tensor.new, (tensor, *args), kwargs)

    def _make_sparse(self, func: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        """Return a sparse tensor of indices and values, converted to one kind. Tensors among them are moved to `device`
        if given, values first (utils/tensor_new.cpp)."""
        device = _default.CURRENT_DEVICE if device is None else _make_device(device)
        if device is None:
            return self._run(func, *self._kinds.all_virtual((args, kwargs)))
        parts: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        tensors = [name for name, part in parts.items() if isinstance(part, torch.Tensor)]
        for name in tensors[-1:] + tensors[:-1]:
            parts[name] = self._to(parts[name], device)
        args, kwargs = self._kinds.all_virtual(
            ([parts[index] for index in range(len(args))], {n: parts[n] for n in kwargs})
        )
        virtual = device.type != HOST or any(
            map(self._device_state.is_virtual, find_tensors([*args, *kwargs.values()]))
        )
        wanted = self._device_state.gpus.named(device) if device.type == "cuda" else device.type
        with self._device_state.factory_device_as(wanted):
            return func(*args, **{**kwargs, "device": _META if virtual else _CPU})

    def _move_to_requested(self, tensor: torch.Tensor, device: Any) -> torch.Tensor:
        """Return a new host tensor on the requested device."""
        if device is None:
            device = _default.CURRENT_DEVICE
        return tensor if device is None else self._to(tensor, device)


def _make_device(*args: Any, **kwargs: Any) -> torch.device:
    """Return a torch.device; a bare index is an index of CUDA devices."""
    if len(args) == 1 and not kwargs and isinstance(args[0], int):
        return torch.device("cuda", args[0])
    return torch.device(*args, **kwargs)
