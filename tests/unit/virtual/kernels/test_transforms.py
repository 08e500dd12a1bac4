"""Fourier transforms: what torch and cuFFT take beside the result."""

from __future__ import annotations

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels import transforms

HOPPER = DeviceProperties((9, 0), 132, 2048, (2, 11))


def beside_result(call, *shape, name="a100-80gb", dtype=torch.float32):
    with VirtualGpu(find_gpu(name)) as gpu:
        signal = torch.empty(*shape, device="cuda", dtype=dtype)
        first = len(gpu.trace.storages)
        result = call(signal)
        hidden = [storage.num_bytes for storage in gpu.trace.storages[first:] if storage.hidden]
    return hidden, result, gpu


@pytest.mark.parametrize(("call", "shape", "expected"), [
    (torch.fft.rfft2, (2, 64, 64), []),
    (torch.fft.rfft2, (64, 64), [64 * 33 * 8]),  # one dimension, and then the other into a second tensor
])  # fmt: skip
def test_tensors_between_steps_of_real_transforms(call, shape, expected):
    assert beside_result(call, *shape)[0] == expected


@pytest.mark.parametrize(("call", "shape", "expected"), [
    (torch.fft.irfft, (16, 33), [16 * 33 * 8]),  # a copy of what is overwritten
    (torch.fft.irfft2, (16, 33), [16 * 33 * 8]),
    (torch.fft.fftn, (2, 3, 4, 5), [120 * 8]),  # three dimensions, and then the fourth
    (torch.fft.fftn, (3, 4, 5), []),
    (lambda x: torch.fft.fft(x, dim=1), (3, 4, 5), [60 * 8]),  # the first and the last dimension are not one in memory
    (lambda x: torch.fft.fft(x, dim=0), (3, 4, 5), []),
])  # fmt: skip
def test_tensors_between_steps_of_complex_transforms(call, shape, expected):
    assert beside_result(call, *shape, dtype=torch.complex64)[0] == expected


# As an H100 (torch 2.11, CUDA 13.0) allocated for 40 signals.
@pytest.mark.parametrize(("length", "of_real", "of_complex"), [
    (1024, 0, 0), (1280, 40 * 640 * 8, 0), (16_384, 0, 0), (24_576, 40 * 12_288 * 8, 0),
    (32_768, 40 * 16_384 * 8, 40 * 32_768 * 8),
    (65_536, 40 * 32_769 * 8, 40 * 65_536 * 8), (1009, 323_232, 0), (4099, 3_422_688, 5_529_600),
    (100_003, 80_801_248, 129_601_536),
])  # fmt: skip
def test_workspaces_of_an_h100(length, of_real, of_complex):
    for is_real, expected in ((True, of_real), (False, of_complex)):
        found = transforms.workspace_bytes(HOPPER, 40, [length], 8, is_real=is_real, in_columns=False)
        assert found == expected


def test_workspaces_along_columns_and_of_images():
    assert transforms.workspace_bytes(HOPPER, 40, [8192], 8, is_real=False, in_columns=True) == 40 * 8192 * 8
    assert transforms.workspace_bytes(HOPPER, 40, [4096], 8, is_real=False, in_columns=True) == 0
    # The columns' length counts as well.
    assert transforms.workspace_bytes(HOPPER, 3, [8192, 64], 8, is_real=True, in_columns=False) == 6_488_064


def test_rule_of_workspaces_is_told_where_one_is_taken():
    hidden, _, gpu = beside_result(torch.fft.rfft, 8, 65_536, name="h100-80gb")
    assert hidden == [2_097_216]
    assert transforms.WORKSPACE_ASSUMPTION in gpu.trace.assumptions
    assert (
        transforms.WORKSPACE_ASSUMPTION
        not in beside_result(torch.fft.rfft, 8, 4096, name="h100-80gb")[2].trace.assumptions
    )


