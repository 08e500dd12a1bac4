"""Products with quantized weights of sgl_kernel: results that SGLang has no fake for, and what the kernels allocate.

Sources: sgl-kernel/csrc of sgl-project/sglang@v0.5.13: gemm/awq_kernel.cu, gemm/gptq/gptq_kernel.cu,
quantization/gguf/gguf_kernel.cu. Not counted: the workspaces of CUTLASS's FP8 and int8 products, at most a few MiB.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.stubs.vllm.binaries import meta, query
from memprof.units import round_up
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels import registry

_WORD_BITS = 32
_ROW_VALUES = 512  # GGUF: inputs are quantized in rows of a multiple of these,
_BLOCK_VALUES, _BLOCK_BYTES = 32, 36  # in blocks of 32 int8 with two float16 (block_q8_1)
# Types of GGUF whose experts have a kernel for many tokens, and how many tokens its blocks have (moe.cuh, MOE_X_*).
_EXPERT_TYPES = frozenset((2, 3, 6, 7, 8, 10, 11, 12, 13, 14))
_EXPERT_TOKENS = 4


@meta("sgl_kernel.awq_dequantize")
def dequantize_awq(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor) -> torch.Tensor:
    """Return the weight (rows of `qweight`, 8 columns for each of its words) in the dtype of the scales."""
    return scales.new_empty((qweight.shape[0], qweight.shape[1] * 8))


@meta("sgl_kernel.ggml_dequantize")
def dequantize_gguf(weight: torch.Tensor, type: int, m: int, n: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the weight (m, n), in float16 unless `dtype` is given."""
    return weight.new_empty((m, n), dtype=dtype or torch.float16)


@meta("sgl_kernel.ggml_mul_mat_a8", "sgl_kernel.ggml_mul_mat_vec_a8")
def multiply_gguf(weight: torch.Tensor, inputs: torch.Tensor, type: int, row: int) -> torch.Tensor:
    """Return the products (rows of `inputs`, `row`) in the dtype of the inputs."""
    return inputs.new_empty((inputs.shape[0], row))


@query("sgl_kernel.ggml_moe_get_block_size")
def get_expert_block_size(type: int) -> int:
    """Return how many tokens of one expert a block of the kernel has; 0 for types that have no such kernel."""
    return _EXPERT_TOKENS if type in _EXPERT_TYPES else 0


@meta("sgl_kernel.ggml_moe_a8")
def multiply_gguf_experts(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    type: int,
    row: int,
    top_k: int,
    tokens: int,
) -> torch.Tensor:
    """Return the products (tokens x top_k, `row`) of tokens and the weights of their experts."""
    return inputs.new_empty((tokens * top_k, row))


@meta("sgl_kernel.ggml_moe_a8_vec")
def multiply_gguf_experts_of_few(
    inputs: torch.Tensor, weight: torch.Tensor, topk_ids: torch.Tensor, top_k: int, type: int, row: int, tokens: int
) -> torch.Tensor:
    """Return the products (tokens x top_k, `row`), of few tokens."""
    return inputs.new_empty((tokens * top_k, row))


@registry.scratch("sgl_kernel.gptq_gemm")
def compute_gptq_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the whole weight in the dtype of the inputs, which is allocated for any number of rows."""
    inputs, weight, bits = args[0], args[1], args[6]
    return [weight.shape[0] * _WORD_BITS // bits * weight.shape[1] * inputs.element_size()]


@registry.scratch("sgl_kernel.ggml_mul_mat_a8", "sgl_kernel.ggml_mul_mat_vec_a8")
def compute_gguf_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the inputs, quantized to int8 in blocks."""
    return [_count_quantized_bytes(args[1])]


@registry.scratch("sgl_kernel.ggml_moe_a8", "sgl_kernel.ggml_moe_a8_vec")
def compute_gguf_experts_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the tokens, quantized to int8 in blocks."""
    return [_count_quantized_bytes(args[0])]


def _count_quantized_bytes(inputs: torch.Tensor) -> int:
    rows, columns = inputs.shape
    return rows * round_up(columns, _ROW_VALUES) // _BLOCK_VALUES * _BLOCK_BYTES
