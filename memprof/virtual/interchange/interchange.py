"""Patches of access to tensor data without torch's operators: pointers, numpy, DLPack, pickles, pinned, shared memory.

Virtual tensors have no data. Each access either returns what a real run returns, with unknown values set by the policy
(values/policy.py), or raises an error that names what is unsupported. A pointer refers to reserved pages, one range for
each storage, that read as zeros.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memprof.torch_private import tensors
from memprof.torch_private.dispatch import disable_current_modes
from memprof.trace.events import HOST, gpu_index, is_gpu
from memprof.virtual.device_state import DeviceState
from memprof.virtual.interchange import storages
from memprof.virtual.interchange.checkpoints import Checkpoints, as_method
from memprof.virtual.interchange.safetensors_files import SafetensorsFiles
from memprof.virtual.operator_call import MIN_VIRTUAL_BYTES, find_tensors
from memprof.virtual.values.budget import is_cheap_to_compute
from memprof.virtual.values.shadows import PAGES
from memprof.watch.failure import KernelError
from memprof.watch.wrappers import has_memory

_META = torch.device("meta")
_storage_data_ptr = torch.UntypedStorage.data_ptr


def _override_for_meta(original: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a method that replaces torch's `original` for meta tensors only."""

    def replace(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with torch.DisableTorchFunction():
                return method(self, tensor, *args, **kwargs) if tensor.is_meta else original(tensor, *args, **kwargs)

        return run

    return replace


class Interchange:
    """Replacements of the functions by which a program accesses the data of tensors, for one virtual GPU."""

    def __init__(self, device_state: DeviceState, move: Callable[..., torch.Tensor], mode: TorchFunctionMode) -> None:
        self._device_state = device_state
        self._move_tensor = move  # moves a tensor to a device, as `Tensor.to`
        self.checkpoints = Checkpoints(device_state, mode)
        self.safetensors = SafetensorsFiles(device_state)
        # Reserved pages of each storage (None if there is no address space), and the pointer that the program gets.
        self._pages: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[mmap.mmap | None, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._pinned_storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._shared_storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def share_state(self, other: Interchange) -> None:
        """Share the state of `other`, the interchange of another thread."""
        self.checkpoints, self.safetensors = other.checkpoints, other.safetensors
        self._pages = other._pages
        self._pinned_storages, self._shared_storages = other._pinned_storages, other._shared_storages

    def handlers(self) -> dict[Any, Callable[..., Any]]:
        """Return for each torch function the method that the function mode calls in its place."""
        return {
            torch.Tensor.tolist: self._tolist,
            torch.Tensor.numpy: self._numpy,
            torch.Tensor.pin_memory: self._pin_memory,
            torch.Tensor.is_pinned: self._is_pinned,
            torch.Tensor.data_ptr: self._data_ptr,
            torch.utils.dlpack.from_dlpack: self._from_dlpack,
        }

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield patches (owner, name, replacement) of functions that bypass the function mode."""
        yield torch.UntypedStorage, "data_ptr", as_method(self._storage_ptr)
        # Methods without a call of the mode; and a data loader pins memory in a thread without the mode.
        methods = {
            "pin_memory": self._pin_memory,
            "is_pinned": self._is_pinned,
            "share_memory_": self._share_memory,
            "is_shared": self._is_shared,
            "__array__": self._array,
            "__dlpack__": self._dlpack,
            "__dlpack_device__": self._dlpack_device,
        }
        for name, method in methods.items():
            yield torch.Tensor, name, as_method(method)
        yield torch.utils.dlpack, "to_dlpack", self._dlpack
        yield torch.utils.dlpack, "from_dlpack", self._from_dlpack
        yield torch, "from_dlpack", self._from_dlpack
        yield from self.checkpoints.patches()
        yield from self.safetensors.patches()
        yield from storages.patches(self._device_state)
        yield torch.Tensor, "__reduce_ex__", as_method(self._reduce)
        yield _patch_pickled_function(tensors.rebuild_meta_tensor_no_storage, self._rebuild_tensor)
        yield _patch_pickled_function(tensors.rebuild_device_tensor_from_cpu_tensor, self._rebuild_known)

    def read_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of `tensor`: unknown ones by policy, and as one expanded element if it is large."""
        with torch.DisableTorchFunction():
            if not tensor.is_meta:
                return tensor
            tensor = tensor.detach()
            with disable_current_modes():
                values = self._device_state.values
                if tensor.numel() * tensor.element_size() < MIN_VIRTUAL_BYTES or values.store.get(tensor) is not None:
                    return values.policy.read(tensor)
                return values.policy.read(torch.empty((), dtype=tensor.dtype, device=_META)).expand(tensor.shape)

    def _tolist(self, tensor: torch.Tensor) -> Any:
        values = self.read_values(tensor)
        with torch.DisableTorchFunction():
            return values.tolist()

    @_override_for_meta(torch.Tensor.numpy)
    def _numpy(self, tensor: torch.Tensor, *, force: bool = False) -> Any:
        if tensor.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        device = self._device_state.device_of(tensor)
        if is_gpu(device) and not force:
            raise TypeError(
                f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
                "memory first."
            )
        with disable_current_modes():
            writable_values = None if force else self._device_state.values.store.get_writable(tensor.detach())
            return (self.read_values(tensor) if writable_values is None else writable_values).numpy()

    @_override_for_meta(torch.Tensor.__array__)
    def _array(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        array = self._numpy(tensor)
        return array if not args or args[0] is None else array.astype(args[0], copy=False)

    @_override_for_meta(torch.Tensor.data_ptr)
    def _data_ptr(self, tensor: torch.Tensor) -> int:
        if not tensor.numel():
            return 0
        return self._storage_ptr(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()

    def _storage_ptr(self, storage: torch.UntypedStorage) -> int:
        """Return an aligned pointer that is unique to `storage`: programs compare pointers to find tied weights."""
        if storage._cdata not in self._device_state.recorder.storages.index_by_address:
            return _storage_data_ptr(storage)
        entry = self._pages.get(storage)
        if entry is None or (entry[0] is not None and len(entry[0]) < storage.nbytes()):
            entry = self._pages[storage] = _reserve_pages(storage)
        return entry[1]

    def _dlpack(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        with torch.DisableTorchFunction():
            if tensor.is_meta and is_gpu(self._device_state.device_of(tensor)):
                raise KernelError("DLPack hands the tensor's data on the GPU to another library", "the DLPack export")
            values = self.read_values(tensor)
            with disable_current_modes():
                return _tensor_dlpack(values, **kwargs)

    def _dlpack_device(self, tensor: torch.Tensor) -> Any:
        device = self._device_state.device_of(tensor)
        return (2, gpu_index(device)) if tensor.is_meta and is_gpu(device) else (1, 0)  # kDLCUDA, kDLCPU of dlpack.h

    def _from_dlpack(self, external: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(external, torch.Tensor):
            return external.detach()
        with torch.DisableTorchFunction():
            return _from_dlpack(external, **kwargs)

    def _pin_memory(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a copy of `tensor` in pinned host memory, or `tensor` itself if it is pinned."""
        with torch.DisableTorchFunction():
            if self._is_pinned(tensor):
                return tensor
            if tensor.is_meta and is_gpu(self._device_state.device_of(tensor)):
                raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
            pinned = tensor.clone(memory_format=torch.contiguous_format)
            self.mark_pinned(pinned)
            return pinned

    def mark_pinned(self, tensors: Any) -> None:
        """Record that `tensors`, a tensor or a nested collection of tensors, are in pinned memory."""
        for tensor in find_tensors(tensors):
            self._pinned_storages.add(tensor.untyped_storage())

    def _is_pinned(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        with torch.DisableTorchFunction():
            return tensor.untyped_storage() in self._pinned_storages

    @_override_for_meta(torch.Tensor.share_memory_)
    def _share_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        self._shared_storages.add(tensor.untyped_storage())  # no change for a GPU tensor: all GPU memory is shareable
        return tensor

    @_override_for_meta(torch.Tensor.is_shared)
    def _is_shared(self, tensor: torch.Tensor) -> bool:
        return is_gpu(self._device_state.device_of(tensor)) or tensor.untyped_storage() in self._shared_storages

    def _reduce(self, tensor: torch.Tensor, protocol: Any) -> Any:
        """Return the result of `__reduce_ex__`; a virtual tensor is pickled as layout, device and known values."""
        if self.checkpoints.is_saving:
            return _reduce_ex(tensor, protocol)  # pickles the storage; the modes show the GPU as device
        with torch.DisableTorchFunction():
            device = self._device_state.device_of(tensor) if has_memory(tensor) and tensor.is_meta else "meta"
            if device == "meta":
                return _reduce_ex(tensor, protocol)
            function, arguments = self._find_rebuild_call(tensor, device)
            state = tensors.get_obj_state(tensor)
            if type(tensor) is torch.Tensor and not state:
                return function, arguments
            return tensors.rebuild_from_type_v2, (function, type(tensor), arguments, state)

    def _find_rebuild_call(
        self, tensor: torch.Tensor, device: str
    ) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the function that rebuilds `tensor` on `device` from a pickle, and the function's arguments."""
        with torch.DisableTorchFunction():
            values = self._device_state.values.store.get(tensor.detach()) if is_cheap_to_compute(tensor) else None
            if values is not None:
                arguments = (values.clone(), tensor.dtype, device, tensor.requires_grad)
                return tensors.rebuild_device_tensor_from_cpu_tensor.get(), arguments
            # The strides encode the device: a list is for the host, a tuple for the first GPU or the GPU at the end.
            device_suffix = () if device in (self._device_state.gpus.first, HOST) else (device,)
            stride = list(tensor.stride()) if device == HOST else (*tensor.stride(), *device_suffix)
            layout = (tensor.dtype, tensor.size(), stride, tensor.requires_grad)
            return tensors.rebuild_meta_tensor_no_storage.get(), layout

    def _rebuild_tensor(self, dtype: torch.dtype, size: Any, stride: Any, requires_grad: bool) -> torch.Tensor:
        """Return a virtual tensor from a pickle; `stride` also encodes the device (see `_find_rebuild_call`)."""
        device = HOST if isinstance(stride, list) else self._device_state.gpus.first
        if stride and isinstance(stride[-1], str):
            *stride, device = stride
        with torch.DisableTorchFunction(), disable_current_modes():
            tensor = torch.empty_strided(size, stride, dtype=dtype, device=_META, requires_grad=requires_grad)
        call_site = self._device_state.recorder.attribution.find_call_site(sys._getframe(1))
        self._device_state.record([tensor], "pickle.loads", call_site, device)
        return tensor

    def _rebuild_known(self, data: torch.Tensor, dtype: torch.dtype, device: str, requires_grad: bool) -> torch.Tensor:
        with torch.DisableTorchFunction():
            return self._move_tensor(data, torch.device(device)).requires_grad_(requires_grad)


_reduce_ex = torch.Tensor.__reduce_ex__
_from_dlpack = torch.utils.dlpack.from_dlpack
_tensor_dlpack = torch.Tensor.__dlpack__


def _reserve_pages(storage: torch.UntypedStorage) -> tuple[mmap.mmap | None, int]:
    """Return pages of the size of `storage`, which take no memory until written, and their address; without address
    space, None and the address of the storage object."""
    try:
        pages = mmap.mmap(-1, max(1, storage.nbytes()), flags=PAGES)
    except (OSError, ValueError, OverflowError, AttributeError):
        return None, storage._cdata
    return pages, ctypes.addressof(ctypes.c_char.from_buffer(pages))


def _patch_pickled_function(name: Any, function: Callable[..., Any]) -> tuple[Any, str, Any]:
    """Return the patch (owner, name, replacement) of a function whose name is written into pickles."""
    return name.patch(functools.wraps(name.get())(lambda *args: function(*args)))
