"""Products with quantized weights, and the choice of experts: what vLLM's kernels allocate beside their results.

Sources: csrc/libtorch_stable of vllm-project/vllm@v0.33.0: quantization/marlin/marlin.cu, awq/gemm_kernels.cu,
moe/marlin_moe_wna16/ops.cu, moe/topk_softmax_kernels.cu. Not counted: the workspaces of CUTLASS's grouped and stream-K
kernels, at most a few MiB.
"""

from __future__ import annotations

from typing import Any

from memprof.units import round_up
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels import registry

_MAX_THREAD_N = 256  # columns of the largest tile (marlin.cuh, max_thread_n)
_FLOAT_BYTES = 4
_MAX_FUSED_EXPERTS = 256  # largest power of two that one kernel handles without a workspace


@registry.scratch("_C.marlin_gemm")
def compute_marlin_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the sums over parts of a row in float32, for each multiprocessor (marlin.cu, c_tmp)."""
    num_rows, uses_float32_sums = args[12], args[17]
    rows = min(round_up(num_rows, 16), 64)
    return [gpu.num_sms * rows * _MAX_THREAD_N * _FLOAT_BYTES] if uses_float32_sums and num_rows else []


@registry.kernel("_moe_C.moe_wna16_marlin_gemm")
def multiply_experts(launch: KernelContext) -> Any:
    """Return the products of tokens and the weights of their experts, in the tensor that the caller gives if any, with
    float32 sums of each multiprocessor's four thread blocks (ops.cu, c_tmp)."""
    names = [argument.name for argument in launch.func._schema.arguments]
    given = dict(zip(names, launch.args, strict=False)) | launch.kwargs
    columns, block = given["size_n"], given["moe_block_size"]
    result = given["c_or_none"]
    if result is None:
        result = launch.new((given["size_m"] * given["top_k"], columns), given["a"].dtype)
    if given["use_fp32_reduce"] and not given["use_atomic_add"]:
        rows = given["sorted_token_ids"].shape[0]
        size = min(columns * rows, launch.gpu.num_sms * 4 * block * _MAX_THREAD_N) * (2 if block == 8 else 1)
        launch.transients(size * _FLOAT_BYTES)
    return result


@registry.input_copies("_C.awq_gemm")
def compute_awq_scratch(args: Any) -> list[int]:
    """Return the bytes of the products of each part of the keys, which are then summed (gemm_kernels.cu)."""
    tokens, weight, num_splits = args[0], args[1], args[4]
    return [num_splits * tokens.shape[0] * weight.shape[1] * 8 * tokens.element_size()]


@registry.scratch("_moe_C.topk_softmax", "_moe_C.topk_sigmoid")
def compute_topk_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the scores in float32, for numbers of experts that the fused kernel does not handle."""
    scores = args[3]
    experts = scores.shape[-1]
    is_fused = experts & (experts - 1) == 0 and experts <= _MAX_FUSED_EXPERTS
    return [] if is_fused else [scores.numel() * _FLOAT_BYTES]
