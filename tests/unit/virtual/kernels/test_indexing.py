"""What indexing and embeddings take beside their results, by hand."""

from __future__ import annotations

import pytest
import torch

from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels import indexing, sorting
from memprof.virtual.kernels.reductions import reduction_buffers
from memprof.virtual.kernels.registry import scratch

A100 = DeviceProperties((8, 0), 108, 2048, (2, 11))
aten = torch.ops.aten


def empty(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def places(*shape):
    return empty(*shape, dtype=torch.int64)


LARGE = places(1 << 21)
SCAN = sorting.scan_bytes(24, 8, A100, "sum of int64")


@pytest.mark.parametrize(("data", "indices", "values", "options", "expected"), [
    # The linear index (wrapped and multiplied), a copy of values, sorted and original positions, a range, CUB's byte.
    (empty(10, 4), [places(5)], empty(5, 4), (True, True), [*2 * [40], *3 * [40], 1]),
    (empty(10, 4), [places(5)], empty(()), (True, True), [*2 * [40], 80, *3 * [40], 1]),
    (empty(10, 4), [places(5)], empty(4, 5).t(), (True, True), [*2 * [40], 80, *3 * [40], 1]),
    (empty(10, 4), [places(5)], empty(5, 4, dtype=torch.float16), (True, True), [*5 * [40], 1]),
    (empty(10, 6, 4), [places(5), places(5)], empty(5, 4), (True, True), [*5 * [40], *3 * [40], 1]),
    (empty(10, 6, 4), [places(5, 1), None, places(4)], empty(()), (True, True), [*5 * [160], 480, *3 * [160], 1]),
    (empty(10, 6, 4), [None, places(5)], empty(()), (True, True), [*2 * [40], 4 * 5 * 40, *3 * [40], 1]),
    # Indices of the host are moved afterwards.
    (empty(10, 4), [torch.zeros(5, dtype=torch.int64)], empty(5, 4), (True, True), [40, *3 * [40], 1]),
    # Extremes of each index, compared, where bounds are checked.
    (empty(10, 4), [places(5)], empty(5, 4), (True, False), [8, 1, 8, 1, *5 * [40], 1]),
    (empty(10, 4), [places(5)], empty(5, 4), (True,), [8, 1, 8, 1, *5 * [40], 1]),
    (empty(10, 4), [places(0)], empty(0, 4), (True,), [*5 * [0], 1]),
    (empty(10, 4), [torch.zeros(5, dtype=torch.int64)], empty(5, 4), (True,), [*4 * [40], 1]),
    (empty(10, 4), [places(5)], empty(5, 4), (False, True), []), (empty(10, 4), [places(5)], empty(5, 4), (), []),
    (empty(10, 4), [None, None], empty(5, 4), (True, True), []),
])  # fmt: skip
def test_adding_at_indices(data, indices, values, options, expected):
    assert indexing.compute_index_put_scratch((data, indices, values, *options), A100) == expected


def test_adding_at_indices_sorts_as_many_bits_as_rows_need():
    for rows, bits in ((65_535, 16), (65_536, 17), (1 << 24, 25)):
        args = (empty(rows, 4), [LARGE], empty(()), True)
        *bounds, sort = indexing.compute_index_put_scratch(args, A100)
        assert sort == sorting.radix_sort_bytes(1 << 21, 8, 8, bits, A100)
        assert bounds[:8] == [8, *reduction_buffers(LARGE, None, 8, A100), 1] * 2


@pytest.mark.parametrize(("operator", "arguments", "expected"), [
    ("pow", (2.0, empty(3)), [8]), ("pow", (1, empty(3)), []), ("pow", (empty(3), 2.0), []),
    ("scatter_reduce", (empty(8), 0, None, empty(6), "mean"), [24, 32, 8]),
    ("scatter_reduce", (empty(8, dtype=torch.float16), 0, None, empty(6), "mean"), [12, 16, 8]),
    ("scatter_reduce", (empty(8), 0, None, empty(6), "sum"), []),
    # Prefix sums in 64 bits, copies of an expanded mask and of the source.
    ("masked_scatter", (empty(4, 6), empty(4, 6, dtype=torch.bool), empty(24)), [192, SCAN]),
    ("masked_scatter", (empty(4, 6), empty(6, dtype=torch.bool), empty(48)[::2]),
     [192, 24, 96, SCAN]),
])  # fmt: skip
def test_scratch_of_an_operator(operator, arguments, expected):
    assert scratch.get(getattr(aten, operator))(arguments, A100) == expected


def requested(gpu, call):
    first = len(gpu.trace.storages)
    call()
    return [storage.num_bytes for storage in gpu.trace.storages[first:] if storage.num_bytes]


def segments(indices, rows, width, item_bytes, grad_bytes):
    """Requests of a sum of the rows of equal indices, after the gradient of `rows` x `width`."""
    count, parts = min(indices, rows), indices // 10 + min(indices, rows)
    return [
        rows * width * grad_bytes, indices * item_bytes, 8, indices * item_bytes, 1279,
        count * item_bytes, count * item_bytes, 1023 if item_bytes == 4 else 1279, 8, parts * item_bytes,
        parts * width * max(4, grad_bytes),
    ]  # fmt: skip


@pytest.mark.usefixtures("recorded_release")
@pytest.mark.parametrize(("count", "rows", "kind", "dtype", "by_frequency", "expected"), [
    (3072, 50, torch.int64, torch.float32, False, [50 * 8 * 4]),
    (40, 50, torch.int64, torch.float32, True, [*3 * [320], 1, 320, *segments(40, 50, 8, 8, 4)]),
    (40, 30, torch.int64, torch.bfloat16, True, [*3 * [320], 1, 320, *segments(40, 30, 8, 8, 2)]),
    (40, 30, torch.int32, torch.float64, True, [*3 * [160], 1, 160, *segments(40, 30, 8, 4, 8)]),
    (0, 30, torch.int64, torch.float32, True, [1, 30 * 8 * 4]),
])  # fmt: skip
def test_gradients_of_an_embedding(gpu, count, rows, kind, dtype, by_frequency, expected):
    grad = torch.empty(count, 8, device="cuda", dtype=dtype)
    indices = torch.empty(count, device="cuda", dtype=kind)
    call = lambda: aten.embedding_dense_backward(grad, indices, rows, -1, by_frequency)  # noqa: E731
    assert requested(gpu, call) == expected


@pytest.mark.usefixtures("recorded_release")
def test_gradients_of_an_embedding_sort_from_3073_indices_on(gpu):
    grad, indices = torch.empty(3073, 8, device="cuda"), torch.empty(3073, device="cuda", dtype=torch.int64)
    found = requested(gpu, lambda: aten.embedding_dense_backward(grad, indices, 50, -1, False))
    sort = sorting.radix_sort_bytes(3073, 8, 8, 64, A100)
    assert found == [*3 * [8 * 3073], sort, *segments(3073, 50, 8, 8, 4)]


@pytest.mark.usefixtures("recorded_release")
@pytest.mark.parametrize(("mode", "by_frequency"), [(0, False), (1, True), (2, False)])
def test_gradients_of_a_bag_of_embeddings(gpu, mode, by_frequency):
    bags, indices = torch.zeros(5, dtype=torch.int64, device="cuda"), torch.zeros(40, dtype=torch.int64, device="cuda")
    grad = torch.empty(5, 8, device="cuda")
    maxima = torch.zeros(5, 8, dtype=torch.int64, device="cuda")
    arguments = (grad, indices, bags, indices, bags, maxima, 30, by_frequency, mode, False, None, -1)
    found = requested(gpu, lambda: aten._embedding_bag_backward(*arguments))
    sums = [*3 * [320], 1, *[320] * by_frequency, *segments(40, 30, 8, 8, 4)]
    assert found == ([30 * 8 * 4] if mode == 2 else sums)  # the places of maxima need no sort


def test_masks_are_replaced_by_their_places(gpu):
    data = torch.empty(4, 6, device="cuda")
    rows, both = (
        torch.tensor([True, False, True, True], device="cuda"),
        torch.ones(4, 6, dtype=torch.bool, device="cuda"),
    )
    # A count of 4 bytes and CUB's byte, the places, CUB's scratch for selecting, the selected.
    assert requested(gpu, lambda: data[rows])[:3] == [4, 1, 24]
    assert requested(gpu, lambda: data[rows])[-1] == 72
    assert requested(gpu, lambda: data[both])[2] == 2 * 8 * 24
    assert data[rows].shape == (3, 6) and data[both].shape == (24,)
    assert data[rows, torch.tensor([0, 1, 2], device="cuda")].shape == (3,)
    assert data[:, torch.tensor([True, False, True, True, True, False], device="cuda")].shape == (4, 4)
    assert data[rows.to(torch.uint8)].shape == (3, 6)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_a_number_at_a_mask_takes_nothing_and_anything_else_its_places(gpu):
    data, mask = torch.zeros(64, device="cuda"), torch.ones(64, dtype=torch.bool, device="cuda")
    number, one = torch.ones(()), torch.ones(1, device="cuda")
    assert requested(gpu, lambda: data.index_put_((mask,), number)) == []
    assert requested(gpu, lambda: data.index_put((mask,), number)) == [256]
    for call in (
        lambda: data.index_put_((mask,), number, accumulate=True),
        lambda: data.index_put_((mask,), one),
        lambda: data.index_put_((mask,), torch.ones(64, device="cuda")),
        lambda: data.view(8, 8).index_put_((mask[:8], mask[8:16]), number),
    ):
        assert {8 * 64, 8 * 8} & set(requested(gpu, call))


def test_rows_assigned_at_an_unknown_mask_are_as_many_as_it_selects(gpu):
    unknown = torch.randn(64, device="cuda") > 0
    for rows in (1, 2, 63, 64):
        data = torch.zeros(64, 3, device="cuda")
        assert (8 * rows if 1 < rows < 64 else 8 * 64) in requested(
            gpu,
            lambda: data.index_put_((unknown,), torch.ones(rows, 3, device="cuda")),  # noqa: B023
        )


def test_broadcast_data_and_masks_select(gpu):
    row, column = torch.ones(6, dtype=torch.bool, device="cuda"), torch.empty(4, 1, device="cuda")
    assert column.masked_select(row).shape == (24,)
    assert torch.empty((), device="cuda").masked_select(row[0]).shape == (1,)


def test_the_number_to_fill_with_may_lie_on_the_host(gpu):
    mask, number = torch.tensor([True, False, True], device="cuda"), torch.tensor(7)
    for fill, in_place in ((aten.masked_fill.Tensor, False), (aten.masked_fill_.Tensor, True)):
        data = torch.zeros(3, dtype=torch.int64, device="cuda")
        assert requested(gpu, lambda: fill(data, mask, number)) == ([] if in_place else [24])  # noqa: B023
        assert fill(data, mask, number).tolist() == [7, 0, 7]
    assert not gpu.trace.mismatches
