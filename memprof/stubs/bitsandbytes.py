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

_KERNELS = "bitsandbytes.backends.cuda.ops"
_FUNCTIONS = "bitsandbytes.functional"
_NAMESPACE = "bitsandbytes::"
_PAGED = (
    "Paged optimizer state is managed memory: counted in the host's, outside the caching allocator. What of it the "
    "driver keeps on the GPU at a time is not simulated."
)


class Bitsandbytes(Extension):
    """The installed bitsandbytes package, patched when it is imported, before or after the virtual GPU was entered."""

    imports = ("bitsandbytes",)

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Suppress the package's warning, with twenty lines of traceback, about a missing CUDA library."""
        yield logging.getLogger("bitsandbytes.cextension"), "disabled", True

    def make_module_patches(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of its native library, and run its Python code for CUDA."""
        yield from _patches(context.assume)
        context.function_mode.register_cuda_kernels(_operators())


class _NoKernels:
    """A native library whose functions all do nothing and report success."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: 0


def _patches(assume: Callable[[str], None]) -> Iterator[Patch]:
    """Yield patches for runs without the native library; none for a release without torch operators (before 0.46)."""
    functions = sys.modules.get(_FUNCTIONS)
    if functions is None or not hasattr(torch.ops.bitsandbytes, "quantize_4bit"):
        return
    kernels = _cuda_kernels()
    if kernels is None:
        return
    native = _NoKernels()
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


@functools.cache  # registered once per process; torch is slow to list its operators
def _operators() -> list[Any]:
    """Return bitsandbytes' operators that have a CUDA kernel; `_patches` must have registered them."""
    found = []
    for name in dispatch.dispatch_get_all_op_names():
        if name.startswith(_NAMESPACE) and dispatch.dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA"):
            packet, _, overload = name.removeprefix(_NAMESPACE).partition(".")
            found.append(getattr(getattr(torch.ops.bitsandbytes, packet), overload or "default"))
    return found


def _cuda_kernels() -> ModuleType | None:
    """Return the module of the CUDA kernels, which bitsandbytes itself imports only if a GPU exists.

    The module needs `torch._C._cuda_getCurrentRawStream`, which the facade adds to builds without CUDA.
    """
    extension: Any = sys.modules["bitsandbytes.cextension"]
    library, extension.lib = extension.lib, _NoKernels()
    try:
        with contextlib.suppress(ImportError):
            return importlib.import_module(_KERNELS)
    finally:
        extension.lib = library
    return None


def _make_get_paged(assume: Callable[[str], None]) -> Callable[..., torch.Tensor]:
    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
        """Return a tensor in managed memory, which torch treats as a host tensor."""
        assume(_PAGED)
        made: Any = torch.empty(shape, dtype=dtype, device="cpu")
        made.is_paged = True
        made.page_deviceid = 0 if device is None else device.index
        return made  # type: ignore[no-any-return]

    return get_paged
