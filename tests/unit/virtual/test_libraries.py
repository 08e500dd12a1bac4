"""What CUDA's libraries and kernels take beside results: workspaces, copies, sorting, formats."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.trace.events import EventKind
from memprof.virtual import VirtualGpu
from tests.unit.virtual.test_tracker import Watch, ones


def hidden(gpu: VirtualGpu) -> list[tuple[str, int]]:
    return [(gpu.trace.op(s), s.num_bytes) for s in gpu.trace.storages if s.hidden]


def test_cublas_workspace_of_each_thread() -> None:
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        layer = nn.Linear(16, 16, bias=False, device="cuda")
        assert hidden(gpu) == []
        # Squared: the gradient of a sum is expanded, and cuBLAS would be given a copy.
        loss = layer(ones(4, 16)).square().sum()
        layer(ones(4, 16))
        assert hidden(gpu) == [("cublas workspace", 8_519_680)]
        loss.backward()
        assert hidden(gpu) == [("cublas workspace", 8_519_680)] * 2


def test_embedding_backward_sorts_many_indices() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        embedding = nn.Embedding(10, 4, device="cuda")
        # Squared: the gradient of a sum is expanded, and would be copied first.
        embedding(torch.zeros(3072, dtype=torch.int64, device="cuda")).square().sum().backward()
        assert hidden(gpu) == []
        embedding(torch.zeros(3073, dtype=torch.int64, device="cuda")).square().sum().backward()
        assert hidden(gpu)[:3] == [("aten.embedding_dense_backward", 3073 * 8)] * 3
    frees = {event.ref for event in gpu.trace.events if event.kind is EventKind.FREE}
    assert all(index in frees for index, storage in enumerate(gpu.trace.storages) if storage.hidden)


def test_embedding_backward_copies_what_is_not_contiguous() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        embedding = nn.Embedding(10, 4, device="cuda")
        embedding(torch.zeros(8, dtype=torch.int64, device="cuda")).sum().backward()
        assert hidden(gpu) == [("aten.embedding_dense_backward", 8 * 4 * 4)]


def test_cumsum_of_booleans_sums_an_integer_copy() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        torch.ones(2, 100, dtype=torch.bool, device="cuda").cumsum(0)
        torch.ones(2, 100, dtype=torch.int64, device="cuda").cumsum(0)
        assert hidden(gpu) == [("aten.cumsum", 1600)]


def test_layer_norm_of_a_transposed_tensor_copies_it_and_gives_contiguous_gradients() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        data = torch.zeros(4, 16, 8, device="cuda", requires_grad=True)
        norm = nn.LayerNorm(16, device="cuda")
        begin = len(gpu.trace.storages)
        states = norm(data.transpose(1, 2))
        assert [s.num_bytes for s in gpu.trace.storages[begin:]] == [2048, 2048, 128, 128]
        gradients = []
        states.register_hook(lambda gradient: None)
        data.register_hook(lambda gradient: gradients.append(gradient.stride()))
        states.transpose(1, 2).contiguous().square().sum().backward()
        # The input's copy first, then three gradients, then the copy of the gradient of the output.
        made = [s.num_bytes for s in gpu.trace.storages if gpu.trace.op(s) == "aten.native_layer_norm_backward"]
        assert made == [2048, 2048, 64, 64, 2048]
        assert gradients == [(128, 1, 16)]


def test_linear_adds_a_bias_in_place_where_it_cannot_be_fused(gpu: VirtualGpu) -> None:
    layer = nn.Linear(16, 32, device="cuda")
    data = ones(4, 16, 8).transpose(1, 2)
    watch = Watch(gpu)
    layer(data)
    assert watch.ops == ["aten.clone", "aten.mm"]


def test_one_hot_scatters_ones_into_zeros(gpu: VirtualGpu) -> None:
    classes = torch.arange(6, device="cuda") % 3
    watch = Watch(gpu)
    assert nn.functional.one_hot(classes).tolist() == nn.functional.one_hot(torch.arange(6) % 3).tolist()
    assert nn.functional.one_hot(classes, 5).shape == (6, 5)
    # The largest class is read from the GPU; the ones on the host are real.
    assert watch.sizes == [8, 6 * 3 * 8, 6 * 5 * 8]


def test_a_list_as_index_is_a_tensor_on_the_gpu(gpu: VirtualGpu) -> None:
    data = torch.arange(12, device="cuda").reshape(3, 4)
    watch = Watch(gpu)
    assert data[:, [3, 0]].tolist() == [[3, 0], [7, 4], [11, 8]]
    assert watch.sizes == [16, 3 * 2 * 8]
    assert data[[2]].tolist() == [[8, 9, 10, 11]]
    data[[0, 1], 0] = 7
    assert data[:, 0].tolist() == [7, 7, 8]
    assert data[[True, False, True]].shape == (2, 4)


def test_rolling_two_dimensions_rolls_one_after_the_other(gpu: VirtualGpu) -> None:
    data = ones(4, 8)
    watch = Watch(gpu)
    torch.roll(data, (1, 2), (0, 1))
    torch.roll(data, 1, 0)
    assert watch.sizes == [128, 128, 128]


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_keep_channels_last_as_cudnn_does(gpu: VirtualGpu, channels_last: bool) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    data = ones(2, 8, 6, 6).to(memory_format=layout).requires_grad_()
    layer = nn.Conv2d(8, 4, 3, device="cuda")
    states = layer(data)
    assert states.is_contiguous(memory_format=layout)
    states.square().sum().backward()
    assert data.grad is not None and data.grad.is_contiguous(memory_format=layout)
    # A weight's gradient has the weight's own layout, whatever the kernel gave.
    assert layer.weight.grad is not None and layer.weight.grad.is_contiguous()


def test_clipping_takes_the_foreach_operators_that_cuda_takes(gpu: VirtualGpu) -> None:
    parameters = [nn.Parameter(ones(8)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = ones(8)
    watch = Watch(gpu)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    assert watch.ops[:4] == ["aten._foreach_norm"] * 4  # the partial norms and three results


def test_adding_at_indices_sorts_them() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        weight = nn.Parameter(torch.zeros(100, 4, device="cuda"))
        weight[torch.arange(50, device="cuda")].square().sum().backward()
        # As real recordings have it: five index tensors and cub's scratch.
        assert hidden(gpu) == [("aten.index_put_", 400)] * 5 + [("aten.index_put_", 1)]
