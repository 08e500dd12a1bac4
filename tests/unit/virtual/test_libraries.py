"""What CUDA's libraries and kernels take beside results: workspaces, copies, sorting, formats."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
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


def test_embedding_backward_copies_what_is_not_contiguous() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        embedding = nn.Embedding(10, 4, device="cuda")
        embedding(torch.zeros(8, dtype=torch.int64, device="cuda")).sum().backward()
        assert hidden(gpu) == [("aten.embedding_dense_backward", 8 * 4 * 4)]


def test_a_list_as_index_is_a_tensor_on_the_gpu(gpu: VirtualGpu) -> None:
    data = torch.arange(12, device="cuda").reshape(3, 4)
    watch = Watch(gpu)
    assert data[:, [3, 0]].tolist() == [[3, 0], [7, 4], [11, 8]]
    assert watch.sizes == [16, 3 * 2 * 8]
    assert data[[2]].tolist() == [[8, 9, 10, 11]]
    data[[0, 1], 0] = 7
    assert data[:, 0].tolist() == [7, 7, 8]
    assert data[[True, False, True]].shape == (2, 4)


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
