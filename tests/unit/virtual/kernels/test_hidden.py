"""Formulas of hidden memory, against sizes of real recordings and of the kernels' own source."""

from __future__ import annotations

import pytest
import torch

import memprof
from memprof.device.catalog import find_gpu
from memprof.ledger.ledger import build_ledger
from memprof.virtual import VirtualGpu
from memprof.virtual.device_properties import DeviceProperties, max_threads_per_sm
from memprof.virtual.kernels import activations, attention, foreach, indexing, normalization, pooling, sorting
from memprof.virtual.kernels.matrix_products import adds_bias_row
from memprof.virtual.kernels.reductions import Reduction, reduction_buffers

MIB = 1 << 20
SMS = 128
THREADS = 1536
GPU = DeviceProperties((8, 9), SMS, THREADS, (2, 11))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def buffers(tensor: torch.Tensor, dims: list[int], sms: int = SMS, threads: int = THREADS) -> list[int]:
    return Reduction.of(tensor, dims, 4).compute_buffers(sms, threads)


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        # Bias-like gradients of medium and xl transformers, torch 2.11 recordings: (batch, length, width) -> (width,).
        ((4, 256, 1024), [0, 1], [8_388_608, 32]),
        ((4, 512, 1024), [0, 1], [16_777_216, 32]),
        ((4, 512, 2560), [0, 1], [41_943_040, 80]),
        # A torch 2.6 recording: batch 10, length 200, width 512.
        ((10, 200, 512), [0, 1], [8_388_608, 16]),
        # The same at length 100 and the medium model at length 128: no buffer was recorded.
        ((10, 100, 512), [0, 1], []),
        ((4, 128, 1024), [0, 1], []),
        # A row sum, one output per 1,024 contiguous values, is not split.
        ((4, 512, 1024), [-1], []),
    ],
)
def test_a_split_reduction_takes_what_was_recorded(
    shape: tuple[int, ...], dims: list[int], expected: list[int]
) -> None:
    assert buffers(empty(*shape), dims) == expected


def test_a_reduction_over_the_rows_of_a_transposed_tensor_takes_what_was_recorded() -> None:
    # Torch 2.6 recording of 512 tokens, with the token dimension fastest: over a vocabulary of 10,000, by sum and by
    # max (which keeps an index: 16 bytes for 4), and over a width of 2,560.
    assert buffers(empty(10_000, 512).t(), [1]) == [41_156_608, 16]
    assert Reduction.of(empty(10_000, 512).t(), [1], 16).compute_buffers(SMS, THREADS) == [164_626_432, 16]
    assert buffers(empty(2560, 512).t(), [1]) == [10_485_760, 16]


def test_a_sum_of_everything_takes_what_was_recorded() -> None:
    # A torch 2.6 recording: the sum of 524,288 float32 values, 1,024 for each of 512 threads, is made by 64 blocks.
    assert buffers(empty(524_288), [0]) == [256, 4]
    # Another: the mean of 1,966,080 values, and whether any of as many booleans is true, took 576 and 144 bytes, which
    # are 144 blocks: three of 512 threads on each of 48 multiprocessors.
    assert buffers(empty(1_966_080), [0], 48, 1536) == [576, 4]
    assert Reduction.of(empty(1_966_080, dtype=torch.bool), [0], 1).compute_buffers(48, 1536) == [144, 4]


def test_outputs_that_are_not_a_multiple_of_four_are_made_by_twos_or_one_by_one() -> None:
    # 1,022 outputs by twos: 511 columns of at most 256 threads, 32 x 8 of them; 2,048 / 8 = 256 values, 16 blocks.
    assert buffers(empty(2048, 1022), [0]) == [4 * 1022 * 16 * 32 * 2, 4 * 16]
    # 1,023 outputs: 32 x 16 threads in 32 columns; 3 blocks on each of 128 multiprocessors are 384, 12 for a column.
    assert buffers(empty(4096, 1023), [0]) == [4 * 1023 * 12 * 32, 4 * 32]


def test_launches_that_follow_one_another_hold_one_buffer_at_a_time() -> None:
    """Liger-Kernel's published jsd rows (H100 PCIe): twice the vocabulary, from 2 GiB to 4 GiB, rises by the tensors
    alone and not by another staging buffer."""
    gpu = DeviceProperties.from_gpu(find_gpu("h100-pcie"))
    one, two = (reduction_buffers(empty(8192, vocabulary), None, 4, gpu) for vocabulary in (65_536, 131_072))
    assert one == two != []


@pytest.mark.parametrize(
    ("capability", "threads"),
    [((7, 0), 2048), ((7, 5), 1024), ((8, 0), 2048), ((8, 6), 1536), ((8, 9), 1536), ((9, 0), 2048), ((12, 0), 1536)],
)
def test_the_threads_of_a_multiprocessor_are_those_of_the_programming_guide(
    capability: tuple[int, int], threads: int
) -> None:
    assert max_threads_per_sm(capability) == threads


