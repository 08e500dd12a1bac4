"""Sparse tensors: torch's own on the host, indices and values on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.trace.events import GPU, Role
from memprof.virtual import VirtualGpu
from memprof.virtual.kernels import sparse

pytestmark = pytest.mark.filterwarnings("ignore")  # torch says once that CSR is a beta


def on_gpu(gpu: VirtualGpu) -> list[int]:
    return [storage.num_bytes for storage in gpu.trace.storages if storage.device == GPU]


HOST: dict[str, Callable[[], torch.Tensor]] = {
    "to_sparse": lambda: torch.eye(6).to_sparse(),
    "sparse_coo_tensor": lambda: torch.sparse_coo_tensor(torch.arange(6).repeat(2, 1), torch.ones(6), (6, 6)),
    "sparse_csr_tensor": lambda: torch.sparse_csr_tensor(torch.arange(7), torch.arange(6), torch.ones(6), (6, 6)),
    "FloatTensor": lambda: torch.sparse.FloatTensor(torch.arange(6).repeat(2, 1), torch.ones(6), torch.Size([6, 6])),
}


@pytest.mark.parametrize("make", HOST.values(), ids=HOST)
def test_on_the_host_and_moved(gpu: VirtualGpu, make: Callable[[], torch.Tensor]) -> None:
    sparse = make()
    assert sparse.device.type == "cpu" and (sparse.to_dense() == torch.eye(6)).all()
    assert on_gpu(gpu) == []
    moved = sparse.to("cuda")
    assert moved.device.type == "cuda" and moved.layout is sparse.layout
    indices = [8 * 12] if sparse.layout is torch.sparse_coo else [8 * 7, 8 * 6]
    assert on_gpu(gpu) == [*indices, 4 * 6]


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


def test_memory_of_a_product(gpu: VirtualGpu) -> None:
    """Requests of torch.sparse.mm in order; the matrix has 3 places, one of them twice, so it is not coalesced."""
    places = torch.tensor([[0, 1, 1], [2, 3, 3]], device="cuda")
    sparse = torch.sparse_coo_tensor(places, torch.ones(3, device="cuda"), (100, 200))
    dense = torch.ones(200, 50, device="cuda")
    before = len(on_gpu(gpu))
    torch.sparse.mm(sparse, dense)
    made = on_gpu(gpu)[before:]
    result = 100 * 50 * 4
    assert made[:2] == [result, result]  # zeros to add to, and the result
    rows = [4 * 101, 4 * 3, 4 * 3]
    assert made[-4:] == [*rows, result]  # 32-bit indices, and the result in columns
    assert sorted(made[2:-4])[-4:] == [24, 24, 24, 48]  # coalesced


def test_memory_of_a_sampled_product(gpu: VirtualGpu) -> None:
    """The result has offsets, columns and values of its own. For the gradients, the mask is made dense, in bool, and
    the positions of all elements in int64."""
    mask = torch.sparse_csr_tensor(torch.arange(101), torch.arange(100), torch.zeros(100), size=(100, 200)).cuda()
    left = torch.randn(100, 8, device="cuda", requires_grad=True)
    right = torch.randn(8, 200, device="cuda", requires_grad=True)
    before = len(on_gpu(gpu))
    sampled = torch.sparse.sampled_addmm(mask, left, right)
    assert sampled.layout is torch.sparse_csr and sampled.shape == (100, 200)
    assert on_gpu(gpu)[before:] == [8 * 101, 8 * 100, 4 * 100]
    before = len(gpu.trace.storages)
    sampled.sum().backward()
    assert left.grad.shape == (100, 8) and right.grad.shape == (8, 200)
    made = [storage for storage in gpu.trace.storages[before:] if storage.hidden]
    assert [one.num_bytes for one in made if gpu.trace.op(one) == "aten.sparse_mask"] == [100 * 200, 8 * 100 * 200]


def test_gradients_of_a_sparse_leaf_add_up(gpu: VirtualGpu) -> None:
    """torch keeps both gradients' elements until they are more than the matrix has."""
    leaf = torch.ones(4, 4, device="cuda").to_sparse().requires_grad_()
    dense = torch.ones(4, 4, device="cuda")
    counts = []
    for _ in range(2):
        torch.sparse.mm(leaf, dense).sum().backward()
        counts.append(leaf.grad._nnz())
    assert counts == [16, 16]
    few = torch.eye(4, device="cuda").to_sparse()
    few.add_(few)
    assert few._nnz() == 8


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
    with pytest.raises(MemprofError, match=r"gives a sparse tensor to aten\.relu"):
        torch.eye(6).to_sparse().cuda().relu()


