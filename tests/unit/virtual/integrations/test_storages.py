"""Deep copies of tensors, storages that the program resizes or shares, and what they take of the GPU."""

import copy
import gc

import pytest
import torch
from torch import nn

import memprof

MIB = 2**20


def allocated() -> int:
    return torch.cuda.memory_allocated()


@pytest.fixture
def gpu():
    with memprof.virtual_gpu("h100-80gb") as gpu:
        yield gpu


def test_a_deep_copy_is_on_the_gpu_and_counted(gpu):
    tensor = torch.empty(4 * MIB, device="cuda")
    made = copy.deepcopy(tensor)
    assert made.device == tensor.device and made.is_cuda
    assert allocated() == 32 * MIB
    del made
    assert allocated() == 16 * MIB


def test_a_deep_copy_of_states(gpu):
    model = nn.Linear(1024, 1024, bias=False, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024, device="cuda")).sum().backward()
    optimizer.step()
    before = allocated()
    best = copy.deepcopy(model.state_dict())
    assert allocated() - before == 4 * MIB
    saved = copy.deepcopy(optimizer.state_dict())
    assert allocated() - before == 12 * MIB
    assert saved["state"][0]["exp_avg"].is_cuda
    model.load_state_dict(best)
    optimizer.load_state_dict(saved)


def test_tensors_that_share_a_storage_share_the_copy(gpu):
    whole = torch.empty(4 * MIB, device="cuda")
    parts = copy.deepcopy([whole[: 2 * MIB], whole[2 * MIB :].view(2, -1), whole])
    assert allocated() == 32 * MIB
    assert [part.shape for part in parts] == [(2 * MIB,), (2, MIB), (4 * MIB,)]
    assert len({part.untyped_storage()._cdata for part in parts}) == 1
    assert parts[1].storage_offset() == 2 * MIB


def test_a_deep_copy_keeps_gradient_class_and_attributes(gpu):
    tensor = torch.ones(MIB, device="cuda", requires_grad=True)
    tensor.sum().backward()
    tensor.note = [1, 2]  # type: ignore[attr-defined]
    made = copy.deepcopy(tensor)
    assert made.requires_grad and made.grad is not None and made.grad.is_cuda
    assert made.note == [1, 2] and made.note is not tensor.note  # type: ignore[attr-defined]
    assert isinstance(copy.deepcopy(nn.Buffer(torch.ones(3, device="cuda"))), nn.Buffer)


def test_no_leaf_is_refused_as_on_a_gpu(gpu):
    tensor = torch.ones(8, device="cuda", requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(tensor)


def test_known_numbers_stay_known(gpu):
    assert copy.deepcopy(torch.arange(4, device="cuda")).tolist() == [0, 1, 2, 3]


def test_a_deep_copy_on_the_host(gpu):
    tensor = torch.zeros(MIB)
    assert copy.deepcopy(tensor).device.type == "cpu"
    assert allocated() == 0


def test_a_storage_that_is_resized(gpu):
    tensor = torch.empty(4096, 4096, device="cuda")
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert allocated() == 0 and storage.size() == 0
    assert tensor.is_cuda
    storage.resize_(64 * MIB)
    assert allocated() == 64 * MIB
    tensor._typed_storage()._resize_(0)  # as FSDP does
    assert allocated() == 0
    del storage, tensor
    assert allocated() == 0


def test_a_host_storage_that_is_resized(gpu):
    tensor = torch.zeros(4 * MIB)
    tensor.untyped_storage().resize_(0)
    assert allocated() == 0


def test_a_storage_that_was_set_dies_with_its_tensors(gpu):
    """What is remembered of a call does not keep the storage that it was given."""
    tensor = torch.empty(4 * MIB, device="cuda")
    other = torch.empty(0, device="cuda")
    other.set_(tensor.untyped_storage(), 0, (MIB,), (1,))
    del tensor, other
    gc.collect()
    assert allocated() == 0


HOST = {
    "type_as": lambda big: torch.arange(4).type_as(big),
    "to": lambda big: torch.arange(4).to(big),
    "new_full": lambda big: big.new_full((2,), 1.0),
    "new_zeros": lambda big: big.new_zeros(2),
    "pad": lambda big: nn.functional.pad(big, (1, 1)),
    "circular pad": lambda big: nn.functional.pad(big[None], (1, 1), mode="circular"),
    "reflected pad": lambda big: nn.functional.pad(big[None], (1, 1), mode="reflect"),
    "where": lambda big: torch.where(big > 0, big, 1.0),
    "repeat": lambda big: big.repeat(2, 1),
    "repeat_interleave": lambda big: big.repeat_interleave(2, 0),
    "interpolate": lambda big: nn.functional.interpolate(big[None], scale_factor=2),
    "cross_entropy": lambda big: nn.functional.cross_entropy(big, torch.zeros(big.shape[0], dtype=torch.int64)),
    "dropout": lambda big: nn.functional.dropout(big),
    "std": lambda big: big.std(),
    "norm": lambda big: big.norm(dim=0),
    "linalg norm": lambda big: torch.linalg.vector_norm(big, 3),
    "diag": lambda big: torch.diag(big[0]),
    "block_diag": lambda big: torch.block_diag(big[:2], big[:2]),
    "kron": lambda big: torch.kron(big[:1], torch.ones(1, 2)),
    "cdist": lambda big: torch.cdist(big[:4], big[:4]),
    "one_hot": lambda big: nn.functional.one_hot(torch.zeros(512 * 1024, dtype=torch.int64), 3),
    "histc": lambda big: torch.histc(big, 4),
    "tril": lambda big: big.tril(),
    "cov": lambda big: torch.cov(big[:4]),
    "gradient": lambda big: torch.gradient(big[:4], dim=1)[0],
    "unfold": lambda big: nn.functional.unfold(big[None, None], 3)[..., :2],
    "matrix_power": lambda big: torch.matrix_power(big[:512, :512], 3),
    "rot90": lambda big: torch.rot90(big),
    "tensor_split": lambda big: torch.tensor_split(big, 2)[0],
    "attention": lambda big: nn.functional.scaled_dot_product_attention(big[None], big[None], big[None]),
    "layer_norm": lambda big: nn.functional.layer_norm(big, big.shape[-1:]),
    "embedding_bag": lambda big: nn.functional.embedding_bag(torch.zeros(2, 2, dtype=torch.int64), big),
}


@pytest.mark.parametrize("name", HOST)
def test_what_is_made_of_host_tensors_is_on_the_host(name, gpu):
    """A large host tensor has no data, and what C++ makes after it is no GPU's."""
    made = HOST[name](torch.zeros(512, 1024))
    assert made.device.type == "cpu"
    assert allocated() == 0
    assert torch.cuda.max_memory_allocated() == 0
    assert not gpu.trace.mismatches


def test_a_slice_of_a_storage_is_memory_of_it(gpu):
    """As nanotron makes the gradients of all parameters in one buffer."""
    buffer = torch.zeros(1024, device="cuda")
    held = allocated()
    part = buffer.untyped_storage()[1024:3072]
    assert (part.nbytes(), part.device.type) == (2048, "cuda")
    tensor = torch.empty([], device="cuda")
    tensor.set_(source=part)
    assert tensor.shape == (512,) and tensor.storage_offset() == 256
    assert tensor.untyped_storage()._cdata == buffer.untyped_storage()._cdata
    assert allocated() == held
    tensor.view(16, 32).add_(1.0)
    host = torch.zeros(16)
    assert torch.empty(0).set_(host.untyped_storage()[0:32]).shape == (8,)
    assert host.untyped_storage()[0] == 0
