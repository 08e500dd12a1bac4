"""`torch.compile` on the virtual GPU, as it is put in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from memprof.patching.extension import Extension
from memprof.patching.patch_set import Patch
from memprof.virtual.compiled.compiler import Compiler
from memprof.virtual.install_context import InstallContext


class TorchCompile(Extension):
    """The compiler of a run."""

    def __init__(self) -> None:
        self._compiler: Compiler | None = None

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Replace `torch.compile`."""
        self._compiler = Compiler(
            context.tracker, context.function_mode, context.run_patches, context.assume, is_on=context.compiles
        )
        yield from self._compiler.patches()

    def around(self, context: InstallContext) -> AbstractContextManager[None]:
        """Return what has code compiled anew that was compiled before the run."""
        assert self._compiler is not None
        return self._compiler.entered()

    def leave_in_child(self) -> None:
        """Take the compiler's own patches back: its files are the parent's."""
        if self._compiler is not None:
            self._compiler.leave_in_child()
