"""Programs for several processes as people write them: one is run, that of the name that is given.

`torchrun --nproc-per-node 4 parallel.py fsdp2` on GPUs; with the environment's BACKEND=gloo on the CPU.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, TOKENS, VOCABULARY = 64, 16, 128
BACKEND = os.environ.get("BACKEND", "nccl")
KIND = "cuda" if BACKEND == "nccl" else "cpu"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def device() -> torch.device:
    return torch.device(KIND, int(os.environ["LOCAL_RANK"])) if KIND == "cuda" else torch.device("cpu")


def batch() -> torch.Tensor:
    return torch.arange(2 * TOKENS, device=device()).view(2, TOKENS) % VOCABULARY


def built(make: Callable[[], nn.Module]) -> Any:
    with device():
        return make()


def train(model: nn.Module, optimizer: Any = None, clip: Any = None, steps: int = 3) -> None:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(steps):
        tokens = batch()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        if clip is not None:
            clip(1.0)
        optimizer.step()
        optimizer.zero_grad()


def ddp(**options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(built(Model), **options)


def train_compressed(hook: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model: Any = ddp()
    if hook == "half":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, steps=4)


def accumulate() -> None:
    model: Any = ddp()
    with model.no_sync():
        model(batch()).sum().backward()
    train(model)


def zero() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = ddp()
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3))


def fsdp1(half: bool = False, synced: bool = False) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    model = FullyShardedDataParallel(
        built(Model),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        device_id=device(),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) if half else None,
        sync_module_states=synced,
    )
    train(model, clip=model.clip_grad_norm_)


def fsdp1_saved() -> None:
    """The state of the optimizer, gathered and whole: other ranks have parameters of which this one has nothing."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = FullyShardedDataParallel(built(Model), device_id=device(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        names = set(model.state_dict())
        found: Any = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    assert set(found) == names and found["head.weight"]["exp_avg"].shape == (VOCABULARY, WIDTH)


def fsdp2(*sizes: int, checkpoint: bool = False, save: bool = False, **options: Any) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint as recompute

    names = ("replicate", "shard")
    mesh = init_device_mesh(KIND, sizes or (dist.get_world_size(),), mesh_dim_names=names[-len(sizes or (1,)) :])
    model = built(Model)
    for block in model.blocks:
        if checkpoint:
            block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    train(model, clip=functools.partial(nn.utils.clip_grad_norm_, model.parameters()))
    if save:
        state = {"model": get_model_state_dict(model)}
        with tempfile.TemporaryDirectory() as folder:
            dist.broadcast_object_list(shared := [folder], 0)
            dcp.save(state, checkpoint_id=shared[0])
            dcp.load(state, checkpoint_id=shared[0])
            dist.barrier()


def fsdp2_half() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    fsdp2(checkpoint=True, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def fsdp2_offload() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    fsdp2(offload_policy=CPUOffloadPolicy())


def tensor_parallel(loss: str = "") -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh(KIND, (dist.get_world_size(),))
    model = built(Model)
    split = Shard(-1) if loss else Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=split, use_local_output=not loss),
        },
    )
    for block in model.blocks:
        up = ColwiseParallel(input_layouts=Shard(1))
        plan = {"norm": SequenceParallel(), "up": up, "down": RowwiseParallel(output_layouts=Shard(1))}
        parallelize_module(block, mesh, plan)
    if not loss:
        train(model)
        return
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(3):
        with loss_parallel():
            F.cross_entropy(model(batch()).flatten(0, 1), batch().flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def context_parallel() -> None:
    from torch.distributed.tensor.experimental import context_parallel as spread
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh(KIND, (dist.get_world_size(),))
    projection = nn.Linear(WIDTH, 3 * WIDTH, device=device(), dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(projection.parameters())
    for _ in range(2):
        x = torch.randn(2, 128, WIDTH, device=device(), dtype=torch.bfloat16)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), spread(mesh, buffers=[x], buffer_seq_dims=[1]):
            q, k, v = projection(x).view(2, -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def pipeline(schedule: str) -> None:
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    layers = built(lambda: nn.Sequential(Block(), Block()))
    example = torch.empty(2, WIDTH, device=device(), requires_grad=True)
    stage = pipelining.PipelineStage(layers, rank, size, device(), input_args=example, output_args=example)
    run = getattr(pipelining, schedule)(stage, n_microbatches=4, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(2):
        x = torch.randn(8, WIDTH, device=device())
        run.step(*([x] if rank == 0 else []), **({"target": x} if rank == size - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()


def by_hand() -> None:
    """Shards gathered before the step and scattered after it, with the calls that wait."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shard = torch.randn(WIDTH * WIDTH // size, device=device())
    for _ in range(3):
        whole = torch.empty(WIDTH * WIDTH, device=device())
        work = dist.all_gather_into_tensor(whole, shard.clone(), async_op=True)
        assert work is not None
        work.wait()
        weight = whole.view(WIDTH, WIDTH).requires_grad_()
        (torch.ones(4, WIDTH, device=device()) @ weight).sum().backward()
        assert weight.grad is not None
        part = torch.empty_like(shard)
        dist.reduce_scatter_tensor(part, weight.grad.view(-1))
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part)
        shard -= parts[rank]


PROGRAMS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: train(ddp()),
    "ddp-views": lambda: train(ddp(gradient_as_bucket_view=True)),
    "ddp-static": lambda: train(ddp(static_graph=True)),
    "ddp-unused": lambda: train(ddp(find_unused_parameters=True)),
    "ddp-half-gradients": lambda: train_compressed("half"),
    "ddp-powersgd": lambda: train_compressed("power"),
    "ddp-accumulating": accumulate,
    "zero": zero,
    "fsdp1": fsdp1,
    "fsdp1-half": lambda: fsdp1(half=True),
    "fsdp1-synced": lambda: fsdp1(synced=True),
    "fsdp1-saved": fsdp1_saved,
    "fsdp2": fsdp2,
    "fsdp2-kept": lambda: fsdp2(reshard_after_forward=False),
    "fsdp2-half": fsdp2_half,
    "fsdp2-offload": fsdp2_offload,
    "fsdp2-saved": lambda: fsdp2(save=True),
    "hsdp": lambda: fsdp2(2, dist.get_world_size() // 2),
    "tensor-parallel": tensor_parallel,
    "loss-parallel": lambda: tensor_parallel("loss"),
    "context-parallel": context_parallel,
    "pipeline": lambda: pipeline("Schedule1F1B"),
    "pipeline-gpipe": lambda: pipeline("ScheduleGPipe"),
    "by-hand": by_hand,
}

if __name__ == "__main__":
    dist.init_process_group(BACKEND)
    if KIND == "cuda":
        torch.cuda.set_device(device())
    PROGRAMS[sys.argv[1]]()
    dist.destroy_process_group()
