"""CUDA's rules for operators whose tensors are on two devices.

CUDA's kernels have one of two checks. torch generates the first from native_functions.yaml: all tensors passed by
position, also those without dimensions, are on one device. Operators marked `device_check: NoCheck` are checked by
TensorIterator, which accepts a 0-dimensional tensor on the host (aten/src/ATen/TensorIterator.cpp, compute_types), or
by themselves: the operators below accept more.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch

_aten = torch.ops.aten

# Operators whose tensors may be on different devices (kernels/indexing.py checks the index operators).
MIXES_DEVICES = frozenset(
    {
        _aten._pack_padded_sequence, _aten.copy_, _aten._to_copy, _aten._foreach_copy_, _aten._foreach_copy,
        _aten.resize_as_,
        _aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_,
        _aten.set_, _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided,
        _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like,
    }
)  # fmt: skip


def accepts_host_scalars(func: Any) -> bool:
    """Return whether the CUDA kernel of the operator `func` accepts a 0-dimensional tensor on the host."""
    return func.name() not in _list_checked_overloads()


def find_missing_quantized_kernel(name: str) -> str:
    """Return the overload without a CUDA kernel for quantized tensors that a call of `name` needs; empty if none."""
    entry = _read_entries().get(name, "")
    delegate = re.search(r"structured_delegate: (\S+)", entry)
    if re.search(r"QuantizedCUDA|: Composite|    Composite", entry) or not (delegate or "  dispatch:" in entry):
        return ""
    return f"aten::{delegate[1]}" if delegate else name


@functools.cache
def _list_checked_overloads() -> frozenset[str]:
    """Return the overloads, such as `aten::add.Tensor`, with the device check of torchgen: those with a CUDA
    kernel, or structured, and without `device_check: NoCheck` (torchgen/dest/register_dispatch_key.py)."""
    kernels = re.compile(r"(?m)^    .*\bCUDA\b|^  structured_delegate:")
    return frozenset(
        name for name, text in _read_entries().items() if "device_check: NoCheck" not in text and kernels.search(text)
    )


@functools.cache
def _read_entries() -> dict[str, str]:
    """Return the entries of torch's native_functions.yaml by overload, such as `aten::add.Tensor`.

    The file comes with torch. It is read when a run first mixes devices or needs a quantized kernel; without the file
    no device check is made.
    """
    spec = importlib.util.find_spec("torchgen")
    folder = Path(spec.origin).parent if spec and spec.origin else Path()
    file = folder / "packaged" / "ATen" / "native" / "native_functions.yaml"
    if not file.is_file():
        return {}
    return {f"aten::{entry.partition('(')[0]}": entry for entry in re.split(r"(?m)^- func: ", file.read_text())[1:]}
