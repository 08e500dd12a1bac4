"""State of the simulated host and GPUs: the device of each tensor, and the recording of new storages.

Kernels and the handlers of Python code use the virtual GPU through this class. dispatch_mode.py derives a dispatch mode
from it, so that operators called `with device_state:` run on the virtual GPU too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from memprof.torch_private.dispatch import TorchDispatchMode
from memprof.trace.events import HOST, Workspace, is_gpu
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.engine import Accumulation
from memprof.virtual.flops import Meter
from memprof.virtual.gpus import AutogradNodes, Gpus
from memprof.virtual.operator_call import MIN_COUNTED_BYTES, OperatorCall, OpInfo
from memprof.virtual.values import Values
from memprof.watch.failure import OUT_OF_MEMORY_ERRORS
from memprof.watch.forward import CallSite
from memprof.watch.recorder import Recorder
from memprof.watch.trace_writer import TraceWriter
from memprof.watch.wrappers import get_sparse_parts, unwrap

REAL = "real"  # requested device of a tensor that is to have data
_NO_MEMORY = contextlib.nullcontext()


class OperatorLock:
    """Lock that lets one thread at a time run operators on the virtual GPU."""

    def __init__(self, writer: TraceWriter, thread: str = "", on_begin: Callable[[], None] | None = None) -> None:
        self._writer = writer
        self.thread_name = thread
        self._on_begin = on_begin
        self.is_held = False

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Context manager: hold the lock. A thread of the program that enters after the run has ended exits."""
        with self._writer.lock:
            if self.thread_name and self._writer.is_closed:
                raise SystemExit
            if self._on_begin is not None:
                self._on_begin()
                self._on_begin = None
            self.is_held = True
            try:
                yield
            finally:
                self.is_held = False

    @contextlib.contextmanager
    def release(self) -> Iterator[None]:
        """Context manager: release the lock while the program's code runs, which may wait for another thread."""
        if not self.is_held:
            yield
            return
        self.is_held = False
        self._writer.lock.release()
        try:
            yield
        finally:
            self._writer.lock.acquire()
            self.is_held = True


