"""Norms by hand: sums over rows, staging buffers, which batch norm runs, and what each one allocates."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels import normalization
from memprof.virtual.kernels.reductions import reduction_buffers

A100 = DeviceProperties((8, 0), 108, 2048, (2, 11))
HALF, SINGLE = torch.bfloat16, torch.float32
aten = torch.ops.aten


def empty(*shape, dtype=SINGLE):
    return torch.empty(*shape, dtype=dtype, device="meta")


def last(*shape, dtype=SINGLE):
    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.empty(shape, dtype=dtype, device="meta", memory_format=layout)


@pytest.mark.parametrize(("rows", "width", "dtype", "blocks"), [
    (65_536, 64, SINGLE, 0), (65_537, 64, SINGLE, 2049),  # 32 rows a block
    (131_072, 1024, SINGLE, 1024), (131_072, 1000, SINGLE, 1024),  # 32,768 blocks in all, in columns of 32
    (131_072, 1727, SINGLE, 606), (131_072, 1728, SINGLE, 0),  # half as many columns as multiprocessors
    (131_072, 64, HALF, 4096),
])  # fmt: skip
def test_sums_over_many_short_rows(rows, width, dtype, blocks):
    data = empty(rows, width, dtype=dtype)
    sums = [width * dtype.itemsize, *reduction_buffers(empty(blocks or 1, width, dtype=dtype), [0], 4, A100)]
    for parameters in (1, 2):
        found = normalization._compute_partial_sums(data, width, parameters, A100)
        assert found == (parameters * [blocks * width * dtype.itemsize] + parameters * sums if blocks else [])


def test_the_backward_of_a_norm_sums_for_each_parameter():
    data, strided = empty(131_072, 64), empty(64, 131_072).t()
    for mask, parameters in (([True, True, False], 1), ([False, True, True], 2), ([True, False, False], 0)):
        args = (strided, data, [64], None, None, None, None, mask)
        sums = normalization._compute_partial_sums(data, 64, parameters, A100) if parameters else []
        assert normalization.compute_layer_norm_backward_scratch(args, A100) == [data.nbytes, *sums]
    args = (data, empty(131_072, 8, 8), [8, 8], None, None, [True, True])
    assert normalization.compute_rms_norm_backward_scratch(args, A100)[:2] == [4 * 4096 * 64, 256]
    assert normalization._compute_partial_sums(empty(9, 0), 0, 1, A100) == []


def test_statistics_of_rms_norm_are_floats_of_each_row():
    for dtype, expected in ((HALF, SINGLE), (SINGLE, SINGLE), (torch.float64, torch.float64)):
        assert normalization._get_row_statistics_layout(empty(2, 3, 4, dtype=dtype), (4,)) == ((2, 3, 1), expected)
    assert normalization._get_row_statistics_layout(empty(2, 3, 4), (3, 4)) == ((2, 1, 1), SINGLE)
    result, statistics = normalization.meta_rms_norm(empty(4, 3, dtype=HALF).t(), (4,), None, None)
    assert result.is_contiguous() and result.dtype is HALF
    assert (statistics.shape, statistics.dtype) == ((3, 1), SINGLE)


def test_copies_of_parameters_of_norms():
    strided, weight = empty(8, 4).t(), empty(16)[::2]
    assert normalization.compute_layer_norm_copies((strided, [8], weight, None)) == [128, 32]
    assert normalization.compute_layer_norm_copies((empty(4, 8), [8], None, weight)) == [32]
    args = (strided, empty(4, 8), [8], None, None, empty(8), weight)
    assert normalization.compute_layer_norm_backward_copies(args) == [32]
    assert normalization.compute_layer_norm_backward_copies((None, strided, [8], None, None, weight, None)) == [128, 32]
    assert normalization.compute_rms_norm_backward_copies((None, strided, [8], None, weight)) == [128, 32]


@pytest.mark.parametrize(("weight", "bias", "positions", "dtype", "expected"), [
    (empty(6), empty(6), 4, SINGLE, [48, 48]), (empty(6), None, 4, HALF, [48, 48]),
    (None, empty(6), 4, SINGLE, [48, 48]),
    (None, None, 4, SINGLE, []), (empty(6), empty(6), 1, SINGLE, []), (empty(6), None, 2, torch.float64, [96, 96]),
])  # fmt: skip
def test_group_norm(weight, bias, positions, dtype, expected):
    args = (empty(2, 6, positions, dtype=dtype), weight, bias, 2, 6, positions, 3, 1e-5)
    assert normalization.compute_group_norm_scratch(args, A100) == expected


@pytest.mark.parametrize(("weight", "positions", "mask", "expected"), [
    (empty(6), 4, [True, True, True], [48, 48, 24, 24, 48]), (None, 4, [True, True, True], [48, 48, 24, 24]),
    (empty(6), 1, [True, True, True], [48, 48, 24, 24]), (empty(6), 4, [False, True, True], [48, 48]),
])  # fmt: skip
def test_the_backward_of_group_norm(weight, positions, mask, expected):
    args = (None, empty(2, 6, positions, dtype=HALF), None, None, weight, 2, 6, positions, 3, mask)
    assert normalization.compute_group_norm_backward_scratch(args, A100) == expected


@pytest.mark.parametrize(("data", "given", "training", "expected"), [
    (empty(2, 4, 8), "wbmv", True, True), (empty(2, 4, 8), "wb", True, True), (empty(2, 4, 8), "wb", False, False),
    (empty(2, 4, 8), "wbmv", False, True), (empty(2, 4, 8), "wbm", True, False), (empty(2, 4, 8), "wbv", True, False),
    (empty(2, 4, 8), "bmv", True, False), (empty(2, 4, 8), "wmv", True, False), (empty(2, 4), "wbmv", True, False),
    (empty(2, 4, 8, dtype=HALF), "wbmv", True, False), (empty(2, 4, 8, dtype=torch.float16), "wbmv", True, True),
    (empty(880_801, 1, 1), "wbmv", True, True), (empty(880_802, 1, 1), "wbmv", True, False),
    (empty(65_535, 1, 1), "wbmv", False, True), (empty(65_536, 1, 1), "wbmv", False, False),
    (empty(1, 1, (1 << 31) - 2), "wbmv", True, True), (empty(1, 1, (1 << 31) - 1), "wbmv", True, False),
])  # fmt: skip
def test_cudnn_runs_batch_norm_of(data, given, training, expected):
    parameters = [empty(4) if name in given else None for name in "wbmv"]
    assert normalization.uses_cudnn(data, parameters, training) is expected
    with torch.backends.cudnn.flags(enabled=False):
        assert not normalization.uses_cudnn(data, parameters, training)


def test_cudnn_runs_batch_norm_of_float16_with_parameters_in_float32():
    parameters = [empty(4, dtype=torch.float16)] * 4
    assert not normalization.uses_cudnn(empty(2, 4, 8, dtype=torch.float16), parameters, True)


@pytest.mark.parametrize(("shape", "dtype", "expected"), [
    # 512 threads of 16 values: 32 x 16 for 32 channels or more, in rows of blocks from 8 to 128.
    ((8, 100, 256), SINGLE, [4 * 2 * 100 * 8, 4 * 4]), ((7, 100, 256), SINGLE, []),
    ((8, 96, 257), HALF, [4 * 2 * 96 * 9, 4 * 3]), ((200, 32, 256), SINGLE, [4 * 2 * 32 * 128, 4]),
    ((10, 4, 2048), torch.float64, [8 * 2 * 4 * 10, 4]), ((1, 33, 2048), SINGLE, [4 * 2 * 33 * 8, 4 * 2]),
    ((7, 4, 2048), SINGLE, []),
])  # fmt: skip
def test_staging_buffers_of_channels_last_batch_norm(shape, dtype, expected):
    assert normalization._compute_staging_buffers(empty(shape, dtype=dtype), 2) == expected


def test_which_batch_norm_reduces_channels_last():
    tensors = [empty(2, 4), empty(2, 4, 1), empty(2, 4, 8), empty(2, 4, 3, 3), last(2, 4, 3, 3), last(2, 4, 3, 3, 3)]
    found = [normalization._uses_channels_last_kernels(tensor) for tensor in tensors]
    assert found == [True, True, False, False, True, False]


def made(gpu, first=0):
    return [storage.num_bytes for storage in gpu.trace.storages[first:]]


@pytest.mark.parametrize(("layout", "training", "weight", "invstd", "mask", "expected"), [
    # One kernel for what is contiguous: the gradients that are asked for.
    ("contiguous", True, True, True, [True, True, True], [4096, 64, 64]),
    ("contiguous", True, True, True, [True, False, True], [4096, 64]),
    ("contiguous", True, False, True, [True, True, False], [4096, 32]),
    # Else two sums of each channel, the parameters' gradients, and the data's.
    ("last", True, True, True, [True, True, True], [64, 64, 64, 64, 4096]),
    ("last", True, False, True, [True, False, False], [64, 64, 4096]),
    ("last", False, True, True, [True, False, False], [4096]),
    # Without saved statistics they are computed again.
    ("last", False, True, False, [True, True, False], [64, 64, 64, 64, 64, 4096]),
    ("contiguous", False, True, False, [True, False, False], [64, 4096]),
    ("contiguous", True, True, True, [False, True, True], [64, 64, 64, 64]),
])  # fmt: skip
def test_the_backward_of_torchs_own_batch_norm(gpu, layout, training, weight, invstd, mask, expected):
    memory_format = torch.channels_last if layout == "last" else torch.contiguous_format
    data = torch.empty(2, 16, 8, 8, device="cuda", dtype=HALF, memory_format=memory_format)
    vector = torch.empty(16, device="cuda")
    saved = vector if invstd else torch.empty(0, device="cuda")
    first = len(gpu.trace.storages)
    scale = vector if weight else None
    aten.native_batch_norm_backward(data, data, scale, vector, vector, saved, saved, training, 1e-5, mask)
    assert made(gpu, first) == expected


def test_statistics_of_training_are_unknown_and_those_of_evaluation_are_not(gpu):
    for dtype in (SINGLE, HALF):  # cuDNN's and torch's
        layer = nn.BatchNorm2d(4).cuda()
        data = torch.empty(2, 4, 8, 8, device="cuda", dtype=dtype)
        layer.eval()(data)
        assert (layer.running_mean[0].item(), layer.running_var[0].item()) == (0.0, 1.0)
        layer.running_var.zero_()
        layer.train()(data)
        assert (layer.running_mean[0].item(), layer.running_var[0].item()) == (1.0, 1.0)  # as any unknown float


def test_overloads_of_batch_norm_say_at_different_places_whether_they_train(gpu):
    data = torch.empty(32, 16, 32, 32, device="cuda", dtype=HALF, memory_format=torch.channels_last)
    vector = torch.empty(16, device="cuda")
    results, staging = [2 * data.numel(), 64, 64], [4 * 4 * 16 * 64, 4]
    calls = {
        True: [
            lambda: aten._native_batch_norm_legit.no_stats(data, vector, vector, True, 0.1, 1e-5),
            lambda: aten._native_batch_norm_legit(data, vector, vector, vector, vector, True, 0.1, 1e-5),
            lambda: aten.native_batch_norm(data, vector, vector, vector, vector, True, 0.1, 1e-5),
        ],
        False: [
            lambda: aten._native_batch_norm_legit.no_stats(data, vector, vector, False, 0.1, 1e-5),
            lambda: aten.native_batch_norm(data, vector, vector, vector, vector, False, 0.1, 1e-5),
            lambda: aten._native_batch_norm_legit_no_training(data, vector, vector, vector, vector, 0.1, 1e-5),
        ],
    }
    for training, functions in calls.items():
        for call in functions:
            first = len(gpu.trace.storages)
            call()
            assert made(gpu, first) == results + staging * training


@pytest.mark.parametrize(("name", "expected"), [
    # Two sums of 16 channels for each of 132 multiprocessors: three blocks forward, two backward.
    ("h100-80gb", [3 * 132 * 2 * 4 * 16 + 2 * 4 * 16 + 84, 2 * 132 * 2 * 4 * 16 + 36]), ("a100-80gb", []),
])  # fmt: skip
def test_workspaces_of_channels_last_batch_norm_in_half_precision(name, expected):
    with VirtualGpu(find_gpu(name)) as gpu:
        layer = nn.BatchNorm2d(16, track_running_stats=False).cuda()
        for layout in (torch.contiguous_format, torch.channels_last):
            shape = (2, 16, 8, 8)
            data = torch.empty(shape, device="cuda", dtype=torch.float16, memory_format=layout, requires_grad=True)
            layer(data).backward(torch.empty_like(data))
        assert [one.num_bytes for one in gpu.trace.storages if one.hidden] == expected
        assert normalization.CHANNELS_LAST_ASSUMPTION in gpu.trace.assumptions


def test_gradients_of_a_strided_input_of_a_norm_are_contiguous(gpu):
    data = torch.empty(6, 8, device="cuda").as_strided((4, 6), (1, 8))
    weight, rows = torch.empty(6, device="cuda"), torch.empty(4, 1, device="cuda")
    first = len(gpu.trace.storages)
    gradient = torch.empty(4, 6, device="cuda")
    grads = aten.native_layer_norm_backward(gradient, data, [6], rows, rows, weight, weight, [True, True, True])
    assert grads[0].is_contiguous() and grads[0].shape == (4, 6)
    assert sorted(made(gpu, first)[1:]) == [24, 24, 96, 96]  # the copy of the data, and three gradients


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.skipif(not normalization.HAS_FUSED_RMS_NORM, reason="this torch has no fused RMS norm")
def test_rms_norm_is_one_kernel_where_dtypes_agree(gpu):
    data = torch.empty(4, 8, device="cuda", dtype=HALF)
    for weight, is_fused in ((torch.empty(8, device="cuda", dtype=HALF), True), (torch.empty(8, device="cuda"), False)):
        first = len(gpu.trace.storages)
        torch.rms_norm(data, (8,), weight)
        operators = {gpu.trace.op(storage) for storage in gpu.trace.storages[first:]}
        assert (operators == {"aten._fused_rms_norm"}) is is_fused
    first = len(gpu.trace.storages)
    torch.rms_norm(torch.empty(8, 4, device="cuda").t(), (8,), torch.empty(16, device="cuda")[::2])
    assert made(gpu, first)[2:] == [128, 32, 128, 16]  # copies of data and weight, the result and a float for each row


@pytest.mark.parametrize(("tracks", "training"), [(False, True), (True, False)])
def test_instance_norm_repeats_its_parameters_for_each_sample(gpu, tracks, training):
    layer = nn.InstanceNorm1d(3, affine=True, track_running_stats=tracks).cuda().train(training)
    data = torch.empty(2, 3, 8, device="cuda")
    first = len(gpu.trace.storages)
    assert layer(data).shape == (2, 3, 8)
    parameters, statistics = [24] * (4 if tracks else 2), [24, 24] * training
    assert made(gpu, first) == [*parameters, 192, *statistics, *[12, 12] * tracks]  # and means of the statistics


def test_wide_rows_depend_on_the_gpu():
    gpu = dataclasses.replace(A100, num_sms=54)
    wide, narrow = (normalization._compute_partial_sums(empty(131_072, width), width, 1, gpu) for width in (864, 863))
    assert wide == [] != narrow
