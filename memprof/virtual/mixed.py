"""Calls that mix devices: noted as mismatches, then run again with every tensor on the card, as the program meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from memprof.trace.events import GPU, HOST
from memprof.virtual.calls import tensors_of
from memprof.virtual.machine import Machine

_Tensor = torch.Tensor
_CUDA = torch.device("cuda", 0)
_NoTorchFunction = torch._C.DisableTorchFunction


class MixedDevices:
    """`believed` says which device the program takes a tensor to be on, `to` moves a tensor."""

    def __init__(self, recording: Machine, believed: Callable[[torch.Tensor], str], to: Callable[..., Any]) -> None:
        self._recording = recording
        self._believed = believed
        self._to = to

    def on_one_device(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`func`, run again with all tensors on the card if it mixed devices and cannot go on so."""
        mismatches = self._recording.recorder.trace.mismatches
        before = len(mismatches)
        try:
            result = self.inside(func, args, kwargs)
        except RuntimeError as error:
            # C++ compares the devices above all operators, or a meta kernel does; theirs are other words for it.
            if "device" not in str(error) or not self._is_mixed([*args, *kwargs.values()]):
                raise
            if len(mismatches) == before:
                with _NoTorchFunction():
                    tensors = tensors_of([*args, *kwargs.values()])
                    self._recording.note_mixed(f"aten.{func.__name__}", tensors)
        else:
            # On the way back the host tensor would be given a gradient on the card.
            if len(mismatches) == before or in_place(func) or not any(t.requires_grad for t in tensors_of(result)):
                return result
            del result
            return func(*self._moved(args), **self._moved(kwargs))
        return func(*self._moved(args, numbers=True), **self._moved(kwargs, numbers=True))

    def writable(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Arguments of an in-place call, its host operands moved if it mixes devices: what autograd has seen of an
        assignment cannot be taken back, so that it is tried without first."""
        target = args[0]
        if func is _Tensor.copy_:  # made to mix devices
            return args
        host = any(isinstance(a, _Tensor) and a.dim() and self._believed(a) == HOST for a in args[1:])
        if not (host and torch.is_grad_enabled() and isinstance(target, _Tensor) and self._believed(target) == GPU):
            return args
        mismatches = self._recording.recorder.trace.mismatches
        before = len(mismatches)
        with torch.no_grad():
            func(target.detach(), *(a.detach() if isinstance(a, _Tensor) else a for a in args[1:]), **kwargs)
        return args if len(mismatches) == before else (target, *self._moved(args[1:]))

    def assignable(self, tensor: torch.Tensor, index: Any, value: torch.Tensor) -> torch.Tensor:
        """`value` moved if assigning it mixes devices (a slice takes a host tensor, indices on the card do not).

        Tried without autograd, since an assignment that autograd has seen cannot be taken back.
        """
        if self._believed(tensor) != GPU or self._believed(value) != HOST:
            return value
        mismatches = self._recording.recorder.trace.mismatches
        before = len(mismatches)
        with torch.no_grad():
            _Tensor.__setitem__(tensor.detach(), index, value.detach())
        return value if len(mismatches) == before else self._moved(value)

    def recurrent(self, op: str, func: Any, *args: Any) -> Any:
        """RNNs compare the devices of input and weights in C++ (native/RNN.cpp), and would say "meta" of the card's.

        The lengths of packed sequences are integers, and always on the host.
        """
        tensors = [tensor for tensor in tensors_of(list(args)) if tensor.is_floating_point()]
        if {self._believed(tensor) for tensor in tensors if tensor.dim()} >= {GPU, HOST}:
            with _NoTorchFunction():
                self._recording.note_mixed(op, [tensors[0], *(t for t in tensors[1:] if not t.is_meta)][:2])
            args = tuple(
                arg if isinstance(arg, _Tensor) and not arg.is_floating_point() else self._moved(arg) for arg in args
            )
        return func(*args)

    def _is_mixed(self, values: list[Any]) -> bool:
        return {self._believed(tensor) for tensor in tensors_of(values)} >= {GPU, HOST}

    def inside(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`func`, of which the recording mode knows what it was given: C++ makes tensors after those."""
        recording = self._recording
        outer, recording.calling = recording.calling, args
        try:
            return func(*args, **kwargs)
        finally:
            recording.calling = outer

    def _moved(self, value: Any, numbers: bool = False) -> Any:
        """Arguments of a call that mixed devices, its host tensors moved where autograd sees it; those without
        dimensions too if `numbers`."""

        def move(part: Any) -> Any:
            if isinstance(part, _Tensor) and (numbers or part.dim()) and self._believed(part) == HOST:
                return self._to(part, _CUDA)
            return part

        return tree_map(move, value)


def in_place(func: Any) -> bool:
    """Whether the name of `func` says that it changes its first argument."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


RECURRENT: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
