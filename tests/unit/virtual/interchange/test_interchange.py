"""What programs do with tensors beside computing: what a real run gives, or one clear error; never a crash."""

from __future__ import annotations

import ctypes
import gc
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.trace.events import GPU, HOST, EventKind, FailureKind
from memprof.virtual import VirtualGpu
from memprof.watch.failure import KernelError
from tests.processes import python

GPU_MODEL = find_gpu("a100-80gb")
LARGE = 1 << 20
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def host_bytes(gpu: VirtualGpu) -> int:
    trace = gpu.trace
    live: set[int] = set()
    for event in trace.events:
        if event.kind is EventKind.ALLOC and trace.storages[event.ref].device == HOST:
            live.add(event.ref)
        elif event.kind is EventKind.FREE:
            live.discard(event.ref)
    return sum(trace.storages[index].num_bytes for index in live)


# -- pointers and arrays ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_way_to_the_data_ends_the_process() -> None:
    """In a process of its own: what these did before was a segmentation fault."""
    program = """
import ctypes, pickle, torch, memprof
with memprof.virtual_gpu("t4"):
    for device in ("cuda", "cpu"):
        t = torch.zeros(1 << 20, device=device)
        ctypes.memset(t.data_ptr(), 1, t.nbytes)
        ctypes.memset(t[1:].untyped_storage().data_ptr(), 1, t.nbytes)
        assert ctypes.string_at(t.data_ptr() + 4, 4) == bytes([1] * 4)
        assert pickle.loads(pickle.dumps(t)).device == t.device
        assert pickle.loads(pickle.dumps(t.untyped_storage())).nbytes() == t.nbytes
        for reach in (lambda: bytes(t.untyped_storage()),
                      lambda: t.untyped_storage()._write_file(open("/dev/null", "wb"), False, True, 4)):
            try:
                reach()
            except (RuntimeError, NotImplementedError):
                continue
            raise SystemExit("data that is not there was read")
print("live")
"""
    done = python("-c", program, seconds=120)
    assert (done.exit_code, done.stdout) == (0, "live\n"), done.stderr[-1500:]


def test_pointers_are_distinct_stable_and_aligned(gpu: VirtualGpu) -> None:
    tensors = [torch.empty(LARGE, device="cuda"), torch.empty(LARGE, device="cuda"), torch.empty(LARGE)]
    pointers = [tensor.data_ptr() for tensor in tensors]
    assert len(set(pointers)) == 3 and all(pointer % 512 == 0 for pointer in pointers)
    assert pointers == [tensor.data_ptr() for tensor in tensors]
    assert tensors[0][10:].data_ptr() == pointers[0] + 40
    assert tensors[0].untyped_storage().data_ptr() == pointers[0]
    assert ctypes.c_float.from_address(pointers[1] + 4 * (LARGE - 1)).value == 0.0
    assert torch.empty(0, device="cuda").data_ptr() == 0


def test_numpy_as_on_a_real_gpu(gpu: VirtualGpu) -> None:
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        torch.zeros(3, device="cuda").numpy()
    with pytest.raises(TypeError, match="cuda:0"):
        np.asarray(torch.zeros(3, device="cuda"))
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.zeros(LARGE, requires_grad=True).numpy()
    assert torch.arange(3, device="cuda").cpu().numpy().tolist() == [0, 1, 2]
    large = torch.randn(LARGE, device="cuda").cpu()
    for array in (large.numpy(), np.asarray(large), np.array(large), np.from_dlpack(large)):
        assert array.shape == (LARGE,) and array[5] == 1.0


def test_arrays_of_unknown_numbers_take_no_memory(gpu: VirtualGpu) -> None:
    assert torch.zeros(1 << 36).numpy().shape == (1 << 36,)  # 256 GiB
    assert (torch.zeros(1 << 36, device="cuda") > 0).cpu().numpy()[7] == False  # noqa: E712


@pytest.mark.parametrize(
    ("make", "num_bytes"),
    [
        (lambda: torch.tensor([1] * 1000), 8000),
        (lambda: torch.tensor([1.0] * (1 << 18)), 1 << 20),  # large, and real all the same: the numbers are given
        (lambda: torch.as_tensor([[1, 2]] * 1000, dtype=torch.int32), 8000),
        (lambda: torch.LongTensor([1] * 1000), 8000),
        (lambda: torch.ones(2).new_tensor([1.0] * 2000), 8000),
        (lambda: torch.tensor(np.ones(1000)), 8000),
        (lambda: torch.from_numpy(np.ones(1000)), 0),  # numpy's memory
        (lambda: torch.as_tensor(np.ones(1000)), 0),
        (lambda: torch.tensor([1] * 500), 0),  # below 4 KiB
    ],
)
def test_tensors_of_lists_are_counted_on_the_host(gpu: VirtualGpu, make: Any, num_bytes: int) -> None:
    tensors = [make() for _ in range(3)]
    assert host_bytes(gpu) == 3 * num_bytes
    moved = [tensor.to("cuda") for tensor in tensors]
    assert host_bytes(gpu) == 3 * num_bytes
    assert all(tensor.tolist() == other.tolist() for tensor, other in zip(tensors, moved, strict=True))
    tensors.pop()
    assert host_bytes(gpu) == 2 * num_bytes


