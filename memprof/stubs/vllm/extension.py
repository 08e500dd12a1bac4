"""The virtual GPU's extension for vLLM: its compiled modules, the processes it would start, and where it writes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from memprof.patching import Extension, Patch
from memprof.stubs.engines import set_variables
from memprof.stubs.packages import NO_STUBS_HINT
from memprof.stubs.vllm import engine
from memprof.stubs.vllm.binaries import BinaryFinder
from memprof.stubs.vllm.sleep import SleepMode
from memprof.virtual.install_context import InstallContext

_NOT_LOADED = (
    "vLLM's compiled modules are not loaded: their operators are defined by the schemas in its own files, and allocate "
    f"as those of 0.33.0 do {NO_STUBS_HINT}"
)
# The last two avoid what a start leaves behind: caches of compiled code, and statistics that are sent to its authors.
_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, where the virtual GPU is
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_CACHE_VARIABLE = "VLLM_CACHE_ROOT"
_SAMPLER_VARIABLE = "VLLM_USE_FLASHINFER_SAMPLER"
_NO_FLASHINFER = (
    "flashinfer is not installed: vLLM samples by its own kernels, as it does where FlashInfer has no CUDA toolkit to "
    "compile its kernels with."
)


class Vllm(Extension):
    """The extension by which vLLM's own code starts an engine on the virtual GPU, in this process."""

    imports = ("vllm.model_executor.models.registry", "vllm.device_allocator.cumem", *engine.MODULES)

    def __init__(self) -> None:
        self._start: engine.EngineStart | None = None

    @contextlib.contextmanager
    def around(self, context: InstallContext) -> Iterator[None]:
        """Context manager: imports of vLLM's compiled modules define their operators; at exit, remove its caches."""
        if "vllm" not in sys.modules and importlib.util.find_spec("vllm") is None:
            yield
            return
        from memprof.stubs.vllm import attention, operators, quantization  # noqa: F401 (they register functions)

        has_flashinfer = importlib.util.find_spec("flashinfer") is not None

        def note_use() -> None:
            context.assume(_NOT_LOADED)
            if not has_flashinfer:
                context.assume(_NO_FLASHINFER)

        finder = BinaryFinder("vllm", note_use)
        variables = dict(_VARIABLES)
        if not has_flashinfer and _SAMPLER_VARIABLE not in os.environ:
            variables[_SAMPLER_VARIABLE] = "0"
        sys.meta_path.insert(0, finder)
        try:
            with set_variables(_CACHE_VARIABLE, variables):
                yield
        finally:
            sys.meta_path.remove(finder)
            if self._start is not None:
                self._start.end()

    def make_module_patches(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of `module`, by the name of one of `imports`."""
        if module.__name__ in engine.MODULES:
            self._start = self._start or engine.EngineStart(context)
            yield from self._start.get_patches(module)
        if module.__name__ == "vllm.device_allocator.cumem":
            yield from SleepMode(context).get_patches(module)
        # A model's class is imported to read its properties, in a process that must not initialize CUDA.
        if hasattr(module, "_run_in_subprocess"):
            yield module, "_run_in_subprocess", _call


def _call(function: Callable[[], Any]) -> Any:
    return function()
