"""Convolutions and batch norm on the virtual GPU: layouts, and what CUDA keeps and takes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels.convolution import is_output_padding_big, uses_cudnn

MIB = 1 << 20


GPU = find_gpu("rtx-4090")


def made(gpu, first, *, op="", hidden=None):
    """Sizes of the storages since number `first`, of one operator."""
    return [
        storage.num_bytes
        for storage in gpu.trace.storages[first:]
        if op in gpu.trace.op(storage) and hidden in (None, storage.hidden)
    ]


def count(gpu):
    return len(gpu.trace.storages)


# -- convolution -------------------------------------------------------------------------------------------------------


def test_a_convolution_of_contiguous_tensors_takes_its_output_only(gpu):
    layer = nn.Conv2d(3, 16, 5, padding=2).cuda()
    data = torch.randn(16, 3, 64, 64, device="cuda")
    first = count(gpu)
    result = layer(data)
    assert made(gpu, first) == [4 * MIB]  # and the bias is added in place, as a recording shows
    assert result.is_contiguous()


@pytest.mark.parametrize("where", ["input", "weight"])
def test_one_channels_last_tensor_makes_the_output_channels_last_and_copies_the_other(gpu, where):
    layer = nn.Conv2d(4, 8, 3, bias=False).cuda()
    data = torch.randn(2, 4, 10, 10, device="cuda")
    if where == "input":
        data = data.contiguous(memory_format=torch.channels_last)
        copy, order = 4 * layer.weight.numel(), 1
    else:
        layer = layer.to(memory_format=torch.channels_last)
        copy, order = 4 * data.numel(), 0
    first = count(gpu)
    result = layer(data)
    assert result.is_contiguous(memory_format=torch.channels_last)
    # The input is copied before the output is made, the weight after it.
    sizes = [4 * result.numel()]
    sizes.insert(order, copy)
    assert made(gpu, first) == sizes
    assert made(gpu, first, hidden=True) == [copy]


def test_a_move_to_the_gpu_changes_the_layout(gpu):
    layer = nn.Conv2d(4, 8, 3).to("cuda", memory_format=torch.channels_last)
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    back = layer.weight.detach().to("cpu", memory_format=torch.contiguous_format)
    assert back.is_contiguous()


def test_float64_is_never_channels_last(gpu):
    layer = nn.Conv2d(4, 8, 3).cuda().double().to(memory_format=torch.channels_last)
    data = torch.randn(2, 4, 10, 10, device="cuda", dtype=torch.float64)
    assert layer(data).is_contiguous()


def test_without_cudnn_a_convolution_is_contiguous(gpu):
    layer = nn.Conv2d(4, 8, 3).cuda().to(memory_format=torch.channels_last)
    with torch.backends.cudnn.flags(enabled=False):
        assert layer(torch.randn(2, 4, 10, 10, device="cuda")).is_contiguous()
    assert not any("workspace" in sentence for sentence in gpu.trace.assumptions)


@pytest.mark.parametrize(
    ("channels", "size", "padding", "dtype", "columns"),
    [
        # github.com/pytorch/pytorch/issues/136479, 95024 and 128947: "Tried to allocate 108.00", 108.21 and 161.37 GiB,
        # by releases that had no cuDNN for tensors of 2^31 elements.
        ((128, 128), (256, 256, 256), 1, torch.float16, 108.00),
        ((64, 32), (362, 370, 251), 1, torch.float16, 108.21),
        ((256, 64), (5, 1090, 1922), 0, torch.float32, 161.37),
    ],
)
def test_torchs_own_kernels_lay_out_columns(gpu, channels, size, padding, dtype, columns):
    data = torch.empty(1, channels[0], *size, device="cuda", dtype=dtype)
    layer = nn.Conv3d(*channels, 3, padding=padding).cuda().to(dtype)
    with torch.backends.cudnn.flags(enabled=False), torch.no_grad():
        first = count(gpu)
        layer(data)
    assert [round(size / (1 << 30), 2) for size in made(gpu, first, hidden=True)] == [columns]


def test_the_backward_of_torchs_own_kernels_lays_out_columns(gpu):
    layer = nn.Conv2d(4, 8, 3, bias=False).cuda()
    of_one_point = nn.Conv2d(4, 8, 1, bias=False).cuda()
    data = torch.randn(2, 4, 10, 10, device="cuda", requires_grad=True)
    with torch.backends.cudnn.flags(enabled=False):
        result = layer(data)
        first = count(gpu)
        result.backward(torch.ones_like(result))
        assert made(gpu, first, op="convolution_backward", hidden=True) == [4 * 4 * 9 * 8 * 8]
        first = count(gpu)
        result = of_one_point(data)  # has the columns already
        assert made(gpu, first, hidden=True) == []
        result.backward(torch.ones_like(result))
    assert made(gpu, first, op="convolution_backward", hidden=True) == [4 * 4 * 10 * 10]


@pytest.mark.parametrize(("release", "own"), [((2, 8), False), ((2, 9), True), ((2, 10), True), ((2, 11), False)])
def test_conv3d_in_half_precision_goes_round_a_fault_of_cudnn(release, own):
    gpu = dataclasses.replace(DeviceProperties.from_gpu(find_gpu("rtx-4090")), release=release)
    data, weight = (torch.empty(2, 4, 8, 8, 8, dtype=torch.float16, device="meta") for _ in range(2))
    assert uses_cudnn(gpu, data, weight, False) is not own
    last = data.to(memory_format=torch.channels_last_3d)
    assert uses_cudnn(gpu, last, weight, False)
    assert uses_cudnn(gpu, data.float(), weight.float(), False)
    assert uses_cudnn(gpu, data, weight[:, :, :1, :1, :1], False)


def test_gradients_are_in_the_layout_of_the_convolution(gpu):
    layer = nn.Conv2d(4, 8, 3, padding=1).cuda().to(memory_format=torch.channels_last)
    data = torch.randn(2, 4, 10, 10, device="cuda").contiguous(memory_format=torch.channels_last).requires_grad_()
    result = layer(data)
    first = count(gpu)
    result.backward(torch.ones_like(result))
    assert data.grad.is_contiguous(memory_format=torch.channels_last)
    assert layer.weight.grad.is_contiguous(memory_format=torch.channels_last)
    sizes = made(gpu, first, op="convolution_backward", hidden=False)
    assert sizes == [4 * data.numel(), 4 * layer.weight.numel(), 4 * 8]


def test_a_contiguous_gradient_is_copied_into_the_layout_of_the_input(gpu):
    layer = nn.Conv2d(4, 8, 3, padding=1, bias=False).cuda().to(memory_format=torch.channels_last)
    result = layer(torch.randn(2, 4, 10, 10, device="cuda").contiguous(memory_format=torch.channels_last))
    grad = torch.ones(result.shape, device="cuda")
    first = count(gpu)
    result.backward(grad)
    assert made(gpu, first, op="convolution_backward") == [4 * grad.numel(), 4 * layer.weight.numel()]


def test_a_depthwise_convolution_makes_the_gradient_of_its_weight_first(gpu):
    layer = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False).cuda()
    data = torch.randn(2, 8, 10, 10, device="cuda", requires_grad=True)
    result = layer(data)
    first = count(gpu)
    result.backward(torch.ones_like(result))
    assert made(gpu, first, op="convolution_backward") == [4 * 8 * 9, 4 * data.numel()]


@pytest.mark.parametrize(
    ("layer", "shape", "result"),
    [
        (nn.Conv1d(4, 8, 3, padding=1), (2, 4, 10), (2, 8, 10)),
        (nn.Conv3d(4, 8, 3, padding=1), (2, 4, 6, 6, 6), (2, 8, 6, 6, 6)),
        (nn.ConvTranspose2d(4, 8, 2, stride=2), (2, 4, 5, 5), (2, 8, 10, 10)),
        (nn.ConvTranspose1d(4, 8, 4, stride=2, padding=1), (2, 4, 5), (2, 8, 10)),
        (nn.Conv2d(4, 8, 3, groups=2, dilation=2, padding=2), (2, 4, 9, 9), (2, 8, 9, 9)),
    ],
)
def test_convolutions_of_every_rank_train(gpu, layer, shape, result):
    layer = layer.cuda()
    data = torch.randn(shape, device="cuda", requires_grad=True)
    output = layer(data)
    assert output.shape == result
    assert output.is_contiguous()
    output.sum().backward()
    assert data.grad.shape == shape
    assert layer.weight.grad.shape == layer.weight.shape
    assert layer.bias.grad.shape == layer.bias.shape


def test_a_transposed_signal_is_copied_before_a_convolution_over_one_dimension(gpu):
    layer = nn.Conv1d(4, 8, 1, bias=False).cuda()
    data = torch.randn(2, 10, 4, device="cuda").transpose(1, 2).requires_grad_()
    first = count(gpu)
    output = layer(data)
    assert output.is_contiguous() and made(gpu, first) == [4 * 80, 4 * 160]
    first = count(gpu)
    output.backward(torch.ones_like(output))
    assert made(gpu, first, op="convolution_backward", hidden=True) == [4 * 80]


def test_output_padding_is_less_than_the_stride_in_each_dimension():
    assert not is_output_padding_big([2], [1, 1]) and is_output_padding_big([2], [1, 2])
    assert not is_output_padding_big([2, 3], [1, 2]) and is_output_padding_big([2, 3], [2, 0])


def test_wrong_channels_are_torchs_own_error(gpu):
    with pytest.raises(RuntimeError):
        nn.Conv2d(4, 8, 3).cuda()(torch.randn(2, 5, 10, 10, device="cuda"))


# -- batch norm --------------------------------------------------------------------------------------------------------


def test_cudnn_batch_norm_takes_what_was_recorded(gpu):
    # A recording of torch 2.3: output, mean and inverse deviation of 16 channels, and the gradients of all three.
    layer = nn.BatchNorm2d(16).cuda()
    data = torch.randn(16, 16, 64, 64, device="cuda", requires_grad=True)
    first = count(gpu)
    result = layer(data)
    assert made(gpu, first, op="cudnn_batch_norm") == [4 * MIB, 64, 64]
    first = count(gpu)
    result.backward(torch.ones_like(result))
    assert made(gpu, first, op="cudnn_batch_norm_backward") == [4 * MIB, 64, 64]


def test_cudnn_batch_norm_keeps_float32_statistics_for_float16(gpu):
    layer = nn.BatchNorm2d(16).cuda()
    first = count(gpu)
    assert layer(torch.randn(2, 16, 8, 8, device="cuda", dtype=torch.float16)).dtype is torch.float16
    assert made(gpu, first, op="cudnn_batch_norm") == [2 * 2 * 16 * 64, 64, 64]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("training", [True, False])
def test_torchs_own_batch_norm_keeps_float32_statistics(gpu, dtype, training):
    layer = nn.BatchNorm2d(16).cuda().train(training)
    data = torch.randn(2, 16, 8, 8, device="cuda", dtype=dtype)
    first = count(gpu)
    with torch.backends.cudnn.flags(enabled=dtype is torch.bfloat16):  # cuDNN's is never taken in bfloat16
        layer(data)
    assert made(gpu, first, op="native_batch_norm") == [dtype.itemsize * 2048, 64, 64]


def test_cudnn_batch_norm_keeps_no_statistics_in_evaluation_and_computes_them_backward(gpu):
    layer = nn.BatchNorm2d(16).cuda().eval()
    data = torch.randn(2, 16, 8, 8, device="cuda", requires_grad=True)
    first = count(gpu)
    result = layer(data)
    assert made(gpu, first) == [8192]
    result.sum().backward()
    assert data.grad.shape == data.shape
    assert layer.weight.grad.shape == (16,)


def test_channels_last_batch_norm_of_torchs_own_stages_its_sums(gpu):
    layer = nn.BatchNorm2d(16).cuda()
    data = torch.randn(8, 16, 64, 64, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    first = count(gpu)
    layer(data)
    # 32,768 values for a channel: 32 rows of values for 512 threads in 16 columns, 16 a thread: 64 rows of blocks.
    assert made(gpu, first, hidden=True) == [4 * 4 * 16 * 64, 4]


def test_batch_norm_keeps_the_layout_of_its_input(gpu):
    data = torch.randn(2, 16, 8, 8, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    result = nn.BatchNorm2d(16).cuda()(data)
    assert result.is_contiguous(memory_format=torch.channels_last)
    result.backward(torch.ones(result.shape, device="cuda"))
    assert data.grad.is_contiguous(memory_format=torch.channels_last)


def test_channels_last_batch_norm_takes_workspaces_on_an_h100():
    """operators.jsonl of the recorded H100."""
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        data = torch.randn(8, 64, 56, 56, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
        result = nn.BatchNorm2d(64, track_running_stats=False).cuda()(data)
        result.backward(torch.ones_like(result))
    assert made(gpu, 0, op="batch_norm", hidden=True) == [203_348, 135_204]


def test_instance_norm_is_batch_norm_of_one_sample(gpu):
    layer = nn.InstanceNorm2d(4, affine=True, track_running_stats=True).cuda()
    data = torch.randn(2, 4, 8, 8, device="cuda", requires_grad=True)
    first = count(gpu)
    result = layer(data)
    assert made(gpu, first, op="cudnn_batch_norm") == [4 * data.numel(), 32, 32]
    result.sum().backward()
    assert data.grad.shape == data.shape
    assert layer.weight.grad.shape == (4,)


def test_batch_norm_of_features_alone_is_torchs_own(gpu):
    first = count(gpu)
    nn.BatchNorm1d(16).cuda()(torch.randn(8, 16, device="cuda"))
    assert made(gpu, first, op="native_batch_norm") == [512, 64, 64]