def test_dlpack(gpu: VirtualGpu) -> None:
    tensor = torch.zeros(8, device="cuda")
    assert torch.from_dlpack(tensor).device == CUDA
    with pytest.raises(KernelError, match="another library"):
        torch.utils.dlpack.to_dlpack(tensor)
    assert torch.from_dlpack(np.arange(3)).tolist() == [0, 1, 2]


def test_tensors_in_lists(gpu: VirtualGpu) -> None:
    assert torch.tensor([torch.tensor(2, device="cuda"), torch.tensor(3)]).tolist() == [2, 3]


# -- pinned and shared memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2048, LARGE])
def test_pinned_memory_is_a_copy(gpu: VirtualGpu, count: int) -> None:
    tensor = torch.zeros(count)
    assert not tensor.is_pinned() and host_bytes(gpu) == 4 * count
    pinned = tensor.pin_memory()
    assert pinned.is_pinned() and not tensor.is_pinned() and pinned.pin_memory() is pinned
    assert host_bytes(gpu) == 8 * count
    del tensor
    assert host_bytes(gpu) == 4 * count
    made = torch.empty(count, pin_memory=True)
    assert made.is_pinned() and made.device == CPU and host_bytes(gpu) == 8 * count
    assert pinned.to("cuda", non_blocking=True).device == CUDA
    with pytest.raises(RuntimeError, match="cannot pin"):
        torch.zeros(4, device="cuda").pin_memory()


def test_shared_memory(gpu: VirtualGpu) -> None:
    for tensor in (torch.zeros(LARGE), torch.zeros(4)):
        assert not tensor.is_shared()
        assert tensor.share_memory_() is tensor and tensor.is_shared()
    assert torch.zeros(4, device="cuda").is_shared()
    assert nn.Linear(1024, 1024).share_memory().weight.is_shared()


class Images(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 400, 400), float(index)), index  # 1.8 MiB: large enough to be virtual, were it made here


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_and_pinned_memory(gpu: VirtualGpu, workers: int) -> None:
    loader = torch.utils.data.DataLoader(Images(), batch_size=4, num_workers=workers, pin_memory=True)
    seen = []
    for images, labels in loader:
        assert images.shape == (4, 3, 400, 400) and images.device == CPU and images.is_pinned()
        assert images.to("cuda", non_blocking=True).device == CUDA
        seen += labels.tolist()
    assert seen == list(range(8))
    assert gpu.trace.mismatches == []


# -- files ------------------------------------------------------------------------------------------------------------


def test_checkpoints_come_back_where_they_were(gpu: VirtualGpu) -> None:
    state = {"gpu": torch.randn(LARGE, device="cuda"), "host": torch.zeros(LARGE), "known": torch.arange(3).cuda()}
    state["parameter"] = nn.Parameter(torch.randn(LARGE, device="cuda"))
    file = io.BytesIO()
    torch.save(state, file)
    assert file.tell() < 1 << 14  # of 12 MiB and more
    wanted: list[tuple[Any, list[torch.device]]] = [
        (None, [CUDA, CPU, CUDA, CUDA]),
        ("cpu", [CPU] * 4),
        ("cuda:0", [CUDA] * 4),
        (torch.device("cpu"), [CPU] * 4),
    ]
    for map_location, devices in wanted:
        file.seek(0)
        loaded: dict[str, torch.Tensor] = {}
        before = torch.cuda.memory_allocated()
        loaded = torch.load(file, map_location=map_location, weights_only=True)
        assert [tensor.device for tensor in loaded.values()] == devices, map_location
        assert loaded["known"].tolist() == [0, 1, 2] and isinstance(loaded["parameter"], nn.Parameter)
        taken = torch.cuda.memory_allocated() - before
        assert taken == sum(t.nbytes for t in loaded.values() if t.is_cuda)


