"""Memory that a program handles below its tensors: deep copies of them, and storages that it resizes itself."""

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


def patches(tracker: DeviceState) -> Iterator[tuple[Any, str, Any]]:
    """The patches (owner, name, replacement)."""

    def deepcopy(tensor: torch.Tensor, memo: dict[Any, Any]) -> Any:
        """Copy as torch/_tensor.py does: the whole storage, once for all tensors that share it.

        torch's own copies the storage of a meta tensor where no mode sees it: off the GPU, and uncounted.
        """
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf or not tracker.is_virtual(tensor):
            return _deepcopy(tensor, memo)  # which says what is wrong with one that is no leaf
        if tensor.is_quantized:
            return memo.setdefault(id(tensor), tensor.clone())
        storage = tensor.untyped_storage()
        key = ("memprof", storage._cdata)
        if key not in memo:
            whole = tensor.detach().new_empty(0)
            whole.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
            memo[key] = whole.clone()
        made = tensor.detach().new_empty(0)
        made.set_(memo[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        if type(tensor) is not torch.Tensor:
            made = made.as_subclass(type(tensor))
        if tensor.requires_grad:
            made.requires_grad_()
        if tensor.grad is not None:
            made.grad = copy.deepcopy(tensor.grad, memo)
        vars(made).update(copy.deepcopy(vars(tensor), memo))
        memo[id(tensor)] = made
        return made

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        """Resize as on CUDA: the old block is released, and another one taken (native/cuda/Resize.cpp)."""
        with torch.DisableTorchFunction():
            device = tracker.recorder.storages.get_device(storage) if storage.device.type == "meta" else "meta"
            before = storage.nbytes()
            result: torch.UntypedStorage = _resize(storage, size)
            if device != "meta" and storage.nbytes() != before:
                tracker.resized(storage, device, tracker.recorder.attribution.find_call_site(sys._getframe(1)))
            return result

    def getitem(storage: torch.UntypedStorage, index: Any) -> Any:
        """A slice of a storage is memory of it, which a storage without data has no pointer into."""
        if not isinstance(index, slice) or storage.device.type != "meta":
            return _getitem(storage, index)
        device = tracker.recorder.storages.get_device(storage)
        start, stop, step = index.indices(storage.nbytes())
        if device == "meta" or step != 1:
            return _getitem(storage, index)
        return _Part(storage, start, max(start, stop), torch.device(device))

    def set_(tensor: torch.Tensor, source: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(source, _Part) or args or kwargs:
            return _set(tensor, *(() if source is None else (source,)), *args, **kwargs)
        size = tensor.element_size()
        return _set(tensor, source.whole, source.start // size, (source.nbytes() // size,), (1,))

    yield torch.Tensor, "__deepcopy__", deepcopy
    yield torch.Tensor, "set_", set_
    yield torch.UntypedStorage, "resize_", resize_
    yield torch.UntypedStorage, "__getitem__", getitem


class _Part:
    """Bytes of a storage, as `storage[start:stop]` gives them; a tensor can be set to them."""

    def __init__(self, whole: torch.UntypedStorage, start: int, stop: int, device: torch.device) -> None:
        self.whole, self.start, self.device = whole, start, device
        self._nbytes = stop - start

    def nbytes(self) -> int:
        return self._nbytes

    size = __len__ = nbytes