class DeviceState(TorchDispatchMode):
    """The simulated host and GPUs, as one thread of the program sees them.

    Each thread of the program has a copy of this object (integrations/threads.py), with its own values of the
    attributes below the blank line in `__init__`.
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
        self.autograd_nodes = AutogradNodes(gpus)
        self.accumulation = Accumulation()
        self.meter = Meter(recorder, self.device_of)
        # Address of a host tensor with data -> a reference to its storage, and the source line that made the tensor.
        self.host_sources: dict[int, tuple[Any, int]] = {}
        # Tensors that a library makes once and never frees.
        self.library_tensors: dict[str, torch.Tensor] = {}
        # Results of collectives -> the inputs of these collectives.
        self.pending_collectives: weakref.WeakKeyDictionary[torch.UntypedStorage, torch.Tensor] = (
            weakref.WeakKeyDictionary()
        )

        self.operator_lock = OperatorLock(recorder.writer)
        # Set by the function mode: the device that the program requests from a factory, and the arguments of the
        # running function.
        self.factory_device: str | None = None
        self.current_arguments: tuple[Any, ...] = ()
        self.adds_bias = False  # whether the operators that run are those of a linear layer with a bias

    def run_allocating(self, operator: OpInfo, call: OperatorCall, site: CallSite) -> Any:
        """Run an operator that allocates its results."""
        raise NotImplementedError

    def allocate_cublas_workspace(self, operator: OpInfo, args: Any, site: CallSite, gpu: str) -> None:
        """Allocate the cuBLAS workspace of a call, unless the current handle and stream have one."""
        raise NotImplementedError

    def device_of(self, tensor: torch.Tensor) -> str:
        """Return the name of the simulated device of `tensor`, such as "cuda:0"."""
        if not tensor.is_meta:
            return str(tensor.device)
        tensor = unwrap(tensor)
        if tensor.layout is not torch.strided:
            tensor = get_sparse_parts(tensor)[-1]
        return self.recorder.storages.get_device(tensor.untyped_storage())

    def is_on_gpu(self, tensor: torch.Tensor) -> bool:
        """Return whether the simulated device of `tensor` is a GPU."""
        with torch.DisableTorchFunction():
            return is_gpu(self.device_of(tensor))

    def is_virtual(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a meta tensor that simulates a tensor with data."""
        with torch.DisableTorchFunction():
            return tensor.is_meta and self.device_of(tensor) != "meta"

    # -- recording --------------------------------------------------------------------------------------------------

    def record(self, tensors: list[torch.Tensor], op: str, site: CallSite, device: str) -> None:
        """Record the storages of `tensors` that are not recorded yet, as allocations by `op` on `device`."""
        self.recorder.storages.record_allocations(tensors, op, site, device)

    def record_real(self, tensor: torch.Tensor, op: str, site: CallSite) -> None:
        """Record a new host tensor that has data, if it has at least `MIN_COUNTED_BYTES`."""
        storage, storages = tensor.untyped_storage(), self.recorder.storages
        if storage.nbytes() >= MIN_COUNTED_BYTES and storage._cdata not in storages.index_by_address:
            storages.allocate(storage, tensor.size(), tensor.dtype, HOST, op, site)

    def record_copy(self, copy: torch.Tensor) -> None:
        """Register `copy`, a virtual copy of a real host tensor: it is on the host, and its memory is not counted."""
        storage = copy.untyped_storage()
        self.recorder.storages.device_by_empty_storage[storage] = HOST
        weakref.finalize(storage, self.values.store.drop, storage._cdata).atexit = False

    def record_resize(self, storage: torch.UntypedStorage, device: str, site: CallSite) -> None:
        """Record that the program resized `storage` on `device`."""
        storages = self.recorder.storages
        index = storages.index_by_address.get(storage._cdata)
        if index is not None:
            storages.free(index)
            self.values.store.drop(storage._cdata)
        if storage.nbytes():
            storages.allocate(storage, (storage.nbytes(),), torch.uint8, device, "storage.resize_", site)
        elif device != self.gpus.first:
            storages.device_by_empty_storage[storage] = device

    def hold_scratch(
        self, sizes: Iterable[int], op: str, site: CallSite, device: str
    ) -> contextlib.AbstractContextManager[None]:
        """Context manager: hold scratch memory of these `sizes` in bytes on a GPU; sizes of 0 are ignored."""
        nonzero_sizes = [size for size in sizes if size]
        return self._hold_sizes(nonzero_sizes, op, site, device) if nonzero_sizes else _NO_MEMORY

    @contextlib.contextmanager
    def _hold_sizes(self, sizes: list[int], op: str, site: CallSite, device: str) -> Iterator[None]:
        storages = self.recorder.storages
        with contextlib.ExitStack() as stack:  # released in reverse order, as C++ destroys local variables
            for size in sizes:
                stack.callback(storages.free_without_tensor, storages.allocate_without_tensor(size, op, site, device))
            yield

    def allocate_transients(self, sizes: Iterable[int], op: str, site: CallSite, device: str) -> None:
        """Allocate temporary buffers of a kernel, of `sizes` in bytes, one after the other; then free all of them."""
        with self.hold_scratch(sizes, op, site, device):
            pass

    def workspace(self, num_bytes: int, max_bytes: int, op: str, site: CallSite, device: str) -> None:
        """Allocate and free a library's workspace for one call: `num_bytes` as estimated, at most `max_bytes`."""
        if self.workspaces:
            trace = self.recorder.trace
            trace.workspaces.append(Workspace(len(trace.events), device, num_bytes, max_bytes))
            with contextlib.suppress(*OUT_OF_MEMORY_ERRORS):  # torch then takes the library's next algorithm
                self.allocate_transients((num_bytes,), op, site, device)

    @contextlib.contextmanager
    def factory_device_as(self, device: str) -> Iterator[None]:
        """Context manager: factory functions, such as `torch.empty`, create tensors on `device`."""
        previous, self.factory_device = self.factory_device, device
        try:
            yield
        finally:
            self.factory_device = previous