def test_training_resumes_from_a_checkpoint(gpu: VirtualGpu) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(1024, 1024).to("cuda")
        return model, torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    step(model, optimizer)
    used = torch.cuda.memory_allocated()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    del model, optimizer
    gc.collect()  # optimizers are part of reference cycles
    assert torch.cuda.memory_allocated() == 0
    file.seek(0)
    model, optimizer = make()
    checkpoint = torch.load(file, map_location="cpu")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    step(model, optimizer)
    assert torch.cuda.memory_allocated() == used
    assert {str(v.device) for v in optimizer.state[model.weight].values()} == {"cpu", "cuda:0"}


def test_a_real_checkpoint_is_loaded_to_the_gpu(tmp_path: Path) -> None:
    file = tmp_path / "real.pt"
    torch.save({"weight": torch.ones(2048, 64), "steps": 3}, file)
    with VirtualGpu(GPU_MODEL) as gpu:
        for map_location in ("cuda", {"cpu": "cuda:0"}, lambda storage, location: storage.cuda()):
            loaded = torch.load(file, map_location=map_location)
            assert loaded["weight"].device == CUDA and loaded["steps"] == 3
        assert torch.load(file)["weight"].device == CPU
    assert [s.device for s in gpu.trace.storages] == [HOST, GPU] * 3 + [HOST]  # read on the host, then moved
    assert torch.load(file)["weight"].sum() == 2048 * 64


def test_pickles(gpu: VirtualGpu) -> None:
    for tensor in (torch.randn(LARGE, device="cuda"), torch.zeros(LARGE), torch.arange(4, device="cuda")):
        again = pickle.loads(pickle.dumps(tensor))
        assert (again.device, again.shape, again.dtype) == (tensor.device, tensor.shape, tensor.dtype)
    assert again.tolist() == [0, 1, 2, 3]


# -- devices ----------------------------------------------------------------------------------------------------------


def test_parameters_moved_by_their_data(gpu: VirtualGpu) -> None:
    layer = nn.Linear(8, 8)
    weight = layer.weight
    for parameter in layer.parameters():
        parameter.data = parameter.data.cuda()
    assert layer.weight is weight and weight.device == CUDA and isinstance(weight, nn.Parameter)
    layer(torch.ones(2, 8, device="cuda")).sum().backward()
    assert weight.grad is not None and weight.grad.device == CUDA


def test_an_empty_tensor_of_the_meta_device(gpu: VirtualGpu) -> None:
    assert torch.empty(0, device="meta").device == torch.device("meta")
    assert torch.empty(0, device="cuda").device == CUDA and torch.empty(0).device == CPU


def test_taking_over_a_storage_moves_no_memory(gpu: VirtualGpu) -> None:
    first, second = torch.empty(100, device="cuda"), torch.empty(1000, device="cuda")
    events = len(gpu.trace.events)
    first.set_(second)
    (event,) = gpu.trace.events[events:]
    assert event.kind is EventKind.FREE and gpu.trace.storages[event.ref].num_bytes == 400
    assert first.shape == (1000,) and torch.cuda.memory_allocated() == 4000
    del second
    assert torch.cuda.memory_allocated() == 4000
    del first
    assert torch.cuda.memory_allocated() == 0


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_left_on_the_host_is_a_mismatch(gpu: VirtualGpu, kind: type[nn.RNNBase]) -> None:
    layer = kind(8, 8)
    output, _ = layer(torch.randn(2, 3, 8, device="cuda"))
    assert output.device == CUDA
    output.sum().backward()
    (mismatch,) = gpu.trace.mismatches
    assert [operand.device for operand in mismatch.operands] == [GPU, HOST]
    assert gpu.trace.ops[mismatch.op].startswith("aten.")


def test_backward_after_a_mismatch(gpu: VirtualGpu) -> None:
    weight = torch.randn(8, 8, device="cuda", requires_grad=True)
    stranger = torch.randn(8, requires_grad=True)
    product = weight * 2
    product.add_(stranger)
    product.sum().backward()
    assert weight.grad is not None and stranger.grad is not None and len(gpu.trace.mismatches) == 1
    query = torch.randn(1, 2, 16, 8, device="cuda", requires_grad=True)
    key = torch.randn(1, 2, 16, 8, requires_grad=True)
    nn.functional.scaled_dot_product_attention(query, key, key).sum().backward()
    assert query.grad is not None and key.grad is not None and len(gpu.trace.mismatches) == 2


def test_a_thread_that_was_there_before_does_not_see_the_gpu() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        gpu = VirtualGpu(GPU_MODEL)
        with pytest.raises((RuntimeError, AssertionError)), gpu:
            pool.submit(lambda: torch.zeros(4, device="cuda")).result()
    failure = gpu.trace.failure
    assert failure is not None and failure.kind is FailureKind.OTHER_THREAD