LAYOUTS = {
    torch.sparse_csr: torch.sparse_csr_tensor,
    torch.sparse_csc: torch.sparse_csc_tensor,
    torch.sparse_bsr: torch.sparse_bsr_tensor,
    torch.sparse_bsc: torch.sparse_bsc_tensor,
}
# Of elements that are not zero: 4 bytes for each as values, from which 1 MiB is virtual; drawn indices are real.
COUNTS = {"real": 1000, "real indices, virtual values": 1 << 18}
# Of (elements, device of the other part): what is made, on either device.
PROGRAMS: dict[str, Callable[[int, str], object]] = {}


def program(function: Callable[[int, str], object]) -> Callable[[int, str], object]:
    PROGRAMS[function.__name__] = function
    return function


def coo(count: int, **options: object) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.randint(0, 2048, (2, count)), torch.randn(count), (2048, 2048), **options)


def compressed(count: int, layout: torch.layout, **options: object) -> torch.Tensor:
    """256 rows, or columns, of as many elements or blocks each."""
    block = (4, 4) if layout in (torch.sparse_bsr, torch.sparse_bsc) else ()
    count //= 16 if block else 1
    begins = torch.linspace(0, count, 257).long()
    values = torch.randn(count, *block)
    return LAYOUTS[layout](begins, torch.randint(0, 256, (count,)), values, **options)


@program
def moved(count: int, device: str) -> object:
    made = coo(count)
    there = made.to(device)
    return made, there, torch.sparse.mm(there, torch.randn(2048, 4, device=device)), there.cpu().to(device)


