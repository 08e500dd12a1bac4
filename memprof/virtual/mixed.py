"""Functions whose tensors are on the host and on a GPU: noted as mismatches, and run again with all on the GPU, as the
program meant."""

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

# How torch's errors speak of devices; the latter of parts of a sparse tensor.
_DEVICES = re.compile("device|backend of indices")


class MixedDevices:
    """`believed` says which device the program takes a tensor to be on, `to` moves a tensor."""

    def __init__(
        self, tracker: DeviceState, believed: Callable[[torch.Tensor], str], to: Callable[..., Any], kinds: HostKinds
    ) -> None:
        self._tracker = tracker
        self._believed = believed
        self._to = to
        self._kinds = kinds

    def is_mismatch(
        self, error: RuntimeError, func: Callable[..., Any], args: Any, kwargs: Any, *, noted: bool
    ) -> bool:
        """Return whether `func` raised `error` because these arguments mix devices, which is noted in the trace.

        C++ compares the devices above all operators, or a meta kernel does; theirs are other words for it.
        """
        if not _DEVICES.search(error_text(error)) or not self._is_mixed([*args, *kwargs.values()]):
            return False
        if not noted:
            with torch.DisableTorchFunction():
                tensors = find_tensors([*args, *kwargs.values()])
                note_mismatch(self._tracker, f"aten.{func.__name__}", tensors)
        return True

    def run_moved(self, func: Callable[..., Any], args: Any, kwargs: Any, *, numbers: bool) -> Any:
        """Run a call that mixed devices with its host tensors moved to the GPU, where autograd sees it; those without
        dimensions too if `numbers`."""
        args, kwargs = self._moved((args, kwargs), [*args, *kwargs.values()], numbers)
        return func(*args, **kwargs)

    def writable(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Arguments of an in-place call, its host operands moved if it mixes devices: what autograd has seen of an
        assignment cannot be taken back, so that it is tried without first."""
        target = args[0]
        if func is torch.Tensor.copy_:  # made to mix devices
            return args
        host = any(isinstance(a, torch.Tensor) and a.dim() and self._believed(a) == HOST for a in args[1:])
        if not (
            host and torch.is_grad_enabled() and isinstance(target, torch.Tensor) and is_gpu(self._believed(target))
        ):
            return args
        mismatches = self._tracker.recorder.trace.mismatches
        before = len(mismatches)
        with torch.no_grad():
            func(target.detach(), *(a.detach() if isinstance(a, torch.Tensor) else a for a in args[1:]), **kwargs)
        return args if len(mismatches) == before else (target, *self._moved(args[1:], target))

    def assignable(self, tensor: torch.Tensor, index: Any, value: torch.Tensor) -> torch.Tensor:
        """`value` moved if assigning it mixes devices (a slice takes a host tensor, indices on the GPU do not).

        Tried without autograd, since an assignment that autograd has seen cannot be taken back.
        """
        if not is_gpu(self._believed(tensor)) or self._believed(value) != HOST:
            return value
        mismatches = self._tracker.recorder.trace.mismatches
        before = len(mismatches)
        with torch.no_grad():
            torch.Tensor.__setitem__(tensor.detach(), index, value.detach())
        return value if len(mismatches) == before else self._moved(value, tensor)

    def recurrent(self, op: str, func: Any, *args: Any) -> Any:
        """RNNs compare the devices of input and weights in C++ (native/RNN.cpp), and would say "meta" of the GPU's.

        The lengths of packed sequences are integers, and always on the host.
        """
        args = self._kinds.all_virtual(args, only=torch.is_floating_point)
        tensors = [tensor for tensor in find_tensors(list(args)) if tensor.is_floating_point()]
        if self._is_mixed([tensor for tensor in tensors if tensor.dim()]):
            with torch.DisableTorchFunction():
                note_mismatch(self._tracker, op, [tensors[0], *(t for t in tensors[1:] if not t.is_meta)][:2])
            args = tuple(
                arg if isinstance(arg, torch.Tensor) and not arg.is_floating_point() else self._moved(arg, tensors)
                for arg in args
            )
        return func(*args)

    def _is_mixed(self, values: list[Any]) -> bool:
        devices = {self._believed(tensor) for tensor in find_tensors(values)}
        return HOST in devices and any(map(is_gpu, devices))

    def inside(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`func`, of which the allocation tracker knows what it was given: C++ makes tensors after those."""
        tracker = self._tracker
        outer, tracker.calling = tracker.calling, args
        try:
            return func(*args, **kwargs)
        finally:
            tracker.calling = outer

    def _moved(self, value: Any, beside: Any, numbers: bool = False) -> Any:
        """Arguments of a call that mixed devices, its host tensors moved, where autograd sees it, to the GPU of the
        first tensor `beside` them that is on one; those without dimensions too if `numbers`."""
        gpu = next(filter(is_gpu, map(self._believed, find_tensors(beside))), "cuda")

        def move(part: Any) -> Any:
            if isinstance(part, torch.Tensor) and (numbers or part.dim()) and self._believed(part) == HOST:
                return self._to(part, gpu)
            return part

        return tree_map(move, value)


RECURRENT: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
