"""DTensor on one rank alone: what it asks of tensors beside their layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, debug, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.virtual.distributed import dtensor

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:barrier:UserWarning"),
]


@contextlib.contextmanager
def rank(number: int, size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualGpu]:
    """As torchrun starts it; nothing listens at the address."""
    for name, value in {"RANK": number, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with VirtualGpu(find_gpu("a100-80gb"), gpus=size, workspaces=False) as gpu:
        torch.cuda.set_device(number)
        yield gpu


def test_layouts_of_another_rank_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch before 2.11 too, which has no function that forgets them all."""
    forgotten: list[int] = []
    forget = debug._clear_fast_path_sharding_prop_cache
    monkeypatch.setattr(debug, "_clear_fast_path_sharding_prop_cache", lambda: (forgotten.append(number), forget()))
    monkeypatch.delattr(debug, "_clear_sharding_prop_cache")
    for number in (0, 3):
        with rank(number, 4, monkeypatch):
            mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
            tensor = distribute_tensor(torch.ones(4, 4, device="cuda"), mesh["dp"], [Shard(0)])
            assert (tensor + tensor).to_local().shape == (2, 4)
    assert 3 in forgotten


def test_a_mesh_joins_where_the_program_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with rank(1, 4, monkeypatch):
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        assert mesh.get_coordinate() == (0, 1) and dist.get_world_size() == 4
    assert not dist.is_initialized()


@pytest.mark.parametrize("rows", [3, 8, 11])
def test_shards_of_ranks_that_a_parameter_does_not_reach(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param

    with rank(0, 2, monkeypatch):
        weight = torch.empty(rows, 4, device="cuda")
        found, wanted = (module._chunk_with_empty(weight, 8, 0) for module in (_fsdp_param, _fsdp_common))
        assert [(one.shape, one.storage_offset()) for one in found] == [(w.shape, w.storage_offset()) for w in wanted]


def test_a_sharded_weight_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with rank(0, 2, monkeypatch) as gpu:
        weight = distribute_tensor(torch.empty(64, 16, device="cuda"), init_device_mesh("cuda", (2,)), [Shard(0)])
        since = len(gpu.trace.storages)
        made = nn.init.kaiming_uniform_(weight)
        assert isinstance(made, DTensor) and made.shape == (64, 16) and made.to_local().shape == (32, 16)
        # It is written in place; what its generator is requested is small.
        assert all(storage.num_bytes <= 16 for storage in gpu.trace.storages[since:])


def test_a_sequence_is_gathered_and_scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of collectives that are waited for where they are first used: here in the backward pass, as a view."""
    with rank(1, 4, monkeypatch):
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).cuda()
        plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
        parallelize_module(model, init_device_mesh("cuda", (4,)), plan)
        result = model(torch.rand(20, 16, device="cuda"))
        assert result.shape == (20, 8) and result.device == torch.device("cuda", 1)
        result.sum().backward()
        assert model[0].weight.grad.to_local().shape == (8, 16)


def test_an_optimizers_lists_are_spread_as_torch_spreads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is passed over for lists of hundreds of tensors changes nothing: the same requests, and the same layouts."""

    def steps(mesh_shape: tuple[int, ...]) -> tuple[object, ...]:
        _clear_sharding_prop_cache()
        with rank(1, 4, monkeypatch) as gpu:
            mesh = init_device_mesh("cuda", mesh_shape, mesh_dim_names=("dp", "tp")[-len(mesh_shape) :])
            model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(3))).cuda()
            if len(mesh_shape) > 1:  # shards of parts: their placements are strided
                parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            for layer in model:
                fully_shard(layer, mesh=mesh["dp"] if len(mesh_shape) > 1 else mesh)
            groups: dict[object, list[nn.Parameter]] = {}
            for parameter in model.parameters():
                groups.setdefault(parameter.device_mesh, []).append(parameter)
            optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], foreach=True)
            for _ in range(2):
                model(torch.rand(4, 12, device="cuda")).sum().backward()
                optimizer.step()
            layouts = [
                (name, value.placements, value.device_mesh.shape)
                for state in optimizer.state.values()
                for name, value in state.items()
                if isinstance(value, DTensor)
            ]
            assert len(layouts) == 12
            sizes = [storage.num_bytes for storage in gpu.trace.storages]
            return gpu.trace.events, sizes, layouts

    for shape in ((4,), (2, 2)):
        fast = steps(shape)
        with monkeypatch.context() as patched:
            patched.setattr(dtensor.DTensorPatches, "imports", ())
            assert steps(shape) == fast
