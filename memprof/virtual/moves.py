"""Copies of tensors between devices (`.to()`, `.cuda()`), whose backward copies gradients to the source device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memprof.torch_private import dispatch, kernels
from memprof.trace.events import HOST, is_gpu
from memprof.virtual.device_answers import DeviceAnswers
from memprof.virtual.device_state import DeviceState
from memprof.virtual.host_kinds import HostKinds
from memprof.virtual.legacy_types import legacy_name, legacy_type

_META = torch.device("meta")
_CPU = torch.device("cpu")


class Moves:
    """Handlers of the functions that move a tensor."""

    def __init__(
        self, device_state: DeviceState, answers: DeviceAnswers, mode: TorchFunctionMode, run: Callable[..., Any]
    ) -> None:
        self._device_state = device_state
        self._believed = answers.believed
        self._device = answers.device
        self._mode = mode
        self._run = run
        self.kinds = HostKinds(device_state, self._move_gradient)

    def handlers(self) -> dict[Any, Callable[..., Any]]:
        """Return the handlers of the function mode: torch function -> replacement."""
        return {
            kernels.parse_to: _parse_to,
            torch.Tensor.type: self._type,
            torch.Tensor.to: self.to,
            torch.Tensor.type_as: self.to,
            torch.Tensor.cuda: self._to_cuda,
            torch.Tensor.cpu: self._to_cpu,
            torch.Tensor.copy_: self._copy_,
        }

    def _type(self, tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return legacy_name(tensor.dtype, on_gpu=is_gpu(self._believed(tensor)))
        named = legacy_type(dtype)
        return torch.Tensor.type(tensor, dtype, non_blocking) if named is None else self.to(tensor, *named)

    def to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run `Tensor.to`."""
        other = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.get("other")
        if other is not None:
            device: Any = self._device(other)
            dtype: Any = other.dtype
            rest = {name: kwargs[name] for name in ("copy", "memory_format") if name in kwargs}
            copy = kwargs.get("copy", False)
            non_blocking = kwargs.get("non_blocking", args[1] if len(args) > 1 else False)
        else:
            # Two flags by position are non_blocking and copy; torch's parser ignores the second.
            both = len(args) > 1 and isinstance(args[-1], bool) and isinstance(args[-2], bool)
            copy = args[-1] if both else bool(kwargs.get("copy", False))
            device, dtype, non_blocking, memory_format = _parse_to(
                *(args[:-1] if both else args), **{name: value for name, value in kwargs.items() if name != "copy"}
            )
            rest = {"memory_format": memory_format} if memory_format is not None else {}
        believed = self._believed(tensor)
        if device is None:
            wanted = believed
        else:
            other = "meta" if device.type == "meta" else HOST
            wanted = self._device_state.gpus.named(device) if device.type == "cuda" else other
        dtype = dtype or tensor.dtype
        if wanted == believed and dtype == tensor.dtype and not copy and not rest.get("memory_format"):
            return tensor
        if wanted == believed:
            # No move: torch runs `to` on the actual device of the tensor.
            return torch.Tensor.to(tensor, dtype, copy=copy, **{k: v for k, v in rest.items() if k != "copy"})
        device_argument = _CPU if wanted == HOST else _META
        kwargs = {"memory_format": rest["memory_format"]} if rest.get("memory_format") is not None else {}
        if non_blocking:
            kwargs["non_blocking"] = True
        return self._copy_to(tensor, believed, wanted, dtype=dtype, device=device_argument, **kwargs)

    def _copy_to(self, tensor: torch.Tensor, believed: str, wanted: str, **kwargs: Any) -> torch.Tensor:
        """Return a copy on another device, with a hook that returns gradients to the source device."""
        with self._device_state.factory_device_as(wanted):
            made: torch.Tensor = torch.ops.aten._to_copy.default(tensor, **kwargs)
        if made.grad_fn is not None and made.is_meta and tensor.is_meta and "meta" not in (believed, wanted):
            made.grad_fn.register_hook(self._make_gradient_hook(believed))
        return made

    def _to_cuda(self, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        return self.to(tensor, "cuda" if device is None else device, non_blocking=non_blocking, **kwargs)

    def _make_gradient_hook(self, device: str) -> Callable[..., Any]:
        """Return a hook for a copy between devices that moves the gradient to `device`, the source of the copy. C++
        compares the actual devices, which are both meta."""

        def send(inputs: Any, outputs: Any) -> Any:
            with contextlib.nullcontext() if dispatch.len_torch_function_stack() else self._mode:
                return tuple(None if gradient is None else self._send_gradient(gradient, device) for gradient in inputs)

        return send

    def _move_gradient(self, gradient: torch.Tensor, device: str) -> torch.Tensor:
        """Return `gradient` on the device that the engine expects, by a call that this mode always sees."""
        with contextlib.nullcontext() if dispatch.len_torch_function_stack() else self._mode:
            return gradient.to(device)

    def _send_gradient(self, gradient: torch.Tensor, device: str) -> torch.Tensor:
        """Return the gradient of a virtual tensor on `device`, as a virtual tensor."""
        believed = self._believed(gradient)
        if device != HOST or believed == HOST:
            return gradient.to(device)
        with torch.DisableTorchFunction():
            return self._copy_to(gradient, believed, HOST, device=_META)

    def _copy_(self, tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Run `copy_`. Between GPUs, a source that needs a gradient is moved first, with a gradient hook."""
        if isinstance(source, torch.Tensor) and source.requires_grad:
            ends = self._believed(source), self._believed(tensor)
            if not (self._device_state.gpus.several and torch.is_grad_enabled()):
                source = self.kinds.like(source, tensor) if ends[0] == ends[1] else source
            elif ends[0] != ends[1] and all(map(is_gpu, ends)):
                source = self.to(source, ends[1])
        with torch.DisableTorchFunction():
            is_wrapper = tensor.is_cuda  # reported by a subclass itself; the method would set a guard of that GPU
        copy = torch.ops.aten.copy_.default if is_wrapper else torch.Tensor.copy_
        return self._run(copy, (tensor, source, non_blocking), {})

    def _to_cpu(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        return self.to(tensor, _CPU, **kwargs)


def _parse_to(*args: Any, **kwargs: Any) -> Any:
    """Return the parsed arguments of a `.to()`; a bare index is an index of CUDA devices."""
    if args and isinstance(args[0], int) and not isinstance(args[0], bool):
        args = (torch.device("cuda", args[0]), *args[1:])
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = torch.device("cuda", kwargs["device"])
    return kernels.parse_to(*args, **kwargs)
