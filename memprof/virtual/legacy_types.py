"""Tensor types from before torch had dtypes, such as `torch.cuda.FloatTensor`, by name."""

from __future__ import annotations

from typing import Any

import torch

from memprof.trace.events import GPU_TYPES, is_gpu

LEGACY_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}
_GPU_MODULES = {f"torch.{gpu_type}": gpu_type for gpu_type in GPU_TYPES}
_LEGACY_NAMES = {dtype: name for name, dtype in LEGACY_TYPES.items()}


def get_legacy_name(dtype: torch.dtype, device: str) -> str:
    """Return the name of the legacy tensor type of `dtype` on `device`, such as `torch.cuda.FloatTensor`."""
    name = _LEGACY_NAMES.get(dtype, str(dtype).removeprefix("torch."))
    return f"torch.{device.partition(':')[0]}.{name}" if is_gpu(device) else f"torch.{name}"


def parse_legacy_type(kind: Any) -> tuple[str, torch.dtype] | None:
    """Return device and dtype of the legacy tensor type `kind`, a class or a name; None for anything else."""
    name = kind if isinstance(kind, str) else f"{getattr(kind, '__module__', '')}.{getattr(kind, '__name__', '')}"
    module, _, type_name = name.rpartition(".")
    device = "cpu" if module == "torch" else _GPU_MODULES.get(module)
    dtype = LEGACY_TYPES.get(type_name)
    return None if device is None or dtype is None else (device, dtype)
