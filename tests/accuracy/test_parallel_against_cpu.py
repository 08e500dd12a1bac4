"""Programs of one process that are written for many: what they allocate on the virtual GPU is what they allocate on
the CPU, where they really run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from memprof.patching import Patch, PatchSet
from memprof.virtual.distributed.process_groups import ProcessGroups
from memprof.virtual.install_context import GpuOptions
from memprof.virtual.peers.single_rank import SingleRankBackend
from memprof.virtual.values import Values
from memprof.watch.modules import ModuleTracker
from memprof.watch.recorder import Recorder
from tests.accuracy.cpu_events import Change, Program
from tests.accuracy.cpu_models import LLAMA, Batch, tokens
from tests.accuracy.cpu_temporaries import NUMBER_BYTES, Comparison, _renumbered, compared
from tests.accuracy.test_against_cpu import check
from tests.lanes import by_day

pytestmark = pytest.mark.slow
Parallel = Callable[[nn.Module, str], nn.Module]  # Makes a model parallel on a device.


def _layers(model: nn.Module) -> Any:
    return model.model.layers


def ddp(model: nn.Module, device: str, **options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, **options)


def fsdp1(model: nn.Module, device: str, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device(device), use_orig_params=True, **options)


def fsdp2(model: nn.Module, device: str, *sizes: int, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, sizes or (1,), mesh_dim_names=("replicate", "shard")[-len(sizes or (1,)) :])
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def halved(model: nn.Module, device: str, reduced: torch.dtype) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fsdp2(model, device, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced))


def tensor_parallel(model: nn.Module, device: str) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device, (1,))
    across, along = ColwiseParallel(), RowwiseParallel()
    for layer in _layers(model):
        parallelize_module(layer.mlp, mesh, {"gate_proj": across, "up_proj": across, "down_proj": along})
    return model


def accumulating(model: nn.Module, device: str) -> nn.Module:
    """The first backward of three leaves its gradients as they are."""
    parallel: Any = fsdp2(model, device)
    calls = itertools.count()
    model.register_forward_pre_hook(lambda *args: parallel.set_requires_gradient_sync(next(calls) > 0))
    return model


WAYS: dict[str, Parallel] = {
    "ddp": ddp,
    "ddp, views": lambda model, device: ddp(model, device, gradient_as_bucket_view=True),
    "ddp, static graph": lambda model, device: ddp(model, device, static_graph=True),
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "fsdp2, resharded": lambda model, device: fsdp2(model, device, reshard_after_forward=True),
    "fsdp2, not resharded": lambda model, device: fsdp2(model, device, reshard_after_forward=False),
    "fsdp2, half": lambda model, device: halved(model, device, torch.bfloat16),
    "fsdp2, half but for gradients": lambda model, device: halved(model, device, torch.float32),
    "fsdp2, hybrid": lambda model, device: fsdp2(model, device, 1, 1),
    "fsdp2, accumulating": accumulating,
    "tensor parallel": tensor_parallel,
}
_PARAMETERS = 21
# What DDP makes on the host first and then on the GPU, so that the CPU has it twice: sizes and strides of all
# parameters, the order in which their gradients came, which of them were used.
_HOST_BYTES = {8 * 74, 4 * (_PARAMETERS + 1), 4 * _PARAMETERS}


def _joining() -> Iterator[Patch]:
    assume = MagicMock()
    rank_backend = SingleRankBackend(assume, Values(assume))
    context = MagicMock(
        channel=None, options=GpuOptions(), rank_backend=rank_backend, recorder=Recorder(ModuleTracker())
    )
    context.gpus.num_gpus, context.is_on_gpu.return_value = 1, False
    return ProcessGroups().patches(context)


def program(way: str, started: PatchSet) -> Program:
    """On the CPU without gloo, whose threads release what they were given at times of their own: with torch's own
    group of which nothing is done, or, for DDP, which asks for results, memprof's."""
    make_parallel, backend = WAYS[way], "gloo" if way.startswith("ddp") else "fake"

    def make(device: str) -> Callable[[], None]:
        started.apply_all(_joining() if device == "cpu" else ())
        dist.init_process_group("nccl" if device == "cuda" else backend, rank=0, world_size=1)
        batch: Batch = {name: value.to(device) for name, value in tokens().items()}

        def run() -> None:
            with torch.device(device):
                model = LLAMA().train()
            model = make_parallel(model, device)
            # A list on the GPU takes no DTensor beside other tensors.
            foreach = len({type(parameter) for parameter in model.parameters()}) == 1
            optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
            for _ in range(3):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            dist.destroy_process_group()

        return run

    return make


def beyond(cpu: list[Change]) -> set[int]:
    """Blocks of the CPU alone: its casts in `_chunk_cat`, which is one kernel on CUDA; indices of a mesh; and the
    first of each of _HOST_BYTES."""
    found: set[int] = set()
    seen: set[int] = set()
    for change in cpu:
        names = {call.name for call in change.calls}
        if change.free:
            continue
        if change.num_bytes in _HOST_BYTES:
            is_beyond = change.num_bytes not in seen
            seen.add(change.num_bytes)
        else:
            is_beyond = "aten::nonzero" in names or {"aten::_chunk_cat", "aten::cat"} <= names
        if is_beyond:
            found.add(change.block)
    return found


def without_numbers(found: Comparison) -> Comparison:
    """Both sides without blocks of 8 bytes and less: as it is constructed, DDP counts the parameters on the GPU."""
    sides = ([change for change in side if change.num_bytes > NUMBER_BYTES] for side in (found.virtual, found.cpu))
    virtual, cpu = map(_renumbered, sides)
    return found._replace(virtual=virtual, cpu=cpu)


@pytest.mark.parametrize(
    "way",
    by_day(WAYS, "ddp, views", "fsdp1", "fsdp2, half but for gradients", "fsdp2, accumulating", "tensor parallel"),
)
def test_ways(way: str) -> None:
    started = PatchSet()
    try:
        found = compared(program(way, started), beyond)
    finally:
        started.undo()
        if dist.is_initialized():
            dist.destroy_process_group()
    check(without_numbers(found) if way.startswith("ddp") else found)
