"""The virtual GPU's extension for SGLang: its compiled kernels, and the processes it would start."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.stubs import tools
from memprof.stubs.engines import set_variables
from memprof.stubs.packages import NO_STUBS_HINT
from memprof.stubs.sglang import engine
from memprof.stubs.vllm.binaries import BinaryFinder, define_module
from memprof.virtual.install_context import InstallContext

_KERNELS = "sgl_kernel"
_NOT_LOADED = (
    "SGLang's compiled kernels are not loaded: their operators are defined by the schemas in sgl_kernel's own files "
    f"{NO_STUBS_HINT}"
)
# Modules whose `load_jit` compiles a kernel at its first use: of 0.5.13, and of 0.5.23.
_LOADERS = ("sglang.jit_kernel.utils", "sglang.kernels.jit.utils.compile.loader")
_NOT_COMPILED = (
    "SGLang's kernels that are compiled at their first use are not: each writes into its arguments, and allocates "
    f"nothing beside {NO_STUBS_HINT}"
)
_HOPPER = 90  # 10 x major + minor of the GPUs that have kernels of their own (sgl_kernel/load_utils.py)


class Sglang(Extension):
    """The extension by which SGLang's own code starts an engine on the virtual GPU, in this process."""

    imports = ("sgl_kernel.load_utils", *_LOADERS, *engine.MODULES)

    def __init__(self) -> None:
        self._start: engine.EngineStart | None = None

    @contextlib.contextmanager
    def around(self, context: InstallContext) -> Iterator[None]:
        """Context manager: imports of sgl_kernel's compiled modules define their operators; at exit, remove caches."""
        if _KERNELS not in sys.modules and importlib.util.find_spec(_KERNELS) is None:
            yield
            return
        from memprof.stubs.sglang import operators, quantization  # noqa: F401 (they register functions)

        finder = BinaryFinder(_KERNELS, lambda: context.assume(_NOT_LOADED))
        sys.meta_path.insert(0, finder)
        try:
            with set_variables("SGLANG_CACHE_DIR", {}):
                yield
        finally:
            sys.meta_path.remove(finder)

    def make_module_patches(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of `module`, by the name of one of `imports`."""
        if module.__name__ == "sgl_kernel.load_utils":
            yield from _patch_loading(module, context)
            return
        if module.__name__ in _LOADERS:
            yield module, "load_jit", functools.partial(_load_kernels, context.assume)
            return
        self._start = self._start or engine.EngineStart(context)
        yield from self._start.get_patches(module)


def _patch_loading(module: Any, context: InstallContext) -> Iterator[Patch]:
    """Yield a patch by which the kernels for the virtual GPU's architecture are defined, and not loaded."""

    def load() -> ModuleType:
        folder = "sm90" if module._get_compute_capability() == _HOPPER else "sm100"
        (path,) = (Path(module.__file__).parent / folder).glob("common_ops.*.so")
        define_module("sgl_kernel.common_ops", str(path))
        context.assume(_NOT_LOADED)
        return ModuleType("common_ops")

    yield module, "_load_architecture_specific_ops", load


class _Kernels:
    """A module of kernels that the engine compiles: its functions take results as arguments, and return nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _run_kernel


def _load_kernels(assume: Callable[[str], None], *args: Any, **kwargs: Any) -> _Kernels:
    assume(_NOT_COMPILED)
    return _Kernels()


def _run_kernel(*args: Any) -> None:
    tools.mark_written(*(value for value in args if isinstance(value, torch.Tensor)))
