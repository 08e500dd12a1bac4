"""`torch.save` and `torch.load`: checkpoints of tensors without data, and real ones loaded without reading them.

A file has torch's own form. A storage of the virtual GPU, and a large one of the host, is an *empty shell* in it: its
entry in the pickle says type, size and device, and its record is missing; the record's name says why, so that torch's
own error says it wherever the file is opened without memprof. Numbers that are known (counters, random states) and the
data of real tensors are in the file as they always are. Sharing and views are the pickle's, and come back.

What is loaded goes storage by storage, as in torch: each is made on the host, then moved to where `map_location` wants
it. Large storages of floating-point numbers and bytes are not read.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.serialization
from torch.overrides import TorchFunctionMode

from memprof.torch_private import dispatch, tensors
from memprof.torch_private.dispatch import disable_current_modes
from memprof.trace.events import HOST, is_gpu
from memprof.virtual.device_state import DeviceState
from memprof.virtual.operator_call import HOST_COUNTED_BYTES, HOST_VIRTUAL_BYTES
from memprof.virtual.values.budget import is_cheap_to_compute

_META = torch.device("meta")
_FORM = torch.serialization
_storage_to = torch.UntypedStorage.to

# What stands in a file in place of data.
EMPTY = "empty shell that memprof wrote on a virtual GPU: this file holds no weights"
SHELLS = (
    "Checkpoints are written as empty shells: names, shapes and types without the data of tensors that have none here. "
    "On a virtual GPU they load as what they were; anywhere else, loading them is an error."
)
UNREAD = "Large tensors of checkpoints are not read: what they hold is unknown, like all that is computed from it."
# Types whose large storages are read all the same: tokens, indices and masks decide what a program does.
READ = frozenset({torch.bool, torch.int16, torch.int32, torch.int64})


class Checkpoints:
    """Checkpoint files (torch.save, torch.load), for one virtual GPU."""

    def __init__(self, tracker: DeviceState, mode: TorchFunctionMode) -> None:
        self._tracker = tracker
        self._mode = mode
        self._assume = tracker.values.assume
        self._dtype = torch.uint8  # of the storage that is being loaded
        # Whether tensors are being pickled for a file of torch's, in which storages stand by themselves.
        self.saving = False

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """The patches (owner, name, replacement)."""
        yield tensors.save.patch(self._save)
        yield tensors.load.patch(self._load)
        yield tensors.legacy_load.patch(self._loading_old_files(tensors.legacy_load.get()))
        original = torch.save

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            # The old form has no place for a storage without data.
            kwargs.pop("_use_new_zipfile_serialization", None)
            original(obj, f, *args[:2], **kwargs)

        for owner in (torch, _FORM):
            yield owner, "save", save
        yield torch.UntypedStorage, "to", as_method(self._storage_to)
        yield torch.UntypedStorage, "cuda", as_method(self._to_gpu)

    def _save(
        self, obj: Any, file: Any, pickle_module: Any, pickle_protocol: Any, without_byte_order: bool = False
    ) -> None:
        """Write as `torch.serialization._save` does: a pickle, then one record for each storage."""
        keys: dict[int, str] = {}
        storages: dict[str, torch.UntypedStorage] = {}
        dtypes: dict[int, torch.dtype] = {}

        def persistent_id(value: Any) -> Any:
            storage: torch.UntypedStorage
            if isinstance(value, torch.storage.TypedStorage):
                storage, dtype = value._untyped_storage, value.dtype
                kind, count = getattr(torch, value._pickle_storage_type()), value._size()
            elif torch.is_storage(value):
                storage, dtype, kind, count = cast(Any, value), torch.uint8, torch.UntypedStorage, value.nbytes()
            else:
                return None
            address = storage._cdata
            if dtypes.setdefault(address, dtype) != dtype:
                raise RuntimeError(
                    "Cannot save multiple tensors or storages that view the same data as different types"
                )
            if address not in keys:
                number = str(len(keys))
                keys[address] = number if self._data(storage) is not None else f"{number}, an {EMPTY}"
                storages[keys[address]] = storage
            return "storage", kind, keys[address], self._location(storage), count

        class Pickler(pickle_module.Pickler):  # type: ignore[misc]
            def persistent_id(self, value: Any) -> Any:
                return persistent_id(value)

        pickled = io.BytesIO()
        outer, self.saving = self.saving, True
        try:
            # A thread that writes checkpoints sees no modes, and would find tensors on the meta device.
            with contextlib.nullcontext() if dispatch.len_torch_function_stack() else self._mode:
                Pickler(pickled, protocol=pickle_protocol).dump(obj)
        finally:
            self.saving = outer
        records: list[tuple[str, Any]] = [("data.pkl", pickled.getvalue())]
        records += [] if without_byte_order else [("byteorder", sys.byteorder)]
        if any(self._data(storage) is None for storage in storages.values()):
            self._assume(SHELLS)
            records.append(("memprof", f"Each storage without a record is an {EMPTY}.\n"))
        for name, content in records:
            file.write_record(name, content, len(content))
        for key, storage in storages.items():
            data = self._data(storage)
            if self._location(storage).startswith("cuda"):  # it passes through host memory
                self._tracker.transients((storage.nbytes(),), "torch.save", self._place(), HOST)
            if data is not None:
                with torch.DisableTorchFunction(), disable_current_modes():
                    file.write_record(f"data/{key}", data, data.nbytes())
        # A class is a cycle, and this one sees the table: it must not keep the storages until the next collection.
        storages.clear()

    def _data(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Return what to write of `storage`: itself if it is real, the known numbers of a small one, else nothing."""
        if storage.device.type != "meta":
            return storage
        if not storage.nbytes():
            return torch.UntypedStorage(0)
        known = self._tracker.values.store.flat(storage) if storage.nbytes() < HOST_VIRTUAL_BYTES else None
        if known is None or not is_cheap_to_compute(known):
            return None
        with torch.DisableTorchFunction():
            data = known.untyped_storage()
        return data if data.nbytes() == storage.nbytes() else None

    def _location(self, storage: torch.UntypedStorage) -> str:
        if storage.device.type != "meta":
            return str(_FORM.location_tag(storage))
        device = self._tracker.recorder.storages.get_device(storage)
        return device if is_gpu(device) else "cpu"

    def _load(
        self, file: Any, map_location: Any, pickle_module: Any, pickle_file: str = "data.pkl", **options: Any
    ) -> Any:
        """Read as `torch.serialization._load` does; a mapped file (`overall_storage`) is read as any other."""
        options.pop("overall_storage", None)
        # From 2.15 on it is said here, too, and not for the unpickler.
        trust = {"weights_only": options.pop("weights_only")} if "weights_only" in options else {}
        restore = tensors.get_restore_location(map_location)
        to_meta = map_location is not None and not callable(map_location) and str(map_location) == "meta"
        loaded: dict[str, Any] = {}
        records = set(file.get_all_records())
        swap = "byteorder" in records and file.get_record("byteorder").decode() != sys.byteorder

        def persistent_load(saved: Any) -> Any:
            _, kind, key, location, count = saved
            if key not in loaded:
                dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
                num_bytes = count * dtype.itemsize
                if to_meta:
                    storage = torch.UntypedStorage(num_bytes, device="meta")
                else:
                    host = self._read(file, f"data/{key}", num_bytes, dtype, records, swap)
                    with self._of(dtype):
                        storage = restore(host, location)
                loaded[key] = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
            return loaded[key]

        class Unpickler(pickle_module.Unpickler):  # type: ignore[misc]
            def find_class(self, module: str, name: str) -> Any:
                if isinstance(name, str) and "Storage" in name:
                    with contextlib.suppress(KeyError):
                        return _FORM.StorageType(name)
                return super().find_class("torch._tensor" if module == "torch.tensor" else module, name)

        with _current_functions():
            unpickler = Unpickler(io.BytesIO(file.get_record(pickle_file)), **options)
            unpickler.persistent_load = persistent_load
            tensors.serialization_tls.map_location = map_location
            try:
                result = unpickler.load()
            finally:
                tensors.serialization_tls.map_location = None
                loaded.clear()
        tensors.validate_loaded_sparse_tensors(**trust)
        return result

    def _read(
        self, file: Any, name: str, num_bytes: int, dtype: torch.dtype, records: set[str], swap: bool
    ) -> torch.UntypedStorage:
        """The storage of a record on the host: real if it is worth reading, else without data."""
        if name in records and (num_bytes < HOST_VIRTUAL_BYTES or dtype in READ):
            with torch.DisableTorchFunction(), disable_current_modes():
                data = file.get_storage_from_record(name, num_bytes, torch.UntypedStorage)
                storage: torch.UntypedStorage = data._typed_storage()._untyped_storage
                if swap:
                    storage.byteswap(dtype)
                if num_bytes >= HOST_COUNTED_BYTES:
                    self._tracker.record_real(data, "torch.load", self._place())
            return storage
        if name not in records and EMPTY not in name and num_bytes:
            raise pickle.UnpicklingError(f"this checkpoint is damaged: it has no record {name!r}")
        if name in records:
            self._assume(UNREAD)
        return self._new(num_bytes, dtype, HOST)

    def _new(self, num_bytes: int, dtype: torch.dtype, device: str) -> torch.UntypedStorage:
        with torch.DisableTorchFunction():
            with disable_current_modes():
                made = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=_META)
            self._tracker.record([made], "torch.load", self._place(), device)
            return made.untyped_storage()

    def _place(self) -> Any:
        return self._tracker.recorder.attribution.find_call_site(sys._getframe(1))

    @contextlib.contextmanager
    def _of(self, dtype: torch.dtype) -> Iterator[None]:
        outer, self._dtype = self._dtype, dtype
        try:
            yield
        finally:
            self._dtype = outer

    def _storage_to(self, storage: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
        target = torch.device(device) if isinstance(device, str) else device
        if isinstance(target, int) or target.type == "cuda":
            return self._to_gpu(storage, target)
        return _storage_to(storage, device=target, non_blocking=non_blocking)

    def _to_gpu(self, storage: torch.UntypedStorage, device: Any = None, **unused: Any) -> torch.UntypedStorage:
        """A copy of `storage` on a GPU; its numbers are kept if they are few, or integers."""
        values, dtype = self._tracker.values, self._dtype
        made = self._new(storage.nbytes(), dtype, self._tracker.gpus.named(device))
        with torch.DisableTorchFunction(), disable_current_modes():
            copy = torch.empty(0, dtype=dtype, device=_META).set_(made)  # type: ignore[call-overload]
            if not (is_cheap_to_compute(copy) or (values.store.is_trackable(copy) and not dtype.is_floating_point)):
                return made
            real = storage.device.type != "meta"
            known = torch.empty(0, dtype=dtype).set_(storage) if real else values.store.flat(storage)  # type: ignore[call-overload]
            if known is not None and known.dtype == dtype and known.numel() == copy.numel():
                values.store.set(copy, known)
        return made

    def _loading_old_files(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Files from before torch 1.6 make their storages before they read them: read on the host, then moved."""

        def load(f: Any, map_location: Any, pickle_module: Any, **options: Any) -> Any:
            restore = tensors.get_restore_location(map_location)
            on_gpu: dict[int, torch.UntypedStorage] = {}

            def place(storage: Any, location: str) -> Any:
                untyped = getattr(storage, "_untyped_storage", storage)
                result = restore(torch.UntypedStorage(0), location)
                if getattr(result, "_untyped_storage", result).device.type == "meta":
                    on_gpu[untyped._cdata] = untyped
                return storage

            with _current_functions():
                return self._moved(original(f, place, pickle_module, **options), on_gpu)

        return load

    def _moved(self, value: Any, on_gpu: dict[int, torch.UntypedStorage]) -> Any:
        if isinstance(value, torch.Tensor):
            with torch.DisableTorchFunction():
                moves = not value.is_meta and value.untyped_storage()._cdata in on_gpu
            return value.to("cuda") if moves else value
        if isinstance(value, dict):
            for key, part in value.items():  # in place: state dicts carry attributes
                value[key] = self._moved(part, on_gpu)
            return value
        if type(value) in (list, tuple):
            return type(value)(self._moved(part, on_gpu) for part in value)
        return value


def as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that becomes a method when it is made a class's attribute; bound ones do not."""
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


@contextlib.contextmanager
def _current_functions() -> Iterator[None]:
    """The unpickler of `weights_only` remembers the functions that were there when it was first asked."""
    allowed = tensors.get_allowed_globals
    allowed.cache_clear()
    try:
        yield
    finally:
        allowed.cache_clear()
