"""State of the simulated machine: the device that the program sees for each tensor, and the record of new storages.

Kernels, and the replacements of Python functions, use the virtual GPU through this class. dispatch_mode.py derives a
dispatch mode from it, so that operators called inside `with device_state:` run on the virtual GPU too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from memprof.torch_private.dispatch import TorchDispatchMode
from memprof.trace.events import GPU, HOST, Workspace, is_gpu
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.engine import Accumulation
from memprof.virtual.flops import Meter
from memprof.virtual.gpus import AutogradNodes, Gpus
from memprof.virtual.operator_call import HOST_COUNTED_BYTES, OperatorCall, OpInfo
from memprof.virtual.values import Values
from memprof.watch.forward import CallSite
from memprof.watch.recorder import Recorder
from memprof.watch.trace_writer import TraceWriter
from memprof.watch.wrappers import get_sparse_parts, unwrap

REAL = "real"  # requested device of a tensor that is to have data
_NONE_HELD = contextlib.nullcontext()


class Turn:
    """The lock by which only one thread at a time runs an operator on the virtual GPU."""

    def __init__(self, writer: TraceWriter, thread: str = "", begin: Callable[[], None] | None = None) -> None:
        self._writer = writer
        self.thread = thread
        self._begin = begin
        self.is_taken = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Context manager: no other thread runs an operator. A thread that enters after the end of the run exits."""
        with self._writer.lock:
            if self.thread and self._writer.is_closed:
                raise SystemExit
            if self._begin is not None:
                self._begin()
                self._begin = None
            self.is_taken = True
            try:
                yield
            finally:
                self.is_taken = False

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager: release the lock while the program's own code runs, which may await a thread."""
        if not self.is_taken:
            yield
            return
        self.is_taken = False
        self._writer.lock.release()
        try:
            yield
        finally:
            self._writer.lock.acquire()
            self.is_taken = True


