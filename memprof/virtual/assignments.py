"""Assignments to tensors: to elements by an index, to `.data` and to `.grad`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from memprof.torch_private import tensors
from memprof.torch_private.dispatch import disable_current_modes
from memprof.trace.events import HOST, is_gpu
from memprof.virtual.device_answers import DeviceAnswers
from memprof.virtual.device_state import DeviceState
from memprof.virtual.host_kinds import HostKinds
from memprof.virtual.mixed import MixedDevices

_META = torch.device("meta")
_CPU = torch.device("cpu")
_SCRIPTED = (
    "TorchScript runs operator by operator. On a GPU it joins operators on single elements into kernels (NNC) from "
    "the second or third call on, and what is between them is not kept then."
)


class Assignments:
    """Handlers of the program's assignments to tensors; assigned values get the device that autograd expects."""

    def __init__(
        self,
        device_state: DeviceState,
        answers: DeviceAnswers,
        move: Callable[..., Any],
        mixed_devices: MixedDevices,
        host_kinds: HostKinds,
        read_values: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._device_state = device_state
        self._device_of = answers.get_device_name
        self._get_device = answers.get_device
        self._move = move
        self._mixed_devices = mixed_devices
        self._host_kinds = host_kinds
        self._read_values = read_values

    def handlers(self) -> dict[Any, Callable[..., Any]]:
        """Return the handlers of the function mode: torch function -> replacement."""
        return {
            torch.Tensor.data.__set__: self._set_data,  # type: ignore[attr-defined]
            torch.Tensor.grad.__set__: self._set_grad,  # type: ignore[union-attr]
            torch.Tensor.__setitem__: self._setitem,
        }

    def getitem(self, tensor: torch.Tensor, index: Any) -> Any:
        """Return `tensor[index]`."""
        if _has_list(index):
            index = self._convert_lists(tensor, index)
        return torch.Tensor.__getitem__(tensor, index)

    def _convert_lists(self, tensor: torch.Tensor, index: Any) -> Any:
        """Convert lists of numbers in `index` to tensors on the device of `tensor`. torch's C++ would create them where
        no mode sees them (python_variable_indexing.cpp, sequenceToVariable)."""
        if isinstance(index, tuple):
            return tuple(self._convert_lists(tensor, item) if type(item) is list else item for item in index)
        if not index or not all(type(item) in (int, bool) for item in index):
            return index
        return self._move(torch.tensor(index, device=_CPU), self._get_device(tensor))

    def _setitem(self, tensor: torch.Tensor, index: Any, value: Any) -> None:
        if _has_list(index):
            index = self._convert_lists(tensor, index)
        if isinstance(value, (bool, int, float)) and is_gpu(self._device_of(tensor)):
            # The number stays on the host for a CUDA tensor (torch/csrc/autograd/python_variable_indexing.cpp).
            value = torch.tensor(value, dtype=tensor.dtype, device=_CPU)
        elif isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            value = self._mixed_devices.move_assigned_value(tensor, index, value)
            if self._device_of(tensor) == HOST == self._device_of(value):
                value = self._host_kinds.match_kind(value, tensor)
        torch.Tensor.__setitem__(tensor, index, value)

    def _set_data(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set `tensor.data` to `value`; if only one of both has data, replace the C++ tensor behind `tensor`."""
        with torch.DisableTorchFunction():
            if tensor.is_meta == value.is_meta:
                tensor.data = value
                return
            replacement = value.detach().requires_grad_(tensor.requires_grad)
            if tensor.grad is not None:
                # nn.Module._apply puts the gradient's data into `other.grad` next, which therefore must exist.
                with disable_current_modes():
                    replacement.grad = torch.empty_like(replacement)
            # Class and attributes stay, hooks are set again. The swap also works where a graph has saved the old tensor
            # (`weight_norm` saves one when the model is built), which torch.utils.swap_tensors refuses.
            tensors.swap_tensor_impl(tensor, replacement)
            for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                setattr(tensor, hooks, getattr(tensor, hooks))

    def _set_grad(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """Set `tensor.grad`; the gradient has data if and only if `tensor` has, as small host tensors do.

        Raises:
            RuntimeError: the devices differ; the message is that of torch/csrc/autograd/python_variable.cpp.
        """
        with torch.DisableTorchFunction():
            if isinstance(value, torch.Tensor) and value.dtype == tensor.dtype:
                tensor_type, value_type = self._get_device(tensor).type, self._get_device(value).type
                if tensor_type != value_type:
                    raise RuntimeError(
                        f"attempting to assign a gradient with device type '{value_type}' to a tensor with device type "
                        f"'{tensor_type}'. Please ensure that the gradient and the tensor are on the same device"
                    )
            if isinstance(value, torch.Tensor) and value.is_meta != tensor.is_meta and self._device_of(tensor) == HOST:
                value = self._match_kind(tensor, value)
            tensor.grad = value

    def _match_kind(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            inner_tensors = {name: getattr(value, name) for name in names}
            for name, inner_tensor in inner_tensors.items():
                if isinstance(inner_tensor, torch.Tensor):
                    inner_tensors[name] = self._match_kind(getattr(tensor, name), inner_tensor)
            rebuilt: torch.Tensor = type(value).__tensor_unflatten__(  # type: ignore[attr-defined]
                inner_tensors, context, value.size(), value.stride()
            )
            return rebuilt
        if value.is_meta == tensor.is_meta:
            return value
        if value.layout is not torch.strided:
            return self._host_kinds.match_kind(value, tensor)
        if value.is_meta:
            return self._read_values(value).clone()
        with disable_current_modes():
            virtual = torch.empty_like(value, device=_META)
        site = self._device_state.recorder.attribution.find_call_site(sys._getframe(1))
        self._device_state.record([virtual], "aten.clone", site, HOST)
        if self._device_state.values.store.is_trackable(virtual):
            self._device_state.values.store.set(virtual, value)
        return virtual

    def wrap_compatibility_check(self, original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        """Return the replacement for `torch._has_compatible_shallow_copy_type`, by which `nn.Module._apply` decides
        whether parameters stay the same objects: between host and GPU they do. The parameters of a scripted module
        belong to C++, which needs new objects."""

        def have_compatible_data(tensor: torch.Tensor, other: torch.Tensor) -> bool:
            frame = sys._getframe(1).f_back  # nn.Module._apply, which calls a function of its own
            if frame is not None and isinstance(frame.f_locals.get("self"), torch.jit.ScriptModule):
                self._device_state.values.assume(_SCRIPTED)
                return original(tensor, other)
            with torch.DisableTorchFunction():
                is_one_virtual = tensor.is_meta != other.is_meta
                devices = {self._device_state.device_of(tensor), self._device_state.device_of(other)}
            return (is_one_virtual and "meta" not in devices) or original(tensor, other)

        return have_compatible_data


def _has_list(index: Any) -> bool:
    return type(index) is list or (type(index) is tuple and any(type(item) is list for item in index))
