"""What a program sees of the virtual GPU: devices, moves, and torch.cuda."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.trace.events import GPU, HOST, Event, EventKind
from memprof.virtual import VirtualGpu

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
META = torch.device("meta")
GPU_MODEL = find_gpu("a100-80gb")


def devices(gpu: VirtualGpu) -> list[str]:
    return [storage.device for storage in gpu.trace.storages]


# -- a tensor's own account -----------------------------------------------------------------------------------------


def test_cuda_tensor(gpu: VirtualGpu) -> None:
    tensor = torch.ones(2, 3, device="cuda")
    assert tensor.device == CUDA and tensor.device == torch.device("cuda:0") and tensor.device.index == 0
    assert tensor.is_cuda and not tensor.is_cpu and not tensor.is_meta
    assert tensor.get_device() == 0
    assert tensor.type() == "torch.cuda.FloatTensor"
    for relative in (tensor[0], tensor.t(), tensor.detach(), tensor.data, tensor + 1, tensor.view(-1), tensor.half()):
        assert relative.device == CUDA
    assert devices(gpu) and set(devices(gpu)) == {GPU}


def test_small_host_tensor_is_real(gpu: VirtualGpu) -> None:
    tensor = torch.ones(2, 3)
    assert tensor.device == CPU and tensor.is_cpu and not tensor.is_cuda and not tensor.is_meta
    assert tensor.get_device() == -1 and tensor.type() == "torch.FloatTensor"
    assert tensor.tolist() == [[1.0] * 3] * 2
    assert devices(gpu) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(4, device="cuda"),
        lambda: torch.zeros(4, device="cuda:0"),
        lambda: torch.ones(4, device=torch.device("cuda")),
        lambda: torch.full((4,), 2, device=torch.device("cuda", 0)),
        lambda: torch.randn(4, device=0),
        lambda: torch.arange(4, device="cuda"),
        lambda: torch.eye(4, device="cuda"),
        lambda: torch.linspace(0, 1, 4, device="cuda"),
        lambda: torch.randint(4, (4,), device="cuda"),
        lambda: torch.empty_strided((2, 2), (2, 1), device="cuda"),
        lambda: torch.ones(4).to("cuda"),
        lambda: torch.ones(4).to(CUDA),
        lambda: torch.ones(4).to(device="cuda", dtype=torch.bfloat16, non_blocking=True),
        lambda: torch.ones(4).to("cuda", torch.float16),
        lambda: torch.ones(4).to(torch.ones(1, device="cuda")),
        lambda: torch.ones(4).cuda(),
        lambda: torch.ones(4).cuda(0),
        lambda: torch.ones(4).cuda(non_blocking=True),
        lambda: torch.ones(4).pin_memory().cuda(),
        lambda: torch.ones(4).type("torch.cuda.FloatTensor"),
        lambda: torch.zeros_like(torch.ones(4), device="cuda"),
        lambda: torch.ones(4).new_zeros(4, device="cuda"),
    ],
)
def test_ways_to_the_gpu(gpu: VirtualGpu, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    assert tensor.device == CUDA and tensor.is_cuda
    assert devices(gpu)[-1] == GPU
    assert gpu.trace.storages[-1].num_bytes == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize(
    "like",
    [
        lambda tensor: torch.zeros_like(tensor),
        lambda tensor: torch.ones_like(tensor),
        lambda tensor: torch.empty_like(tensor),
        lambda tensor: torch.full_like(tensor, 7),
        lambda tensor: torch.rand_like(tensor),
        lambda tensor: torch.randn_like(tensor),
        lambda tensor: tensor.new_zeros(4),
        lambda tensor: tensor.new_ones(4),
        lambda tensor: tensor.new_empty(4),
        lambda tensor: tensor.new_full((4,), 7),
        lambda tensor: tensor.clone(),
        lambda tensor: tensor.contiguous().float().double(),
    ],
)
def test_like_functions_stay_where_the_tensor_is(gpu: VirtualGpu, like: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert like(torch.ones(4, device="cuda")).device == CUDA
    assert like(torch.ones(4)).device == CPU
    assert like(torch.ones(4, device="meta")).device == META


def test_no_move_gives_the_same_tensor(gpu: VirtualGpu) -> None:
    there, here = torch.ones(4, device="cuda"), torch.ones(4)
    count = len(gpu.trace.storages)
    assert there.to("cuda") is there and there.cuda() is there and there.to(torch.float32) is there
    assert here.to("cpu") is here and here.cpu() is here
    assert len(gpu.trace.storages) == count
    assert there.to("cuda", copy=True) is not there
    assert len(gpu.trace.storages) == count + 1


def test_back_to_the_host(gpu: VirtualGpu) -> None:
    tensor = torch.arange(4, device="cuda")
    for back in (tensor.cpu(), tensor.to("cpu"), tensor.to(CPU), tensor.to(torch.ones(1))):
        assert back.device == CPU and back.is_cpu and not back.is_cuda
    assert tensor.is_cuda
    assert torch.zeros_like(tensor, device="cpu").device == CPU


def test_device_context_and_default_device(gpu: VirtualGpu) -> None:
    with torch.device("cuda"):
        assert torch.ones(4).device == CUDA
        assert torch.ones(4, device="cpu").device == CPU
        assert nn.Linear(4, 4).weight.device == CUDA
    assert torch.ones(4).device == CPU
    torch.set_default_device("cuda")
    try:
        assert torch.ones(4).device == CUDA
        assert torch.empty(4).is_cuda
    finally:
        torch.set_default_device(None)
    assert torch.ones(4).device == CPU


# -- genuine meta tensors ---------------------------------------------------------------------------------------------


def test_genuine_meta_tensors_stay_meta_and_are_not_counted(gpu: VirtualGpu) -> None:
    tensor = torch.empty(1 << 20, device="meta")
    product = tensor * 2 + tensor
    moved = torch.ones(4).to("meta")
    with torch.device("meta"):
        layer = nn.Linear(1024, 1024)
    for one in (tensor, product, moved, layer.weight, layer(torch.ones(2, 1024, device="meta"))):
        assert one.device == META and one.is_meta and not one.is_cuda and not one.is_cpu
    assert devices(gpu) == []


def test_meta_model_is_brought_to_the_gpu(gpu: VirtualGpu) -> None:
    with torch.device("meta"):
        layer = nn.Linear(16, 16)
    layer.to_empty(device="cuda")
    assert layer.weight.device == CUDA
    assert sorted(storage.num_bytes for storage in gpu.trace.storages) == [64, 1024]


# -- host tensors -----------------------------------------------------------------------------------------------------


def test_large_host_tensors_are_virtual_and_counted_on_the_host(gpu: VirtualGpu) -> None:
    tiny, small = torch.zeros(1023), torch.zeros((1 << 18) - 1)
    assert tiny.sum().item() == small.sum().item() == 0.0
    assert [storage.num_bytes for storage in gpu.trace.storages] == [(1 << 20) - 4]  # real, and counted
    assert devices(gpu) == [HOST]
    gpu.trace.storages.clear()
    large = torch.zeros(1 << 18)
    assert devices(gpu) == [HOST] and gpu.trace.storages[0].num_bytes == 1 << 20
    assert large.device == CPU and large.is_cpu and not large.is_meta and not large.is_cuda
    doubled = large * 2
    assert doubled.device == CPU and devices(gpu) == [HOST, HOST]
    there = large.to("cuda")
    back = there.cpu()
    assert there.device == CUDA and back.device == CPU
    assert devices(gpu) == [HOST, HOST, GPU, HOST]
    assert torch.cuda.memory_allocated() == 1 << 20


def test_tensors_are_grouped_by_the_device_that_the_program_believes_in(gpu: VirtualGpu) -> None:
    small, large, gpu = torch.zeros(4), torch.zeros(1 << 19), torch.zeros(4, device="cuda")
    states = [torch.zeros_like(tensor) for tensor in (large, gpu, small)]
    groups = torch.utils._foreach_utils._group_tensors_by_device_and_dtype(
        [[large, gpu, small], states, []], with_indices=True
    )
    assert {device: sorted(indices) for (device, _), (_, indices) in groups.items()} == {CPU: [0, 2], CUDA: [1]}
    lists, _ = groups[CUDA, torch.float32]
    assert lists[0][0] is gpu and lists[1][0] is states[1] and lists[2] == []


def test_what_c_makes_without_a_size_is_where_its_source_is(gpu: VirtualGpu) -> None:
    """`polar` makes its result of no elements, and lets its kernel size it (native/TensorFactories.cpp)."""
    for where in ("cpu", "cuda"):
        angles = torch.ones(1 << 20, device=where)
        made = torch.polar(angles, angles)
        assert made.device.type == where and made.shape == angles.shape and made.dtype == torch.complex64
        assert gpu.trace.storages[-1].device == {"cpu": "cpu", "cuda": "cuda:0"}[where]


def test_terabytes_cost_no_host_memory(gpu: VirtualGpu) -> None:
    tensor = torch.zeros(1 << 38)
    assert tensor.device == CPU
    assert gpu.trace.storages[0].num_bytes == 1 << 40


def test_mixed_devices_are_noted_and_the_run_goes_on(gpu: VirtualGpu) -> None:
    there, here = torch.ones(4, device="cuda"), torch.ones(4)
    assert (there + here).device == CUDA
    (mismatch,) = gpu.trace.mismatches
    assert gpu.trace.ops[mismatch.op] == "aten.add"
    assert [operand.device for operand in mismatch.operands] == [GPU, HOST]
    assert [operand.shape for operand in mismatch.operands] == [(4,), (4,)]


@pytest.mark.parametrize("scalar", [2, 2.0, True, torch.tensor(2.0), torch.tensor(2)])
def test_scalars_may_mix(gpu: VirtualGpu, scalar: object) -> None:
    assert (torch.ones(4, device="cuda") * scalar).device == CUDA  # type: ignore[operator]
    assert gpu.trace.mismatches == []


# -- modules ----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.register_buffer("positions", torch.arange(4))
        self.register_buffer("scratch", torch.ones(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(ids)))


@pytest.mark.parametrize("move", [lambda m: m.to("cuda"), lambda m: m.cuda()])
def test_a_module_built_on_the_cpu_moves_whole(gpu: VirtualGpu, move: Callable[[nn.Module], nn.Module]) -> None:
    model = Model()
    assert devices(gpu) == []
    assert move(model) is model
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.device == CUDA
    assert isinstance(model.head.weight, nn.Parameter) and model.head.weight.requires_grad
    num_bytes = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    assert torch.cuda.memory_allocated() == num_bytes
    assert model.positions.tolist() == [0, 1, 2, 3]


def test_a_module_comes_back(gpu: VirtualGpu) -> None:
    model = Model().cuda().cpu()
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.device == CPU
    assert torch.cuda.memory_allocated() == 0


def test_optimizer_built_after_the_move(gpu: VirtualGpu) -> None:
    model = Model().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(4, device="cuda")).sum().backward()
    optimizer.step()
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].device == CUDA
        assert parameter.grad is not None and parameter.grad.device == CUDA


def test_state_dict_and_copies(gpu: VirtualGpu) -> None:
    model = Model().to("cuda")
    assert all(tensor.device == CUDA for tensor in model.state_dict().values())
    model.load_state_dict(
        {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in model.state_dict().items()}
    )
    assert model.head.weight.device == CUDA
    twin = copy.deepcopy(model)
    assert twin.head.weight.device == CUDA and twin.head.weight is not model.head.weight
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() > 0


# -- torch.cuda -------------------------------------------------------------------------------------------------------


def test_torch_cuda_describes_the_gpu(gpu: VirtualGpu) -> None:
    assert torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_bf16_supported()
    assert torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    assert torch.cuda.get_device_name() == torch.cuda.get_device_name(0) == GPU_MODEL.name
    assert torch.cuda.get_device_capability() == GPU_MODEL.compute_capability
    properties = torch.cuda.get_device_properties("cuda")
    assert properties.total_memory == GPU_MODEL.total_bytes and properties.name == GPU_MODEL.name
    assert properties.multi_processor_count == GPU_MODEL.num_sms
    torch.cuda.synchronize()
    torch.cuda.manual_seed_all(1)
    torch.cuda.set_device(0)


@pytest.mark.parametrize("empty", [torch.cuda, torch.cuda.memory, torch.accelerator], ids=lambda owner: owner.__name__)
def test_an_emptied_cache_is_recorded(gpu: VirtualGpu, empty: object) -> None:
    if not hasattr(empty, "empty_cache"):
        pytest.skip("this release of torch has no torch.accelerator.empty_cache")
    empty.empty_cache()
    assert gpu.trace.events[-1] == Event(EventKind.EMPTY_CACHE, 0)


def test_memory_statistics_follow_the_run(gpu: VirtualGpu) -> None:
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 0
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 1 << 20
    free, total = torch.cuda.mem_get_info()
    assert total == GPU_MODEL.total_bytes and free == total - (1 << 20)
    del tensor
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory.max_memory_allocated() == 1 << 20
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0


def test_streams_and_events(gpu: VirtualGpu) -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.ones(4, device="cuda")
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0.0
    assert tensor.device == CUDA
