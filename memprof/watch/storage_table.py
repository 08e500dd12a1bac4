"""The storages of a run: which of them live, on which device, and how many bytes those on GPUs take.

It keeps a weak reference to the storage's Python object, which torch keeps alive exactly as long as the storage, so
that a free is seen where it really happens: when the last reference goes, be it Python's, autograd's or a container's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memprof.torch_private import tensors
from memprof.trace.events import GPU, HOST, NONE, is_gpu
from memprof.watch.forward import CallSite
from memprof.watch.trace_writer import TraceWriter
from memprof.watch.wrappers import unwrapped

# An extension that asks C++ for the data gets an error; a null pointer would end the process.
_forbid_data = tensors.set_throw_on_mutable_data_ptr


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that remembers which one it was."""

    __slots__ = ("address", "index")

    address: int
    index: int


class StorageTable:
    """Tells the writer of each storage that is allocated and freed, and knows which of them live."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self.live: dict[int, int] = {}  # Address of a living storage -> its index in the trace.
        self._refs: dict[int, _StorageRef] = {}
        # Storages without memory on torch's meta device -> where they are: those without bytes that are on the meta
        # device for the program, too, on the host, or on a later GPU, and virtual copies of real host tensors.
        self.uncounted: weakref.WeakKeyDictionary[torch.UntypedStorage, str] = weakref.WeakKeyDictionary()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.counts_hidden = True  # Whether memory that no tensor shows is recorded.
        # Asked after each allocation on a GPU, by its device: what torch.OutOfMemoryError is to say, or None.
        self.refusal: Callable[[str], str | None] | None = None
        # Called with the index of each storage that a tensor shows.
        self.on_allocate: Callable[[int], None] | None = None
        self.on_death: Callable[[int], None] = lambda address: None  # Called with the address of a storage that died.
        self._freed_with_process: set[int] = set()  # Storages that live on, of processes that have ended.

    def index_of(self, tensor: torch.Tensor) -> int:
        """Return the index in the trace of the living storage below any `tensor`; NONE if that is not known."""
        try:
            return self.live.get(unwrapped(tensor).untyped_storage()._cdata, NONE)
        except (NotImplementedError, RuntimeError):  # it has none: sparse, or a subclass around others
            return NONE

    def device_of(self, storage: torch.UntypedStorage) -> str:
        """Return the device that the program believes a storage of torch's meta device to be on."""
        index = self.live.get(storage._cdata)
        if index is None:
            # Empty tensors take no memory and are not tracked; but for those that the program asked of the meta device
            # itself, they are taken for the program's own.
            return self.uncounted.get(storage, "meta" if storage.nbytes() else GPU)
        return self._writer.trace.storages[index].device

    def is_alive(self, index: int) -> bool:
        """Return whether a storage that a tensor shows was not freed yet."""
        return index in self._refs

    def record(self, tensors: Iterable[torch.Tensor], op: str, place: CallSite, device: str) -> None:
        """Allocate on `device` the storages of those of `tensors` on torch's meta device that are not known yet."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live and tensor.is_meta and storage.nbytes():
                _forbid_data(tensor)
                self.allocate(storage, tensor.size(), tensor.dtype, device, op, place)
            elif device != GPU and tensor.is_meta and not storage.nbytes() and (device == HOST or is_gpu(device)):
                self.uncounted[storage] = device

    def allocate(
        self,
        storage: torch.UntypedStorage,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        op: str,
        place: CallSite,
    ) -> int:
        """Record a new storage; return its index. Its free is recorded when its last reference goes.

        `shape` and `dtype` are of the tensor that it was made for; `device` is the one that the program believes in.
        Raises torch.OutOfMemoryError where the GPU has no room for it.
        """
        index = self._allocate(storage.nbytes(), shape, dtype, device, op, place, False)
        if self.on_allocate is not None:
            self.on_allocate(index)
        ref = _StorageRef(storage, self._died)
        ref.address = address = storage._cdata
        ref.index = index
        self._refs[index] = ref
        self.live[address] = index
        return index

    def allocate_hidden(self, num_bytes: int, op: str, place: CallSite, device: str) -> int:
        """Record memory that a library takes and no tensor shows; return its index, NONE if that is not counted.

        The caller frees it with `free_hidden`, also where its operator raises. Raises torch.OutOfMemoryError.
        """
        if not self.counts_hidden:
            return NONE
        return self._allocate(num_bytes, (num_bytes,), torch.uint8, device, op, place, True)

    def _allocate(
        self,
        num_bytes: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        op: str,
        place: CallSite,
        hidden: bool,
    ) -> int:
        with self._writer.lock:
            index = self._writer.allocate(num_bytes, shape, dtype, device, op, place, hidden)
            if device != "cpu":
                self.live_bytes += num_bytes
                if self.live_bytes > self.peak_bytes:
                    self.peak_bytes = self.live_bytes
                if self.refusal is not None and (message := self.refusal(device)) is not None:
                    self._writer.trace.refused.append(index)
                    self._free(index)
                    raise torch.OutOfMemoryError(message)
            return index

    def free_hidden(self, index: int) -> None:
        """Record that the library has released what `allocate_hidden` returned as `index`."""
        if index != NONE:
            self._free(index)

    def free(self, index: int) -> None:
        """Record that the memory of a storage was freed although the storage lives on (it was resized)."""
        ref = self._refs.pop(index)
        self.live.pop(ref.address, None)
        self._free(index)

    def end_process(self, first: int) -> None:
        """Free all memory of a process of the program that has ended: storages number `first` and later.

        What keeps some of it live here (a hook that its own tensor holds) would not outlive a real one.
        """
        for index in self._refs:
            if index >= first:
                self._free(index)
                self._freed_with_process.add(index)

    def _died(self, ref: Any) -> None:
        if self._writer.closed or self._refs.pop(ref.index, None) is None:
            return
        if self.live.get(ref.address) == ref.index:
            del self.live[ref.address]
            self.on_death(ref.address)
        self._free(ref.index)

    def _free(self, index: int) -> None:
        if index in self._freed_with_process:
            return
        with self._writer.lock:
            storage = self._writer.free(index)
            if storage.device != "cpu":
                self.live_bytes -= storage.num_bytes

    def clear(self) -> None:
        """Watch none of the storages any more."""
        self._refs.clear()
        self.live.clear()