@pytest.mark.parametrize(("length", "item", "is_real", "in_columns", "expected"), [
    # Real signals of a power of two, to 16,384 or in columns to 2,048; in float64 to 4,096. Then as half as long ones.
    (2048, 8, True, True, 0), (4096, 8, True, True, 40 * 2048 * 8), (4096, 16, True, False, 0),
    (8192, 16, True, False, 40 * 4096 * 16), (8192, 16, True, True, 40 * 4096 * 16),
    # Odd lengths to 127, then by pairs of signals, which are copied and transformed.
    (127, 8, True, False, 0), (129, 8, True, False, 20 * 129 * 8 + 21_504),
    # Even ones to 480, of factors up to 13.
    (480, 8, True, False, 0), (416, 8, True, False, 0), (476, 8, True, False, 40 * 238 * 8),
    (486, 8, True, False, 40 * 243 * 8),
    # Complex signals with a prime factor beyond 127 and more than 4,096 values are padded: 8,640 for 8,383 and more.
    (4093, 8, False, False, 0), (8128, 8, False, False, 0), (4192, 8, False, False, 2 * 40 * 8640 * 8),
    (24_640, 8, False, False, 40 * 24_640 * 8), (4098, 8, False, True, 2 * 40 * 8640 * 8),
    (4116, 8, False, True, 40 * 4116 * 8),
])  # fmt: skip
def test_workspaces_by_hand(length, item, is_real, in_columns, expected):
    found = transforms.workspace_bytes(HOPPER, 40, [length], item, is_real=is_real, in_columns=in_columns)
    assert found == expected


def test_workspaces_of_an_odd_number_of_real_signals_and_of_rows():
    found = transforms.workspace_bytes(HOPPER, 3, [5, 129], 8, is_real=True, in_columns=False)
    assert found == 10 * 129 * 8 + 10 * 1024 + 1024  # two pairs of five rows: 10,320 bytes, and up to the next KiB
    options = {"is_real": False, "in_columns": False}
    assert transforms.workspace_bytes(HOPPER, 3, [], 8, **options) == 0
    for capability in ((8, 0), (10, 0)):
        gpu = DeviceProperties(capability, 132, 2048, (2, 11))
        assert transforms.workspace_bytes(gpu, 40, [32_768], 8, **options) == 0


def test_which_dimensions_are_one_plan():
    plans = {
        (0,): True,
        (1, 2): True,
        (0, 1): False,
        (0, 1, 2): False,
        (1, 2, 3): True,
        (1, 2, 3, 4): False,
        (0, 2): True,
    }
    assert {dims: transforms._is_one_plan(dims) for dims in plans} == plans


@pytest.mark.parametrize(("call", "shape", "dtype", "expected"), [
    # A copy of an input whose signals do not follow one another, then cuFFT's workspace: of rows, and of columns.
    (lambda x: torch.fft.fft(x), (3, 32_768), torch.complex64, [3 * 32_768 * 8]),
    (lambda x: torch.fft.fft(x, dim=0), (8192, 3), torch.complex64, [3 * 8192 * 8]),
    (lambda x: torch.fft.fft(x, dim=0), (4096, 3), torch.complex64, []),
    (lambda x: torch.fft.fft(x[:, :3]), (4, 6, 32_768), torch.complex64, [12 * 32_768 * 8, 12 * 32_768 * 8]),
    (lambda x: torch.fft.irfft(x), (3, 16_385), torch.complex64, [3 * 16_385 * 8, 3 * 16_384 * 8]),
    (lambda x: torch.fft.irfftn(x, dim=(0, 1)), (2, 2049), torch.complex64, [2 * 2049 * 8, 2 * 2048 * 8]),
    (lambda x: torch.fft.rfft(x), (3, 32_768), torch.float32, [3 * 16_384 * 8]),
    (lambda x: torch.fft.rfftn(x, dim=(0, 1)), (6, 8), torch.float32, [6 * 5 * 8]),
    (lambda x: torch.fft.ihfft(x), (3, 16), torch.float32, []),
])  # fmt: skip
def test_temporaries_on_an_h100(call, shape, dtype, expected):
    assert beside_result(call, *shape, name="h100-80gb", dtype=dtype)[0] == expected
