"""Ways out of torch to code that needs a GPU: one clear error at the first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.trace.events import FailureKind
from memprof.virtual import VirtualGpu
from memprof.watch.failure import KernelError

GPU = find_gpu("a100-80gb")


def test_the_array_interface_of_a_tensor_on_the_gpu() -> None:
    with pytest.raises(KernelError, match="to another library"), VirtualGpu(GPU) as gpu:
        torch.zeros(4, device="cuda").__cuda_array_interface__  # noqa: B018 - what cupy.asarray reads
    assert gpu.trace.failure is not None
    assert gpu.trace.failure.kind is FailureKind.CUSTOM_KERNEL and gpu.trace.failure.op == "the CUDA array interface"
    with VirtualGpu(GPU):
        assert not hasattr(torch.zeros(4), "__cuda_array_interface__")


def jiterator() -> None:
    jitted = torch.cuda.jiterator._create_jit_fn("template <typename T> T twice(T x) { return x + x; }")
    jitted(torch.zeros(4, device="cuda"))


@pytest.mark.parametrize("launch", [jiterator, lambda: torch.cuda._compile_kernel("__global__ void f() {}", "f")])
def test_kernels_compiled_at_run_time(launch: Callable[[], Any]) -> None:
    with pytest.raises(KernelError, match="compiles a kernel"), VirtualGpu(GPU) as gpu:
        launch()
    assert gpu.trace.failure is not None and gpu.trace.failure.kind is FailureKind.CUSTOM_KERNEL


def test_a_launch_is_passed_over_where_kernels_are() -> None:
    with VirtualGpu(GPU, skips_kernels=True):
        filled = torch.zeros(4, device="cuda")
        fill = torch.cuda._compile_kernel("__global__ void f() {}", "f", compute_capability="90")
        fill.set_shared_memory_config(1024)
        fill((1, 1, 1), (4, 1, 1), (filled, 4), shared_mem=1024)
        assert filled.tolist() == [1.0] * 4  # what an unknown number reads as


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.cuda.memory.CUDAPluggableAllocator("allocator.so", "allocate", "free"),
        lambda: torch.cuda.caching_allocator_alloc(1 << 20),
    ],
)
def test_other_allocators(make: Callable[[], Any]) -> None:
    with VirtualGpu(GPU), pytest.raises(MemprofError, match=r"not yet: .*test_native\.py:\d+ .* uses "):
        make()


@pytest.mark.parametrize(
    "message",
    [
        "CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
        "cudaErrorNoDevice: no CUDA-capable device is detected",
        "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
        "input must be a CUDA tensor",
    ],
)
def test_what_extensions_say_without_a_gpu(message: str) -> None:
    with pytest.raises(OSError, match="CUDA"), VirtualGpu(GPU) as gpu:
        raise OSError(message)
    assert gpu.trace.failure is not None and gpu.trace.failure.kind is FailureKind.CUSTOM_KERNEL


def test_the_runtime_that_profilers_talk_to() -> None:
    with VirtualGpu(GPU):
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaProfilerStart())
        torch.cuda.check_error(runtime.cudaProfilerStop())
        assert runtime.cudaMemGetInfo(0) == torch.cuda.mem_get_info()
        torch.cuda.profiler.start()
        torch.cuda.profiler.stop()
