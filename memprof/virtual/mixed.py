"""Calls with tensors on the host and on a GPU: recorded as mismatches, and run again with all tensors on the GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from memprof.errors import error_text
from memprof.torch_private.pytree import tree_map
from memprof.trace.events import HOST, is_gpu
from memprof.virtual.device_checks import note_mismatch
from memprof.virtual.device_state import DeviceState
from memprof.virtual.host_kinds import HostKinds
from memprof.virtual.operator_call import find_tensors

# Words for devices in torch's errors; the second is for parts of a sparse tensor.
_DEVICES = re.compile("device|backend of indices")


class MixedDevices:
    """Handler of calls with host and GPU tensors; `move` is called as `Tensor.to`."""

    def __init__(
        self,
        device_state: DeviceState,
        get_device_name: Callable[[torch.Tensor], str],
        move: Callable[..., Any],
        host_kinds: HostKinds,
    ) -> None:
        self._device_state = device_state
        self._locate = get_device_name
        self._move = move
        self._host_kinds = host_kinds

    def is_mismatch(
        self, error: RuntimeError, func: Callable[..., Any], args: Any, kwargs: Any, *, is_recorded: bool
    ) -> bool:
        """Return whether `func` raised `error` because these arguments mix devices; record the mismatch.

        torch compares devices in C++ before any operator, or in meta kernels, with different error messages.
        """
        if not _DEVICES.search(error_text(error)) or not self._is_mixed([*args, *kwargs.values()]):
            return False
        if not is_recorded:
            with torch.DisableTorchFunction():
                tensors = find_tensors([*args, *kwargs.values()])
                note_mismatch(self._device_state, f"aten.{func.__name__}", tensors)
        return True

    def run_on_gpu(self, func: Callable[..., Any], args: Any, kwargs: Any, *, with_scalars: bool) -> Any:
        """Return the result of a call that mixed devices, with its host tensors moved to the GPU (differentiably); if
        `with_scalars`, 0-dimensional tensors too."""
        args, kwargs = self._to_gpu((args, kwargs), [*args, *kwargs.values()], with_scalars)
        return func(*args, **kwargs)

    def move_operands(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the arguments of an in-place call, with host operands moved if the call mixes devices. The call is
        tried without autograd, since an assignment that autograd has recorded cannot be undone."""
        target = args[0]
        if func is torch.Tensor.copy_:  # supports tensors on two devices
            return args
        has_host = any(isinstance(a, torch.Tensor) and a.dim() and self._locate(a) == HOST for a in args[1:])
        if not (
            has_host and torch.is_grad_enabled() and isinstance(target, torch.Tensor) and is_gpu(self._locate(target))
        ):
            return args
        mismatches = self._device_state.recorder.trace.mismatches
        num_mismatches = len(mismatches)
        with torch.no_grad():
            func(target.detach(), *(a.detach() if isinstance(a, torch.Tensor) else a for a in args[1:]), **kwargs)
        return args if len(mismatches) == num_mismatches else (target, *self._to_gpu(args[1:], target))

    def move_assigned_value(self, tensor: torch.Tensor, index: Any, value: torch.Tensor) -> torch.Tensor:
        """Return `value`, moved to the GPU if `tensor[index] = value` mixes devices, as with `index` on a GPU.

        The assignment is tried without autograd, since an assignment that autograd has recorded cannot be undone.
        """
        if not is_gpu(self._locate(tensor)) or self._locate(value) != HOST:
            return value
        mismatches = self._device_state.recorder.trace.mismatches
        num_mismatches = len(mismatches)
        with torch.no_grad():
            torch.Tensor.__setitem__(tensor.detach(), index, value.detach())
        return value if len(mismatches) == num_mismatches else self._to_gpu(value, tensor)

    def run_recurrent(self, op: str, func: Any, *args: Any) -> Any:
        """Return the result of an RNN after a check of devices: C++ (native/RNN.cpp) would report "meta" for the GPU.

        The lengths of packed sequences are integers, and always on the host.
        """
        args = self._host_kinds.make_virtual(args, is_selected=torch.is_floating_point)
        tensors = [tensor for tensor in find_tensors(list(args)) if tensor.is_floating_point()]
        if self._is_mixed([tensor for tensor in tensors if tensor.dim()]):
            with torch.DisableTorchFunction():
                note_mismatch(self._device_state, op, [tensors[0], *(t for t in tensors[1:] if not t.is_meta)][:2])
            args = tuple(
                arg if isinstance(arg, torch.Tensor) and not arg.is_floating_point() else self._to_gpu(arg, tensors)
                for arg in args
            )
        return func(*args)

    def _is_mixed(self, values: list[Any]) -> bool:
        devices = {self._locate(tensor) for tensor in find_tensors(values)}
        return HOST in devices and any(map(is_gpu, devices))

    def run_with_arguments(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of `func`; tensors that its C++ code creates are on the device of its arguments."""
        device_state = self._device_state
        previous, device_state.current_arguments = device_state.current_arguments, args
        try:
            return func(*args, **kwargs)
        finally:
            device_state.current_arguments = previous

    def _to_gpu(self, value: Any, reference: Any, with_scalars: bool = False) -> Any:
        """Return `value` with its host tensors moved by autograd operations to the GPU of the first GPU tensor in
        `reference`; if `with_scalars`, 0-dimensional tensors too."""
        gpu = next(filter(is_gpu, map(self._locate, find_tensors(reference))), self._device_state.gpus.first)

        def move_item(item: Any) -> Any:
            if isinstance(item, torch.Tensor) and (with_scalars or item.dim()) and self._locate(item) == HOST:
                return self._move(item, gpu)
            return item

        return tree_map(move_item, value)


RECURRENT: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
