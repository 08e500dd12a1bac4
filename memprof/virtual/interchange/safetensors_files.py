"""Patches of safetensors, which write files as empty shells, and read only the header for large tensors.

A file begins with a header that has dtype, shape and offsets of each tensor. The virtual GPU needs no more of large
tensors, so their data is not read. (safetensors itself would map the entire file into memory.) In an empty shell, the
dtype of a tensor without data has a suffix that says what the file is; readers other than memprof raise an error that
repeats the suffix.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from memprof.patching import bind_everywhere
from memprof.torch_private.dispatch import disable_current_modes
from memprof.trace.events import HOST, is_gpu
from memprof.virtual.device_state import DeviceState
from memprof.virtual.interchange.checkpoints import (
    ALWAYS_READ_DTYPES,
    EMPTY_SHELL,
    EMPTY_SHELLS_ASSUMPTION,
    UNREAD_DATA_ASSUMPTION,
)
from memprof.virtual.operator_call import MIN_VIRTUAL_BYTES
from memprof.virtual.values.budget import is_cheap_to_compute

_META = torch.device("meta")
_SHELL_DTYPE_SUFFIX = f", in an {EMPTY_SHELL}"
_MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
# Limit of one tensor of `ALWAYS_READ_DTYPES`: more than the tokens of any data set.
_MAX_READ_BYTES = 1 << 28
_OPERATOR_NAME = "safetensors"
_DTYPES_BY_CODE: dict[str, torch.dtype] = {
    **{dtype_code: dtype for dtype_code, dtype in safetensors.torch._TYPES.items() if dtype is not None},
    "F8_E8M0": torch.float8_e8m0fnu,
}
_CODES_BY_DTYPE = {dtype: dtype_code for dtype_code, dtype in _DTYPES_BY_CODE.items()}
_real_open = safetensors.safe_open
_real_serialize = safetensors.serialize
_real_serialize_file = safetensors.serialize_file


class SafetensorsFiles:
    """Replacements of safetensors' functions that write and read files, for one virtual GPU."""

    def __init__(self, device_state: DeviceState) -> None:
        self._device_state = device_state
        self.assume = device_state.values.assume
        self.is_disabled = False  # whether this is a forked child, in which files are read with their data

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield patches (owner, name, replacement) of the functions of safetensors.torch that write files."""
        library = safetensors.torch
        for name in ("_flatten_as_ptr", "_flatten"):  # releases differ
            if hasattr(library, name):
                yield library, name, self._wrap_flatten(getattr(library, name))
        yield library, "serialize", self._serialize
        yield library, "serialize_file", self._serialize_file

    def replace_safe_open(self) -> AbstractContextManager[None]:
        """Return a context manager that replaces `safe_open` in every module that has imported it."""
        return bind_everywhere("safe_open", _real_open, self._open)

    def _wrap_flatten(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def flatten(tensors: dict[str, torch.Tensor], *rest: Any) -> Any:
            if not isinstance(tensors, dict) or not any(
                self._has_unknown_values(tensor) for tensor in tensors.values()
            ):
                return original(tensors, *rest)
            if hasattr(safetensors.torch, "_evaluate_tensors_for_save"):  # raises for shared and sparse tensors
                safetensors.torch._evaluate_tensors_for_save(tensors)
            for name, tensor in tensors.items():
                if not tensor.is_contiguous():
                    raise ValueError(
                        f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. "
                        "Call `.contiguous()` on it before saving."
                    )
            return _ShellTensors(tensors)

        return flatten

    def _has_unknown_values(self, tensor: Any) -> bool:
        """Return whether `tensor` is a virtual tensor whose values are not known, or too large to write."""
        with torch.DisableTorchFunction():
            is_nonempty_meta = isinstance(tensor, torch.Tensor) and tensor.is_meta and tensor.numel()
            return (
                bool(is_nonempty_meta)
                and self._device_state.device_of(tensor) != "meta"
                and self._find_values(tensor) is None
            )

    def _find_values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of `tensor`; None if they are not known, or too large to write."""
        with disable_current_modes():
            is_large = tensor.numel() * tensor.element_size() >= MIN_VIRTUAL_BYTES or not is_cheap_to_compute(tensor)
            return None if is_large and tensor.is_meta else self._device_state.values.store.get(tensor.detach())

    def _serialize(self, flat_tensors: Any, metadata: Any = None) -> bytes:
        return (
            self._serialize_shell(flat_tensors, metadata)
            if isinstance(flat_tensors, _ShellTensors)
            else _real_serialize(flat_tensors, metadata=metadata)
        )

    def _serialize_file(self, flat_tensors: Any, filename: Any, metadata: Any = None) -> None:
        if isinstance(flat_tensors, _ShellTensors):
            Path(filename).write_bytes(self._serialize_shell(flat_tensors, metadata))
        else:
            _real_serialize_file(flat_tensors, filename, metadata=metadata)

    def _serialize_shell(self, tensors: _ShellTensors, metadata: dict[str, str] | None) -> bytes:
        """Return the bytes of a file with `tensors`, without the data of tensors whose values are unknown."""
        self.assume(EMPTY_SHELLS_ASSUMPTION)
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        contents: list[bytes] = []
        call_site = self._device_state.recorder.attribution.find_call_site(sys._getframe(1))
        offset = 0
        with torch.DisableTorchFunction():
            # All tensors are copied to the host before the first is written.
            copy_sizes = [tensor.nbytes for tensor in tensors.values() if is_gpu(self._device_state.device_of(tensor))]
        with torch.DisableTorchFunction(), self._device_state.hold_scratch(copy_sizes, _OPERATOR_NAME, call_site, HOST):
            for name, tensor in tensors.items():
                values = self._find_values(tensor)
                content = b""
                if values is not None:
                    with disable_current_modes():
                        content = bytes(values.contiguous().reshape(-1).view(torch.uint8).numpy())
                dtype_code = _CODES_BY_DTYPE[tensor.dtype] + (_SHELL_DTYPE_SUFFIX if values is None else "")
                offsets = [offset, offset + len(content)]
                header[name] = {"dtype": dtype_code, "shape": list(tensor.shape), "data_offsets": offsets}
                contents.append(content)
                offset += len(content)
        header_bytes = json.dumps(header).encode()
        header_bytes += b" " * (-len(header_bytes) % 8)
        return struct.pack("<Q", len(header_bytes)) + header_bytes + b"".join(contents)

    def _open(self, filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        """Open a file as `safetensors.safe_open` does; call that function if the header cannot be read."""
        header = _read_header(filename) if framework in ("pt", "torch", "pytorch") and not self.is_disabled else None
        if header is None:
            return _real_open(filename, framework, device, **options)
        target_device = (
            torch.device(self._device_state.gpus.type, device) if isinstance(device, int) else torch.device(device)
        )
        return _SafetensorsFile(self, header, target_device, filename)

    def make_unread_tensor(self, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a virtual tensor on `device`, for a tensor in a file whose data is not read."""
        with torch.DisableTorchFunction():
            with disable_current_modes():
                tensor = torch.empty(shape, dtype=dtype, device=_META)
            if device.type != "meta":
                call_site = self._device_state.recorder.attribution.find_call_site(sys._getframe(1))
                device_name = (
                    self._device_state.gpus.get_name(device) if device.type == self._device_state.gpus.type else HOST
                )
                self._device_state.record([tensor], _OPERATOR_NAME, call_site, device_name)
        return tensor

    def record_read_tensor(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Record `tensor`, whose data was read from a file, and return the tensor on `device`."""
        with torch.DisableTorchFunction():
            self._device_state.record_real(
                tensor, _OPERATOR_NAME, self._device_state.recorder.attribution.find_call_site(sys._getframe(1))
            )
        return tensor if device.type == "cpu" else tensor.to(device)


class _ShellTensors(dict[str, torch.Tensor]):
    """Tensors to serialize as an empty shell, by name."""


class _SafetensorsFile:
    """A safetensors file that is open, with the methods of safetensors' `safe_open`."""

    def __init__(self, files: SafetensorsFiles, header: dict[str, Any], device: torch.device, path: Any) -> None:
        self.files = files
        self._metadata = header.get("__metadata__")
        self._entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self.device = device
        self.path = path

    def __enter__(self) -> _SafetensorsFile:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def keys(self) -> list[str]:
        return sorted(self._entries)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in the order of their data in the file."""
        return sorted(self._entries, key=lambda name: self._entries[name]["data_offsets"])

    def metadata(self) -> dict[str, str] | None:
        return self._metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[...]

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def get_slice(self, name: str) -> _TensorSlice:
        if name not in self._entries:
            raise safetensors.SafetensorError(f"File does not contain tensor {name}")
        return _TensorSlice(self, self._entries[name])


class _TensorSlice:
    """A tensor in a file, which reads the elements that are indexed; a replacement of safetensors' `PySafeSlice`."""

    def __init__(self, file: _SafetensorsFile, entry: dict[str, Any]) -> None:
        self._file = file
        self._entry = entry
        self._dtype_code = entry["dtype"].removesuffix(_SHELL_DTYPE_SUFFIX)

    def get_shape(self) -> list[int]:
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        return str(self._dtype_code)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the elements at `index` on the device of the open file; without data if they are large."""
        file, dtype = self._file, _DTYPES_BY_CODE[self._dtype_code]
        is_shell = _SHELL_DTYPE_SUFFIX in self._entry["dtype"]
        with torch.DisableTorchFunction(), disable_current_modes():
            meta_tensor = torch.empty(self._entry["shape"], dtype=dtype, device=_META)[index]
            max_bytes = _MAX_READ_BYTES if dtype in ALWAYS_READ_DTYPES else MIN_VIRTUAL_BYTES
            reads_data = not is_shell and meta_tensor.numel() * dtype.itemsize < max_bytes
            tensor = _read_values(file.path, self._entry, dtype, index) if reads_data else None
        if tensor is not None:
            return file.files.record_read_tensor(tensor, file.device)
        if not is_shell:
            file.files.assume(UNREAD_DATA_ASSUMPTION)
        return file.files.make_unread_tensor(meta_tensor.shape, dtype, file.device)


def _read_header(filename: Any) -> dict[str, Any] | None:
    """Return the header of a safetensors file; None if it is invalid."""
    try:
        with open(os.fspath(filename), "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                return None
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error):
        return None
    if not isinstance(header, dict):
        return None
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    return header if _has_valid_entries(entries, os.path.getsize(filename) - 8 - length) else None


def _has_valid_entries(entries: list[Any], data_bytes: int) -> bool:
    """Return whether the tensors of `entries` have known dtypes and together fill the `data_bytes` bytes of data."""
    offset = 0
    try:
        for entry in sorted(entries, key=lambda entry: entry["data_offsets"]):
            dtype_code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            num_bytes = (
                0
                if _SHELL_DTYPE_SUFFIX in dtype_code and begin == end
                else math.prod(shape) * _DTYPES_BY_CODE[dtype_code.removesuffix(_SHELL_DTYPE_SUFFIX)].itemsize
            )
            if begin != offset or end - begin != num_bytes or min(shape, default=0) < 0:
                return False
            offset = end
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    return offset == data_bytes


def _read_values(filename: Any, entry: dict[str, Any], dtype: torch.dtype, index: Any) -> torch.Tensor:
    """Return the elements at `index` of the tensor of `entry`; only the pages with these elements are read."""
    begin, end = entry["data_offsets"]
    if begin == end:
        return torch.empty(entry["shape"], dtype=dtype)[index]
    with open(os.fspath(filename), "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        start = 8 + length + begin
        padding = start % mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(file.fileno(), end - begin + padding, access=mmap.ACCESS_READ, offset=start - padding)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that the buffer is read-only; the elements are copied
        return torch.frombuffer(pages, dtype=dtype, offset=padding).reshape(entry["shape"])[index].clone()
