"""Patches of tensor and storage methods that access storages: deep copy, `set_`, resizing and slicing."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch

from memprof.virtual.device_state import DeviceState

_deepcopy = torch.Tensor.__deepcopy__
_resize = torch.UntypedStorage.resize_
_getitem = torch.UntypedStorage.__getitem__
_set: Any = torch.Tensor.set_


def patches(device_state: DeviceState) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, replacement) of methods of `Tensor` and `UntypedStorage`."""

    def deepcopy(tensor: torch.Tensor, memo: dict[Any, Any]) -> Any:
        # Copies the storage once for all tensors that share the storage, as torch/_tensor.py does. torch's own method
        # copies the storage of a meta tensor without an operator, so that the copy would not be recorded.
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf or not device_state.is_virtual(tensor):
            return _deepcopy(tensor, memo)  # raises for a tensor that is no leaf
        if tensor.is_quantized:
            return memo.setdefault(id(tensor), tensor.clone())
        storage = tensor.untyped_storage()
        key = ("memprof", storage._cdata)
        if key not in memo:
            flat = tensor.detach().new_empty(0)
            flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
            memo[key] = flat.clone()
        result = tensor.detach().new_empty(0)
        result.set_(memo[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        if type(tensor) is not torch.Tensor:
            result = result.as_subclass(type(tensor))
        if tensor.requires_grad:
            result.requires_grad_()
        if tensor.grad is not None:
            result.grad = copy.deepcopy(tensor.grad, memo)
        vars(result).update(copy.deepcopy(vars(tensor), memo))
        memo[id(tensor)] = result
        return result

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        # As on CUDA, a new block is allocated and the old one freed (native/cuda/Resize.cpp).
        with torch.DisableTorchFunction():
            device = device_state.recorder.storages.get_device(storage) if storage.device.type == "meta" else "meta"
            old_bytes = storage.nbytes()
            result: torch.UntypedStorage = _resize(storage, size)
            if device != "meta" and storage.nbytes() != old_bytes:
                device_state.record_resize(
                    storage, device, device_state.recorder.attribution.find_call_site(sys._getframe(1))
                )
            return result

    def getitem(storage: torch.UntypedStorage, index: Any) -> Any:
        # torch slices a storage by its data pointer, which a virtual storage does not have.
        if not isinstance(index, slice) or storage.device.type != "meta":
            return _getitem(storage, index)
        device = device_state.recorder.storages.get_device(storage)
        start, stop, step = index.indices(storage.nbytes())
        if device == "meta" or step != 1:
            return _getitem(storage, index)
        return _StorageSlice(storage, start, max(start, stop), torch.device(device))

    def set_(tensor: torch.Tensor, source: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(source, _StorageSlice) or args or kwargs:
            return _set(tensor, *(() if source is None else (source,)), *args, **kwargs)
        size = tensor.element_size()
        return _set(tensor, source.storage, source.start // size, (source.nbytes() // size,), (1,))

    yield torch.Tensor, "__deepcopy__", deepcopy
    yield torch.Tensor, "set_", set_
    yield torch.UntypedStorage, "resize_", resize_
    yield torch.UntypedStorage, "__getitem__", getitem


class _StorageSlice:
    """The slice `storage[start:stop]` of a virtual storage, which `Tensor.set_` accepts."""

    def __init__(self, storage: torch.UntypedStorage, start: int, stop: int, device: torch.device) -> None:
        self.storage, self.start, self.device = storage, start, device
        self._nbytes = stop - start

    def nbytes(self) -> int:
        return self._nbytes

    size = __len__ = nbytes
