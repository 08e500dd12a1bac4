"""`torch.distributed` with one process on the virtual GPU: identities, DDP's own buckets, and a clear end for more."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.trace.events import GPU, EventKind, Role
from memprof.virtual import VirtualGpu

GPU_MODEL = find_gpu("a100-80gb")
CUDA = torch.device("cuda", 0)
MIB = 1 << 20
pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
    # New names of collectives; the old ones are those that programs use.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualGpu]:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with VirtualGpu(GPU_MODEL, workspaces=False) as virtual:
        dist.init_process_group("nccl")
        yield virtual
    assert not dist.is_initialized()


def large_on_gpu(gpu: VirtualGpu, since: int) -> list[tuple[EventKind, int]]:
    """Allocations and frees of at least a mebibyte."""
    trace = gpu.trace
    return [
        (event.kind, trace.storages[event.ref].num_bytes)
        for event in trace.events[since:]
        if event.kind in (EventKind.ALLOC, EventKind.FREE)
        and trace.storages[event.ref].device == GPU
        and trace.storages[event.ref].num_bytes >= MIB
    ]


# -- starting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"backend": "nccl", "init_method": "tcp://10.0.0.1:1", "rank": 0, "world_size": 1},
        {"backend": "nccl", "init_method": "tcp://10.0.0.1:1?rank=0&world_size=1"},
        {"backend": "nccl", "rank": 0, "world_size": 1, "device_id": CUDA},
        {"backend": "gloo", "rank": 0, "world_size": 1},
        {"backend": "cpu:gloo,cuda:nccl", "rank": 0, "world_size": 1},
        {"rank": 0, "world_size": 1},
    ],
)
def test_ways_to_start(arguments: Any) -> None:
    hook = sys.excepthook
    names = set(vars(dist.Backend))
    with VirtualGpu(GPU_MODEL) as gpu:
        dist.init_process_group(**arguments)
        asked = arguments.get("backend", "nccl")
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == (asked, 0, 1)
        tensor = torch.ones(3, device="cuda")
        dist.all_reduce(tensor)
        dist.barrier()
        assert dist.is_nccl_available()
    assert not dist.is_initialized() and sys.excepthook is hook
    assert set(vars(dist.Backend)) - names <= {"FAKE"}  # torch's own, made when it is first wanted
    assert "memprof" not in str(vars(dist.Backend)).lower()
    assert any(line.startswith("torch.distributed runs with one process") for line in gpu.trace.assumptions)


def test_a_program_that_ends_its_group() -> None:
    with VirtualGpu(GPU_MODEL):
        for _ in range(2):
            dist.init_process_group("nccl", rank=0, world_size=1)
            dist.destroy_process_group()


@pytest.mark.parametrize("said", ["argument", "environment", "address"])
def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    arguments: dict[str, Any] = {}
    if said == "environment":
        monkeypatch.setenv("WORLD_SIZE", "8")
        monkeypatch.setenv("RANK", "0")
    elif said == "argument":
        arguments = {"rank": 1, "world_size": 8}
    else:
        arguments = {"init_method": "tcp://10.0.0.1:1?rank=0&world_size=8"}
    with (
        VirtualGpu(GPU_MODEL),
        pytest.raises(MemprofError, match=r"test_one_process\.py.* a group of 8 processes, and there are GPUs for 1"),
    ):
        dist.init_process_group("nccl", **arguments)


def test_what_is_missing_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    with VirtualGpu(GPU_MODEL), pytest.raises(ValueError, match="environment variable RANK expected"):
        dist.init_process_group("nccl")


# -- collectives ------------------------------------------------------------------------------------------------------


def test_collectives_give_back_what_they_are_given(gpu: VirtualGpu) -> None:
    tensor = torch.arange(4, device="cuda")
    for change in (dist.all_reduce, lambda t: dist.broadcast(t, 0), lambda t: dist.reduce(t, 0)):
        change(tensor)
        assert tensor.tolist() == [0, 1, 2, 3]
    for collect in (
        lambda out: dist.all_gather([out], tensor),
        lambda out: dist.all_gather_into_tensor(out, tensor),
        lambda out: dist.reduce_scatter(out, [tensor]),
        lambda out: dist.reduce_scatter_tensor(out, tensor),
        lambda out: dist.all_to_all_single(out, tensor),
        lambda out: dist.all_to_all([out], [tensor]),
        lambda out: dist.gather(tensor, [out], 0),
        lambda out: dist.scatter(out, [tensor], 0),
    ):
        out = torch.zeros(4, dtype=torch.long, device="cuda")
        collect(out)
        assert out.tolist() == [0, 1, 2, 3]
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None and work.wait() and work.get_future().value()[0] is tensor
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"loss": 2})
    dist.broadcast_object_list(objects, 0)
    assert objects == [{"loss": 2}]
    host = torch.ones(2)
    dist.all_reduce(host, group=dist.new_group(backend="gloo"))
    assert host.tolist() == [1, 1] and dist.get_backend(dist.new_group([0])) == "nccl"


def test_nccl_gathers_into_one_tensor_first(gpu: VirtualGpu) -> None:
    tensor, out = torch.zeros(MIB, device="cuda"), torch.zeros(MIB, device="cuda")
    since = len(gpu.trace.events)
    flat = [(EventKind.ALLOC, 4 * MIB), (EventKind.FREE, 4 * MIB)]
    dist.all_gather([out], tensor)
    assert large_on_gpu(gpu, since) == flat
    dist.reduce_scatter(out, [tensor])
    assert large_on_gpu(gpu, since) == flat * 2
    dist.all_gather_into_tensor(out, tensor)
    dist.all_reduce(tensor)
    assert large_on_gpu(gpu, since) == flat * 2


def test_collectives_in_a_graph(gpu: VirtualGpu) -> None:
    import torch.distributed.nn.functional as functional

    tensor = torch.ones(4, 4, device="cuda", requires_grad=True)
    (functional.all_reduce(tensor).sum() + torch.stack(functional.all_gather(tensor)).sum()).backward()
    assert tensor.grad is not None and tensor.grad.device == CUDA


# -- data parallelism -------------------------------------------------------------------------------------------------


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).to("cuda")  # 8 x 4 MiB


@pytest.mark.parametrize("views", [False, True])
def test_buckets_of_ddp(gpu: VirtualGpu, views: bool) -> None:
    model = layers()
    parameters = 32 * MIB
    assert torch.cuda.memory_allocated() == parameters
    parallel = nn.parallel.DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=views)
    # All gradients in one bucket, until their order is known.
    assert torch.cuda.memory_allocated() == parameters + 32 * MIB
    inputs = torch.ones(2, 1024, device="cuda")
    parallel(inputs).sum().backward()
    gradients = 0 if views else 32 * MIB
    assert torch.cuda.memory_allocated() == parameters + 32 * MIB + gradients + inputs.nbytes
    since = len(gpu.trace.events)
    parallel(inputs)
    # Rebuilt in the order of arrival: the first bucket is full with one layer (1 MiB), the others hold up to 25 MiB.
    made = [num_bytes for kind, num_bytes in large_on_gpu(gpu, since) if kind is EventKind.ALLOC]
    assert made == [4 * MIB, 28 * MIB]
    for _ in range(2):
        parallel(inputs).sum().backward()
    gc.collect()
    assert torch.cuda.memory_allocated() == parameters + 32 * MIB + gradients + inputs.nbytes
    assert all(p.grad is not None and p.grad.device == CUDA for p in model.parameters())
    assert gpu.trace.mismatches == []


def roles_of(gpu: VirtualGpu, since: int) -> dict[Role | None, int]:
    """Bytes of what is live on the GPU and was made since, by role."""
    found: dict[Role | None, int] = {}
    for index in gpu.recorder.storages.index_by_address.values():
        if index >= since and gpu.trace.storages[index].num_bytes >= MIB:
            owner = gpu.trace.owners.get(index)
            role = None if owner is None else owner.role
            found[role] = found.get(role, 0) + gpu.trace.storages[index].num_bytes
    return found


@pytest.mark.parametrize("views", [False, True])
def test_buckets_are_communication_unless_gradients_lie_in_them(gpu: VirtualGpu, views: bool) -> None:
    model = layers()
    since = len(gpu.trace.storages)
    parallel = nn.parallel.DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=views)
    assert roles_of(gpu, since) == {Role.COMMUNICATION: 32 * MIB}
    for _ in range(2):  # the second time with buckets that were made anew
        parallel(torch.ones(2, 1024, device="cuda")).sum().backward()
        buckets = {} if views else {Role.COMMUNICATION: 32 * MIB}
        assert roles_of(gpu, since) == {Role.GRADIENT: 32 * MIB, **buckets}


def test_what_a_collective_lays_flat_and_what_a_hook_sends_is_communication(gpu: VirtualGpu) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    parallel = nn.parallel.DistributedDataParallel(layers())
    parallel.register_comm_hook(None, fp16_compress_hook)
    tensor, out = torch.zeros(MIB, device="cuda"), torch.zeros(MIB, device="cuda")
    since = len(gpu.trace.storages)
    dist.all_gather([out], tensor)
    parallel(torch.ones(1024, 1024)).sum().backward()
    made = [
        (gpu.trace.op(gpu.trace.storages[index]), gpu.trace.storages[index].dtype)
        for index, owner in gpu.trace.owners.items()
        if owner.role is Role.COMMUNICATION and index >= since and gpu.trace.storages[index].num_bytes >= MIB
    ]
    assert made == [("aten.empty", "float32"), ("aten._to_copy", "float16")], "its inputs are none"


def test_without_a_group_nothing_is_communication() -> None:
    with VirtualGpu(GPU_MODEL) as gpu:
        dist.utils._recursive_to(torch.ones(1 << 20), CUDA, False)
    assert not gpu.recorder.owners.is_naming_communication and Role.COMMUNICATION not in {
        o.role for o in gpu.trace.owners.values()
    }


def test_ddp_trains_and_saves(gpu: VirtualGpu) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    parallel = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda(), find_unused_parameters=True)
    parallel.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.AdamW(parallel.parameters())
    for _ in range(2):
        with parallel.no_sync():
            parallel(torch.ones(2, 64, device="cuda")).sum().backward()
        parallel(torch.ones(2, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert list(parallel.module.state_dict()) == ["weight", "bias"]


def test_fsdp1_of_whole_modules(gpu: VirtualGpu) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = FullyShardedDataParallel(layers(), device_id=0)
    sharded(torch.ones(2, 1024, device="cuda")).sum().backward()
    assert all(p.grad is not None for p in sharded.parameters())


# -- sharding: accuracy/test_parallel_against_cpu.py has the bytes ----------------------------------------------------


def fully_sharded(**options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def test_a_sharded_model_says_where_it_is(gpu: VirtualGpu) -> None:
    model = fully_sharded()
    weight = model[0].weight
    assert weight.device == CUDA and weight.is_cuda and not weight.is_meta and weight.to_local().is_cuda
    model(torch.ones(2, 1024, device="cuda")).sum().backward()
    assert weight.grad.device == CUDA and weight.grad.full_tensor().is_cuda
    assert gpu.trace.mismatches == []
    roles = {owner.role: 0 for owner in gpu.trace.owners.values()}
    for index, owner in gpu.trace.owners.items():
        roles[owner.role] += gpu.trace.storages[index].num_bytes
    assert roles[Role.PARAMETER] >= 32 * MIB and roles[Role.GRADIENT] == 32 * MIB


def test_a_model_sharded_on_the_meta_device_is_made_on_the_gpu(gpu: VirtualGpu) -> None:
    from torch.distributed.fsdp import fully_shard

    def made() -> Any:
        with torch.device("meta"):
            return fully_shard(nn.Linear(1024, 1024, bias=False))

    with pytest.raises(RuntimeError, match="meta device"):
        made()(torch.ones(2, 1024, device="cuda"))
    model = made()
    gc.collect()
    model.to_empty(device="cuda")
    assert torch.cuda.memory_allocated() == 4 * MIB
    nn.init.ones_(model.weight)
    model(torch.ones(2, 1024, device="cuda")).sum().backward()


def test_offloaded_parameters_are_pinned_and_on_the_host(gpu: VirtualGpu) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    model = fully_sharded(offload_policy=CPUOffloadPolicy())
    del model[0]
    gc.collect()
    assert torch.cuda.memory_allocated() == 0
    weight = model[0].weight
    assert weight.device.type == "cpu" and weight.to_local().is_pinned()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 1024, device="cuda")).sum().backward()
        assert weight.grad.device.type == "cpu"
        optimizer.step()
    assert optimizer.state[weight]["exp_avg"].device.type == "cpu"
    assert gpu.trace.mismatches == []


def test_gathered_parameters_and_buffers_of_gradients_are_communication(gpu: VirtualGpu) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    half = FullyShardedDataParallel(layers(), device_id=0, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    for model, sizes in ((fully_sharded(), [4 * MIB]), (half, [16 * MIB])):
        since = len(gpu.trace.storages)
        for _ in range(2):
            model(torch.ones(2, 1024, device="cuda")).sum().backward()
        found = {
            gpu.trace.storages[index].num_bytes: gpu.trace.op(gpu.trace.storages[index])
            for index, owner in gpu.trace.owners.items()
            if owner.role is Role.COMMUNICATION and index >= since and gpu.trace.storages[index].num_bytes >= MIB
        }
        assert [size for size in found if size in sizes] == sizes


def test_metadata_of_the_kernel_that_joins_gradients(gpu: VirtualGpu) -> None:
    """native/cuda/TensorShape.cu: a number for each 2 KiB of a chunk, six for each tensor and two."""
    model = fully_sharded()
    since = len(gpu.trace.storages)
    model(torch.ones(2, 1024, device="cuda")).sum().backward()
    made = [s.num_bytes for s in gpu.trace.storages[since:] if gpu.trace.op(s) == "aten._chunk_cat"]
    assert made == [8 * (4 * MIB // 2048 + 6 + 2)] * 8


def test_gradients_are_reduced_on_a_stream_of_their_own(gpu: VirtualGpu) -> None:
    model = fully_sharded()
    since = len(gpu.trace.storages)
    model(torch.ones(2, 1024, device="cuda")).sum().backward()
    streams, made = {0: 0}, 0
    for event in gpu.trace.events:
        if event.kind is EventKind.STREAM:
            made = event.ref
        elif event.kind is EventKind.ALLOC and event.ref >= since:
            streams[made] = streams.get(made, 0) + (gpu.trace.op(gpu.trace.storages[event.ref]) == "aten.empty")
    # Of each layer: the whole weight and its gradient's buffer on the stream that computes, the sum on another.
    assert sorted(streams.values()) == [8, 16]


def test_tensors_spread_over_a_mesh(gpu: VirtualGpu) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (1,))
    spread = distribute_tensor(torch.ones(1024, 1024, device="cuda"), mesh, [Shard(0)])
    assert torch.cuda.memory_allocated() == 4 * MIB and spread.device == CUDA
    whole = spread.redistribute(mesh, [Replicate()])
    product = whole @ spread.t()
    assert isinstance(product, DTensor) and product.device == CUDA
    del whole, spread, product
    gc.collect()
    assert torch.cuda.memory_allocated() == 0
    host = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (1,)))
    assert host.device.type == "cpu" and host.sum().item() == 4


def test_a_sharded_checkpoint(gpu: VirtualGpu) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = fully_sharded()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = get_model_state_dict(model, options=options)
    assert [value.shape for value in saved.values()] == [torch.Size([1024, 1024])] * 8
    assert all(value.device.type == "cpu" for value in saved.values())
