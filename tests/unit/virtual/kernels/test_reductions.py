"""Which reductions are split over blocks, by hand at each limit, and what each operator accumulates."""

from __future__ import annotations

import pytest
import torch

from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels import reductions
from memprof.virtual.kernels.reductions import Reduction, reduction_buffers
from memprof.virtual.kernels.registry import scratch

GPU = DeviceProperties((8, 9), 128, 1536, (2, 11))
aten = torch.ops.aten


def empty(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


# Of 2^21 values 512 threads have 4,096 each: 256 blocks of 16.
VALUES = 1 << 21
ACCUMULATED = {
    **dict.fromkeys(("sum", "prod", "nansum", "mean", "amax", "amin", "max", "min"), 4),
    **dict.fromkeys(("argmax", "argmin", "var", "std", "var_mean", "std_mean"), 16),
}


@pytest.mark.parametrize(("name", "item_bytes"), ACCUMULATED.items())
def test_what_an_operator_accumulates(name, item_bytes):
    assert scratch.get(getattr(aten, name))((empty(VALUES),), GPU) == [256 * item_bytes, 4]


BUFFERS = [
    ("linalg_vector_norm", (empty(VALUES), 2, None), [1024, 4]), ("linalg_vector_norm", (empty(9, 9), 2, [0]), []),
    ("linalg_vector_norm", (empty(4, VALUES), 2, [0]), []),
    ("linalg_vector_norm", (empty(VALUES, 2), 2, [0]), [8192, 4]),
    ("any", (empty(VALUES, dtype=torch.bool),), [256, 4]), ("all", (empty(VALUES, dtype=torch.bool),), [256, 4]),
    ("max", (empty(VALUES), 0), [4096, 4]), ("min", (empty(VALUES), 0), [4096, 4]),
    ("max", (empty(VALUES, dtype=torch.float16),), [512, 4]),
    ("argmin", (empty(VALUES, dtype=torch.float16),), [4096, 4]),
    ("var", (empty(VALUES, dtype=torch.float64),), [8192, 4]),
    ("std", (empty(VALUES, dtype=torch.float16),), [4096, 4]),
    ("sum", (empty(VALUES, dtype=torch.float16),), [1024, 4]),
    ("sum", (empty(VALUES, dtype=torch.float64),), [2048, 4]),
    # Integers are converted first, and added up in 64 bits.
    ("sum", (empty(VALUES, dtype=torch.int32),), [8 * VALUES, 2048, 4]), ("prod", (empty(9, dtype=torch.bool),), [72]),
    ("sum", (empty(VALUES, dtype=torch.int64),), [2048, 4]), ("nansum", (empty(VALUES, dtype=torch.int32),), [2048, 4]),
    ("sum", (empty(VALUES, dtype=torch.complex64),), [2048, 4]),
    ("mean", (empty(1 << 20, dtype=torch.complex64),), [1024, 4]),
    ("sum", (empty(1),), []), ("sum", (empty(0),), []),
]  # fmt: skip


def test_buffers_of_an_operator():
    for name, arguments, expected in BUFFERS:
        assert scratch.get(getattr(aten, name))(arguments, GPU) == expected


SPLIT = [
    # 256 values for each of 512 threads: not split with less.
    ((131_072,), [0], 128, 1536, [4 * 16, 4]), ((130_560,), [0], 128, 1536, []),
    # No more blocks than run at once, and each thread of a block has no fewer than 16 values.
    ((1 << 23,), [0], 10, 1024, [4 * 64, 4]), ((1 << 23,), [0], 2, 1023, [4 * 64, 4]),
    ((1 << 21,), [0], 8, 512, [4 * 16, 4]),
    ((1 << 21,), [0], 20, 512, [4 * 20, 4]),
    # Rows of contiguous values, one after the other: a block for each row, and several where more blocks run at once.
    ((16, 131_072), [1], 128, 1536, [4 * 16 * 16, 4 * 16]), ((16, 130_560), [1], 128, 1536, []),
    ((192, 131_072), [1], 128, 1536, [4 * 192 * 2, 4 * 192]), ((384, 131_072), [1], 128, 1536, []),
    ((384, 131_073), [1], 128, 1536, [4 * 384 * 2, 4 * 384]), ((385, 131_073), [1], 128, 1536, []),
    ((8, 131_072), [1], 128, 1536, [4 * 8 * 16, 4 * 8]), ((1, 131_072), [1], 128, 1536, [4 * 16, 4]),
    # Columns, four to a thread: 32 x 4 threads, of which each column has its own sums.
    ((2048, 1024), [0], 128, 1536, [4 * 1024 * 32 * 32 * 4, 4 * 8]), ((1020, 128), [0], 128, 1536, []),
    ((1021, 128), [0], 128, 1536, [4 * 128 * 16 * 32 * 4, 4]), ((32_768, 4), [0], 128, 1536, [4 * 4 * 16 * 4, 4]),
]  # fmt: skip


def test_reductions_are_split_from_a_size_on():
    for shape, dims, sms, threads, expected in SPLIT:
        assert Reduction.of(empty(shape), dims, 4).compute_buffers(sms, threads) == expected


def test_dimensions_may_be_a_number_a_list_or_all():
    data = empty(4, 6)
    columns = ((4, 6),), ((6, 1),)
    for dims in (0, [0], -2, [-2]):
        found = Reduction.of(data, dims, 4)
        assert (found.reduced_dims, found.kept_dims) == columns
    for dims in (None, [], True, False, [0, 1]):
        found = Reduction.of(data, dims, 4)
        assert (found.reduced_dims, found.kept_dims) == (((24, 1),), ())
    assert (found.item_bytes, found.accumulator_bytes) == (4, 4)
    assert Reduction.of(empty(4, 1, 6), [1], 4).reduced_dims == ()


def test_adjacent_outputs_of_a_thread_divide_all_strides():
    counts = {1024: 4, 1022: 2, 1023: 1}
    for width, count in counts.items():
        assert Reduction.of(empty(64, width), [0], 4)._count_outputs_per_thread() == count
    assert Reduction.of(empty(64, 1026)[:, :1024], [0], 4)._count_outputs_per_thread() == 2
    assert Reduction.of(empty(3, 64, 1024)[:, :, :512], [1], 4)._count_outputs_per_thread() == 4
    assert Reduction.of(empty(3, 64, 1025)[:, :, :512], [1], 4)._count_outputs_per_thread() == 1


@pytest.mark.parametrize(("pairs", "expected"), [
    ([(3, 4), (4, 1)], [(4, 1), (3, 4)]), ([(3, 1), (4, 0)], [(3, 1), (4, 0)]), ([(4, 0), (3, 1)], [(4, 0), (3, 1)]),
    ([(5, 2), (3, 2)], [(3, 2), (5, 2)]), ([(3, 2), (3, 2)], [(3, 2), (3, 2)]),
    ([(2, 12), (3, 4), (4, 1)], [(4, 1), (3, 4), (2, 12)]), ([(2, 12), (3, 0), (4, 1)], [(4, 1), (3, 0), (2, 12)]),
])  # fmt: skip
def test_dimensions_are_sorted_by_stride_and_expanded_ones_stay(pairs, expected):
    assert reductions._sort_by_stride(pairs) == expected


def test_dimensions_are_merged_where_one_stride_covers_both():
    assert reductions._merge_dims([(4, 1), (3, 4), (2, 12)]) == ((24, 1),)
    assert reductions._merge_dims([(4, 1), (3, 5), (2, 15)]) == ((4, 1), (6, 5))
    assert reductions._merge_dims([]) == ()


def test_powers_of_two_and_accumulators():
    assert [reductions.floor_power_of_two(value) for value in (-1, 0, 1, 2, 3, 4, 1023, 1024)] == [
        1,
        1,
        1,
        2,
        2,
        4,
        512,
        1024,
    ]
    sizes = {torch.float16: 4, torch.float32: 4, torch.float64: 8, torch.complex64: 8, torch.int8: 8, torch.bool: 8}
    assert {dtype: reductions.accumulator_bytes_per_value(empty(1, dtype=dtype)) for dtype in sizes} == sizes


def test_large_tensors_are_halved_along_their_widest_dimension():
    # 2^31 bytes and more; as many values as 31 bits count, of one byte each.
    assert len(Reduction.of(empty(1 << 15, 1 << 14), [1], 4).split()) == 1
    two = Reduction.of(empty(1 << 15, (1 << 14) + 1), [1], 4).split()
    assert [(part.reduced_dims, part.kept_dims) for part in two] == [
        ((((1 << 14) + 1, 1),), ((1 << 14, (1 << 14) + 1),)) for _ in range(2)
    ]
    assert len(Reduction.of(empty((1 << 31) - 1, dtype=torch.bool), None, 1).split()) == 1
    assert len(Reduction.of(empty(1 << 31, dtype=torch.bool), None, 1).split()) == 2
    assert [part.reduced_dims for part in Reduction.of(empty((1 << 30) + 2), None, 4).split()] == [
        (((1 << 28), 1),), (((1 << 28) + 1, 1),), (((1 << 28), 1),), (((1 << 28) + 1, 1),)
    ]  # fmt: skip
    expanded = empty(1).expand(1 << 31)
    assert len(Reduction.of(expanded, None, 4).split()) == 2
    assert Reduction((), (), 4, 4).split() == [Reduction((), (), 4, 4)]


def test_accumulators_are_kept_between_launches_of_half_precision_and_of_pairs():
    # 5 rows of 2^29 values: several launches, each with 512 threads x 384 blocks.
    half, single = empty(5, 1 << 29, dtype=torch.float16), empty(5, 1 << 29)
    assert reduction_buffers(half, [1], 4, GPU)[0] == 4 * 5
    assert reduction_buffers(half.to(torch.bfloat16), [1], 4, GPU)[0] == 4 * 5
    assert reduction_buffers(single, [1], 16, GPU)[0] == 16 * 5
    assert len(reduction_buffers(single, [1], 4, GPU)) == 2
    assert len(reduction_buffers(empty(5, 1 << 20, dtype=torch.float16), [1], 4, GPU)) == 2
    assert reduction_buffers(empty(1), None, 4, GPU) == []


def test_nothing_is_split_without_outputs_or_inputs():
    assert Reduction(((0, 1),), (), 4, 4).compute_buffers(128, 1536) == []
    assert Reduction(((VALUES, 1),), ((0, VALUES),), 4, 4).compute_buffers(128, 1536) == []
