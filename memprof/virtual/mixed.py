"""Functions called with tensors on the host and on a GPU: recorded as a device mismatch, and run again with all tensors
on the GPU, so that the run can continue."""

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
    """Calls that mix host and GPU tensors. `believed` returns a tensor's device, `to` moves a tensor."""

    def __init__(
        self,
        device_state: DeviceState,
        believed: Callable[[torch.Tensor], str],
        to: Callable[..., Any],
        kinds: HostKinds,
    ) -> None:
        self._device_state = device_state
        self._believed = believed
        self._to = to
        self._kinds = kinds

    def is_mismatch(
        self, error: RuntimeError, func: Callable[..., Any], args: Any, kwargs: Any, *, noted: bool
    ) -> bool:
        """Return whether `func` raised `error` because these arguments mix devices, and note the mismatch in the trace.

        The devices are compared in C++ above all operators, or in a meta kernel, each with its own error text.
        """
        if not _DEVICES.search(error_text(error)) or not self._is_mixed([*args, *kwargs.values()]):
            return False
        if not noted:
            with torch.DisableTorchFunction():
                tensors = find_tensors([*args, *kwargs.values()])
                note_mismatch(self._device_state, f"aten.{func.__name__}", tensors)
        return True

    def run_moved(self, func: Callable[..., Any], args: Any, kwargs: Any, *, numbers: bool) -> Any:
        """Run a call that mixed devices, with its host tensors moved to the GPU and recorded by autograd; with
        `numbers`, tensors without dimensions are moved too."""
        args, kwargs = self._to_gpu((args, kwargs), [*args, *kwargs.values()], numbers)
        return func(*args, **kwargs)

    def writable(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the arguments of an in-place call, with host operands moved if the call mixes devices. The call is
        tried without autograd first, since an assignment that autograd has recorded cannot be undone."""
        target = args[0]
        if func is torch.Tensor.copy_:  # supports tensors on two devices
            return args
        has_host = any(isinstance(a, torch.Tensor) and a.dim() and self._believed(a) == HOST for a in args[1:])
        if not (
            has_host and torch.is_grad_enabled() and isinstance(target, torch.Tensor) and is_gpu(self._believed(target))
        ):
            return args
        mismatches = self._device_state.recorder.trace.mismatches
        before = len(mismatches)
        with torch.no_grad():
            func(target.detach(), *(a.detach() if isinstance(a, torch.Tensor) else a for a in args[1:]), **kwargs)
        return args if len(mismatches) == before else (target, *self._to_gpu(args[1:], target))

    def move_assigned_value(self, tensor: torch.Tensor, index: Any, value: torch.Tensor) -> torch.Tensor:
        """Return `value`, moved if the assignment mixes devices: slices accept a host tensor, GPU indices do not.

        The assignment is tried without autograd, since an assignment that autograd has recorded cannot be undone.
        """
        if not is_gpu(self._believed(tensor)) or self._believed(value) != HOST:
            return value
        mismatches = self._device_state.recorder.trace.mismatches
        before = len(mismatches)
        with torch.no_grad():
            torch.Tensor.__setitem__(tensor.detach(), index, value.detach())
        return value if len(mismatches) == before else self._to_gpu(value, tensor)

    def recurrent(self, op: str, func: Any, *args: Any) -> Any:
        """Run an RNN after a check of its devices: C++ (native/RNN.cpp) would report "meta" for the GPU.

        The lengths of packed sequences are integers, and always on the host.
        """
        args = self._kinds.all_virtual(args, only=torch.is_floating_point)
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
        devices = {self._believed(tensor) for tensor in find_tensors(values)}
        return HOST in devices and any(map(is_gpu, devices))

    def inside(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `func` with its arguments noted in the dispatch mode: C++ makes new tensors on their device."""
        device_state = self._device_state
        outer, device_state.calling = device_state.calling, args
        try:
            return func(*args, **kwargs)
        finally:
            device_state.calling = outer

    def _to_gpu(self, value: Any, reference: Any, numbers: bool = False) -> Any:
        """Return arguments of a call that mixed devices, with host tensors moved, and recorded by autograd, to the GPU
        of the first GPU tensor in `reference`; with `numbers`, tensors without dimensions are moved too."""
        gpu = next(filter(is_gpu, map(self._believed, find_tensors(reference))), "cuda")

        def move(part: Any) -> Any:
            if isinstance(part, torch.Tensor) and (numbers or part.dim()) and self._believed(part) == HOST:
                return self._to(part, gpu)
            return part

        return tree_map(move, value)


RECURRENT: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
