"""Sparse tensors: torch's own on the host, indices and values on the card."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from memprof.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.trace.events import GPU, Role
from memprof.virtual import VirtualGpu


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        yield gpu


def on_card(gpu: VirtualGpu) -> list[int]:
    return [storage.num_bytes for storage in gpu.trace.storages if storage.device == GPU]


HOST: dict[str, Callable[[], torch.Tensor]] = {
    "to_sparse": lambda: torch.eye(6).to_sparse(),
    "sparse_coo_tensor": lambda: torch.sparse_coo_tensor(torch.arange(6).repeat(2, 1), torch.ones(6), (6, 6)),
    "sparse_csr_tensor": lambda: torch.sparse_csr_tensor(torch.arange(7), torch.arange(6), torch.ones(6), (6, 6)),
    "FloatTensor": lambda: torch.sparse.FloatTensor(torch.arange(6).repeat(2, 1), torch.ones(6), torch.Size([6, 6])),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", HOST.values(), ids=HOST)
def test_on_the_host_and_moved(gpu: VirtualGpu, make: Callable[[], torch.Tensor]) -> None:
    sparse = make()
    assert sparse.device.type == "cpu" and (sparse.to_dense() == torch.eye(6)).all()
    assert on_card(gpu) == []
    moved = sparse.to("cuda")
    assert moved.device.type == "cuda" and moved.layout is sparse.layout
    indices = [8 * 12] if sparse.layout is torch.sparse_coo else [8 * 7, 8 * 6]
    assert on_card(gpu) == [*indices, 4 * 6]


def test_of_a_module(gpu: VirtualGpu) -> None:
    module = nn.Linear(8, 8)
    module.register_buffer("heads", torch.ones(6, 8, dtype=torch.bool).to_sparse(), persistent=False)
    module.cuda()
    module(torch.ones(2, 8, device="cuda"))
    buffers = [index for index, owner in gpu.trace.owners.items() if owner.role is Role.BUFFER]
    assert [gpu.trace.storages[index].num_bytes for index in buffers] == [2 * 48 * 8, 48]


def test_of_a_large_tensor_of_the_host(gpu: VirtualGpu) -> None:
    assert torch.diag(torch.ones(1024)).to_sparse()._nnz() == 1024  # determined, and so computed
    sparse = torch.randn(1024, 1024).to_sparse()
    assert sparse.device.type == "cpu" and sparse._nnz() == 1024 * 1024  # what is not known is not zero
    assert any("keeps every element" in sentence for sentence in gpu.trace.assumptions)


def test_products(gpu: VirtualGpu) -> None:
    sparse = torch.eye(6).to_sparse().cuda()
    dense = torch.ones(6, 3, device="cuda", requires_grad=True)
    product = torch.sparse.mm(sparse, dense)
    assert product.shape == (6, 3) and product.is_cuda
    product.sum().backward()
    assert dense.grad is not None and dense.grad.shape == (6, 3)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD])
def test_sparse_gradients(
    gpu: VirtualGpu, kind: type[nn.Module], optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    table = kind(1000, 16, sparse=True).cuda()
    steps = optimizer(table.parameters(), lr=0.1)
    for _ in range(2):
        steps.zero_grad()
        table(torch.randint(0, 1000, (4, 5), device="cuda")).sum().backward()
        grad = table.weight.grad
        assert grad.is_sparse and grad.device.type == "cuda"
        assert grad._indices().shape == (1, 20) and grad._values().shape == (20, 16)
        steps.step()
    grads = [index for index, owner in gpu.trace.owners.items() if owner.role is Role.GRADIENT]
    assert {gpu.trace.storages[index].num_bytes for index in grads} == {20 * 8, 20 * 16 * 4}


def test_what_cannot_be_followed(gpu: VirtualGpu) -> None:
    with pytest.raises(MemprofError, match=r"gives a sparse tensor on the card to aten\.relu"):
        torch.eye(6).to_sparse().cuda().relu()
