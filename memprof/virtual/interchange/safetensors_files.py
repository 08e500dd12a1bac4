"""Files of safetensors: written as empty shells, read by their header.

A file begins with a header that names types, shapes and places. That is all that the virtual GPU needs of large
tensors, so their data is not read; nor is a whole file mapped, which the library does, and which wants as much memory
to be promised as the file is long. A shell's header gives tensors without data a type that no other reader knows, and
which says what the file is; that reader's error repeats it.
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

from memprof.patching import bound_everywhere
from memprof.torch_private.dispatch import disable_current_modes
from memprof.trace.events import HOST, is_gpu
from memprof.virtual.device_state import DeviceState
from memprof.virtual.interchange.checkpoints import EMPTY, READ, SHELLS, UNREAD
from memprof.virtual.operator_call import HOST_VIRTUAL_BYTES
from memprof.virtual.values.budget import is_cheap_to_compute

_META = torch.device("meta")
_MARK = f", in an {EMPTY}"
_LARGEST_HEADER = 100_000_000  # as safetensors itself refuses longer ones
# Of one tensor of the types that are read whatever their size: far above any data set's tokens.
_MOST_READ_BYTES = 1 << 28
_OP = "safetensors"
_TYPES: dict[str, torch.dtype] = {
    **{code: dtype for code, dtype in safetensors.torch._TYPES.items() if dtype is not None},
    "F8_E8M0": torch.float8_e8m0fnu,
}
_CODES = {dtype: code for code, dtype in _TYPES.items()}
_real_open = safetensors.safe_open
_real_serialize = safetensors.serialize
_real_serialize_file = safetensors.serialize_file


class SafetensorsFiles:
    """Files of safetensors, for one virtual GPU."""

    def __init__(self, tracker: DeviceState) -> None:
        self._tracker = tracker
        self.assume = tracker.values.assume
        self.is_off = False  # whether this is a forked child, in which files are read as they are

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """The patches (owner, name, replacement)."""
        library = safetensors.torch
        for name in ("_flatten_as_ptr", "_flatten"):  # releases differ
            if hasattr(library, name):
                yield library, name, self._flattening(getattr(library, name))
        yield library, "serialize", self._serialize
        yield library, "serialize_file", self._serialize_file

    def opening(self) -> AbstractContextManager[None]:
        """Replace `safe_open` by memprof's inside."""
        return bound_everywhere("safe_open", _real_open, self._open)

    def _flattening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def flatten(tensors: dict[str, torch.Tensor], *rest: Any) -> Any:
            if not isinstance(tensors, dict) or not any(self._is_shell(tensor) for tensor in tensors.values()):
                return original(tensors, *rest)
            if hasattr(safetensors.torch, "_evaluate_tensors_for_save"):  # shared and sparse tensors are refused
                safetensors.torch._evaluate_tensors_for_save(tensors)
            for name, tensor in tensors.items():
                if not tensor.is_contiguous():
                    raise ValueError(
                        f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. "
                        "Call `.contiguous()` on it before saving."
                    )
            return _Shell(tensors)

        return flatten

    def _is_shell(self, tensor: Any) -> bool:
        """Return whether `tensor` is one of ours whose numbers are not known."""
        with torch.DisableTorchFunction():
            virtual = isinstance(tensor, torch.Tensor) and tensor.is_meta and tensor.numel()
            return bool(virtual) and self._tracker.device_of(tensor) != "meta" and self._numbers(tensor) is None

    def _numbers(self, tensor: torch.Tensor) -> torch.Tensor | None:
        with disable_current_modes():
            large = tensor.numel() * tensor.element_size() >= HOST_VIRTUAL_BYTES or not is_cheap_to_compute(tensor)
            return None if large and tensor.is_meta else self._tracker.values.store.get(tensor.detach())

    def _serialize(self, flat: Any, metadata: Any = None) -> bytes:
        return self._shell(flat, metadata) if isinstance(flat, _Shell) else _real_serialize(flat, metadata=metadata)

    def _serialize_file(self, flat: Any, filename: Any, metadata: Any = None) -> None:
        if isinstance(flat, _Shell):
            Path(filename).write_bytes(self._shell(flat, metadata))
        else:
            _real_serialize_file(flat, filename, metadata=metadata)

    def _shell(self, flat: _Shell, metadata: dict[str, str] | None) -> bytes:
        self.assume(SHELLS)
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        data: list[bytes] = []
        place = self._tracker.recorder.attribution.find_call_site(sys._getframe(1))
        at = 0
        with torch.DisableTorchFunction():
            # All are copied to the host before the first is written.
            copies = [tensor.nbytes for tensor in flat.values() if is_gpu(self._tracker.device_of(tensor))]
        with torch.DisableTorchFunction(), self._tracker.hidden(copies, _OP, place, HOST):
            for name, tensor in flat.items():
                numbers = self._numbers(tensor)
                content = b""
                if numbers is not None:
                    with disable_current_modes():
                        content = bytes(numbers.contiguous().reshape(-1).view(torch.uint8).numpy())
                code = _CODES[tensor.dtype] + (_MARK if numbers is None else "")
                offsets = [at, at + len(content)]
                header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": offsets}
                data.append(content)
                at += len(content)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + b"".join(data)

    def _open(self, filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        """Open a file as `safetensors.safe_open` does."""
        header = _header(filename) if framework in ("pt", "torch", "pytorch") and not self.is_off else None
        if header is None:
            return _real_open(filename, framework, device, **options)
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return _File(self, header, target, filename)

    def make(self, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor whose data is not read."""
        with torch.DisableTorchFunction():
            with disable_current_modes():
                made = torch.empty(shape, dtype=dtype, device=_META)
            if device.type != "meta":
                place = self._tracker.recorder.attribution.find_call_site(sys._getframe(1))
                on = self._tracker.gpus.named(device) if device.type == "cuda" else HOST
                self._tracker.record([made], _OP, place, on)
        return made

    def place(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor that was read, where it is wanted."""
        with torch.DisableTorchFunction():
            self._tracker.record_real(tensor, _OP, self._tracker.recorder.attribution.find_call_site(sys._getframe(1)))
        return tensor if device.type == "cpu" else tensor.to(device)


class _Shell(dict[str, torch.Tensor]):
    """Tensors on their way into a file."""


class _File:
    """An open file, or an open shell."""

    def __init__(self, files: SafetensorsFiles, header: dict[str, Any], device: torch.device, source: Any) -> None:
        self._files = files
        self._metadata = header.get("__metadata__")
        self._entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self._device = device
        self._source = source

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def keys(self) -> list[str]:
        return sorted(self._entries)

    def offset_keys(self) -> list[str]:
        """The names as they lie in the file."""
        return sorted(self._entries, key=lambda name: self._entries[name]["data_offsets"])

    def metadata(self) -> dict[str, str] | None:
        return self._metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[...]

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def get_slice(self, name: str) -> _Slice:
        if name not in self._entries:
            raise safetensors.SafetensorError(f"File does not contain tensor {name}")
        return _Slice(self, self._entries[name])

    def read(self, dtype: torch.dtype, entry: dict[str, Any], index: Any) -> torch.Tensor:
        """`tensor[index]` on the device that the file was opened for."""
        shape = entry["shape"]
        with torch.DisableTorchFunction(), disable_current_modes():
            layout = torch.empty(shape, dtype=dtype, device=_META)[index]
            size = layout.numel() * dtype.itemsize
            large = size >= (_MOST_READ_BYTES if dtype in READ else HOST_VIRTUAL_BYTES)
            tensor = None if large or _MARK in entry["dtype"] else _numbers(self._source, entry, dtype, index)
        if tensor is None:
            if _MARK not in entry["dtype"]:
                self._files.assume(UNREAD)
            return self._files.make(layout.shape, dtype, self._device)
        return self._files.place(tensor, self._device)


class _Slice:
    """A tensor of a file, to be indexed: what is not requested is not read."""

    def __init__(self, file: _File, entry: dict[str, Any]) -> None:
        self._file = file
        self._entry = entry
        self._code = entry["dtype"].removesuffix(_MARK)

    def get_shape(self) -> list[int]:
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        return str(self._code)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._file.read(_TYPES[self._code], self._entry, index)


def _header(filename: Any) -> dict[str, Any] | None:
    """A file's header, shell or not; None if it is none that we can read: safetensors says what is wrong with it."""
    try:
        with open(os.fspath(filename), "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LARGEST_HEADER:
                return None
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error):
        return None
    if not isinstance(header, dict):
        return None
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    return header if _is_whole(entries, os.path.getsize(filename) - 8 - length) else None


def _is_whole(entries: list[Any], data_bytes: int) -> bool:
    """Return whether the tensors have types that we know, and fill the file's data one after the other."""
    at = 0
    try:
        for entry in sorted(entries, key=lambda entry: entry["data_offsets"]):
            code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            size = 0 if _MARK in code and begin == end else math.prod(shape) * _TYPES[code.removesuffix(_MARK)].itemsize
            if begin != at or end - begin != size or min(shape, default=0) < 0:
                return False
            at = end
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    return at == data_bytes


def _numbers(filename: Any, entry: dict[str, Any], dtype: torch.dtype, index: Any) -> torch.Tensor:
    """`tensor[index]` of one entry. Pages that are not looked at are not read."""
    begin, end = entry["data_offsets"]
    if begin == end:
        return torch.empty(entry["shape"], dtype=dtype)[index]
    with open(os.fspath(filename), "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        first = 8 + length + begin
        before = first % mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(file.fileno(), end - begin + before, access=mmap.ACCESS_READ, offset=first - before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the buffer is not to be written: what is requested is copied
        return torch.frombuffer(pages, dtype=dtype, offset=before).reshape(entry["shape"])[index].clone()
