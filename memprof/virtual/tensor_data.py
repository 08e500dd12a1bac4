"""Tensors that the program creates from data (numbers, lists, arrays), on the requested device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memprof.torch_private import dispatch, kernels
from memprof.trace.events import HOST
from memprof.virtual.device_answers import DeviceAnswers
from memprof.virtual.device_state import DeviceState
from memprof.virtual.mixed import MixedDevices
from memprof.virtual.moves import Moves
from memprof.virtual.operator_call import find_tensors

_META = torch.device("meta")
_CPU = torch.device("cpu")
_default_device: Any = dispatch.default_device.get()
_MAKE_SPARSE = (
    *(torch.sparse_coo_tensor, torch.sparse_csr_tensor, torch.sparse_csc_tensor),
    *(torch.sparse_bsr_tensor, torch.sparse_bsc_tensor, torch.sparse_compressed_tensor),
)

_COMPARE_DEVICES = (kernels.stft, kernels.istft)  # native/SpectralOps.cpp


class TensorsFromData:
    """Handlers of functions such as `torch.tensor`, which create the tensor on the host and then move it."""

    def __init__(
        self,
        device_state: DeviceState,
        device_answers: DeviceAnswers,
        moves: Moves,
        mixed_devices: MixedDevices,
        run: Callable[..., Any],
        read_values: Callable[[torch.Tensor], torch.Tensor],
        mark_pinned: Callable[[torch.Tensor], None],
    ) -> None:
        self._device_state = device_state
        self._get_device = device_answers.get_device
        self._move = moves.to
        self._host_kinds = moves.host_kinds
        self._mixed_devices = mixed_devices
        self._run = run
        self._read_values = read_values
        self._mark_pinned = mark_pinned

    def handlers(self) -> dict[Any, Callable[..., Any]]:
        """Return the handlers of the function mode: torch function -> replacement."""
        return {
            torch.device: self._make_device,
            **{func: functools.partial(self._make_sparse, func) for func in _MAKE_SPARSE},
            **{func: functools.partial(self._run_with_one_kind, func) for func in _COMPARE_DEVICES},
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
            target = self._get_device(data) if device is None else device
            result = self._move(data.detach(), target, dtype, copy=True)
            return result.requires_grad_() if requires_grad else result
        try:
            result = torch.tensor(data, dtype=dtype, device=_CPU)
        except (RuntimeError, TypeError):
            result = torch.tensor(self._to_numbers(data), dtype=dtype, device=_CPU)  # of a list that holds tensors
        result = self._move_to_requested(result, device)
        if pin_memory:
            self._mark_pinned(result)
        # Functions transformed by torch.func may make tensors, but not call requires_grad_.
        return result.requires_grad_() if requires_grad else result

    def _to_numbers(self, data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            return self._read_values(data).tolist()
        return [self._to_numbers(item) for item in data] if isinstance(data, (list, tuple)) else data

    def _as_tensor(self, data: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, torch.Tensor):
            return self._move(data, self._get_device(data) if device is None else device, dtype)
        return self._move_to_requested(torch.as_tensor(data, dtype=dtype, device=_CPU), device)

    def _new_tensor(
        self, tensor: torch.Tensor, data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> torch.Tensor:
        target = self._get_device(tensor) if device is None else device
        return self._tensor(data, dtype=dtype or tensor.dtype, device=target, requires_grad=requires_grad)

    def _new(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the result of `Tensor.new`: a tensor from numbers, from indices and values, or of a shape."""
        if tensor.layout is torch.sparse_coo and args:
            return torch.sparse_coo_tensor(*args, dtype=tensor.dtype, check_invariants=False)
        if args and isinstance(args[0], (list, tuple)) and not isinstance(args[0], torch.Size):
            return self._new_tensor(tensor, args[0], **kwargs)
        return self._mixed_devices.run_with_arguments(torch.Tensor.new, (tensor, *args), kwargs)

    def _run_with_one_kind(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a function that compares the devices of host tensors in C++, of which large ones are
        virtual and small ones real."""
        return self._run(func, *self._host_kinds.make_virtual((args, kwargs)))

    def _make_sparse(self, func: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        """Return a sparse tensor. Indices and values that are tensors are moved to `device` if given, values first
        (utils/tensor_new.cpp), and converted to one kind of host tensors."""
        device = _default_device.CURRENT_DEVICE if device is None else self._make_device(device)
        if device is None:
            return self._run_with_one_kind(func, *args, **kwargs)
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        tensors = [name for name, argument in arguments.items() if isinstance(argument, torch.Tensor)]
        for name in tensors[-1:] + tensors[:-1]:
            arguments[name] = self._move(arguments[name], device)
        args, kwargs = self._host_kinds.make_virtual(
            ([arguments[index] for index in range(len(args))], {n: arguments[n] for n in kwargs})
        )
        is_virtual = device.type != HOST or any(
            map(self._device_state.is_virtual, find_tensors([*args, *kwargs.values()]))
        )
        device_name = (
            self._device_state.gpus.get_name(device) if device.type == self._device_state.gpus.type else device.type
        )
        with self._device_state.factory_device_as(device_name):
            return func(*args, **{**kwargs, "device": _META if is_virtual else _CPU})

    def _move_to_requested(self, tensor: torch.Tensor, device: Any) -> torch.Tensor:
        """Return `tensor`, a new host tensor, moved to `device` or the default device."""
        if device is None:
            device = _default_device.CURRENT_DEVICE
        return tensor if device is None else self._move(tensor, device)

    def _make_device(self, *args: Any, **kwargs: Any) -> torch.device:
        """Return a torch.device; an integer is the index of a GPU."""
        if len(args) == 1 and not kwargs and isinstance(args[0], int):
            return torch.device(self._device_state.gpus.type, args[0])
        return torch.device(*args, **kwargs)