@program
def virtual_indices_and_real_values(count: int, device: str) -> object:
    made = torch.sparse_coo_tensor(torch.zeros(2, count // 4, dtype=torch.long), torch.ones(count // 4), (8, 8))
    return made, made.to(device)


@program
def dense_rows(count: int, device: str) -> object:
    made = torch.sparse_coo_tensor(torch.randint(0, 64, (1, count // 64)), torch.randn(count // 64, 64), (64, 64))
    return made.to_dense(), made.to(device).to_dense()


@program
def by_keyword_and_by_list(count: int, device: str) -> object:
    values = torch.randn(count)
    made = torch.sparse_coo_tensor(size=(8, count), values=values, indices=torch.randint(0, 8, (2, count)))
    listed = torch.sparse_coo_tensor([[0, 1], [1, 0]], torch.randn(2, count), (2, 2, count), requires_grad=True)
    legacy = torch.sparse.FloatTensor(torch.randint(0, 8, (2, count)), values, torch.Size([8, 8]))
    return made, listed.to(device), legacy, listed.requires_grad


@program
def on_a_named_device(count: int, device: str) -> object:
    made = coo(count, device=device)
    with torch.device(device):
        listed = torch.sparse_csr_tensor([0, 1, 2], [0, 1], torch.randn(2))
    # Its size is given: else it is as wide as the largest column that was drawn.
    return made, coo(count, device="cpu"), listed, compressed(count, torch.sparse_csr, size=(256, 256), device=device)


@program
def of_every_layout(count: int, device: str) -> object:
    made = [compressed(count, layout, size=(1024 if "bs" in str(layout) else 256,) * 2) for layout in LAYOUTS]
    general = torch.sparse_compressed_tensor(
        torch.linspace(0, count, 257).long(),
        torch.randint(0, 256, (count,)),
        torch.randn(count),
        size=(256, 256),  # else as wide as the largest column that was drawn
        layout=torch.sparse_csr,
    )
    there = [one.to(device) for one in (*made, general)]
    return made, there, [one.to_dense() for one in there]


@program
def used_on_the_host(count: int, device: str) -> object:
    made = coo(count)
    rows = torch.sparse.sum(made, dim=1)
    return (
        (made * 0.5).to(device), made.t().to(device), torch.zeros(2048, 2048) + made, made.to_sparse_csr(), rows.layout,
        rows.to_dense(), torch.sparse.sum(made, dim=(0, 1)), torch.sparse.mm(made, torch.randn(2048, 4)),
        torch.randn(2048, 2048).to_sparse_csr().to_dense(), torch.zeros(4096, 64, layout=torch.sparse_coo),
        torch.sparse_coo_tensor((4096, 4096)),
    )  # fmt: skip


@program
def gradients_of_values(count: int, device: str) -> object:
    values = [torch.randn(count, requires_grad=True) for _ in range(2)]
    of = {"indices": torch.randint(0, 2048, (2, count)), "size": (2048, 2048)}
    made = torch.sparse_coo_tensor(values=values[0], **of).to(device)
    other = torch.sparse_coo_tensor(values=values[1], device=device, **of)
    for one in (made, other):
        torch.sparse.mm(one, torch.randn(2048, 4, device=device)).sum().backward()
    return [one.grad for one in values]


def table_on_the_host(
    kind: type[nn.Module], make: Callable[..., torch.optim.Optimizer]
) -> Callable[[int, str], object]:
    """4096 rows for as many elements, looked up so often that indices are virtual, and once."""

    def run(count: int, device: str) -> object:
        made = []
        for looks in (64, 1 << 18):
            table, net = kind(4096, count // 4096 or 1, sparse=True), nn.Linear(count // 4096 or 1, 2).to(device)
            steps = make(list(table.parameters()))
            for _ in range(2):
                rows = table(torch.zeros(1, looks, dtype=torch.long))
                net(rows.to(device)).sum().backward()
                made.append(table.weight.grad)
                steps.step()
                steps.zero_grad()
        return [(one, one._indices(), one._values()) for one in made]

    return run


for one in (nn.Embedding, nn.EmbeddingBag):
    for optimizer in (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad):
        PROGRAMS[f"{one.__name__}, {optimizer.__name__}"] = table_on_the_host(one, optimizer)


@program
def gradient_set_by_hand(count: int, device: str) -> object:
    large, small = nn.Parameter(torch.randn(count, 4)), nn.Parameter(torch.randn(8, 4))
    for weight, rows in ((large, 8), (small, count)):
        indices, values = torch.randint(0, 8, (1, rows)), torch.randn(rows, 4)
        weight.grad = torch.sparse_coo_tensor(indices, values, weight.shape)
    torch.optim.SGD([large, small], lr=0.1).step()
    return large.grad, small.grad


class OfRows(torch.autograd.Function):
    """Its gradient is sparse, and made by hand."""

    @staticmethod
    def forward(ctx, weight, rows):
        ctx.save_for_backward(rows)
        ctx.shape = weight.shape
        return weight[rows]

    @staticmethod
    def backward(ctx, gradient):
        (rows,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(rows[None], gradient, ctx.shape), None


@program
def gradient_of_a_function(count: int, device: str) -> object:
    large, small = nn.Parameter(torch.randn(count, 4)), nn.Parameter(torch.randn(8, 4))
    for weight, rows in ((large, 8), (small, count)):
        OfRows.apply(weight, torch.randint(0, 8, (rows,))).to(device).sum().backward()
    return large.grad, small.grad


def described(made: object) -> object:
    if isinstance(made, torch.Tensor):
        stride = made.stride() if made.layout is torch.strided else ()
        return made.shape, made.dtype, made.device.type, made.layout, stride, made.requires_grad
    return [described(part) for part in made] if isinstance(made, (list, tuple)) else made


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_host_has_what_plain_torch_has(name: str, count: int) -> None:
    plain = described(PROGRAMS[name](count, "cpu"))
    with VirtualGpu(find_gpu("a100-80gb")):
        made = described(PROGRAMS[name](count, "cuda"))
    assert str(made).replace("'cuda'", "'cpu'") == str(plain)


def test_moved_to_the_gpu_it_takes_indices_and_values(gpu: VirtualGpu) -> None:
    coo(1 << 18, device="cuda")
    assert on_gpu(gpu) == [4 << 18, 16 << 18]
    compressed(1 << 18, torch.sparse_csr).cuda()
    assert on_gpu(gpu)[2:] == [8 * 257, 8 << 18, 4 << 18]


def test_what_the_host_does_takes_nothing_of_the_gpu(gpu: VirtualGpu) -> None:
    made = coo(1 << 18)
    made.coalesce().to_sparse_csr()
    torch.zeros(2048, 2048).add_(made, alpha=2)
    assert on_gpu(gpu) == []


@pytest.mark.parametrize("size", [8, 2048])
def test_a_dense_tensor_becomes_what_is_asked_for(gpu: VirtualGpu, size: int) -> None:
    for dense in (torch.ones(size, size), torch.ones(size, size, device="cuda")):
        assert dense.to_sparse(layout=torch.sparse_csr).cuda().layout is torch.sparse_csr
        assert dense.to_sparse(layout=torch.sparse_coo).cuda().layout is torch.sparse_coo


@pytest.mark.parametrize("name", ["to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc"])
def test_other_layouts_are_not_simulated(gpu: VirtualGpu, name: str) -> None:
    blocks = [] if name == "to_sparse_csc" else [(4, 4)]
    with pytest.raises(MemprofError, match=rf"not yet: .* gives a sparse tensor to aten\._{name}"):
        getattr(torch.ones(2048, 2048, device="cuda"), name)(*blocks)


def test_sparse_dimensions_of_ones_choice_are_not_simulated(gpu: VirtualGpu) -> None:
    with pytest.raises(MemprofError, match=r"not yet: .* gives a sparse tensor to aten\._to_sparse"):
        torch.ones(2048, 2048, device="cuda").to_sparse(1)


def test_rows_that_are_added_up_are_no_more_than_there_are(gpu: VirtualGpu) -> None:
    made = torch.sparse_coo_tensor(torch.randint(0, 16, (1, 1 << 18)), torch.randn(1 << 18), (16,))
    assert made.coalesce()._nnz() == 16


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_parts_on_two_devices_are_a_mismatch(gpu: VirtualGpu, count: int) -> None:
    torch.sparse_coo_tensor(torch.randint(0, 8, (2, count)), torch.randn(count, device="cuda"), (8, 8))
    torch.sparse.mm(coo(count), torch.randn(2048, 4, device="cuda"))
    torch.sparse.mm(coo(count).cuda(), torch.randn(2048, 1024))
    assert len(gpu.trace.mismatches) == 3


def test_a_transposed_matrix_is_a_copy_with_as_many_elements():
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        places = torch.arange(100, device="cuda")
        made = torch.sparse_coo_tensor(torch.stack([places, places]), torch.ones(100, device="cuda"), (200, 100))
        first = len(gpu.trace.storages)
        transposed = made.coalesce().t()
        num_bytes = [storage.num_bytes for storage in gpu.trace.storages[first:]]
    assert (transposed._nnz(), transposed.shape) == (100, (100, 200))
    assert num_bytes[-3:] == [4 * 100, 2 * 8 * 100, 8 * 100]


@pytest.mark.parametrize(("layout", "sides", "expected"), [
    ("coo", 64, 4 * 197 + 3), ("coo", 1, 4 * 14 + 3), ("csr", 64, 8 * 2084 + 7), ("csr", 1, 8 * 18 + 7),
])  # fmt: skip
def test_buffers_of_products_are_those_of_an_h100(layout, sides, expected):
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        count = torch.arange(50_000, device="cuda")
        made = torch.sparse_coo_tensor(torch.stack([count // 50, count % 50]), count.float(), (1000, 1000)).coalesce()
        matrix = made.to_sparse_csr() if layout == "csr" else made
        matrix @ torch.ones(1000, sides, device="cuda")
        assert gpu.trace.storages[-1].num_bytes == expected


@pytest.mark.parametrize(("count", "is_vector", "is_csr", "num_bytes"), [
    (3072, True, True, 8 * 2 + 7), (3073, True, True, 8 * 3 + 7), (4096, True, False, 4 * 2 + 3),
    (4097, True, False, 4 * 3 + 3), (24, False, True, 8 + 7), (25, False, True, 8 * 2 + 7),
    (256, False, False, 4 * 2 + 3), (257, False, False, 4 * 3 + 3),
])  # fmt: skip
def test_buffers_of_cusparse_by_hand(count, is_vector, is_csr, num_bytes):
    for capability, expected in (((9, 0), [num_bytes]), ((8, 0), []), ((10, 0), [])):
        launch = SimpleNamespace(gpu=SimpleNamespace(compute_capability=capability))
        assert sparse._cusparse_buffer(launch, count, is_vector, is_csr) == expected


@pytest.mark.parametrize(("call", "expected"), [
    # Of a CSR matrix of 6 x 8 with 10 elements: zeros to add to except for a vector, and the result.
    (lambda m: m @ torch.ones(8, 4, device="cuda"), [96, 96]), (lambda m: m @ torch.ones(8, device="cuda"), [24]),
    (lambda m: torch.sparse.addmm(torch.ones(6, 4, device="cuda"), m, torch.ones(8, 4, device="cuda")), [96]),
    # A matrix that is neither in rows nor in columns is copied.
    (lambda m: m @ torch.ones(8, 8, device="cuda")[:, ::2], [96, 96, 128]),
    (lambda m: m @ torch.ones(4, 8, device="cuda").t(), [96, 96]),
    (lambda m: m * 2, [40, 56, 80]), (lambda m: -m, [40, 56, 80]), (lambda m: m.to_dense(), [192]),
])  # fmt: skip
def test_requests_of_a_csr_matrix(gpu: VirtualGpu, call: Callable[[torch.Tensor], object], expected: list[int]) -> None:
    offsets = torch.tensor([0, 2, 4, 6, 8, 9, 10], device="cuda")
    matrix = torch.sparse_csr_tensor(
        offsets, torch.zeros(10, dtype=torch.int64, device="cuda"), torch.ones(10, device="cuda"), (6, 8)
    )
    first = len(gpu.trace.storages)
    call(matrix)
    made = [one.num_bytes for one in gpu.trace.storages[first:] if gpu.trace.op(one) != "aten.ones" and one.num_bytes]
    assert made == expected


@pytest.mark.parametrize(("dims", "expected"), [
    # The indices of 10 elements of 4 values each: kept, of one dimension, or none where all are summed.
    ([2], [(2, 10), (10,)]), ([0], [(1, 6), (6, 4)]), ([1, 2], [(1, 4), (4,)]), ([-1], [(2, 10), (10,)]),
])  # fmt: skip
def test_sums_of_a_sparse_tensor(gpu: VirtualGpu, dims: list[int], expected: list[tuple[int, ...]]) -> None:
    places = torch.stack([torch.arange(10, device="cuda") % 4, torch.arange(10, device="cuda") % 6])
    tensor = torch.sparse_coo_tensor(places, torch.ones(10, 4, device="cuda"), (4, 6, 4))
    found = torch.sparse.sum(tensor, dims)
    assert [tuple(part.shape) for part in (found._indices(), found._values())] == expected


def test_sums_of_all_sparse_dimensions_are_dense(gpu: VirtualGpu) -> None:
    tensor = torch.sparse_coo_tensor(torch.zeros(2, 10, dtype=torch.int64), torch.ones(10, 4), (4, 6, 4)).cuda()
    found = torch.sparse.sum(tensor, [0, 1])
    assert found.layout is torch.strided and found.shape == (4,)


@pytest.mark.parametrize(("alpha", "coalesced", "expected"), [(1, False, [80]), (2, False, [80, 40]), (2, True, [])])
def test_adding_to_a_dense_matrix_takes_an_index_of_each_row(
    gpu: VirtualGpu, alpha: int, coalesced: bool, expected: list[int]
) -> None:
    tensor = torch.sparse_coo_tensor(torch.zeros(2, 10, dtype=torch.int64), torch.ones(10), (4, 6)).cuda()
    tensor = tensor._coalesced_(coalesced)
    dense = torch.ones(4, 6, device="cuda")
    first = len(gpu.trace.storages)
    dense.add_(tensor, alpha=alpha)
    assert [one.num_bytes for one in gpu.trace.storages[first:] if one.num_bytes] == expected
    first = len(gpu.trace.storages)
    assert torch.add(dense, tensor, alpha=alpha).layout is torch.strided
    assert [one.num_bytes for one in gpu.trace.storages[first:] if one.num_bytes] == [96, *expected]
    assert dense[0, 0].item() == 1.0  # as any unknown float
