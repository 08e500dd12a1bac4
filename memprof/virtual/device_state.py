"""The machine that the program believes in: where each tensor lives, and the record of the storages it makes.

What kernels and the program's edges are given of the virtual GPU. dispatch_mode.py makes a dispatch mode of it, so that
operators called `with machine:` run on it in turn.
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
from memprof.watch.wrappers import parts_of_sparse, unwrapped

REAL = "real"  # what is requested where a tensor is to have data
_NONE_HELD = contextlib.nullcontext()


class Turn:
    """One thread's turn: one at a time runs an operator on the virtual GPU."""

    def __init__(self, writer: TraceWriter, thread: str = "", begin: Callable[[], None] | None = None) -> None:
        self._writer = writer
        self.thread = thread
        self._begin = begin
        self.is_taken = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, no other thread runs an operator. When the run is over, threads of it end here."""
        with self._writer.lock:
            if self.thread and self._writer.closed:
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
        """Inside, the program's own code runs, which may wait for another thread."""
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
    """A host and its GPUs, as one thread of the program has them.

    Its attributes are many because a thread of the program has a copy of it (integrations/threads.py), with others of
    its own in the second group.
    """

    def __init__(self, recorder: Recorder, values: Values, gpu: DeviceProperties, gpus: Gpus, workspaces: bool) -> None:
        super().__init__()
        self.recorder = recorder
        self.values = values
        self.gpu = gpu
        self.gpus = gpus
        self.workspaces = workspaces and recorder.storages.counts_hidden  # whether what libraries take is counted
        self.nodes = AutogradNodes(gpus)
        self.accumulation = Accumulation()
        self.meter = Meter(recorder, self.device_of)
        # Address of a host tensor with data -> a reference to it, and the line that made it.
        self.host_sources: dict[int, tuple[Any, int]] = {}
        # What a library makes once and keeps for good.
        self.kept: dict[str, torch.Tensor] = {}
        # Results of collectives -> what these were given.
        self.pending_collectives: weakref.WeakKeyDictionary[torch.UntypedStorage, torch.Tensor] = (
            weakref.WeakKeyDictionary()
        )

        self.turn = Turn(recorder.writer)
        # Set by the function mode: the device that the program asks a factory for, and the arguments of the function
        # that is running.
        self.factory_device: str | None = None
        self.calling: tuple[Any, ...] = ()
        self.adds_bias = False  # whether the operators that run are those of a linear layer with a bias

    def allocating(self, operator: OpInfo, call: OperatorCall, place: CallSite) -> Any:
        """Run an operator that makes new storages in the ordinary way."""
        raise NotImplementedError

    def take_workspace(self, operator: OpInfo, args: Any, place: CallSite, gpu: str) -> None:
        """Take what cuBLAS needs for a call of its own, unless it has it."""
        raise NotImplementedError

    def device_of(self, tensor: torch.Tensor) -> str:
        """Return the device that the program believes `tensor` to be on."""
        if not tensor.is_meta:
            return str(tensor.device)
        tensor = unwrapped(tensor)
        if tensor.layout is not torch.strided:
            tensor = parts_of_sparse(tensor)[-1]
        return self.recorder.storages.device_of(tensor.untyped_storage())

    def is_on_gpu(self, tensor: torch.Tensor) -> bool:
        """Return whether the program believes `tensor` to be on the GPU."""
        with torch.DisableTorchFunction():
            return is_gpu(self.device_of(tensor))

    def is_virtual(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` stands for one that has data in a real run."""
        with torch.DisableTorchFunction():
            return tensor.is_meta and self.device_of(tensor) != "meta"

    # -- recording --------------------------------------------------------------------------------------------------

    def record(self, tensors: list[torch.Tensor], op: str, place: CallSite, device: str) -> None:
        """Record the storages of `tensors` that are not known yet."""
        self.recorder.storages.record(tensors, op, place, device)

    def record_real(self, tensor: torch.Tensor, op: str, place: CallSite) -> None:
        """Record a new host tensor that has data: too small to be virtual, yet a model may have many."""
        storage, storages = tensor.untyped_storage(), self.recorder.storages
        if storage.nbytes() >= HOST_COUNTED_BYTES and storage._cdata not in storages.live:
            storages.allocate(storage, tensor.size(), tensor.dtype, HOST, op, place)

    def record_copy(self, copy: torch.Tensor) -> None:
        """A virtual copy of a real host tensor stands for that one: it is on the host, and takes no memory."""
        storage = copy.untyped_storage()
        self.recorder.storages.uncounted[storage] = HOST
        weakref.finalize(storage, self.values.store.drop, storage._cdata).atexit = False

    def resized(self, storage: torch.UntypedStorage, device: str, place: CallSite) -> None:
        """The program resized a storage of `device` itself."""
        storages = self.recorder.storages
        index = storages.live.get(storage._cdata)
        if index is not None:
            storages.free(index)
            self.values.store.drop(storage._cdata)
        if storage.nbytes():
            storages.allocate(storage, (storage.nbytes(),), torch.uint8, device, "storage.resize_", place)
        elif device != GPU:
            storages.uncounted[storage] = device

    def hidden(
        self, sizes: Iterable[int], op: str, place: CallSite, device: str = GPU
    ) -> contextlib.AbstractContextManager[None]:
        """Take memory on a GPU that no tensor shows, for as long as something runs; sizes in bytes, 0 is none."""
        wanted = [size for size in sizes if size]
        return self._held(wanted, op, place, device) if wanted else _NONE_HELD

    @contextlib.contextmanager
    def _held(self, sizes: list[int], op: str, place: CallSite, device: str) -> Iterator[None]:
        storages = self.recorder.storages
        with contextlib.ExitStack() as taken:  # released in reverse, as C++ destroys what a function holds
            for size in sizes:
                taken.callback(storages.free_hidden, storages.allocate_hidden(size, op, place, device))
            yield

    def transients(self, sizes: Iterable[int], op: str, place: CallSite, device: str = GPU) -> None:
        """Temporaries of a kernel: taken one after the other, all released when it returns."""
        with self.hidden(sizes, op, place, device):
            pass

    def workspace(self, num_bytes: int, most_bytes: int, op: str, place: CallSite, device: str) -> None:
        """Memory that a library takes for one call, by a rule; what it may be instead is kept beside it."""
        if self.workspaces:
            trace = self.recorder.trace
            trace.workspaces.append(Workspace(len(trace.events), device, num_bytes, most_bytes))
            with contextlib.suppress(torch.OutOfMemoryError):  # torch then takes the library's next algorithm
                self.transients((num_bytes,), op, place, device)

    @contextlib.contextmanager
    def factory_device_as(self, device: str) -> Iterator[None]:
        """Inside, factories make tensors on `device`."""
        outer, self.factory_device = self.factory_device, device
        try:
            yield
        finally:
            self.factory_device = outer
