"""Answers to the program's queries of a tensor's device: `t.device`, `t.is_cuda`, `repr(t)`, groups by device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memprof.trace.events import HOST, gpu_index, is_gpu
from memprof.virtual.device_state import DeviceState
from memprof.watch.wrappers import has_memory, unwrap

_device_named = functools.cache(torch.device)


class DeviceAnswers:
    """Replacements for the attributes and functions that report a tensor's device."""

    def __init__(self, device_state: DeviceState) -> None:
        self._device_state = device_state

    def handlers(self) -> dict[Any, Callable[..., Any]]:
        """Return the handlers of the function mode: torch function -> replacement."""
        return {
            torch.Tensor.device.__get__: self.device,  # type: ignore[attr-defined]
            torch.Tensor.is_cuda.__get__: lambda tensor: is_gpu(self.believed(tensor)),  # type: ignore[attr-defined]
            torch.Tensor.is_cpu.__get__: lambda tensor: self.believed(tensor) == HOST,  # type: ignore[attr-defined]
            torch.Tensor.is_meta.__get__: lambda tensor: self.believed(tensor) == "meta",  # type: ignore[attr-defined]
            torch.Tensor.get_device: self._get_device,
        }

    def believed(self, tensor: torch.Tensor) -> str:
        """Return the device that the program believes `tensor` to be on."""
        with torch.DisableTorchFunction():
            return self._device_state.device_of(tensor)

    def device(self, tensor: torch.Tensor) -> torch.device:
        """Return the device that the program believes `tensor` to be on, as a torch.device."""
        with torch.DisableTorchFunction():
            tensor = unwrap(tensor)
            if not tensor.is_meta:
                return tensor.device
            believed = self._device_state.device_of(tensor)
        return _device_named(believed)

    def _get_device(self, tensor: torch.Tensor) -> int:
        believed = self.believed(tensor)
        return gpu_index(believed) if is_gpu(believed) else -1

    def wrap_str(
        self, original: Callable[..., str], read: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[..., str]:
        """Return the replacement for `torch._tensor_str._str`, which disables all modes before it reads the data."""

        def _str(tensor: torch.Tensor, **kwargs: Any) -> str:
            with torch.DisableTorchFunction():
                virtual = has_memory(tensor) and tensor.is_meta
                device = self._device_state.device_of(tensor) if virtual else "meta"
                if device == "meta":
                    return original(tensor, **kwargs)
                known = self._device_state.values.store.get(tensor.detach())
                if known is None and tensor.dim() == 0:
                    known = read(tensor)
                kind = torch.Tensor if type(tensor) is torch.nn.Parameter else type(tensor)  # as torch prints it
                if known is None:
                    name = "tensor" if kind is torch.Tensor else kind.__name__
                    return f"{name}(..., device='{device}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"
                return f"{original(known.as_subclass(kind), **kwargs)[:-1]}, device='{device}')"

        return _str

    def wrap_grouping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for `torch._C._group_tensors_by_device_and_dtype`, by believed devices.

        Optimizers and gradient clipping group tensors by this function before they call operators on lists. Tensors on
        "meta" may be on two believed devices, and host tensors may be real or virtual.
        """

        def group(tensor_lists: Any, with_indices: bool = False) -> Any:
            groups: dict[Any, Any] = {}
            for (_, dtype), (lists, indices) in original(tensor_lists, with_indices).items():
                for column, tensor in enumerate(lists[0]):
                    key = (self.device(tensor), dtype)
                    if key not in groups:
                        groups[key] = ([[] for _ in lists], [])
                    parts, numbers = groups[key]
                    for part, members in zip(parts, lists, strict=True):
                        if members:
                            part.append(members[column])
                    if indices:
                        numbers.append(indices[column])
            return groups

        return group
