"""bitsandbytes on the virtual GPU: 8-bit and 4-bit weights, optimizers whose state is quantized or paged.

Its operators are Python functions that allocate with torch and then call a native library. On the virtual GPU those
for CUDA (bitsandbytes/backends/cuda/ops.py) run as they are, so that sizes, order and temporaries are the library's
own; only the native calls do nothing. They are given every buffer that they use; cuBLASLt is given no workspace.

Paged state is managed memory (`get_paged` in bitsandbytes/functional.py): not the caching allocator's, and moved
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
    """The package, once it is imported; it may be with the model, after this GPU was entered."""

    imports = ("bitsandbytes",)

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Keep it from complaining, in twenty lines of traceback, that there is no library for CUDA."""
        yield logging.getLogger("bitsandbytes.cextension"), "disabled", True

    def patches_of(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Replace its native library, and run its Python code for CUDA."""
        yield from _patches(context.assume)
        context.function_mode.run_cuda_kernels_of(_operators())


class _NoKernels:
    """A native library every function of which does nothing and reports success."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: 0


def _patches(assume: Callable[[str], None]) -> Iterator[Patch]:
    """Give what lets it run without its native library; nothing for a release without torch operators (before 0.46)."""
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
        elif isinstance(value, functools._lru_cache_wrapper):  # it remembers the facts of a GPU
            yield kernels, name, functools.cache(value.__wrapped__)
    yield functions, "get_paged", _paged(assume)
    if hasattr(functions, "name2qmap"):  # tables, which stay where they were first wanted
        yield functions, "name2qmap", {}
    for name in ("GlobalPageManager", "CUBLAS_Context"):  # what they hold is this GPU's
        if hasattr(functions, name):
            yield getattr(functions, name), "_instance", None


@functools.cache  # registered once, for good; torch takes its time to name its thousands of operators
def _operators() -> list[Any]:
    """Return the operators of bitsandbytes that have a kernel for CUDA; after `_patches`, which has them registered."""
    found = []
    for name in dispatch.dispatch_get_all_op_names():
        if name.startswith(_NAMESPACE) and dispatch.dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA"):
            packet, _, overload = name.removeprefix(_NAMESPACE).partition(".")
            found.append(getattr(getattr(torch.ops.bitsandbytes, packet), overload or "default"))
    return found


def _cuda_kernels() -> ModuleType | None:
    """Return the module of the CUDA kernels; bitsandbytes itself imports it only where there is a GPU.

    It looks for `torch._C._cuda_getCurrentRawStream`, which the facade gives to builds without CUDA.
    """
    extension: Any = sys.modules["bitsandbytes.cextension"]
    library, extension.lib = extension.lib, _NoKernels()
    try:
        with contextlib.suppress(ImportError):
            return importlib.import_module(_KERNELS)
    finally:
        extension.lib = library
    return None


def _paged(assume: Callable[[str], None]) -> Callable[..., torch.Tensor]:
    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
        """A tensor in managed memory, which torch takes for one of the host."""
        assume(_PAGED)
        made: Any = torch.empty(shape, dtype=dtype, device="cpu")
        made.is_paged = True
        made.page_deviceid = 0 if device is None else device.index
        return made  # type: ignore[no-any-return]

    return get_paged
