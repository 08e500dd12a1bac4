"""Answers to the program's queries of a tensor's device: `tensor.device`, `is_cuda`, `repr(tensor)`, grouping."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memprof.trace.events import GPU_TYPES, HOST, gpu_index, is_gpu
from memprof.virtual.device_state import DeviceState
from memprof.watch.wrappers import has_memory, unwrap

_make_device = functools.cache(torch.device)


class DeviceAnswers:
    """Replacements for the attributes and functions that report a tensor's device."""

    def __init__(self, device_state: DeviceState) -> None:
        self._device_state = device_state

    def handlers(self) -> dict[Any, Callable[..., Any]]:
        """Return the handlers of the function mode: torch function -> replacement."""
        return {
            torch.Tensor.device.__get__: self.get_device,  # type: ignore[attr-defined]
            **{
                getattr(torch.Tensor, f"is_{gpu_type}").__get__: functools.partial(self._is_on, gpu_type)
                for gpu_type in GPU_TYPES
            },
            torch.Tensor.is_cpu.__get__: lambda tensor: self.get_device_name(tensor) == HOST,  # type: ignore[attr-defined]
            torch.Tensor.is_meta.__get__: lambda tensor: self.get_device_name(tensor) == "meta",  # type: ignore[attr-defined]
            torch.Tensor.get_device: self._get_device_index,
        }

    def get_device_name(self, tensor: torch.Tensor) -> str:
        """Return the name of the simulated device of `tensor`, such as "cuda:0"."""
        with torch.DisableTorchFunction():
            return self._device_state.device_of(tensor)

    def get_device(self, tensor: torch.Tensor) -> torch.device:
        """Return the simulated device of `tensor`."""
        with torch.DisableTorchFunction():
            tensor = unwrap(tensor)
            if not tensor.is_meta:
                return tensor.device
            name = self._device_state.device_of(tensor)
        return _make_device(name)

    def _is_on(self, gpu_type: str, tensor: torch.Tensor) -> bool:
        return self.get_device_name(tensor).startswith(gpu_type)

    def _get_device_index(self, tensor: torch.Tensor) -> int:
        device = self.get_device_name(tensor)
        return gpu_index(device) if is_gpu(device) else -1

    def wrap_str(
        self, original: Callable[..., str], read_values: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[..., str]:
        """Return a replacement for `torch._tensor_str._str` that prints the simulated device, and values if known."""

        def _str(tensor: torch.Tensor, **kwargs: Any) -> str:
            with torch.DisableTorchFunction():
                is_virtual = has_memory(tensor) and tensor.is_meta
                device = self._device_state.device_of(tensor) if is_virtual else "meta"
                if device == "meta":
                    return original(tensor, **kwargs)
                values = self._device_state.values.store.get(tensor.detach())
                if values is None and tensor.dim() == 0:
                    values = read_values(tensor)
                cls = torch.Tensor if type(tensor) is torch.nn.Parameter else type(tensor)  # as torch prints it
                if values is None:
                    name = "tensor" if cls is torch.Tensor else cls.__name__
                    return f"{name}(..., device='{device}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"
                return f"{original(values.as_subclass(cls), **kwargs)[:-1]}, device='{device}')"

        return _str

    def wrap_grouping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for `torch._C._group_tensors_by_device_and_dtype` that groups by simulated device.

        Optimizers and gradient clipping group tensors by this function before they call operators on lists. Tensors on
        "meta" may be on two simulated devices, and host tensors may be real or virtual.
        """

        def group(tensor_lists: Any, with_indices: bool = False) -> Any:
            groups: dict[Any, Any] = {}
            for (_, dtype), (lists, indices) in original(tensor_lists, with_indices).items():
                for index, tensor in enumerate(lists[0]):
                    key = (self.get_device(tensor), dtype)
                    if key not in groups:
                        groups[key] = ([[] for _ in lists], [])
                    group_lists, group_indices = groups[key]
                    for group_list, tensors in zip(group_lists, lists, strict=True):
                        if tensors:
                            group_list.append(tensors[index])
                    if indices:
                        group_indices.append(indices[index])
            return groups

        return group
