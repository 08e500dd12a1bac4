"""bitsandbytes on the virtual GPU: 8-bit and 4-bit weights, optimizers whose state is quantized or paged.

Its operators are Python functions that allocate with torch and then call a native library. On the virtual GPU the CUDA
functions (bitsandbytes/backends/cuda/ops.py) run unchanged, so that sizes, order and temporaries are the library's own;
only the native calls do nothing. Every buffer is an argument of these calls; cuBLASLt gets no workspace.

Paged state is managed memory (`get_paged` in bitsandbytes/functional.py): outside the caching allocator, and moved
between host and GPU by the driver. It is counted as host memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.torch_private import dispatch
from memprof.virtual.install_context import InstallContext

_KERNEL_MODULE = "bitsandbytes.backends.cuda.ops"
_FUNCTION_MODULE = "bitsandbytes.functional"
_NAMESPACE = "bitsandbytes::"
_PAGED_ASSUMPTION = (
    "Paged optimizer state is managed memory: counted in the host's, outside the caching allocator. What of it the "
    "driver keeps on the GPU at a time is not simulated."
)


class Bitsandbytes(Extension):
    """The extension that runs an installed bitsandbytes without its native library."""

    imports = ("bitsandbytes",)

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield a patch that disables the package's logger, which warns of a missing CUDA library."""
        yield logging.getLogger("bitsandbytes.cextension"), "disabled", True

    def make_module_patches(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of the native library; register the package's operators to run its Python code for CUDA."""
        if context.gpu.device_type != "cuda":  # as on such a machine, its operators then have no kernel
            return
        yield from _make_patches(context.assume)
        context.function_mode.register_cuda_kernels(_list_operators())


class _NullLibrary:
    """A native library whose functions all do nothing and report success."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: 0


def _make_patches(assume: Callable[[str], None]) -> Iterator[Patch]:
    """Yield patches for runs without the native library; none for bitsandbytes before 0.46, without operators."""
    functions = sys.modules.get(_FUNCTION_MODULE)
    if functions is None or not hasattr(torch.ops.bitsandbytes, "quantize_4bit"):
        return
    kernels = _import_cuda_kernels()
    if kernels is None:
        return
    native = _NullLibrary()
    yield functions, "lib", native
    yield kernels, "lib", native
    if hasattr(kernels, "_get_raw_stream"):
        yield kernels, "_get_raw_stream", lambda index: 0
    for name, value in list(vars(kernels).items()):
        if name.startswith("str2optimizer"):
            table = {optimizer: tuple(native.kernel for _ in entries) for optimizer, entries in value.items()}
            yield kernels, name, table
        elif isinstance(value, functools._lru_cache_wrapper):  # a cache of the facts of a GPU
            yield kernels, name, functools.cache(value.__wrapped__)
    yield functions, "get_paged", _make_get_paged(assume)
    if hasattr(functions, "name2qmap"):  # tables, which stay on the device of their first use
        yield functions, "name2qmap", {}
    for name in ("GlobalPageManager", "CUBLAS_Context"):  # their contents belong to this GPU
        if hasattr(functions, name):
            yield getattr(functions, name), "_instance", None


def _list_operators() -> list[Any]:
    """Return bitsandbytes' operators that have a CUDA kernel; `_make_patches` must have registered them."""
    operators = []
    for name in dispatch.dispatch_get_all_op_names():
        if name.startswith(_NAMESPACE) and dispatch.dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA"):
            packet, _, overload = name.removeprefix(_NAMESPACE).partition(".")
            operators.append(getattr(getattr(torch.ops.bitsandbytes, packet), overload or "default"))
    return operators


def _import_cuda_kernels() -> ModuleType | None:
    """Import and return bitsandbytes' module of CUDA kernels, which the package imports only if a GPU exists.

    None: the release has no such module.
    """
    extension: Any = sys.modules["bitsandbytes.cextension"]
    library, extension.lib = extension.lib, _NullLibrary()
    try:
        with contextlib.suppress(ImportError):
            return importlib.import_module(_KERNEL_MODULE)
    finally:
        extension.lib = library
    return None


def _make_get_paged(assume: Callable[[str], None]) -> Callable[..., torch.Tensor]:
    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
        """Return a host tensor in place of one in managed memory, marked as paged."""
        assume(_PAGED_ASSUMPTION)
        tensor: Any = torch.empty(shape, dtype=dtype, device="cpu")
        tensor.is_paged = True
        tensor.page_deviceid = 0 if device is None else device.index
        return tensor  # type: ignore[no-any-return]

    return get_paged
