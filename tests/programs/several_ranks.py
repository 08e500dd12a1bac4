"""What ranks of one program do together, right and wrong: the part that is named is run, by each rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def numbers(size: int = 4) -> torch.Tensor:
    return torch.arange(size, device="cuda")


def exchanged() -> None:
    """Everything that is known comes from whom it should."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor([rank, 10 * rank], device="cuda")
    total = mine.clone()
    dist.all_reduce(total)
    assert total.tolist() == [6, 60]
    for reduction, expected in ((dist.ReduceOp.MAX, 30), (dist.ReduceOp.MIN, 0), (dist.ReduceOp.PRODUCT, 0)):
        one = mine.clone()
        work = dist.all_reduce(one, reduction, async_op=True)
        assert work is not None
        work.wait()
        assert one[1].item() == expected
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": one} for one in range(size)]
    told: list[Any] = ["from rank 2"] if rank == 2 else [None]
    dist.broadcast_object_list(told, 2)
    dist.scatter_object_list(given := [None], list("abcd") if rank == 1 else None, 1)
    assert (told, given) == (["from rank 2"], ["abcd"[rank]])
    counts = torch.tensor([rank + 1] * size, device="cuda")  # so many rows go to each
    takes = torch.empty_like(counts)
    dist.all_to_all_single(takes, counts)
    assert takes.tolist() == [1, 2, 3, 4]
    rows = torch.empty(int(takes.sum()), 8, device="cuda")
    dist.all_to_all_single(rows, torch.randn(4 * (rank + 1), 8, device="cuda"), takes.tolist(), counts.tolist())
    vote = torch.tensor([rank == 3], device="cuda")  # it goes round
    if rank:
        dist.recv(vote, rank - 1)
        vote |= rank == 3
    dist.send(vote, (rank + 1) % size)
    if not rank:
        dist.recv(vote, 3)
        assert vote.item()
    parts = [torch.zeros(2, dtype=torch.long, device="cuda") for _ in range(size)] if rank == 1 else None
    dist.gather(mine, parts, 1)
    assert parts is None or [int(part[0]) for part in parts] == [0, 1, 2, 3]
    half = torch.zeros(1, dtype=torch.long, device="cuda")
    dist.reduce_scatter_tensor(half, numbers() + rank)
    assert half.item() == 4 * rank + 6
    pair = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    dist.broadcast(mine, group_src=1, group=pair)
    assert mine.tolist() == [rank % 2 + 2, 10 * (rank % 2 + 2)]
    store = dist.TCPStore("localhost", 29513, size, rank == 0)
    store.set(f"of {rank}", str(rank))
    assert store.get(f"of {(rank + 1) % size}") == str((rank + 1) % size).encode()
    dist.barrier()
    torch.ones(1 << (20 + rank), device="cuda")


def train(batches: int = 3) -> None:
    torch.cuda.set_device(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(batches):
        model(torch.randn(4, 8, device="cuda")).sum().backward()
        optimizer.step()


def pipeline() -> None:
    """A stage that is told nothing of what it is given."""
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    stage = pipelining.PipelineStage(nn.Linear(16, 16).cuda(), rank, size, torch.device("cuda"))
    run = pipelining.Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    x = torch.randn(8, 16, device="cuda")
    run.step(*([x] if rank == 0 else []), **({"target": x} if rank == size - 1 else {}))


def wrong(what: str) -> None:
    """Something that hangs on GPUs, or fails."""
    rank = dist.get_rank()
    torch.ones(1 << 20, device="cuda")
    if what == "sizes":
        dist.all_reduce(numbers(4 if rank else 8))
    elif what == "order":
        calls = [lambda: dist.all_reduce(numbers()), lambda: dist.broadcast(numbers(), 0)]
        for call in calls if rank != 2 else reversed(calls):
            call()
    elif what == "never":
        if rank != 3:
            dist.all_reduce(numbers())
    elif what == "crossed":
        dist.recv(numbers(), rank ^ 1)
    elif what == "received":
        dist.send(numbers(), rank ^ 1)
        dist.recv(numbers(8), rank ^ 1)
    elif what == "store":
        dist.TCPStore("localhost", 29513, 4, rank == 0).get("never set")
    elif what == "raises":
        if rank == 2:
            raise ValueError("no such file: shard-2")
        dist.barrier()
    elif what == "all raise":
        raise ValueError("a typing error")
    elif what == "killed":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    elif what == "uneven":
        train(3 if rank else 2)
    elif what == "forks":
        if os.fork() == 0:
            dist.all_reduce(torch.ones(1))
        os.wait()
        dist.barrier()
    elif what == "full":
        torch.ones((1 << 31) if rank == 2 else 8, device="cuda")
        dist.barrier()
    elif what == "sleeps":
        if rank == 1:
            time.sleep(600)
        dist.barrier()


def spawned(rank: int, size: int, what: str) -> None:
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29514", rank=rank, world_size=size)
    run(what)


def run(what: str) -> None:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    named = {"exchanged": exchanged, "train": train, "pipeline": pipeline}
    if what in named:
        named[what]()
    else:
        wrong(what)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        torch.multiprocessing.spawn(spawned, (int(sys.argv[3]), sys.argv[2]), nprocs=int(sys.argv[3]))
    elif sys.argv[1] in ("gloo", "mpi"):
        dist.init_process_group(sys.argv[1])
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total)
        assert total.item() == 6
    else:
        if sys.argv[1] == "smaller":
            os.environ["WORLD_SIZE"] = "3"
        dist.init_process_group("nccl")
        run(sys.argv[1])
