"""Ways out of torch to code that needs a GPU: array interfaces, kernels compiled at run time, other allocators.

Each ends the run at its first use, with the name of what was used. What other libraries (cupy, numba) and extensions
raise by themselves when they find no GPU, failure.py recognises by its words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.cuda.profiler

from memprof.patching import Extension, Patch
from memprof.torch_private import cuda
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import unsupported_error
from memprof.watch.failure import KernelError

_array_interface: Any = torch.Tensor.__cuda_array_interface__


class Native(Extension):
    """The calls by which torch hands tensors, or code of the program's, to CUDA itself."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Replace these ends of torch: a kernel that is compiled at run time is passed over, or ends the run."""

        def array_interface(tensor: torch.Tensor) -> Any:
            if context.is_on_gpu(tensor):
                problem = "__cuda_array_interface__ hands the tensor's data on the GPU to another library"
                raise KernelError(problem, "the CUDA array interface")
            return _array_interface.fget(tensor)

        yield torch.Tensor, "__cuda_array_interface__", property(array_interface)
        yield cuda.jiterator_compile_and_launch_kernel.patch(_kernel("torch.cuda.jiterator"))
        compiled = _NoLaunch(functools.partial(context.note_written, by="CUDA kernels that are compiled at run time"))
        refuses = _kernel("torch.cuda._compile_kernel")
        passes = context.options.passes_kernels
        yield cuda.compile_kernel.patch((lambda *args, **kwargs: compiled) if passes else refuses)
        for owner in (torch.cuda, torch.cuda.memory):
            for name, what in _ALLOCATORS.items():
                if hasattr(owner, name):
                    yield owner, name, _allocator(name, what)
        for owner in (torch.cuda, torch.cuda.profiler):
            yield owner, "cudart", _runtime
            yield owner, "check_error", lambda result: None


def _kernel(name: str) -> Callable[..., NoReturn]:
    def launch(*args: Any, **kwargs: Any) -> NoReturn:
        raise KernelError(f"{name} compiles a kernel for a GPU that is not there", name)

    return launch


class _NoLaunch:
    """A kernel that torch.cuda._compile_kernel would have made of C++: it allocates nothing."""

    def __init__(self, written: Callable[[torch.Tensor], None]) -> None:
        self._written = written

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Accept how much shared memory a block may use."""

    def __call__(self, grid: Any = (1, 1, 1), block: Any = (1, 1, 1), args: Any = None, *of: Any, **how: Any) -> None:
        """A launch. Which of its tensors it writes is not known: any may be another now."""
        for value in args or ():
            if isinstance(value, torch.Tensor):
                self._written(value)


def _allocator(name: str, what: str) -> type:
    """A class, for programs name it in annotations (`Allocator | None`), of which there is no instance."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise unsupported_error(
            f"uses {what}", "leave it out here: the run is simulated with torch's caching allocator"
        )

    return type(name, (), {"__new__": refuse})


def _runtime() -> Any:
    """Stand for `torch.cuda.cudart()`: calls that only tell the driver or a profiler something."""
    telling = ("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister")
    calls: dict[str, Any] = dict.fromkeys(telling, lambda *args, **kwargs: 0)
    calls["cudaMemGetInfo"] = lambda device=0: torch.cuda.mem_get_info(device)
    return SimpleNamespace(cudaError=SimpleNamespace(success=0), **calls)


_ALLOCATORS = {
    "CUDAPluggableAllocator": "an allocator of its own (CUDAPluggableAllocator)",
    "caching_allocator_alloc": "the caching allocator without tensors (caching_allocator_alloc)",
}
