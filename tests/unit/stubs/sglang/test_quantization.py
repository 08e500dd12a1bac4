"""Products of sgl_kernel with quantized weights. By hand: results, and what their kernels allocate beside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.stubs.sglang import quantization
from memprof.stubs.vllm.binaries import define_module
from memprof.virtual import VirtualGpu
from tests.unit.stubs.vllm.test_schemas import write_library

assert quantization  # its import registers the functions
SCHEMAS = (
    "awq_dequantize(Tensor qweight, Tensor scales, Tensor qzeros) -> Tensor",
    "ggml_dequantize(Tensor W, int type, SymInt m, SymInt n, ScalarType? dtype) -> Tensor",
    "ggml_mul_mat_a8(Tensor W, Tensor X, int type, SymInt row) -> Tensor",
    "ggml_mul_mat_vec_a8(Tensor W, Tensor X, int type, SymInt row) -> Tensor",
    "ggml_moe_a8(Tensor X, Tensor W, Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded,"
    " int type, SymInt row, SymInt top_k, SymInt tokens) -> Tensor",
    "ggml_moe_a8_vec(Tensor X, Tensor W, Tensor topk_ids, int top_k, int type, SymInt row, SymInt tokens) -> Tensor",
    "ggml_moe_get_block_size(int type) -> int",
    "gptq_gemm(Tensor a, Tensor b_q_weight, Tensor b_gptq_qzeros, Tensor b_gptq_scales, Tensor b_g_idx,"
    " bool use_shuffle, int bit) -> Tensor",
)
Q4_0, IQ2_XS = 2, 17


@pytest.fixture
def measure(tmp_path: Path) -> Iterator[Any]:
    """Return a function from an operator's name and arguments to its result, and the bytes at its peak."""
    path = tmp_path / "common_ops.abi3.so"
    write_library(path, {".rodata": b"\0" + b"\0".join(schema.encode() for schema in SCHEMAS) + b"\0"})
    define_module("sgl_kernel.common_ops", str(path))
    if not torch._C._dispatch_has_kernel_for_dispatch_key("sgl_kernel::gptq_gemm", "Meta"):  # as SGLang registers it

        @torch.library.register_fake("sgl_kernel::gptq_gemm")
        def multiply(a, b_q_weight, *args):
            return a.new_empty((a.shape[0], b_q_weight.shape[-1]))

    with VirtualGpu(find_gpu("h100-80gb")) as gpu:

        def run(name: str, *args: Any) -> tuple[torch.Tensor, int]:
            torch.cuda.reset_peak_memory_stats()
            before = gpu.recorder.storages.live_bytes
            result = getattr(torch.ops.sgl_kernel, name)(*args)
            return result, torch.cuda.max_memory_allocated() - before

        yield run


def test_weights_are_written_out(measure):
    words = torch.zeros(512, 64, dtype=torch.int32, device="cuda")
    scales = torch.zeros(4, 512, dtype=torch.float16, device="cuda")
    weight, peak = measure("awq_dequantize", words, scales, words)
    assert weight.shape == (512, 512) and weight.dtype == torch.float16 and peak == 512 * 512 * 2
    weight, peak = measure("ggml_dequantize", words, Q4_0, 256, 512, torch.bfloat16)
    assert weight.shape == (256, 512) and weight.dtype == torch.bfloat16 and peak == 256 * 512 * 2
    assert measure("ggml_dequantize", words, Q4_0, 8, 32, None)[0].dtype == torch.float16


@pytest.mark.parametrize("name", ["ggml_mul_mat_a8", "ggml_mul_mat_vec_a8"])
def test_gguf_quantizes_its_inputs(measure, name):
    weight = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    rows = torch.zeros(1024, 520, dtype=torch.bfloat16, device="cuda")
    result, peak = measure(name, weight, rows, Q4_0, 2048)
    assert result.shape == (1024, 2048) and result.dtype == torch.bfloat16
    assert peak == 1024 * 2048 * 2 + 1024 * (1024 // 32) * 36  # 520 values are a row of 1,024


def test_gguf_experts_have_a_row_for_each_choice(measure):
    weight = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    rows = torch.zeros(1024, 512, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(64, dtype=torch.int32, device="cuda")
    expected = 2048 * 256 * 2 + 1024 * (512 // 32) * 36
    for name, args in (
        ("ggml_moe_a8", (ids, ids, ids, Q4_0, 256, 2, 1024)),
        ("ggml_moe_a8_vec", (ids, 2, Q4_0, 256, 1024)),
    ):
        result, peak = measure(name, rows, weight, *args)
        assert result.shape == (2048, 256) and peak == expected
    assert torch.ops.sgl_kernel.ggml_moe_get_block_size(Q4_0) == 4
    assert torch.ops.sgl_kernel.ggml_moe_get_block_size(IQ2_XS) == 0


@pytest.mark.parametrize(("bits", "word_rows"), [(4, 128), (8, 256), (3, 96)])
def test_gptq_allocates_the_whole_weight(measure, bits, word_rows):
    words = torch.zeros(word_rows, 512, dtype=torch.int32, device="cuda")
    rows = torch.zeros(1, 1024, dtype=torch.float16, device="cuda")
    result, peak = measure("gptq_gemm", rows, words, words, words, words, True, bits)
    assert result.shape == (1, 512) and peak == 1024 + 1024 * 512 * 2
