"""Operators of vLLM's main compiled module: answers about the GPU, and views of memory.

Source: csrc/libtorch_stable of vllm-project/vllm@v0.33.0.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.stubs.vllm.binaries import meta, query
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels import registry

# cudaDevAttrMaxSharedMemoryPerBlockOptin (cuda_utils_kernels.cu, get_max_shared_memory_per_block_device_attribute).
_MAX_SHARED_MEMORY_OPTIN = 97


@query("_C_cuda_utils.get_max_shared_memory_per_block_device_attribute")
def get_max_shared_memory(device_id: int) -> int:
    """Return the bytes of shared memory that one block can have."""
    properties: Any = torch.cuda.get_device_properties(device_id)
    return int(properties.shared_memory_per_block_optin)


@query("_C_cuda_utils.get_device_attribute")
def get_device_attribute(attribute: int, device_id: int) -> int:
    """Return an attribute of the GPU by CUDA's number of it; vLLM asks for the shared memory alone."""
    if attribute != _MAX_SHARED_MEMORY_OPTIN:
        raise RuntimeError(f"device attribute {attribute} is not simulated")
    return get_max_shared_memory(device_id)


@query("_C.cutlass_scaled_mm_supports_fp8")
def supports_fp8(cuda_device_capability: int) -> bool:
    """Return whether CUTLASS has FP8 products for the capability, 10 x major + minor (scaled_mm_entry.cu)."""
    return cuda_device_capability >= 89


@query("_C.cutlass_scaled_mm_supports_block_fp8")
def supports_block_fp8(cuda_device_capability: int) -> bool:
    """Return whether CUTLASS has products of FP8 blocks with scales: Hopper and Blackwell (scaled_mm_entry.cu)."""
    return cuda_device_capability >= 90


@query("_C.cutlass_group_gemm_supported")
def supports_group_gemm(cuda_device_capability: int) -> bool:
    """Return whether CUTLASS has grouped FP8 products: Hopper and Blackwell of data centers (scaled_mm_entry.cu)."""
    return 90 <= cuda_device_capability < 110


@query("_C.cutlass_scaled_mm_supports_fp4", "_C.mxfp4_experts_quant_supported")
def supports_fp4(cuda_device_capability: int) -> bool:
    """Return whether the GPU has products in FP4: Blackwell (nvfp4_scaled_mm_entry.cu)."""
    return 100 <= cuda_device_capability < 130


@query("_moe_C.moe_permute_unpermute_supported")
def supports_permutation() -> bool:
    """Return True: the wheel has the kernels that sort tokens by expert (moe_permute_unpermute_op.cu)."""
    return True


@meta("_C.weak_ref_tensor")
def refer_weakly(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory that does not keep it (ops.h, weak_ref_tensor)."""
    raise NotImplementedError


@registry.kernel("_C.weak_ref_tensor")
def make_weak_reference(launch: KernelContext) -> Any:
    """Return a tensor of the same layout that keeps no memory: that of CUDA graphs stays in their pool."""
    (tensor,) = launch.args
    return _make_view(launch, tensor.size(), tensor.stride(), tensor.dtype)


@registry.kernel("_C.get_cuda_view_from_cpu_tensor", on_host=True)
def view_host_memory(launch: KernelContext) -> Any:
    """Return a tensor on the GPU whose memory is the pinned memory of a host tensor (cuda_view.cu)."""
    (tensor,) = launch.args
    return _make_view(launch, tensor.size(), tensor.stride(), tensor.dtype)


def _make_view(launch: KernelContext, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the GPU whose memory is not counted."""
    view = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    launch.device_state.recorder.storages.device_by_empty_storage[view.untyped_storage()] = launch.call.gpu
    return view
