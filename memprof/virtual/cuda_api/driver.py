"""Replacements of the layer below `torch.cuda`: functions of `torch._C`, tensor types.

A CPU build of torch lacks this layer. In a CUDA build, the replacements prevent calls of a real GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from memprof.torch_private import cuda
from memprof.torch_private.names import PrivateName
from memprof.virtual.generators import make_gpu_generator
from memprof.virtual.gpu_functions import make_constant_function
from memprof.virtual.gpus import Gpus
from memprof.virtual.legacy_types import LEGACY_TYPES, parse_legacy_type

UUID = "00000000-0000-0000-0000-000000000000"
_MIB = 1 << 20


def _make_legacy_type(name: str, dtype: torch.dtype) -> type:
    """Return a legacy tensor type such as `torch.cuda.FloatTensor`, for construction and isinstance only."""

    class DtypeMeta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == dtype

    def __new__(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and all(isinstance(arg, int) for arg in args):
            return torch.empty(args, dtype=dtype, device="cuda")
        if args and isinstance(args[0], torch.Size):
            return torch.empty(args[0], dtype=dtype, device="cuda")
        return torch.tensor(args[0] if args else [], dtype=dtype, device="cuda")

    return DtypeMeta(name, (), {"__new__": __new__, "__module__": "torch.cuda", "dtype": dtype, "is_cuda": True})


def _patch_default_tensor_type() -> Iterator[tuple[Any, str, Any]]:
    """Yield patches of `torch.set_default_tensor_type` and of `torch.Tensor(...)`, which uses that type."""
    default_types: list[Any] = []
    original_new = torch.Tensor.__new__

    def set_default_tensor_type(tensor_type: Any) -> None:
        device_and_dtype = parse_legacy_type(tensor_type)
        if device_and_dtype is None:
            raise TypeError("invalid type object")
        torch.set_default_dtype(device_and_dtype[1])
        torch.set_default_device(None if device_and_dtype[0] == "cpu" else "cuda")
        default_types[:] = [] if device_and_dtype[0] == "cpu" else [_make_legacy_type("Tensor", device_and_dtype[1])]

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return default_types[0](*args) if default_types and cls is torch.Tensor else original_new(cls, *args, **kwargs)

    yield torch, "set_default_tensor_type", set_default_tensor_type
    yield torch.Tensor, "__new__", __new__


def patch_driver(gpus: Gpus) -> Iterator[tuple[Any, str, Any]]:
    """Yield patches (owner, name, replacement) of the functions below `torch.cuda`."""

    results: dict[PrivateName, Any] = {
        cuda.get_device_count: gpus.num_gpus,
        cuda.init: None,
        cuda.is_in_bad_fork: False,
        cuda.has_primary_context: True,
        cuda.synchronize: None,
        cuda.can_device_access_peer: gpus.has_several and gpus.are_peers,
        cuda.get_current_raw_stream: 0,
        cuda.get_current_blas_handle: 0,
        cuda.get_current_solver_handle: 0,
        cuda.get_allocator_backend: "native",
        cuda.get_sync_debug_mode: 0,
        cuda.set_sync_debug_mode: None,
        cuda.host_memory_stats: {},
        cuda.reset_accumulated_host_memory_stats: None,
        cuda.reset_peak_host_memory_stats: None,
        cuda.ipc_collect: None,
        cuda.sleep: None,
        # Imported by torch._dynamo.reset() where a GPU exists (torch/_inductor/cudagraph_trees.py).
        cuda.allocator_state: None,
        cuda.set_cached_tensors_enabled: None,
    }
    yield from (function.patch(make_constant_function(value)) for function, value in results.items())
    yield cuda.get_device.patch(lambda: gpus.current)
    for function in (
        cuda.set_device, cuda.exchange_device, cuda.maybe_exchange_device, cuda.exchange_device_of_torch,
        cuda.maybe_exchange_device_of_torch,
    ):  # fmt: skip
        yield function.patch(lambda device: gpus.select(device))
    yield torch.cuda, "default_generators", tuple(map(make_gpu_generator, gpus.devices))
    for name, dtype in LEGACY_TYPES.items():
        yield torch.cuda, name, _make_legacy_type(name, dtype)
    yield from _patch_default_tensor_type()


# -- properties of a multiprocessor -----------------------------------------------------------------------------------

_SHARED_KIB = {(7, 0): 96, (7, 5): 64, (8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228, (11, 0): 228}


def get_multiprocessor_limits(compute_capability: tuple[int, int]) -> dict[str, int]:
    """Return the shared memory (bytes) and registers of a multiprocessor, by the names of device properties. From 8.0
    on, a block can opt in to all but 1 KiB of the shared memory (CUDA C++ programming guide)."""
    total_bytes = 1024 * _SHARED_KIB.get(compute_capability, 100)
    return {
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_block_optin": total_bytes - (1024 if compute_capability >= (8, 0) else 0),
        "shared_memory_per_multiprocessor": total_bytes,
        "regs_per_multiprocessor": 65_536,
    }


class DeviceProperties(SimpleNamespace):
    """A replacement of the result of `torch.cuda.get_device_properties`."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // _MIB}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, pci_bus_id=0, pci_device_id=0, pci_domain_id=0, "
            f"L2_cache_size={self.L2_cache_size // _MIB}MB)"
        )
