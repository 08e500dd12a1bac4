"""Scratch memory of sorts, selections, scans, norms, embeddings and matrix products on the virtual GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from memprof.device.catalog import find_gpu
from memprof.trace.events import HOST
from memprof.virtual import VirtualGpu
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels import registry, sorting

GPU = DeviceProperties((8, 0), 108, 2048, (2, 11))
HOPPER = DeviceProperties((9, 0), 132, 2048, (2, 11))
MIB = 1 << 20


def empty(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def made(gpu, first, op):
    return [
        storage.num_bytes
        for storage in gpu.trace.storages[first:]
        if storage.hidden and gpu.trace.op(storage) == f"aten.{op}"
    ]


# -- sorts -------------------------------------------------------------------------------------------------------------


def test_cubs_sort_takes_nothing_of_note_for_one_tile_and_copies_of_keys_and_values_beyond():
    assert sorting.radix_sort_bytes(512, 8, 8, 20, GPU) == 1  # as recorded with 512 indices
    assert sorting.radix_sort_bytes(4096, 8, 8, 14, GPU) == 72_191  # as recorded with 4,096 of a vocabulary of 10,000
    # 8-byte keys: 384 threads of 10 items; 4 passes. 27 tiles of 256 counters, digits of every pass, two copies.
    count = 100_000
    parts = [4 * 256 * 8, 27 * 256 * 4, 8 * count, 8 * count, 16]
    assert sorting.radix_sort_bytes(count, 8, 8, 32, GPU) == sum(-(-part // 256) * 256 for part in parts) + 255
    # With one pass there is nothing to exchange.
    assert sorting.radix_sort_bytes(count, 8, 8, 8, GPU) == 2048 + 27 * 1024 + 256 + 255
    # A GPU of compute capability 9.0 has tiles of 384 x 12.
    assert sorting.radix_sort_bytes(count, 8, 8, 8, HOPPER) == 2048 + 22 * 1024 + 256 + 255


def test_sorts_change_their_way_at_exactly_so_many_values_and_slices():
    assert sorting.compute_sort_scratch((empty(4097),), GPU) == [
        8 * 4097,
        sorting.radix_sort_bytes(4097, 4, 8, 32, GPU),
    ]
    assert len(sorting.compute_sort_scratch((empty(127, 5000), -1), GPU)) == 4
    assert len(sorting.compute_sort_scratch((empty(128, 5000), -1), GPU)) == 2
    # From a million values on, a slice is sorted after the other.
    assert len(sorting.compute_sort_scratch((empty(4, 999_999), -1), GPU)) == 4
    assert sorting.compute_sort_scratch((empty(4, 1_000_000), -1), GPU)[0] == 8 * 1_000_000


def test_a_sort_of_a_part_copies_nothing():
    assert sorting.compute_sort_scratch((empty(20_000)[:10_000],), GPU) == sorting.compute_sort_scratch(
        (empty(10_000),), GPU
    )


def test_topk_of_few_experts_takes_nothing_and_of_a_vocabulary_a_little():
    assert sorting.compute_topk_scratch((empty(8192, 128), 8), GPU) == []
    sizes = sorting.compute_topk_scratch((empty(1, 128_256), 50), GPU)
    # 128,256 values over 108 x 6 blocks of 256 threads: 4 values a thread, 126 blocks.
    assert sizes == [4, 8, 8, 126 * 512, 1024, 4 * 126, 4 * 126, 1279, 1279]
    older = sorting.compute_topk_scratch((empty(1, 128_256), 50), dataclasses.replace(GPU, release=(2, 9)))
    assert older == [4, 4, 8, 8, 126 * 512, 4 * 126, 4 * 126, 1279, 1279]


def test_a_scan_copies_a_strided_input_and_takes_status_words_where_it_is_alone():
    assert sorting.compute_scan_scratch((empty(4, 8).t(), 1), GPU) == [128]
    assert sorting.compute_scan_scratch((empty(4, 8), 1), GPU) == []
    older = dataclasses.replace(GPU, release=(2, 10))
    assert sorting.compute_scan_scratch((empty(19_200), 0), older) == [
        8 * 42 + 48 + 128 + 255
    ]  # 10 tiles and 32 spare, rounded to 256
    assert sorting.compute_scan_scratch((empty(19_200), 0), GPU) == [8 * 42 + 48 + 128 + 256 + 255]


# What CUB of CUDA 13.0 answers for 4,194,304 items: on compute capability 8.6, 8.0 and 9.0, the last as an H100 took.
TILES = {
    "sum of int32": (4, [18_431, 9_727, 11_775]),
    "sum of int64": (8, [76_031, 22_271, 26_111]),
    "flagged": (4, [53_247, 15_359, 8_959]),
    "unique of int32": (4, [27_135, 8_191, 6_143]),
    "unique of int64": (4, [53_247, 18_431, 8_959]),
    "unique by key": (8, [210_943, 38_655, 16_127]),
}


@pytest.mark.parametrize(("tuned", "item_bytes", "expected"), [(name, *rest) for name, rest in TILES.items()])
def test_cub_has_a_tile_for_each_gpu(tuned, item_bytes, expected):
    gpus = [dataclasses.replace(GPU, compute_capability=capability) for capability in ((8, 6), (8, 0), (9, 0))]
    assert [sorting.scan_bytes(1 << 22, item_bytes, gpu, tuned) for gpu in gpus] == expected
    assert sorting.scan_bytes(1 << 22, 8, GPU) == 76_031
    assert sorting.reduce_bytes(1 << 22, HOPPER) == 21_503
    assert sorting.run_length_bytes(1 << 22) == 88_319


# What an H100 (torch 2.11.0+cu130) requested, results among it, of 4,194,304 numbers; in order.
COUNT = 1 << 22
ON_HOPPER = {
    "unique": (lambda x: x.long().unique(), [8 * COUNT] * 2 + [34_317_823, 8 * COUNT, 8, 8_959]),
    "unique with all": (
        lambda x: x.long().unique(return_inverse=True, return_counts=True),
        [8 * COUNT] * 4 + [68_058_623, 8 * COUNT, 8 * COUNT, 11_775, 8 * COUNT, 8, 8 * COUNT, 88_319],
    ),
    "histc": (lambda x: x.histc(100), [400, 4, 2048, 4, 4, 2048, 4]),
    "equal": (lambda x: torch.equal(x[:25], x[25:50]), [25, 1]),
    "histc of bounds": (lambda x: x.histc(100, -1), [400]),
    "multinomial": (
        lambda x: x[:262_144].view(8, -1).multinomial(5),
        [
            320,
            4,
            128,
            4,
            1,
            4,
            128,
            4,
            1,
            1,
            32,
            8,
            1,
            1,
            1 << 20,
            160,
            *[32, 64, 64, 131_072, 8192, 1024, 1024],
            1279,
            1279,
        ],
    ),
    "topk": (
        lambda x: x.view(512, -1).topk(50),
        [102_400, 204_800, 2048, 4096, 4096, 524_288, 524_288, 4096, 4096, 1279, 1279],
    ),
    "repeat_interleave": (
        lambda x: x[:9999].repeat_interleave(torch.full((9999,), 3, device="cuda")),
        [79_992, 79_992, 1279, 9999, 1, 239_976, 119_988],
    ),
    "nonzero": (lambda x: x.nonzero(), [4, 21_503, 8 * COUNT, 8_959]),
    "cumsum": (lambda x: x.cumsum(0), [4 * COUNT, 18_431]),
}


@pytest.mark.usefixtures("recorded_release")
@pytest.mark.parametrize(("call", "expected"), ON_HOPPER.values(), ids=ON_HOPPER)
def test_requests_are_those_of_an_h100(call, expected):
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        data = torch.randn(COUNT, device="cuda")
        first = len(gpu.trace.storages)
        call(data)
        requests = gpu.trace.storages[first:]
    assert [storage.num_bytes for storage in requests if storage.device != HOST and storage.num_bytes] == expected


@pytest.mark.usefixtures("recorded_release")
def test_a_bag_of_embeddings_sorts_its_indices():
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        table = torch.randn(5000, 128, device="cuda", requires_grad=True)
        indices = torch.randint(0, 5000, (64, 20), device="cuda")
        first = len(gpu.trace.storages)
        functional.embedding_bag(indices, table).backward(torch.ones(64, 128, device="cuda"))
        requests = [storage.num_bytes for storage in gpu.trace.storages[first:]]
    sorts, sums = [10_240] * 3 + [1], [10_240, 8, 10_240, 1279, 10_240, 10_240, 1279, 8, 11_264, 720_896]
    assert requests == [512, 512, 10_240, 32_768, 32_768, *sorts, 2_560_000, *sums]


def test_what_unique_and_windows_give_keeps_the_room_it_was_made_with(gpu):
    data = torch.randn(4, 16, 64, 64, device="cuda")
    windows = functional.unfold(data, 3)
    folded = functional.fold(windows, (64, 64), 3)
    assert folded.untyped_storage().nbytes() == windows.untyped_storage().nbytes() == windows.nbytes
    numbers = torch.arange(1000, device="cuda") % 10
    values, counts = numbers.unique(return_counts=True)
    assert (values.tolist(), counts.tolist()) == (list(range(10)), [100] * 10)
    assert values.untyped_storage().nbytes() == counts.untyped_storage().nbytes() == 8000


def test_indices_of_a_mask_are_one_tensor(gpu):
    data = torch.randn(64, 64, device="cuda")
    mask = torch.arange(64 * 64, device="cuda").view(64, 64) % 2 == 0
    first = len(gpu.trace.storages)
    assert data[mask].shape == (2048,)
    nonzero = [s.num_bytes for s in gpu.trace.storages[first:] if gpu.trace.op(s) == "aten.nonzero"]
    assert nonzero == [2 * 2048 * 8]


# -- the others --------------------------------------------------------------------------------------------------------


def test_clipping_gradients_takes_a_norm_for_every_chunk(gpu):
    parameters = [nn.Parameter(torch.zeros(size, device="cuda")) for size in (200_000, 10)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    first = len(gpu.trace.storages)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    assert made(gpu, first, "_foreach_norm")[0] == 4 * 2 * 4  # the larger has four chunks of 65,536


@pytest.mark.parametrize(
    ("matrix", "copied"),
    [
        (empty(8, 16), False),
        (empty(16, 8).t(), False),
        (empty(8, 32)[:, :16], False),
        (empty(8, 32)[:, ::2], True),
        (empty(1, 16).expand(8, 16), True),
        (empty(1, 32)[:, :16], False),
        (empty(3, 8, 16), False),
        (empty(1, 8, 16).expand(3, 8, 16), False),
        (empty(3, 8, 1).expand(3, 8, 16), True),
    ],
)
def test_cublas_copies_matrices_without_neighbours_in_rows_or_columns(matrix, copied):
    other = empty(*matrix.shape[:-2], 16, 4)
    op = torch.ops.aten.mm if matrix.dim() == 2 else torch.ops.aten.bmm
    assert registry.input_copies.get(op)((matrix, other)) == ([4 * matrix.numel()] if copied else [])


def test_a_copy_for_cublas_lives_while_the_product_is_made(gpu):
    data = torch.randn(8, 32, device="cuda")[:, ::2]
    other = torch.randn(16, 4, device="cuda")
    first, before = len(gpu.trace.storages), gpu.recorder.storages.live_bytes
    product = data @ other
    assert made(gpu, first, "mm") == [4 * 8 * 16]
    assert gpu.recorder.storages.live_bytes - before == 4 * product.numel()


def test_nothing_hidden_is_counted_on_request():
    with VirtualGpu(find_gpu("a100-80gb"), tensors_only=True) as gpu:
        table = nn.Embedding(1000, 16).cuda()
        table(torch.zeros(4000, dtype=torch.int64, device="cuda")).sum().backward()
        nn.LSTM(16, 8).cuda()(torch.randn(4, 2, 16, device="cuda"))[0].sum().backward()
        nn.Conv2d(3, 4, 3).cuda()(torch.randn(2, 3, 8, 8, device="cuda")).sum().backward()
        torch.randn(5000, 4, device="cuda").sort(0)
        assert not any(storage.hidden for storage in gpu.trace.storages)