def hidden_sizes(run: object, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[int]:
    with memprof.virtual_gpu("rtx-4090") as gpu:
        tensors = [torch.zeros(shape, device="cuda", dtype=dtype) for shape in shapes]
        run(*tensors)  # type: ignore[operator]
    trace = gpu.trace
    return [storage.num_bytes for storage in trace.storages if storage.hidden]


def test_summing_a_mask_first_makes_integers_of_it() -> None:
    assert hidden_sizes(lambda x: x.sum(), (100,), dtype=torch.bool) == [800]
    assert hidden_sizes(lambda x: x.sum(), (100,), dtype=torch.int64) == []


def test_cublaslt_adds_one_row_and_takes_no_workspace_for_a_matrix() -> None:
    first, second = empty(8, 16), empty(16, 32)
    assert adds_bias_row((empty(32), first, second)) and adds_bias_row((empty(1, 32), first, second))
    assert not adds_bias_row((empty(8, 32), first, second))
    assert not adds_bias_row((empty(1), first, empty(16, 1)))
    assert not adds_bias_row((empty(64)[::2], first, second))


def test_flash_attention_backward_makes_keys_and_values_for_every_query_head() -> None:
    query, key = empty(1, 8, 128, 64, dtype=torch.bfloat16), empty(1, 2, 128, 64, dtype=torch.bfloat16)
    sizes = attention.compute_flash_backward_scratch((None, query, key), GPU)
    assert sizes == [4096, 262_144, 131_072, 131_072]


def efficient_backward(
    shape: tuple[int, int, int, int], dtype: torch.dtype, gpu: str = "rtx-4090", dropout_p: float = 0.0
) -> list[int]:
    """What the backward takes beside the gradients, in bytes, in order."""
    with VirtualGpu(find_gpu(gpu), workspaces=False) as virtual:
        query = torch.empty(shape, dtype=dtype, device="cuda")
        sums = torch.empty(shape[:3], device="cuda")
        seed = torch.zeros((), dtype=torch.int64)
        begin = len(virtual.trace.storages)
        torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            query, query, query, query, None, query, sums, seed, seed, dropout_p, [True, True, True, False]
        )
        return [storage.num_bytes for storage in virtual.trace.storages[begin + 3 :]]


def test_efficient_attention_backward_takes_gradients_of_queries_in_tiles_of_float32() -> None:
    tile = 16 + 4 * 64 * 64
    assert efficient_backward((2, 8, 100, 64), torch.bfloat16) == [6400, 16 * 2 * tile]
    # Of a head of 128 registers hold the gradients of keys and values where a block has 128 rows.
    assert efficient_backward((2, 8, 100, 128), torch.bfloat16, "a100-80gb") == [6400, 16 * (16 + 4 * 128 * 128)]
    # In single precision they need no others, and sums are made of a product before.
    product = 4 * 16 * 128 * 64
    assert efficient_backward((2, 8, 128, 64), torch.float32) == [product, 8192, 8192, 16 * 2 * tile]


@pytest.mark.parametrize(
    ("gpu", "head", "by_operators"), [("v100-16gb", 256, True), ("v100-16gb", 64, False), ("t4", 256, False)]
)
def test_volta_sums_by_operators_what_registers_do_not_hold(gpu: str, head: int, by_operators: bool) -> None:
    taken = efficient_backward((2, 8, 100, head), torch.float16, gpu)
    product, sums = 4 * 16 * 100 * head, 6400
    assert taken[:-1] == ([product] * 3 + [sums, sums] if by_operators else [sums])


def test_efficient_attention_backward_of_sequences_one_after_another() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        query = torch.zeros(1, 300, 8, 64, device="cuda")
        bounds = torch.zeros(4, dtype=torch.int32, device="cuda")
        begin = len(gpu.trace.storages)
        out, sums, seed, offset, queries, keys = torch.ops.aten._efficient_attention_forward(
            query, query, query, None, bounds, bounds, 120, 120, 0.0, 0, True
        )
        assert sums.shape == (3, 8, 128)
        made = torch.ops.aten._efficient_attention_backward(
            query, query, query, query, None, out, bounds, bounds, queries, keys, sums, 0.0, seed, offset, 0, False
        )
        assert [one is None for one in made] == [False, False, False, True]
        sizes = [storage.num_bytes for storage in gpu.trace.storages[begin + 4 :]]
    tiles = 3 * 8 * 2 * (16 + 4 * 64 * 64)
    product = 4 * 300 * 8 * 64
    assert sizes == [product] * 3 + [product, 4 * 8 * 300, 4 * 8 * 300, tiles]


def test_safe_softmax_keeps_a_mask_of_scores_one_of_rows_and_a_zero() -> None:
    assert activations.compute_safe_softmax_scratch((empty(2, 4, 16, 32), -1), GPU) == [4096, 128, 4]


