"""Exits from torch to code that needs a GPU: array interfaces, kernels compiled at run time, other allocators.

The first use of each exit ends the run with the name of the function. Errors that other libraries (cupy, numba) and
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


class Native(Extension):
    """The calls by which torch passes tensors, or the program's own code, to CUDA."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of these calls: a kernel that is compiled at run time is skipped, or ends the run."""

        def array_interface(tensor: torch.Tensor) -> Any:
            if context.is_on_gpu(tensor):
                problem = "__cuda_array_interface__ hands the tensor's data on the GPU to another library"
                raise KernelError(problem, "the CUDA array interface")
            return _array_interface.fget(tensor)

        yield torch.Tensor, "__cuda_array_interface__", property(array_interface)
        yield cuda.jiterator_compile_and_launch_kernel.patch(_make_refusing_launch("torch.cuda.jiterator"))
        compiled = _NoOpKernel(functools.partial(context.mark_written, by="CUDA kernels that are compiled at run time"))
        refuses = _make_refusing_launch("torch.cuda._compile_kernel")
        passes = context.options.skips_kernels
        yield cuda.compile_kernel.patch((lambda *args, **kwargs: compiled) if passes else refuses)
        for owner in (torch.cuda, torch.cuda.memory):
            for name, what in _ALLOCATORS.items():
                if hasattr(owner, name):
                    yield owner, name, _make_refusing_class(name, what)
        for owner in (torch.cuda, torch.cuda.profiler):
            yield owner, "cudart", _make_cudart
            yield owner, "check_error", lambda result: None


def _make_refusing_launch(name: str) -> Callable[..., NoReturn]:
    def launch(*args: Any, **kwargs: Any) -> NoReturn:
        raise KernelError(f"{name} compiles a kernel for a GPU that is not there", name)

    return launch


class _NoOpKernel:
    """A skipped kernel of torch.cuda._compile_kernel, which allocates nothing."""

    def __init__(self, note_written: Callable[[torch.Tensor], None]) -> None:
        self._note_written = note_written

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Accept the shared memory per block, in bytes."""

    def __call__(self, grid: Any = (1, 1, 1), block: Any = (1, 1, 1), args: Any = None, *of: Any, **how: Any) -> None:
        """Skip a launch, and note that the kernel may have written any of its tensors."""
        for value in args or ():
            if isinstance(value, torch.Tensor):
                self._note_written(value)


def _make_refusing_class(name: str, what: str) -> type:
    """Return a class without instances: programs use the name in annotations (`Allocator | None`)."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise unsupported_error(
            f"uses {what}", "leave it out here: the run is simulated with torch's caching allocator"
        )

    return type(name, (), {"__new__": refuse})


def _make_cudart() -> Any:
    """Return a replacement for `torch.cuda.cudart()`, whose calls only inform the driver or a profiler."""
    ignored_calls = ("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister")
    calls: dict[str, Any] = dict.fromkeys(ignored_calls, lambda *args, **kwargs: 0)
    calls["cudaMemGetInfo"] = lambda device=0: torch.cuda.mem_get_info(device)
    return SimpleNamespace(cudaError=SimpleNamespace(success=0), **calls)


_ALLOCATORS = {
    "CUDAPluggableAllocator": "an allocator of its own (CUDAPluggableAllocator)",
    "caching_allocator_alloc": "the caching allocator without tensors (caching_allocator_alloc)",
}
