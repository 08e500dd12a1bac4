"""bitsandbytes: its operators for CUDA run as they are, its native library is not called (kernels/quantized.py)."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from memprof.patching.extension import Extension
from memprof.patching.patch_set import Patch
from memprof.virtual.install_context import InstallContext
from memprof.virtual.kernels import quantized


class Bitsandbytes(Extension):
    """The package, once it is imported; it may be with the model, after this GPU was entered."""

    imports = ("bitsandbytes",)

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Keep it from complaining that there is no library for CUDA."""
        yield quantized.load_error_is_silent()

    def patches_of(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Replace its native library, and run its Python code for CUDA."""
        yield from quantized.patches(context.assume)
        context.function_mode.run_cuda_kernels_of(quantized.operators())
