"""Moves of tensors between devices, with backward hooks that move gradients back to the source device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memprof.torch_private import dispatch, kernels
from memprof.trace.events import HOST, is_gpu
from memprof.virtual.device_answers import DeviceAnswers
from memprof.virtual.device_state import DeviceState
from memprof.virtual.host_kinds import HostKinds
from memprof.virtual.legacy_types import get_legacy_name, parse_legacy_type

_META = torch.device("meta")
_CPU = torch.device("cpu")


class Moves:
    """Handlers of the torch functions that move tensors between devices."""

    def __init__(
        self, device_state: DeviceState, answers: DeviceAnswers, mode: TorchFunctionMode, run: Callable[..., Any]
    ) -> None:
        self._device_state, self._gpu_type = device_state, device_state.gpus.type
        self._device_name = answers.get_device_name
        self._get_device = answers.get_device
        self._mode = mode
        self._run = run
        self.host_kinds = HostKinds(device_state, self._move_gradient)

    def handlers(self) -> dict[Any, Callable[..., Any]]:
        """Return the handlers of the function mode: torch function -> replacement."""
        return {
            kernels.parse_to: self._parse_to,
            torch.Tensor.type: self._type,
            torch.Tensor.to: self.to,
            torch.Tensor.type_as: self.to,
            torch.Tensor.cuda: functools.partial(self._to_gpu, "cuda"),
            torch.Tensor.xpu: functools.partial(self._to_gpu, "xpu"),
            torch.Tensor.cpu: self._to_cpu,
            torch.Tensor.copy_: self._copy_,
        }

    def _type(self, tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return get_legacy_name(tensor.dtype, self._device_name(tensor))
        legacy_type = parse_legacy_type(dtype)
        return torch.Tensor.type(tensor, dtype, non_blocking) if legacy_type is None else self.to(tensor, *legacy_type)

    def to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `tensor.to(*args, **kwargs)`, on the simulated device."""
        other = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.get("other")
        if other is not None:
            device: Any = self._get_device(other)
            dtype: Any = other.dtype
            options = {name: kwargs[name] for name in ("copy", "memory_format") if name in kwargs}
            copy = kwargs.get("copy", False)
            non_blocking = kwargs.get("non_blocking", args[1] if len(args) > 1 else False)
        else:
            # Two flags by position are non_blocking and copy; torch's parser ignores the second.
            has_flags = len(args) > 1 and isinstance(args[-1], bool) and isinstance(args[-2], bool)
            copy = args[-1] if has_flags else bool(kwargs.get("copy", False))
            device, dtype, non_blocking, memory_format = self._parse_to(
                *(args[:-1] if has_flags else args), **{name: value for name, value in kwargs.items() if name != "copy"}
            )
            options = {"memory_format": memory_format} if memory_format is not None else {}
        source = self._device_name(tensor)
        if device is None:
            target = source
        else:
            target = self._device_state.gpus.get_name(device) if device.type == self._gpu_type else device.type
            if target not in (HOST, "meta", *self._device_state.gpus.devices):
                torch.empty(0, device=device)  # raises torch's error for a device that the machine lacks
        dtype = dtype or tensor.dtype
        if target == source and dtype == tensor.dtype and not copy and not options.get("memory_format"):
            return tensor
        if target == source:
            # No move: torch runs `to` on the actual device of the tensor.
            return torch.Tensor.to(tensor, dtype, copy=copy, **{k: v for k, v in options.items() if k != "copy"})
        device_argument = _CPU if target == HOST else _META
        kwargs = {"memory_format": options["memory_format"]} if options.get("memory_format") is not None else {}
        if non_blocking:
            kwargs["non_blocking"] = True
        return self._copy_to(tensor, source, target, dtype=dtype, device=device_argument, **kwargs)

    def _copy_to(self, tensor: torch.Tensor, source: str, target: str, **kwargs: Any) -> torch.Tensor:
        """Return a copy of `tensor` on `target`, with a hook that moves gradients back to `source`."""
        with self._device_state.factory_device_as(target):
            copy: torch.Tensor = torch.ops.aten._to_copy.default(tensor, **kwargs)
        if copy.grad_fn is not None and copy.is_meta and tensor.is_meta and "meta" not in (source, target):
            copy.grad_fn.register_hook(self._make_gradient_hook(source))
        return copy

    def _to_gpu(
        self, device_type: str, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any
    ) -> Any:
        target = torch.device(device_type, device) if isinstance(device, int) else device or device_type
        return self.to(tensor, target, non_blocking=non_blocking, **kwargs)

    def _make_gradient_hook(self, device: str) -> Callable[..., Any]:
        """Return a backward hook for a copy between devices, which moves the gradient to `device`, the source of the
        copy. C++ would not move it: for C++ both devices are meta."""

        def send_gradients(inputs: Any, outputs: Any) -> Any:
            with contextlib.nullcontext() if dispatch.len_torch_function_stack() else self._mode:
                return tuple(None if gradient is None else self._send_gradient(gradient, device) for gradient in inputs)

        return send_gradients

    def _move_gradient(self, gradient: torch.Tensor, device: str) -> torch.Tensor:
        """Return `gradient`, moved to `device` with the function mode active."""
        with contextlib.nullcontext() if dispatch.len_torch_function_stack() else self._mode:
            return gradient.to(device)

    def _send_gradient(self, gradient: torch.Tensor, device: str) -> torch.Tensor:
        """Return `gradient`, moved to `device`; a gradient on the host is virtual."""
        source = self._device_name(gradient)
        if device != HOST or source == HOST:
            return gradient.to(device)
        with torch.DisableTorchFunction():
            return self._copy_to(gradient, source, HOST, device=_META)

    def _copy_(self, tensor: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
        """Return the result of `copy_`. Between GPUs, a source that requires a gradient is moved first."""
        if not isinstance(source, torch.Tensor):  # a number, of which torch makes a tensor below the dispatch mode
            source = torch.tensor(source, dtype=tensor.dtype)
        if isinstance(source, torch.Tensor) and source.requires_grad:
            devices = self._device_name(source), self._device_name(tensor)
            if not (self._device_state.gpus.has_several and torch.is_grad_enabled()):
                source = self.host_kinds.match_kind(source, tensor) if devices[0] == devices[1] else source
            elif devices[0] != devices[1] and all(map(is_gpu, devices)):
                source = self.to(source, devices[1])
        with torch.DisableTorchFunction():
            is_wrapper = tensor.is_cuda  # reported by a subclass itself; the method would set a guard of that GPU
        copy = torch.ops.aten.copy_.default if is_wrapper else torch.Tensor.copy_
        return self._run(copy, (tensor, source, non_blocking), {})

    def _to_cpu(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        return self.to(tensor, _CPU, **kwargs)

    def _parse_to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the parsed arguments of `Tensor.to`; an integer device is the index of a GPU."""
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (torch.device(self._gpu_type, args[0]), *args[1:])
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = torch.device(self._gpu_type, kwargs["device"])
        return kernels.parse_to(*args, **kwargs)
