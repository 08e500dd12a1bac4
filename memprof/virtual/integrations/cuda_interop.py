"""Functions that pass torch's tensors to code that needs a GPU: array interfaces, run-time kernels, other allocators.

The first call of such a function ends the run with its name. Errors that other libraries (cupy, numba) and
extensions raise when they find no GPU are recognized in failure.py.
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


class CudaInterop(Extension):
    """Patches of functions that pass tensors to other CUDA libraries, compile kernels, or replace the allocator."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield the patches. Kernels compiled at run time are skipped if `passes_kernels` is set; else they raise."""

        def array_interface(tensor: torch.Tensor) -> Any:
            if context.is_on_gpu(tensor):
                problem = "__cuda_array_interface__ hands the tensor's data on the GPU to another library"
                raise KernelError(problem, "the CUDA array interface")
            return _array_interface.fget(tensor)

        yield torch.Tensor, "__cuda_array_interface__", property(array_interface)
        yield cuda.jiterator_compile_and_launch_kernel.patch(_make_refusing_launch("torch.cuda.jiterator"))
        no_op = _NoOpKernel(functools.partial(context.mark_written, by="CUDA kernels that are compiled at run time"))
        refuse_launch = _make_refusing_launch("torch.cuda._compile_kernel")
        passes_kernels = context.options.skips_kernels
        yield cuda.compile_kernel.patch((lambda *args, **kwargs: no_op) if passes_kernels else refuse_launch)
        for owner in (torch.cuda, torch.cuda.memory):
            for name, description in _ALLOCATORS.items():
                if hasattr(owner, name):
                    yield owner, name, _make_refusing_class(name, description)
        for owner in (torch.cuda, torch.cuda.profiler):
            yield owner, "cudart", _make_cudart
            yield owner, "check_error", lambda result: None


def _make_refusing_launch(name: str) -> Callable[..., NoReturn]:
    def launch(*args: Any, **kwargs: Any) -> NoReturn:
        raise KernelError(f"{name} compiles a kernel for a GPU that is not there", name)

    return launch


class _NoOpKernel:
    """A kernel of torch.cuda._compile_kernel that does nothing and allocates nothing."""

    def __init__(self, note_written: Callable[[torch.Tensor], None]) -> None:
        self._note_written = note_written

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Do nothing: shared memory is not simulated."""

    def __call__(self, grid: Any = (1, 1, 1), block: Any = (1, 1, 1), args: Any = None, *_: Any, **rest: Any) -> None:
        """Skip the launch, and record that the kernel may have written any of its tensors."""
        for value in args or ():
            if isinstance(value, torch.Tensor):
                self._note_written(value)


def _make_refusing_class(name: str, description: str) -> type:
    """Return a class `name` whose constructor raises; programs also use the name in type annotations."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise unsupported_error(
            f"uses {description}", "leave it out here: the run is simulated with torch's caching allocator"
        )

    return type(name, (), {"__new__": refuse})


def _make_cudart() -> Any:
    """Return a replacement for `torch.cuda.cudart()`, whose functions here do nothing, except `cudaMemGetInfo`."""
    ignored_calls = ("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister")
    calls: dict[str, Any] = dict.fromkeys(ignored_calls, lambda *args, **kwargs: 0)
    calls["cudaMemGetInfo"] = lambda device=0: torch.cuda.mem_get_info(device)
    return SimpleNamespace(cudaError=SimpleNamespace(success=0), **calls)


_ALLOCATORS = {
    "CUDAPluggableAllocator": "an allocator of its own (CUDAPluggableAllocator)",
    "caching_allocator_alloc": "the caching allocator without tensors (caching_allocator_alloc)",
}
