"""Operators that torchvision and torchaudio define, which exist once these are imported."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from memprof.patching.extension import Extension
from memprof.patching.patch_set import Patch
from memprof.stubs import audio, detection  # noqa: F401 (they register kernels)
from memprof.virtual.install_context import InstallContext
from memprof.virtual.kernels import registry


class LibraryOperators(Extension):
    """The two packages, once they are imported."""

    imports = ("torchvision", "torchaudio")

    def patches_of(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Register what these operators allocate; nothing is replaced."""
        registry.register_library(module.__name__)
        if module.__name__ == "torchvision":
            context.function_mode.run_in_float32(detection.autocast_in_float32())
        yield from ()
