"""Table of a run's live storages, their devices, and the bytes of live storages on GPUs.

The table has a weak reference to each storage's Python object, which torch keeps alive exactly as long as the storage.
So a free is recorded when the last reference to the storage is gone, in Python, autograd or C++.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from memprof.allocator.messages import MpsOutOfMemoryError
from memprof.torch_private import tensors
from memprof.trace.events import HOST, NONE, is_gpu
from memprof.watch.forward import CallSite
from memprof.watch.trace_writer import TraceWriter
from memprof.watch.wrappers import unwrap

MIN_CALLER_BYTES = 1 << 20  # of a storage whose callers are recorded: finding them reads the whole stack

# With this flag, an extension that reads the data pointer in C++ gets an error instead of a null pointer.
_forbid_data_access = tensors.set_throw_on_mutable_data_ptr


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to a storage, with the storage's address and its index in the trace."""

    __slots__ = ("address", "index")

    address: int
    index: int


# aten/src/ATen/mps/EmptyTensor.cpp: raised for tensors that are made, converted or moved.
_NO_FLOAT64 = (
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use float32 "
    "instead."
)


class StorageTable:
    """Table of live storages; reports each allocation and free to the writer."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self.index_by_address: dict[int, int] = {}  # Address of a living storage -> its index in the trace.
        self._ref_by_index: dict[int, _StorageRef] = {}
        self._last_uses: dict[int, int] = {}  # By the storage's index; see `Trace.last_uses`.
        # Meta storage without memory -> device that the program sees: for empty storages on the meta device, on the
        # host, or on a GPU other than the first, and for virtual copies of real host tensors.
        self.device_by_empty_storage: weakref.WeakKeyDictionary[torch.UntypedStorage, str] = weakref.WeakKeyDictionary()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.records_tensorless_memory = True  # Whether memory without a tensor is recorded.
        # Called with the GPU after each allocation; returns the message of the error to raise, or None if it fits.
        self.find_oom_message: Callable[[str], str | None] | None = None
        # Called with each error before it is raised.
        self.on_out_of_memory: Callable[[RuntimeError], None] = lambda error: None
        # Called with the index of each new storage with a tensor.
        self.on_allocate: Callable[[int], None] | None = None
        # Called with the index of each new storage on a GPU that is large, or does not fit.
        self.record_callers: Callable[[int], None] = lambda index: None
        self.on_free: Callable[[int], None] = lambda address: None  # Called with a freed storage's address.
        self._freed_with_process: set[int] = set()  # Live storages of processes that have ended.

    def get_index(self, tensor: torch.Tensor) -> int:
        """Return the trace's index of the storage of `tensor`, or of its innermost tensor; NONE if it is unknown."""
        try:
            return self.index_by_address.get(unwrap(tensor).untyped_storage()._cdata, NONE)
        except (NotImplementedError, RuntimeError):  # a tensor without storage: sparse, or a subclass that wraps others
            return NONE

    def get_device(self, storage: torch.UntypedStorage) -> str:
        """Return the device that the program sees for `storage`, which is on torch's meta device."""
        index = self.index_by_address.get(storage._cdata)
        if index is None:
            # Empty storages take no memory and have no index: on the first GPU, unless `device_by_empty_storage` has
            # their device.
            return self.device_by_empty_storage.get(storage, "meta" if storage.nbytes() else self._writer.trace.device)
        return self._writer.trace.storages[index].device

    def is_live(self, index: int) -> bool:
        """Return whether storage `index` is live; false for memory without a tensor."""
        return index in self._ref_by_index

    def record_uses(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record that an operator, which has just run, has read or written `tensors`."""
        num_events = len(self._writer.trace.events)
        last_uses, index_by_address = self._last_uses, self.index_by_address
        for tensor in tensors:
            try:
                index = index_by_address.get(tensor.untyped_storage()._cdata)
            except (NotImplementedError, RuntimeError):  # sparse, or wrapped
                index = self.get_index(tensor)
            if index is not None:
                last_uses[index] = num_events

    def record_uses_until(self, event: int, indices: Iterable[int]) -> None:
        """Record that the program was using the storages `indices` until the event of this index."""
        self._last_uses.update(dict.fromkeys(indices, event))

    def iterate_unused_since(self, event: int) -> Iterator[int]:
        """Yield the live storages that an operator used before the event of this index, and none since."""
        for index in self.list_live():
            if self._last_uses.get(index, event) < event:
                yield index

    def list_live(self) -> list[int]:
        """Return the live storages that have tensors, oldest first: a list, for a garbage collection may free some."""
        return list(self._ref_by_index)

    def list_gpu_storages(self, first: int) -> list[torch.UntypedStorage]:
        """Return the live storages on GPUs whose index is `first` or later."""
        devices = self._writer.trace.storages
        found = [
            ref() for index, ref in list(self._ref_by_index.items()) if index >= first and is_gpu(devices[index].device)
        ]
        return [storage for storage in found if storage is not None]

    def get_last_use(self, index: int) -> int:
        """Return the last use of storage `index`, as `Trace.last_uses` has it."""
        return self._last_uses.get(index, NONE)

    def list_last_uses(self) -> list[int]:
        """Return the last use of each storage of the trace, as `Trace.last_uses` has it."""
        return [self._last_uses.get(index, NONE) for index in range(len(self._writer.trace.storages))]

    def record_allocations(self, tensors: Iterable[torch.Tensor], op: str, place: CallSite, device: str) -> None:
        """Record allocations on `device` for those storages of `tensors`, on torch's meta device, that are new."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.index_by_address and tensor.is_meta and storage.nbytes():
                _forbid_data_access(tensor)
                self.allocate(storage, tensor.size(), tensor.dtype, device, op, place)
            elif (
                device != self._writer.trace.device
                and tensor.is_meta
                and not storage.nbytes()
                and (device == HOST or is_gpu(device))
            ):
                self.device_by_empty_storage[storage] = device

    def allocate(
        self,
        storage: torch.UntypedStorage,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        op: str,
        place: CallSite,
    ) -> int:
        """Record the allocation of `storage`, and its free once the last reference is gone; return its index.

        `shape` and `dtype` are those of the storage's first tensor; `device` is the device that the program sees.
        Raises torch's error (OUT_OF_MEMORY_ERRORS in failure.py) if the storage does not fit the GPU; TypeError if it
        is of a dtype that the GPU has not.
        """
        if dtype is torch.float64 and device.startswith("mps"):
            raise TypeError(_NO_FLOAT64)
        index = self._append_allocation(storage.nbytes(), shape, dtype, device, op, place, False)
        if self.on_allocate is not None:
            self.on_allocate(index)
        ref = _StorageRef(storage, self._on_storage_free)
        ref.address = address = storage._cdata
        ref.index = index
        self._ref_by_index[index] = ref
        self.index_by_address[address] = index
        return index

    def allocate_without_tensor(self, num_bytes: int, op: str, place: CallSite, device: str) -> int:
        """Record `num_bytes` that a library allocates without a tensor; return the index, NONE if not recorded.

        The caller must free the memory with `free_without_tensor`, even if the operator raises. Raises
        torch.OutOfMemoryError if the memory does not fit the GPU.
        """
        if not self.records_tensorless_memory:
            return NONE
        return self._append_allocation(num_bytes, (num_bytes,), torch.uint8, device, op, place, True)

    def _append_allocation(
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
            index = self._writer.append_allocation(num_bytes, shape, dtype, device, op, place, hidden)
            if device != "cpu":
                self.live_bytes += num_bytes
                if self.live_bytes > self.peak_bytes:
                    self.peak_bytes = self.live_bytes
                message = None if self.find_oom_message is None else self.find_oom_message(device)
                if num_bytes >= MIN_CALLER_BYTES or message is not None:
                    self.record_callers(index)
                if message is not None:
                    self._writer.trace.refused.append(index)
                    self._append_free(index)
                    raise self._make_out_of_memory_error(message, device)
            return index

    def _make_out_of_memory_error(self, message: str, device: str) -> RuntimeError:
        """Return the error to raise. No frame of its traceback may have it in a variable, which would keep it alive."""
        error = (MpsOutOfMemoryError if device.startswith("mps") else torch.OutOfMemoryError)(message)
        self.on_out_of_memory(error)
        return error

    def free_without_tensor(self, index: int) -> None:
        """Record that memory is freed; `index` is the one that `allocate_without_tensor` returned."""
        if index != NONE:
            self._append_free(index)

    def free(self, index: int) -> None:
        """Record that the memory of storage `index` is freed while the storage lives on, as `resize_(0)` does."""
        ref = self._ref_by_index.pop(index)
        self.index_by_address.pop(ref.address, None)
        self._append_free(index)

    def free_process_storages(self, first: int) -> None:
        """Record that a simulated process has ended, which frees all storages with index `first` or later.

        Some may still be referenced here (a tensor that its own hook keeps), but none would outlive a real process.
        """
        for index in self.list_live():
            if index >= first:
                self._append_free(index)
                self._freed_with_process.add(index)

    def _on_storage_free(self, ref: Any) -> None:
        if self._writer.is_closed or self._ref_by_index.pop(ref.index, None) is None:
            return
        if self.index_by_address.get(ref.address) == ref.index:
            del self.index_by_address[ref.address]
            self.on_free(ref.address)
        self._append_free(ref.index)

    def _append_free(self, index: int) -> None:
        if index in self._freed_with_process:
            return
        with self._writer.lock:
            storage = self._writer.append_free(index)
            if storage.device != "cpu":
                self.live_bytes -= storage.num_bytes

    def stop_watching(self) -> None:
        """Forget all storages; their later frees are not recorded."""
        self._ref_by_index.clear()
        self.index_by_address.clear()
