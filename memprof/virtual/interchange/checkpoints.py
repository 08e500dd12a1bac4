"""Patches of `torch.save` and `torch.load`, which write tensors without data, and load large tensors without reading.

A file has torch's format. A storage of the virtual GPU, and a large storage of the host, is an *empty shell* there:
the pickle has type, size and device of the storage, and the record with the data is missing. The name of the missing
record says why, so that torch's error shows the reason where memprof does not open the file. Known values (counters,
random states) and the data of real tensors are written as usual. The pickle preserves views and shared storages.

A storage is loaded on the host first, then moved to the device of `map_location`, as in torch. Large storages of
floating-point numbers and bytes are not read.
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
from memprof.virtual.operator_call import MIN_COUNTED_BYTES, MIN_VIRTUAL_BYTES
from memprof.virtual.values.budget import is_cheap_to_compute

_META = torch.device("meta")
_original_storage_to = torch.UntypedStorage.to

# Part of the name of a record that has no data, and of the dtype in a safetensors header.
EMPTY_SHELL = "empty shell that memprof wrote on a virtual GPU: this file holds no weights"
EMPTY_SHELLS_ASSUMPTION = (
    "Checkpoints are written as empty shells: names, shapes and types without the data of tensors that have none here. "
    "On a virtual GPU they load as what they were; anywhere else, loading them is an error."
)
UNREAD_DATA_ASSUMPTION = (
    "Large tensors of checkpoints are not read: what they hold is unknown, like all that is computed from it."
)
# Dtypes whose large storages are also read: tokens, indices and masks control the program's flow.
ALWAYS_READ_DTYPES = frozenset({torch.bool, torch.int16, torch.int32, torch.int64})


class Checkpoints:
    """Replacements of `torch.save` and `torch.load` for one virtual GPU."""

    def __init__(self, device_state: DeviceState, mode: TorchFunctionMode) -> None:
        self._device_state = device_state
        self._mode = mode
        self._assume = device_state.values.assume
        self._loaded_dtype = torch.uint8  # dtype of the storage that is being loaded
        self.is_saving = False

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield patches (owner, name, replacement) of `torch.save`, `torch.load`, and of storage copies to a GPU."""
        yield tensors.save.patch(self._save)
        yield tensors.load.patch(self._load)
        yield tensors.legacy_load.patch(self._wrap_legacy_load(tensors.legacy_load.get()))
        original = torch.save

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            # The legacy format cannot hold a storage without data.
            kwargs.pop("_use_new_zipfile_serialization", None)
            original(obj, f, *args[:2], **kwargs)

        for owner in (torch, torch.serialization):
            yield owner, "save", save
        yield torch.UntypedStorage, "to", as_method(self._move_storage)
        gpu_type = self._device_state.gpus.type
        if hasattr(torch.UntypedStorage, gpu_type):  # "xpu" has `to` alone
            yield torch.UntypedStorage, gpu_type, as_method(self._copy_storage_to_gpu)

    def _save(
        self, obj: Any, file: Any, pickle_module: Any, pickle_protocol: Any, disable_byteorder: bool = False
    ) -> None:
        """Write a checkpoint as `torch.serialization._save` does: a pickle, then one record for each storage."""
        keys: dict[int, str] = {}
        storages: dict[str, tuple[torch.UntypedStorage, torch.UntypedStorage | None]] = {}  # with the data to write
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
                data = self._find_data(storage)
                keys[address] = f"{len(keys)}, an {EMPTY_SHELL}" if data is None else str(len(keys))
                storages[keys[address]] = storage, data
            return "storage", kind, keys[address], self._find_location(storage), count

        class Pickler(pickle_module.Pickler):  # type: ignore[misc]
            def persistent_id(self, value: Any) -> Any:
                return persistent_id(value)

        pickled = io.BytesIO()
        was_saving, self.is_saving = self.is_saving, True
        try:
            # The modes are not active in a thread that writes checkpoints; without them, tensors are on meta.
            with contextlib.nullcontext() if dispatch.len_torch_function_stack() else self._mode:
                Pickler(pickled, protocol=pickle_protocol).dump(obj)
        finally:
            self.is_saving = was_saving
        records: list[tuple[str, Any]] = [("data.pkl", pickled.getvalue())]
        records += [] if disable_byteorder else [("byteorder", sys.byteorder)]
        if any(data is None for _, data in storages.values()):
            self._assume(EMPTY_SHELLS_ASSUMPTION)
            records.append(("memprof", f"Each storage without a record is an {EMPTY_SHELL}.\n"))
        for name, content in records:
            file.write_record(name, content, len(content))
        for key, (storage, data) in storages.items():
            if is_gpu(self._find_location(storage)):  # the data is copied to the host
                self._device_state.allocate_transients((storage.nbytes(),), "torch.save", self._find_call_site(), HOST)
            if data is not None:
                with torch.DisableTorchFunction(), disable_current_modes():
                    file.write_record(f"data/{key}", data, data.nbytes())
        # `Pickler`, as any class, is a reference cycle, and would keep the storages alive until the next collection.
        storages.clear()

    def _find_data(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Return the data of `storage` to write: itself if it is real, its known values if it is small, else None."""
        if storage.device.type != "meta":
            return storage
        if not storage.nbytes():
            return torch.UntypedStorage(0)
        known_values = (
            self._device_state.values.store.read_elements(storage) if storage.nbytes() < MIN_VIRTUAL_BYTES else None
        )
        if known_values is None or not is_cheap_to_compute(known_values):
            return None
        with torch.DisableTorchFunction():
            data = known_values.untyped_storage()
        return data if data.nbytes() == storage.nbytes() else None

    def _find_location(self, storage: torch.UntypedStorage) -> str:
        """Return torch's location tag of `storage`, such as "cpu" or "cuda:0"."""
        if storage.device.type != "meta":
            return str(torch.serialization.location_tag(storage))
        device = self._device_state.recorder.storages.get_device(storage)
        return device if is_gpu(device) else "cpu"

    def _load(
        self, file: Any, map_location: Any, pickle_module: Any, pickle_file: str = "data.pkl", **options: Any
    ) -> Any:
        """Read a checkpoint as `torch.serialization._load` does, but never by memory mapping (`overall_storage`)."""
        options.pop("overall_storage", None)
        # Passed by torch 2.15 and later, and no option of the unpickler.
        validation = {"weights_only": options.pop("weights_only")} if "weights_only" in options else {}
        restore_location = tensors.get_restore_location(map_location)
        is_meta_target = map_location is not None and not callable(map_location) and str(map_location) == "meta"
        loaded_storages: dict[str, Any] = {}
        record_names = set(file.get_all_records())
        is_byte_swapped = "byteorder" in record_names and file.get_record("byteorder").decode() != sys.byteorder

        def persistent_load(saved_id: Any) -> Any:
            _, storage_type, key, location, count = saved_id
            if key not in loaded_storages:
                dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
                num_bytes = count * dtype.itemsize
                if is_meta_target:
                    storage = torch.UntypedStorage(num_bytes, device="meta")
                else:
                    source = self._read_storage(file, f"data/{key}", num_bytes, dtype, record_names, is_byte_swapped)
                    self._loaded_dtype = dtype
                    try:
                        storage = restore_location(source, location)
                    finally:
                        self._loaded_dtype = torch.uint8
                loaded_storages[key] = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
            return loaded_storages[key]

        class Unpickler(pickle_module.Unpickler):  # type: ignore[misc]
            def find_class(self, module: str, name: str) -> Any:
                if isinstance(name, str) and "Storage" in name:
                    with contextlib.suppress(KeyError):
                        return torch.serialization.StorageType(name)
                return super().find_class("torch._tensor" if module == "torch.tensor" else module, name)

        with _clear_allowed_globals():
            unpickler = Unpickler(io.BytesIO(file.get_record(pickle_file)), **options)
            unpickler.persistent_load = persistent_load
            tensors.serialization_tls.map_location = map_location
            try:
                result = unpickler.load()
            finally:
                tensors.serialization_tls.map_location = None
                loaded_storages.clear()
        tensors.validate_loaded_sparse_tensors(**validation)
        return result

    def _read_storage(
        self, file: Any, name: str, num_bytes: int, dtype: torch.dtype, record_names: set[str], is_byte_swapped: bool
    ) -> torch.UntypedStorage:
        """Return a host storage for the record `name`; without data if the record is large or missing.

        Raises:
            pickle.UnpicklingError: the record is missing, and its name is not that of an empty shell.
        """
        if name in record_names and (num_bytes < MIN_VIRTUAL_BYTES or dtype in ALWAYS_READ_DTYPES):
            with torch.DisableTorchFunction(), disable_current_modes():
                data = file.get_storage_from_record(name, num_bytes, torch.UntypedStorage)
                storage: torch.UntypedStorage = data._typed_storage()._untyped_storage
                if is_byte_swapped:
                    storage.byteswap(dtype)
                if num_bytes >= MIN_COUNTED_BYTES:
                    self._device_state.record_real(data, "torch.load", self._find_call_site())
            return storage
        if name not in record_names and EMPTY_SHELL not in name and num_bytes:
            raise pickle.UnpicklingError(f"this checkpoint is damaged: it has no record {name!r}")
        if name in record_names:
            self._assume(UNREAD_DATA_ASSUMPTION)
        return self._make_virtual_storage(num_bytes, dtype, HOST)

    def _make_virtual_storage(self, num_bytes: int, dtype: torch.dtype, device: str) -> torch.UntypedStorage:
        with torch.DisableTorchFunction():
            with disable_current_modes():
                tensor = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=_META)
            self._device_state.record([tensor], "torch.load", self._find_call_site(), device)
            return tensor.untyped_storage()

    def _find_call_site(self) -> Any:
        return self._device_state.recorder.attribution.find_call_site(sys._getframe(1))

    def _move_storage(self, storage: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
        target_device = torch.device(device) if isinstance(device, str) else device
        if isinstance(target_device, int) or target_device.type == self._device_state.gpus.type:
            return self._copy_storage_to_gpu(storage, target_device)
        return _original_storage_to(storage, device=target_device, non_blocking=non_blocking)

    def _copy_storage_to_gpu(
        self, storage: torch.UntypedStorage, device: Any = None, **unused: Any
    ) -> torch.UntypedStorage:
        """Return a copy of `storage` on the GPU `device`; the values of small or integer storages stay known."""
        values, dtype = self._device_state.values, self._loaded_dtype
        result = self._make_virtual_storage(storage.nbytes(), dtype, self._device_state.gpus.get_name(device))
        with torch.DisableTorchFunction(), disable_current_modes():
            copy = torch.empty(0, dtype=dtype, device=_META).set_(result)  # type: ignore[call-overload]
            if not (is_cheap_to_compute(copy) or (values.store.is_trackable(copy) and not dtype.is_floating_point)):
                return result
            is_real = storage.device.type != "meta"
            known = torch.empty(0, dtype=dtype).set_(storage) if is_real else values.store.read_elements(storage)  # type: ignore[call-overload]
            if known is not None and known.dtype == dtype and known.numel() == copy.numel():
                values.store.set(copy, known)
        return result

    def _wrap_legacy_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a loader for files from before torch 1.6, which create storages before their data is read: tensors are
        read into host memory and then moved to the GPU."""

        def load(f: Any, map_location: Any, pickle_module: Any, **options: Any) -> Any:
            restore_location = tensors.get_restore_location(map_location)
            gpu_storages: dict[int, torch.UntypedStorage] = {}

            def record_location(storage: Any, location: str) -> Any:
                untyped = getattr(storage, "_untyped_storage", storage)
                result = restore_location(torch.UntypedStorage(0), location)
                if getattr(result, "_untyped_storage", result).device.type == "meta":
                    gpu_storages[untyped._cdata] = untyped
                return storage

            with _clear_allowed_globals():
                return self._move_to_gpu(original(f, record_location, pickle_module, **options), gpu_storages)

        return load

    def _move_to_gpu(self, value: Any, gpu_storages: dict[int, torch.UntypedStorage]) -> Any:
        """Return `value` with the tensors of `gpu_storages` moved to the GPU; dictionaries change in place."""
        if isinstance(value, torch.Tensor):
            with torch.DisableTorchFunction():
                needs_move = not value.is_meta and value.untyped_storage()._cdata in gpu_storages
            return value.to(self._device_state.gpus.type) if needs_move else value
        if isinstance(value, dict):
            for key, part in value.items():  # in place: state dicts carry attributes
                value[key] = self._move_to_gpu(part, gpu_storages)
            return value
        if type(value) in (list, tuple):
            return type(value)(self._move_to_gpu(part, gpu_storages) for part in value)
        return value


def as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the bound method `function` as a plain function, so that a class can have it as a method."""
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


@contextlib.contextmanager
def _clear_allowed_globals() -> Iterator[None]:
    """Context manager: clear torch's cache of the globals that `weights_only` allows, on entry and exit."""
    get_allowed_globals = tensors.get_allowed_globals
    get_allowed_globals.cache_clear()
    try:
        yield
    finally:
        get_allowed_globals.cache_clear()
