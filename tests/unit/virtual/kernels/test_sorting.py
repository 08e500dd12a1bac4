"""CUB's scratch memory by hand, at the sizes where it changes, and what sorts and selections run inside."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels import sorting
from memprof.virtual.kernels.registry import find_kernel, scratch

A100 = DeviceProperties((8, 0), 108, 2048, (2, 11))
AMPERE = dataclasses.replace(A100, compute_capability=(8, 6))
HOPPER = DeviceProperties((9, 0), 132, 2048, (2, 11))
OLDER = dataclasses.replace(A100, release=(2, 10))
aten = torch.ops.aten


def empty(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def aligned(*sizes):
    """One allocation for buffers of these sizes, each at a multiple of 256 bytes."""
    return sum(-(-size // 256) * 256 for size in sizes) + 255


def test_buffers_of_one_allocation_are_aligned():
    assert [sorting._sum_aligned(sizes) for sizes in ([0], [1], [256], [257], [1, 0, 256])] == [1, 511, 511, 767, 767]


@pytest.mark.parametrize(("key", "value", "on_a100", "on_h100"), [
    (4, 0, 17, 17), (4, 7, 17, 17), (4, 8, 17, 29), (8, 0, 21, 30), (8, 4, 21, 30), (8, 8, 21, 24), (2, 8, 21, 21),
    (1, 0, 21, 21),
])  # fmt: skip
def test_items_of_a_thread_of_a_sort(key, value, on_a100, on_h100):
    assert [sorting._onesweep_items(key, value, gpu) for gpu in (A100, HOPPER)] == [on_a100, on_h100]


@pytest.mark.parametrize(("count", "key", "value", "bits", "gpu", "sizes"), [
    # Digits of each pass, counters of each tile, second keys and values, and a counter of each pass.
    (2305, 4, 0, 32, A100, (4 * 2048, 1 * 1024, 4 * 2305, 0, 16)),
    (100_000, 4, 8, 32, HOPPER, (4 * 2048, 19 * 1024, 400_000, 800_000, 16)),  # 384 threads of 14 items
    (100_000, 4, 8, 32, A100, (4 * 2048, 33 * 1024, 400_000, 800_000, 16)),  # of 8
    (100_000, 2, 0, 16, A100, (2 * 2048, 13 * 1024, 200_000, 0, 8)),  # of 21
    (100_000, 2, 0, 9, A100, (2 * 2048, 13 * 1024, 200_000, 0, 8)),
    (100_000, 2, 0, 8, A100, (2048, 13 * 1024, 4)),
    (100_000, 16, 8, 64, A100, (8 * 2048, 53 * 1024, 1_600_000, 800_000, 32)),  # of 5
    # Of 2^28 keys the last 256 are a second portion: it has whole tiles of 3,840, and fewer than 2^28 keys.
    (1 << 28, 8, 8, 32, A100, (8 * 2048, 69_905 * 1024, 8 << 28, 8 << 28, 32)),
    (69_905 * 3840, 8, 8, 32, A100, (4 * 2048, 69_905 * 1024, 8 * 69_905 * 3840, 8 * 69_905 * 3840, 16)),
])  # fmt: skip
def test_scratch_of_a_sort(count, key, value, bits, gpu, sizes):
    assert sorting.radix_sort_bytes(count, key, value, bits, gpu) == aligned(*sizes)


def test_one_tile_is_sorted_without_scratch():
    assert sorting.radix_sort_bytes(2304, 4, 8, 32, A100) == 1


@pytest.mark.parametrize(
    ("item", "tile", "word"), [(1, 3840, 8), (2, 3840, 8), (4, 1920, 8), (8, 896, 16), (16, 384, 16)]
)
def test_a_scan_has_a_word_for_each_tile_and_32_more(item, tile, word):
    found = [sorting.scan_bytes(224 * tile + more, item, OLDER) for more in (0, 1)]
    assert found == [aligned(256 * word), aligned(257 * word)]
    # From CUDA 13.0 on they are aligned twice.
    assert sorting.scan_bytes(224 * tile, item, A100) == aligned(aligned(256 * word))


@pytest.mark.parametrize(("gpu", "tile"), [(AMPERE, 2304), (A100, 3840), (HOPPER, 4032)])
def test_sums_by_key_have_keys_for_each_tile(gpu, tile):
    assert sorting._sum_by_key_bytes(224 * tile, gpu) == aligned(256 * 16, 4 * 225)
    assert sorting._sum_by_key_bytes(255 * tile + 1, gpu) == aligned(288 * 16, 4 * 257)


def test_scratch_of_other_algorithms():
    assert [sorting.run_length_bytes(768 * 224 + more) for more in (0, 1)] == [aligned(256 * 16), aligned(257 * 16)]
    assert [sorting.reduce_bytes(count, A100) for count in (4096, 4097)] == [1, aligned(4 * 108 * 8 * 5)]
    assert [sorting.count_key_bits(key) for key in (0, 1, 2, 255, 256)] == [1, 1, 2, 8, 9]


@pytest.mark.parametrize(("data", "dim", "expected"), [
    (empty(()), -1, [8]), (empty(0, 5000), -1, []), (empty(3, 4096), 1, [8 * 4096]),
    (empty(5000, 3), 1, [24]),
    (empty(5000, dtype=torch.float16), 0, [40_000, sorting.radix_sort_bytes(5000, 2, 8, 16, A100)]),
    # Not dense, along the last dimension: one copy.
    (empty(200, 6000)[:, :5000], 1, [4_000_000, 8_000_000, aligned(4_000_000, 8_000_000)]),
    (empty(5000, 200).t(), 1, [4_000_000, 8_000_000, aligned(4_000_000, 8_000_000)]),
    (empty(5000, 200), 0, [4_000_000, 4_000_000, 8_000_000, 8_000_000, aligned(4_000_000, 8_000_000)]),
    (empty(2, 5000), 1, [80_000, 80_000, 40_000, sorting.radix_sort_bytes(10_000, 4, 8, 32, A100)]),
    # As many segments as 31 bits count values: 429,496 of 5,000.
    (empty(500_000, 5000), 1, [8 * 2_147_480_000, aligned(4 * 2_147_480_000, 8 * 2_147_480_000)]),
])  # fmt: skip
def test_buffers_of_a_sort(data, dim, expected):
    assert sorting.compute_sort_scratch((data, dim), A100) == expected


LIMITS = [(20, 20_000), (21, 10_000), (40, 10_000), (41, 8000), (80, 8000), (81, 5000), (199, 5000), (200, 3000)]


@pytest.mark.parametrize(("slices", "length"), [*LIMITS, (799, 3000), (800, 800), (4000, 800), (4001, 400)])
def test_topk_takes_several_blocks_for_slices_from_a_length_on(slices, length):
    assert sorting.compute_topk_scratch((empty(slices, length - 1), 5), A100) == []
    assert sorting.compute_topk_scratch((empty(slices, length), 5), A100) != []


@pytest.mark.parametrize(("data", "arguments", "expected"), [
    # 4 to 64 values for each of 256 threads: here 64, 102 if there were no more than 648 blocks.
    (empty(4, 1 << 22), (9,), [16, 32, 32, 1024 * 512, 4096, 4096, 4096, aligned(33 * 16, 8), aligned(33 * 16, 8)]),
    (empty(1, 1 << 22, dtype=torch.float64), (9,), [8, 8, 16, 631 * 512, 1024, 2524, 2524, *2 * [aligned(528, 8)]]),
    (empty(1, 1 << 22, dtype=torch.float16), (9,), [2, 8, 8, 631 * 512, 1024, 2524, 2524, *2 * [aligned(528, 8)]]),
    (empty(8, 9), (0,), []), (empty(8, 0), (2,), []), (empty(()), (1,), []),
    (empty(9, 8).t(), (2, 0), [288]),
    # More than 4,096 are sorted afterwards, if they are to be in order.
    (empty(8, 9000), (4096,), []), (empty(8, 9000), (4097,), [16 * 8 * 4097, 4 * 8 * 4097, 8 * 4097]),
    (empty(8, 9000), (4097, 1, True, False), []),
    (empty(8, 9000), (4097, 1, True, True), [16 * 8 * 4097, 4 * 8 * 4097, 8 * 4097]),
])  # fmt: skip
def test_buffers_of_topk(data, arguments, expected):
    assert sorting.compute_topk_scratch((data, *arguments), A100) == expected


@pytest.mark.parametrize(("operator", "arguments", "expected"), [
    ("mode", (empty(4, 6), 0), [96]), ("mode", (empty(4, 6), 1), []), ("mode", (empty(4, 6),), []),
    ("mode", (empty(()),), []),
    ("cumsum", (empty(0), 0), []), ("cumsum", (empty(()), 0), []), ("cumsum", (empty(4, 1), 1), []),
    ("cumsum", (empty(1, 4), 1), [aligned(aligned(33 * 8))]),
    ("cumsum", (empty(4, dtype=torch.int32), 0), [32, aligned(aligned(33 * 16))]),
    ("cumsum", (empty(4, dtype=torch.complex64), 0), [aligned(aligned(33 * 16))]),
    ("cumsum", (empty(4, dtype=torch.int64), 0), [aligned(aligned(33 * 16))]),
    ("cummax", (empty(8, 4).t(), 0), [128]), ("searchsorted", (empty(8)[::2], empty(8)[::4]), [16, 8]),
    ("bucketize", (empty(8), empty(8)[::4]), [8]),
    ("multinomial", (empty(5), 2, True), [20, 20]), ("multinomial", (empty(5), 1, True), []),
    ("multinomial", (empty(5), 2, False), []), ("multinomial", (empty(5), 2), []),
    # Keys of 4 bytes for up to 30,083 numbers, of 8 for more.
    ("randperm", (30_083,), [8, 240_664, 120_332, 120_332, sorting.radix_sort_bytes(30_083, 4, 8, 32, A100)]),
    ("randperm", (30_084,), [8, 240_672, 240_672, 240_672, sorting.radix_sort_bytes(30_084, 8, 8, 33, A100)]),
    ("randperm", (0,), []), ("randperm", (1,), [8, 8, 4, 4, 1]),
    ("histc", (empty(9),), [4, 4]), ("histc", (empty(9), 100, 1, 1), [4, 4]), ("histc", (empty(9), 100, 0, 1), []),
    ("histc", (empty(0),), []),
    ("unfold_backward", (empty(4), [8, 6], 1, 3, 2), [48]), ("unfold_backward", (empty(4), [8, 6], 0, 3, 2), [64]),
    ("unfold_backward", (empty(4), [8, 6], 1, 3, 3), []), ("unfold_backward", (empty(4), [], 0, 3, 2), []),
])  # fmt: skip
def test_scratch_of_an_operator(operator, arguments, expected):
    assert scratch.get(getattr(aten, operator))(arguments, A100) == expected


def made(gpu, call):
    first = len(gpu.trace.storages)
    call()
    return [(gpu.trace.op(one).removeprefix("aten."), one.num_bytes) for one in gpu.trace.storages[first:]]


def test_few_elements_are_looked_for_one_by_one_and_more_by_sorting(gpu):
    elements = torch.empty(1000, device="cuda")  # 10 x 1000 ** 0.145 is 27.2
    for number, is_few in ((27, True), (28, False)):
        others = torch.empty(number, device="cuda")
        for invert, steps in ((False, ("eq", "any")), (True, ("ne", "all"))):
            found = made(gpu, lambda: torch.isin(elements, others, invert=invert))  # noqa: B023
            expected = [("empty", 1000), (steps[0], 27_000), (steps[1], 1000)]
            assert (found == expected) is is_few


def test_nonzero_elements_are_counted_along_dimensions(gpu):
    data = torch.ones(4, 6, device="cuda")
    assert made(gpu, lambda: torch.count_nonzero(data, 1)) == [("ne", 24), ("sum", 32), ("sum", 192)]
    assert made(gpu, lambda: torch.count_nonzero(data, (0, 1))) == [("ne", 24), ("sum", 8), ("sum", 192)]
    assert made(gpu, lambda: torch.count_nonzero(data)) == [("ne", 24), ("sum", 8), ("sum", 192)]


def test_medians_are_taken_from_sorted_values(gpu):
    data = torch.empty(3, 7, device="cuda")
    median, nanmedian = (made(gpu, call) for call in (data.median, data.nanmedian))
    assert median == [("sort", 84), ("sort", 168), ("sort", 168), ("isnan", 1), ("where", 4)]
    counted = [("isnan", 21), ("sum", 8), ("sum", 168), ("rsub", 8), ("div", 4), ("_to_copy", 8), ("index", 4)]
    assert nanmedian == [*median[:3], *counted]
    assert made(gpu, lambda: data.median(1)) == [("median", 12), ("median", 24)]


def test_one_hot_tensors_are_zeros_with_ones_scattered_into(gpu):
    labels = torch.tensor([[0, 2, 1]], device="cuda")
    found = made(gpu, lambda: torch.nn.functional.one_hot(labels))
    assert ("zeros", 3 * 3 * 8) in found and "eq" not in [name for name, _ in found]
    assert made(gpu, lambda: torch.nn.functional.one_hot(labels, 5)) == [("zeros", 3 * 5 * 8)]
    assert torch.nn.functional.one_hot(labels, 5).tolist() == [[[1, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0]]]


def test_samples_without_replacement_are_the_largest_quotients(gpu):
    weights = torch.rand(8, 1000, device="cuda")
    checks = ["max", "lt", "min", "ge", "bitwise_and", "sum", "eq", "any"]
    one, two = (made(gpu, lambda: torch.multinomial(weights, number)) for number in (1, 2))  # noqa: B023
    for found in (one, two):
        assert [name for name, _ in found if name in checks] == checks
    assert [size for name, size in one if name == "multinomial"] == [64, 32_000]
    assert [size for name, size in two if name == "multinomial"] == [128, 32_000, 64]
    assert made(gpu, lambda: torch.multinomial(weights, 2, True)) == [
        ("multinomial", size) for size in (128, 32_000, 32_000)
    ]
    row = made(gpu, lambda: torch.multinomial(weights[0], 1))
    assert [name for name, _ in row if name in checks] == checks[:-1]


def test_every_kernel_that_calls_others_is_registered():
    assert all(find_kernel(getattr(aten, name)) for name in ("median", "nanmedian", "isin", "count_nonzero", "roll"))
