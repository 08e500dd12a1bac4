"""Context of one operator call, which a kernel of the virtual GPU receives."""

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
    """The operator call that a kernel simulates, and the operations that the kernel may use.

    `args` and `kwargs` are the operator's; their tensors are on torch's meta device, except small tensors on the host.
    `gpu` has the device properties, `values` the known values of tensors, `device_state` everything else.
    """

    __slots__ = ("args", "call", "device_state", "func", "gpu", "kwargs", "operator", "site", "values")

    def __init__(self, device_state: DeviceState, operator: OpInfo, call: OperatorCall, site: CallSite) -> None:
        self.device_state = device_state
        self.operator = operator
        self.call = call
        self.func = call.func
        self.args = call.args
        self.kwargs = call.kwargs
        self.site = site
        self.gpu = device_state.gpu
        self.values = device_state.values

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument, passed by position or by `name`; `default` if it was not passed."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    @property
    def device(self) -> str:
        """Return the device of the results: that of the virtual inputs, or the call's GPU if no input is virtual."""
        return self.call.device or self.call.gpu

    @property
    def lacks_peer_access(self) -> bool:
        """Return whether the run has several GPUs that cannot read each other's memory."""
        return self.device_state.gpus.has_several and not self.device_state.gpus.are_peers

    def get_allocating_operator(self, tensor: torch.Tensor) -> str:
        """Return the name of the operator that allocated `tensor`; empty if unknown."""
        trace, index = self.device_state.recorder.trace, self.device_state.recorder.storages.get_index(tensor)
        return trace.op(trace.storages[index]) if index != NONE else ""

    def record(self, *tensors: torch.Tensor | None, op: str | None = None, device: str | None = None) -> None:
        """Record `tensors`, new meta tensors, as allocated in this order by the operator, or by `op` that it calls."""
        new_tensors = [tensor for tensor in tensors if tensor is not None]
        self.device_state.record(new_tensors, op or self.operator.name, self.site, device or self.device)

    def new(
        self, shape: Any, dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format
    ) -> torch.Tensor:
        """Return a new meta tensor, recorded as an allocation."""
        tensor = torch.empty(shape, dtype=dtype, device=_META, memory_format=layout)
        self.record(tensor)
        return tensor

    def record_real(self, tensor: torch.Tensor) -> None:
        """Record a new host tensor that has data."""
        self.device_state.record_real(tensor, self.operator.name, self.site)

    def make_virtual(self, result: Any) -> Any:
        """Return `result` with a new virtual tensor for each tensor, with the values of real tensors."""

        def copy_tensor(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            virtual = self.new(value.shape, value.dtype)
            if not value.is_meta and self.values.store.is_trackable(virtual):
                self.values.store.set(virtual, value)
            return virtual

        return tree_map(copy_tensor, result)

    def scratch(self, *sizes: int, gpu: str | None = None) -> AbstractContextManager[None]:
        """Context manager: hold scratch memory of these `sizes` in bytes on `gpu`, by default the call's GPU. Does
        nothing on the host."""
        if self.device == HOST:
            return contextlib.nullcontext()
        return self.device_state.hold_scratch(sizes, self.operator.name, self.site, gpu or self.call.gpu)

    def transients(self, *sizes: int, gpu: str | None = None) -> None:
        """Allocate scratch memory of these `sizes` in bytes, then free it at once; nothing on the host."""
        if self.device != HOST:
            self.device_state.allocate_transients(sizes, self.operator.name, self.site, gpu or self.call.gpu)

    def workspace(self, num_bytes: int, max_bytes: int) -> None:
        """Allocate and free a library's workspace for this call: `num_bytes` as estimated, at most `max_bytes`."""
        self.device_state.workspace(num_bytes, max_bytes, self.operator.name, self.site, self.call.gpu)

    def wait(self) -> None:
        """Record that the host waits until the GPU has finished all launched work."""
        self.device_state.recorder.streams.record_host_wait(self.call.gpu)

    def run(self) -> Any:
        """Return the result of the operator, run on meta and recorded as if no kernel simulated it."""
        return self.device_state.run_allocating(self.operator, self.call, self.site)

    def inside(self) -> AbstractContextManager[Any]:
        """Context manager: operators called under it run on the virtual GPU too, and are recorded."""
        return self.device_state

    def note_mismatch(self) -> None:
        """Record in the trace that this call raises on a real GPU because of the devices of its tensors."""
        note_mismatch(self.device_state, self.operator.name, self.call.tensors, self.site)

    def accumulates_in_place(self) -> bool:
        """Return whether this `add` is the autograd engine's, to a gradient that only the engine holds (engine.py)."""
        recorder = self.device_state.recorder
        index = recorder.storages.index_by_address.get(self.args[0].untyped_storage()._cdata, NONE)
        is_from_node = recorder.attribution.is_made_by_node(index)
        return self.device_state.accumulation.is_in_place(self.args, self.kwargs, is_from_node)
