"""One call of an operator, as its kernel on the virtual GPU receives it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from memprof.torch_private.pytree import tree_map
from memprof.trace.events import HOST, NONE
from memprof.virtual.device_checks import note_mismatch
from memprof.virtual.device_state import DeviceState
from memprof.virtual.operator_call import OperatorCall, OpInfo
from memprof.watch.forward import CallSite

_META = torch.device("meta")


class KernelContext:
    """The call that a kernel simulates, and the operations that a kernel may use.

    `args` and `kwargs` are the operator's; their tensors are on torch's meta device, except small tensors on the host.
    `gpu` has the device properties, `values` the known numbers, `device_state` everything else.
    """

    __slots__ = ("args", "call", "device_state", "func", "gpu", "kwargs", "operator", "place", "values")

    def __init__(self, device_state: DeviceState, operator: OpInfo, call: OperatorCall, place: CallSite) -> None:
        self.device_state = device_state
        self.operator = operator
        self.call = call
        self.func = call.func
        self.args = call.args
        self.kwargs = call.kwargs
        self.place = place
        self.gpu = device_state.gpu
        self.values = device_state.values

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be passed by position, by name or not at all."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    @property
    def device(self) -> str:
        """Return the device of the results: the device of the inputs, or the GPU if no input is virtual."""
        return self.call.device or self.call.gpu

    @property
    def lacks_peers(self) -> bool:
        """Return whether the run has several GPUs that do not read each other's memory."""
        return self.device_state.gpus.several and not self.device_state.gpus.are_peers

    def maker_of(self, tensor: torch.Tensor) -> str:
        """Return the operator that allocated `tensor`; empty if unknown."""
        trace, index = self.device_state.recorder.trace, self.device_state.recorder.storages.get_index(tensor)
        return trace.op(trace.storages[index]) if index != NONE else ""

    def record(self, *tensors: torch.Tensor | None, op: str | None = None, device: str | None = None) -> None:
        """Record, in this order, the meta tensors that the operator (or `op`, which it calls) makes."""
        made = [tensor for tensor in tensors if tensor is not None]
        self.device_state.record(made, op or self.operator.name, self.place, device or self.device)

    def new(
        self, shape: Any, dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format
    ) -> torch.Tensor:
        """Return a new tensor, which is recorded."""
        made = torch.empty(shape, dtype=dtype, device=_META, memory_format=layout)
        self.record(made)
        return made

    def record_real(self, tensor: torch.Tensor) -> None:
        """Record a host tensor that has data."""
        self.device_state.record_real(tensor, self.operator.name, self.place)

    def known(self, result: Any) -> Any:
        """Return new tensors with the values of the real tensors in `result`; meta tensors give shapes alone."""

        def lift(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            lifted = self.new(value.shape, value.dtype)
            if not value.is_meta and self.values.store.is_trackable(lifted):
                self.values.store.set(lifted, value)
            return lifted

        return tree_map(lift, result)

    def scratch(self, *sizes: int, gpu: str | None = None) -> AbstractContextManager[None]:
        """Context manager: hold scratch memory of these sizes in bytes, on the kernel's GPU or on `gpu`; none on the
        host."""
        if self.device == HOST:
            return contextlib.nullcontext()
        return self.device_state.hold_scratch(sizes, self.operator.name, self.place, gpu or self.call.gpu)

    def transients(self, *sizes: int, gpu: str | None = None) -> None:
        """Allocate scratch memory of these sizes in bytes, then free it at once; none on the host."""
        if self.device != HOST:
            self.device_state.allocate_transients(sizes, self.operator.name, self.place, gpu or self.call.gpu)

    def workspace(self, num_bytes: int, most_bytes: int) -> None:
        """Allocate and free a library's workspace for this call: `num_bytes` by a rule, `most_bytes` at most."""
        self.device_state.workspace(num_bytes, most_bytes, self.operator.name, self.place, self.call.gpu)

    def wait(self) -> None:
        """Make the host wait until the GPU has finished all work launched before."""
        self.device_state.recorder.streams.record_host_wait(self.call.gpu)

    def run(self) -> Any:
        """Run and record the operator as one without a kernel of its own."""
        return self.device_state.run_allocating(self.operator, self.call, self.place)

    def inside(self) -> AbstractContextManager[Any]:
        """Context manager: operators called under it run on the virtual GPU in turn."""
        return self.device_state

    def note_mismatch(self) -> None:
        """Note that this call raises on a real GPU, because of the devices of its tensors."""
        note_mismatch(self.device_state, self.operator.name, self.call.tensors, self.place)

    def accumulates_in_place(self) -> bool:
        """Return whether this addition is the engine's, to a gradient with no other reference: see engine.py."""
        recorder = self.device_state.recorder
        index = recorder.storages.index_by_address.get(self.args[0].untyped_storage()._cdata, NONE)
        made = recorder.attribution.is_made_by_node(index)
        return self.device_state.accumulation.is_in_place(self.args, self.kwargs, made)