def test_the_backward_of_softmax_multiplies_gradient_and_output_first() -> None:
    output = empty(4, 8)
    assert activations.compute_softmax_backward_scratch((empty(4, 8), output, -1, torch.float32), GPU) == [128]
    # What is laid out otherwise is copied, an expanded gradient and a transposed output too.
    assert activations.compute_softmax_backward_scratch((empty(8, 4).t(), empty(8, 4).t(), -1, torch.float32), GPU) == [
        128,
        128,
        128,
    ]
    assert activations.compute_softmax_backward_scratch((empty(1).expand(4, 8), output, -1, torch.float32), GPU) == [
        128
    ]
    assert activations.compute_log_softmax_backward_scratch((empty(4, 8), output, -1, torch.float32), GPU) == []
    assert activations.compute_log_softmax_backward_scratch(
        (empty(1).expand(4, 8), output, -1, torch.float32), GPU
    ) == [128]
    assert activations.compute_softmax_scratch((empty(8, 4).t(), -1, False), GPU) == [128]


def test_the_backward_of_eager_attention_peaks_with_the_product() -> None:
    """A score matrix as input, output, gradient of each, and the product: five at the peak."""
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        scores = torch.ones(2, 512, 512, device="cuda", requires_grad=True)
        output = scores.softmax(-1)
        output.backward(torch.ones_like(output))
    assert build_ledger(gpu.trace).peak_bytes == 5 * 2 * 512 * 512 * 4


def test_copies_of_inputs_are_made_only_where_needed() -> None:
    assert sorting.compute_scan_scratch((empty(2, 10, dtype=torch.bool), 0), GPU) == [160]
    assert sorting.compute_scan_scratch((empty(2, 10, dtype=torch.int32).t(), 0), GPU) == [160, 160]
    assert sorting.compute_scan_scratch((empty(2, 10, dtype=torch.int64), 0), GPU) == []
    assert sorting.compute_scan_scratch((empty(2, 10), 0), GPU) == []
    indices = empty(4, 8, dtype=torch.int64)
    assert indexing.compute_embedding_copies((None, indices)) == []
    assert indexing.compute_embedding_copies((None, indices.t())) == [256]


def test_foreach_norm_takes_a_partial_norm_for_every_chunk() -> None:
    assert foreach.compute_foreach_norm_buffers(([empty(65537), empty(3)], 2))[:1] == [2 * 2 * 4]
    assert foreach.compute_foreach_norm_buffers(([empty(3, dtype=torch.bfloat16)],))[:1] == [4]
    assert foreach.compute_foreach_norm_buffers(([empty(3)], 3)) == []


def test_upsampling_copies_what_is_neither_contiguous_nor_channels_last() -> None:
    strided, last = empty(2, 8, 6, 6)[:, :4], empty(2, 4, 6, 6).to(memory_format=torch.channels_last)
    assert pooling.compute_upsample_2d_backward_copies((strided, [6, 6], [2, 4, 3, 3]), GPU) == [2 * 4 * 6 * 6 * 4]
    assert pooling.compute_upsample_2d_backward_copies((last, [6, 6], [2, 4, 3, 3]), GPU) == []
    assert pooling.compute_upsample_2d_backward_copies((strided, [6, 6], [2, 4, 6, 6]), GPU) == []
    assert pooling.compute_upsample_2d_copies((strided, [12, 12]), GPU) == [2 * 4 * 6 * 6 * 4]
    assert pooling.compute_upsample_2d_copies((last, [12, 12]), GPU) == []


def test_upsampling_of_few_channels_has_no_kernel_for_channels_last() -> None:
    images = empty(2, 3, 6, 6).to(memory_format=torch.channels_last)
    assert pooling.compute_upsample_2d_copies((images, [12, 12]), GPU) == [2 * 3 * 144 * 4, 2 * 3 * 36 * 4]


@pytest.mark.skipif(not normalization.HAS_FUSED_RMS_NORM, reason="this torch has no fused RMS norm")
def test_rms_norm_and_its_backward_are_one_kernel_each() -> None:
    """As on a GPU, where autograd differentiates it as one: 40.02 MiB are published for what pieces make 136 of."""
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        layer = torch.nn.RMSNorm(64, eps=1e-6, dtype=torch.bfloat16, device="cuda")
        data = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        before = len(gpu.trace.storages)
        layer(data).backward(torch.ones(16, 64, device="cuda", dtype=torch.bfloat16))
        made = [(gpu.trace.op(each), each.num_bytes) for each in gpu.trace.storages[before:]]
    forward, backward = "aten._fused_rms_norm", "aten._fused_rms_norm_backward"
    assert [size for name, size in made if name == forward] == [2048, 64]  # the result, and a float a row
    assert {name for name, _ in made} == {forward, "aten.ones", backward}
