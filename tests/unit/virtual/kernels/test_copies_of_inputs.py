"""Copies of inputs, and other temporaries, by the formula of each operator: which argument is copied, and into what."""

from __future__ import annotations

import pytest
import torch

from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels import copies, foreach, matrix_products
from memprof.virtual.kernels.registry import input_copies, scratch, uses_cublas

A100 = DeviceProperties((8, 0), 108, 2048, (2, 11))
aten = torch.ops.aten
LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


def empty(*shape, dtype=torch.float32, layout=torch.contiguous_format):
    return torch.empty(shape, dtype=dtype, device="meta", memory_format=layout)


def strided(*shape, dtype=torch.float32):
    """Neither contiguous nor channels-last."""
    return empty(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


IMAGES, VOLUMES = strided(2, 4, 6, 6), strided(2, 4, 3, 6, 6)  # 1,152 and 3,456 bytes
DENSE, LAST_IMAGES, LAST_VOLUMES = (
    empty(2, 4, 6, 6),
    empty(2, 4, 6, 6, layout=LAST),
    empty(2, 4, 3, 6, 6, layout=LAST_3D),
)
FEW = empty(2, 3, 6, 6, layout=LAST)
PART = empty(2, 8, 6, 6, layout=LAST)[:, :4]  # in channels-last order, with gaps
MATRIX, PLACES = strided(2, 4), strided(2, 4, dtype=torch.int64)


COPIES = [
    ("avg_pool2d max_pool2d_with_indices", (IMAGES, [2, 2]), [1152]), ("avg_pool2d", (LAST_IMAGES, [2, 2]), []),
    ("max_pool3d_with_indices", (VOLUMES, [2, 2, 2]), [3456]), ("max_pool2d_with_indices", (PART, [2, 2]), [1152]),
    ("avg_pool2d_backward", (MATRIX, IMAGES, [2, 2]), [1152, 32]), ("avg_pool2d_backward", (MATRIX, DENSE, [2]), [32]),
    ("max_pool2d_with_indices_backward", (IMAGES, LAST_IMAGES, [2], IMAGES.long()), [1152, 2304]),
    ("max_pool3d_with_indices_backward", (VOLUMES, VOLUMES, [2], strided(2, 4, 3, 6, 6, dtype=torch.int64)),
     [3456, 3456, 6912]),
    ("avg_pool3d avg_pool3d_backward _adaptive_avg_pool3d_backward", (VOLUMES, VOLUMES), [3456]),
    ("adaptive_max_pool2d_backward adaptive_max_pool3d_backward", (MATRIX, MATRIX, PLACES), [32, 64]),
    ("reflection_pad1d reflection_pad2d reflection_pad3d", (MATRIX, [1]), [32]),
    ("reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward", (MATRIX, MATRIX, [1]), [32]),
    ("_adaptive_avg_pool2d_backward", (IMAGES, DENSE), [1152]),
    ("_adaptive_avg_pool2d_backward", (IMAGES, LAST_IMAGES), []),
    ("adaptive_max_pool2d", (IMAGES, [2, 2]), [1152]), ("adaptive_max_pool2d", (IMAGES[0], [2, 2]), []),
    ("adaptive_max_pool3d", (VOLUMES, [2, 2, 2]), [3456]), ("adaptive_max_pool3d", (VOLUMES[0], [2, 2, 2]), []),
    # Upsampling to another size: 12 x 12 of images of 6 x 6.
    ("upsample_nearest2d _upsample_nearest_exact2d", (IMAGES, [12, 12]), [1152]),
    ("upsample_nearest2d", (IMAGES, [6, 6]), []), ("upsample_nearest2d", (IMAGES, [6, 12]), [1152]),
    ("upsample_nearest2d", (empty(0, 4, 6, 6)[..., ::2], [12, 12]), []),
    ("upsample_nearest2d", (LAST_IMAGES, [12, 12]), []), ("upsample_nearest2d", (PART, [12, 12]), [1152]),
    ("upsample_nearest2d", (FEW, [12, 12]), [4 * 6 * 144, 4 * 6 * 36]),
    ("upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward",
     (IMAGES, [6, 6], [2, 4, 12, 12]), [1152]),
    ("upsample_bilinear2d_backward", (IMAGES, [6, 6], [2, 4, 6, 6]), []),
    ("upsample_nearest1d upsample_nearest1d_backward", (MATRIX, [8]), [32]),
    ("_upsample_nearest_exact1d _upsample_nearest_exact1d_backward", (MATRIX, [8]), [32]),
    ("upsample_nearest3d _upsample_nearest_exact3d", (VOLUMES, [6, 12, 12]), [3456]),
    ("upsample_nearest3d", (LAST_VOLUMES, [6, 12, 12]), [4 * 8 * 864, 3456]),
    ("upsample_nearest3d", (empty(2, 4, 3, 6, 6), [6, 12, 12]), []),
    ("upsample_nearest3d_backward _upsample_nearest_exact3d_backward", (LAST_VOLUMES, [3, 6, 6], [2, 4, 6, 12, 12]),
     [4 * 8 * 864, 3456]),
    ("nll_loss_forward", (MATRIX, PLACES, MATRIX), [32, 64, 32]),
    ("nll_loss_forward", (MATRIX, PLACES, None, 1), [32, 64]),
    ("nll_loss_backward", (MATRIX, strided(3, 4), PLACES, strided(5)), [64, 48, 32, 20]),
    ("nll_loss2d_forward", (IMAGES, PLACES, strided(4), 1), [1152, 16, 64]),
    ("nll_loss2d_forward", (IMAGES, PLACES, strided(4), 0), [16]),
    ("nll_loss2d_backward", (IMAGES, IMAGES, PLACES, strided(4), 1), [64, 16]),
    ("nll_loss2d_backward", (IMAGES, IMAGES, PLACES, strided(4), 0), [16]),
    ("_softmax _log_softmax", (MATRIX, -1, False), [32]), ("_log_softmax_backward_data", (MATRIX, MATRIX, 1), [32, 32]),
    ("_softmax_backward_data", (empty(2, 4), MATRIX, 1), [32, 32]),
    ("_softmax_backward_data", (MATRIX, empty(2, 4), 1), [32]),
    # Masks of scores and of rows, and a zero.
    ("_safe_softmax", (empty(2, 3, 4), 1), [24, 8, 4]), ("_safe_softmax", (empty(2, 3, 4), -1), [24, 6, 4]),
    ("_safe_softmax", (empty(), 0), [1, 1, 4]), ("_safe_softmax", (empty(2, 0), 1), [0, 0, 4]),
]  # fmt: skip


def test_after_the_result():
    for operators, arguments, expected in COPIES:
        for operator in operators.split():
            assert scratch.get(getattr(aten, operator))(arguments, A100) == expected


@pytest.mark.parametrize(("operators", "arguments", "expected"), [
    ("max_unpool2d max_unpool3d", (MATRIX, PLACES, [4]), [32, 64]), ("roll", (MATRIX, [1]), [32]),
    ("_adaptive_avg_pool2d", (IMAGES, [2, 2]), [1152]), ("_adaptive_avg_pool2d", (PART, [2, 2]), []),
    ("_adaptive_avg_pool2d", (IMAGES[0], [2, 2]), []), ("_adaptive_avg_pool3d", (VOLUMES, [2, 2, 2]), [3456]),
    ("_adaptive_avg_pool3d", (LAST_VOLUMES, [2, 2, 2]), [3456]), ("_adaptive_avg_pool3d", (VOLUMES[0], [2, 2, 2]), []),
    ("embedding", (MATRIX, PLACES), [64]), ("mm", (MATRIX, strided(4, 6)), [32, 96]),
    ("bmm", (strided(2, 3, 4), empty(2, 4, 5)), [96]), ("addmm", (MATRIX, empty(2, 3), strided(3, 4)), [48]),
    ("baddbmm", (strided(2, 3, 5), strided(2, 3, 4), empty(2, 4, 5)), [96]),
])  # fmt: skip
def test_before_the_result(operators, arguments, expected):
    for operator in operators.split():
        assert input_copies.get(getattr(aten, operator))(arguments) == expected


@pytest.mark.parametrize(("size", "stride", "is_valid"), [
    ((4, 6), (6, 1), True), ((4, 6), (5, 1), False), ((4, 6), (1, 4), True), ((4, 6), (1, 3), False),
    ((4, 6), (12, 2), False), ((4, 6), (2, 8), False), ((1, 6), (1, 1), True), ((4, 1), (1, 1), True),
    ((1, 6), (3, 1), True), ((1, 6), (3, 2), False), ((4, 1), (1, 9), True), ((4, 1), (2, 9), False),
    ((4, 1), (0, 1), False), ((1, 1), (7, 7), True), ((1, 1), (0, 7), False), ((3, 4, 6), (0, 6, 1), True),
])  # fmt: skip
def test_strides_that_cublas_supports(size, stride, is_valid):
    tensor = torch.empty(1000, device="meta").as_strided(size, stride)
    assert matrix_products._is_valid_for_cublas(tensor) is is_valid


def test_cublaslt_adds_a_bias_of_the_width_of_the_result():
    def adds(bias, *second):
        return matrix_products.adds_bias_row((bias, empty(8, 16), empty(*second)))

    assert adds(empty(32), 16, 32) and adds(empty(2), 2, 2)
    assert not adds(empty(32), 1, 32) and not adds(empty(16), 16, 32) and not adds(empty(1), 16, 1)
    assert {aten.mm, aten.addmm, aten.bmm} <= {operator for operator, _ in uses_cublas.items()}


def test_layouts_that_tensors_suggest():
    found = [copies.suggest_layout(tensor) for tensor in (DENSE, LAST_IMAGES, LAST_VOLUMES, PART, IMAGES, MATRIX)]
    plain = torch.contiguous_format
    assert found == [plain, LAST, LAST_3D, LAST, plain, plain]
    assert copies.suggest_layout(empty(1, 4, 1, 1)) is plain
    assert copies.suggest_layout(empty(2, 1, 6, 6).expand(2, 4, 6, 6)) is plain
    assert copies.copy_bytes(None, MATRIX, empty(3)) == [32]
    assert copies.make_copies_formula(0, 5)((MATRIX, 3)) == [32] and copies.make_copies_formula(1)((MATRIX, 3)) == []


HAS_GLOBAL_NORM = [320 * 4, 4] if foreach._HAS_GLOBAL_NORM else []


@pytest.mark.parametrize(("arguments", "expected"), [
    # A norm for each part of 65,536 elements of the largest tensor, for each tensor.
    (([empty(65_536), empty(3)],), [2 * 4, *HAS_GLOBAL_NORM]),
    (([empty(65_537), empty(3)], 1), [4 * 4, *HAS_GLOBAL_NORM]),
    (([empty(3)], float("inf")), [4, *HAS_GLOBAL_NORM]), (([empty(3)], 3), []), (([empty(3)], 0), []), (([],), []),
    (([empty(3), empty(3, dtype=torch.float64)],), []), (([empty(3, dtype=torch.int64)],), []),
    (([empty(3, dtype=torch.float64)],), [8, *[2 * each for each in HAS_GLOBAL_NORM]]),
    (([empty(3, dtype=torch.bfloat16)],), [4, *[1280, 2][: len(HAS_GLOBAL_NORM)]]),
])  # fmt: skip
def test_norms_of_lists(arguments, expected):
    assert foreach.compute_foreach_norm_buffers(arguments) == expected


@pytest.mark.parametrize(("shapes", "dim", "chunks", "dtype", "out", "num_bytes"), [
    # Eight bytes for each block of 2,048 bytes, six for each tensor, and two.
    ([(1024,)], 0, 2, torch.float32, None, 8 * (1 + 6 + 2)), ([(1026,)], 0, 2, torch.float32, None, 8 * (2 + 6 + 2)),
    ([(4098,)], 0, 2, torch.uint8, None, 8 * (2 + 6 + 2)),
    ([(1024,), (4, 600)], 0, 2, torch.float32, None, 8 * (1 + 3 + 12 + 2)),
    ([(4, 600)], 1, 2, torch.float32, None, 8 * (1 + 6 + 2)), ([(3, 600)], 0, 2, torch.float32, None, 8 * (3 + 6 + 2)),
    ([(1026,)], 0, 2, torch.bfloat16, None, 8 * (1 + 6 + 2)),
    ([(1026,)], 0, 2, torch.bfloat16, torch.float32, 8 * (2 + 6 + 2)),
    ([(1026,)], 0, 2, torch.float16, torch.float32, None),
])  # fmt: skip
def test_concatenated_chunks_need_metadata(gpu, shapes, dim, chunks, dtype, out, num_bytes):
    tensors = [torch.empty(shape, device="cuda", dtype=dtype) for shape in shapes]
    result = {} if out is None else {"out": torch.empty(0, device="cuda", dtype=out)}
    first = len(gpu.trace.storages)
    aten._chunk_cat(tensors, dim, chunks, **result)
    hidden = [storage.num_bytes for storage in gpu.trace.storages[first:] if storage.hidden]
    assert hidden == ([] if num_bytes is None else [num_bytes])
