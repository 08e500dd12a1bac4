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