class DeviceState(TorchDispatchMode):
    """A host and its GPUs, as one thread of the program sees them.

    A thread of the program has a copy of this object (integrations/threads.py), with its own values of the attributes
    in the second group.
    """

    def __init__(self, recorder: Recorder, values: Values, gpu: DeviceProperties, gpus: Gpus, workspaces: bool) -> None:
        super().__init__()
        self.recorder = recorder
        self.values = values
        self.gpu = gpu
        self.gpus = gpus
        self.workspaces = (
            workspaces and recorder.storages.records_tensorless_memory
        )  # whether library workspaces are counted
        self.nodes = AutogradNodes(gpus)
        self.accumulation = Accumulation()
        self.meter = Meter(recorder, self.device_of)
        # Address of a host tensor with data -> a reference to its storage, and the source line that made the tensor.
        self.host_sources: dict[int, tuple[Any, int]] = {}
        # Tensors that a library makes once and never frees.
        self.kept: dict[str, torch.Tensor] = {}
        # Results of collectives -> the inputs of these collectives.
        self.pending_collectives: weakref.WeakKeyDictionary[torch.UntypedStorage, torch.Tensor] = (
            weakref.WeakKeyDictionary()
        )

        self.turn = Turn(recorder.writer)
        # Set by the function mode: the device that the program requests from a factory, and the arguments of the
        # running function.
        self.factory_device: str | None = None
        self.calling: tuple[Any, ...] = ()
        self.adds_bias = False  # whether the operators that run are those of a linear layer with a bias

    def allocating(self, operator: OpInfo, call: OperatorCall, place: CallSite) -> Any:
        """Run an operator that allocates its results."""
        raise NotImplementedError

    def take_workspace(self, operator: OpInfo, args: Any, place: CallSite, gpu: str) -> None:
        """Allocate the cuBLAS workspace of a call, unless the handle and stream have one."""
        raise NotImplementedError

    def device_of(self, tensor: torch.Tensor) -> str:
        """Return the device that the program believes `tensor` to be on."""
        if not tensor.is_meta:
            return str(tensor.device)
        tensor = unwrap(tensor)
        if tensor.layout is not torch.strided:
            tensor = get_sparse_parts(tensor)[-1]
        return self.recorder.storages.get_device(tensor.untyped_storage())

    def is_on_gpu(self, tensor: torch.Tensor) -> bool:
        """Return whether the program believes `tensor` to be on the GPU."""
        with torch.DisableTorchFunction():
            return is_gpu(self.device_of(tensor))

    def is_virtual(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a meta tensor that stands for a tensor with data in a real run."""
        with torch.DisableTorchFunction():
            return tensor.is_meta and self.device_of(tensor) != "meta"

    # -- recording --------------------------------------------------------------------------------------------------

    def record(self, tensors: list[torch.Tensor], op: str, place: CallSite, device: str) -> None:
        """Record the storages of `tensors` that are not recorded yet."""
        self.recorder.storages.record_allocations(tensors, op, place, device)

    def record_real(self, tensor: torch.Tensor, op: str, place: CallSite) -> None:
        """Record a new host tensor that has data: too small to be virtual, but large enough to count."""
        storage, storages = tensor.untyped_storage(), self.recorder.storages
        if storage.nbytes() >= HOST_COUNTED_BYTES and storage._cdata not in storages.index_by_address:
            storages.allocate(storage, tensor.size(), tensor.dtype, HOST, op, place)

    def record_copy(self, copy: torch.Tensor) -> None:
        """Register a virtual copy of a real host tensor: the copy is on the host, and its memory is not counted."""
        storage = copy.untyped_storage()
        self.recorder.storages.device_by_empty_storage[storage] = HOST
        weakref.finalize(storage, self.values.store.drop, storage._cdata).atexit = False

    def resized(self, storage: torch.UntypedStorage, device: str, place: CallSite) -> None:
        """Record that the program itself resized a storage on `device`."""
        storages = self.recorder.storages
        index = storages.index_by_address.get(storage._cdata)
        if index is not None:
            storages.free(index)
            self.values.store.drop(storage._cdata)
        if storage.nbytes():
            storages.allocate(storage, (storage.nbytes(),), torch.uint8, device, "storage.resize_", place)
        elif device != GPU:
            storages.device_by_empty_storage[storage] = device

    def hidden(
        self, sizes: Iterable[int], op: str, place: CallSite, device: str = GPU
    ) -> contextlib.AbstractContextManager[None]:
        """Context manager: hold memory on a GPU without a tensor. `sizes` are in bytes; sizes of 0 are ignored."""
        wanted = [size for size in sizes if size]
        return self._hold_hidden(wanted, op, place, device) if wanted else _NONE_HELD

    @contextlib.contextmanager
    def _hold_hidden(self, sizes: list[int], op: str, place: CallSite, device: str) -> Iterator[None]:
        storages = self.recorder.storages
        with contextlib.ExitStack() as taken:  # released in reverse order, as C++ destroys local variables
            for size in sizes:
                taken.callback(storages.free_without_tensor, storages.allocate_without_tensor(size, op, place, device))
            yield

    def transients(self, sizes: Iterable[int], op: str, place: CallSite, device: str = GPU) -> None:
        """Allocate the temporary buffers of a kernel one after the other, then free all of them."""
        with self.hidden(sizes, op, place, device):
            pass

    def workspace(self, num_bytes: int, most_bytes: int, op: str, place: CallSite, device: str) -> None:
        """Allocate and free a library's workspace for one call: `num_bytes` by a rule, `most_bytes` at most."""
        if self.workspaces:
            trace = self.recorder.trace
            trace.workspaces.append(Workspace(len(trace.events), device, num_bytes, most_bytes))
            with contextlib.suppress(torch.OutOfMemoryError):  # torch then takes the library's next algorithm
                self.transients((num_bytes,), op, place, device)

    @contextlib.contextmanager
    def factory_device_as(self, device: str) -> Iterator[None]:
        """Context manager: factories make tensors on `device`."""
        outer, self.factory_device = self.factory_device, device
        try:
            yield
        finally:
            self.factory_device = outer
