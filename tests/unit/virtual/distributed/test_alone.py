"""One rank of several, alone: its collectives have the shapes, the allocations and the values that it can know."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.trace.events import EventKind
from memprof.trace.facts import RankFacts
from memprof.virtual import VirtualGpu

MIB = 1 << 20
pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:barrier:UserWarning"),
]


@contextlib.contextmanager
def rank(number: int, size: int, backend: str = "nccl") -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("a100-80gb"), gpus=min(size, 8), nodes=-(-size // 8), workspaces=False) as gpu:
        dist.init_process_group(backend, rank=number, world_size=size)
        torch.cuda.set_device(number % 8)
        yield gpu
    assert not dist.is_initialized()


def made(gpu: VirtualGpu, run: Callable[[], Any]) -> list[tuple[str, int]]:
    """What a call allocates and frees, in MiB."""
    since = len(gpu.trace.events)
    run()
    return [
        (event.kind.name, gpu.trace.storages[event.ref].num_bytes // MIB)
        for event in gpu.trace.events[since:]
        if event.kind in (EventKind.ALLOC, EventKind.FREE) and gpu.trace.storages[event.ref].num_bytes >= MIB
    ]


def numbers() -> torch.Tensor:
    return torch.arange(4, device="cuda")


def test_what_is_known_is_taken_to_be_equal() -> None:
    with rank(1, 2) as gpu:
        for reduction, expected in (
            (dist.ReduceOp.SUM, [0, 2, 4, 6]),
            (dist.ReduceOp.PRODUCT, [0, 1, 4, 9]),
            (dist.ReduceOp.MAX, [0, 1, 2, 3]),
            (dist.ReduceOp.BXOR, [0, 0, 0, 0]),
        ):
            tensor = numbers()
            dist.all_reduce(tensor, reduction)
            assert tensor.tolist() == expected
        wide, narrow = torch.zeros(8, dtype=torch.long, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
        dist.all_gather_into_tensor(wide, numbers())
        assert wide.tolist() == [0, 1, 2, 3] * 2
        dist.reduce_scatter_tensor(narrow, numbers())
        assert narrow.tolist() == [4, 6]
        dist.reduce_scatter(narrow, list(numbers().chunk(2)))
        assert narrow.tolist() == [4, 6]
        parts = [numbers() * 0 for _ in range(2)]
        dist.all_gather(parts, numbers())
        assert [part.tolist() for part in parts] == [[0, 1, 2, 3]] * 2
        dist.all_to_all_single(wide, torch.arange(8, device="cuda"))
        assert wide.tolist() == [4, 5, 6, 7] * 2
        dist.all_to_all_single(narrow, torch.arange(4, device="cuda")[:2], [1, 1], [1, 1])
        assert narrow.tolist() == [1, 1]
        host = torch.ones(2)
        dist.all_reduce(host, group=dist.new_group(backend="gloo"))
        assert host.tolist() == [2, 2]
    said = [text for text in gpu.trace.assumptions if "taken to be equal" in text]
    assert len(said) == 2 and all("test_alone.py:" in text for text in said)
    assert gpu.trace.facts.rank == RankFacts(1, 2)


def test_what_another_rank_sends_is_not_known() -> None:
    with rank(1, 4) as gpu:
        tensor, objects = numbers(), [None]
        dist.recv(tensor, 0)
        assert repr(tensor).startswith("tensor(...")
        dist.broadcast_object_list(objects, 0)
        dist.scatter_object_list(objects, None, 0)
        assert objects == [None]
        gathered: list[Any] = [None] * 4
        dist.all_gather_object(gathered, {"loss": 2})
        assert gathered == [{"loss": 2}] * 4
        dist.send(tensor, 2)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 2), dist.P2POp(dist.irecv, tensor, 0)]):
            work.wait()
        dist.gather(tensor, None, 0)
        dist.scatter(tensor, None, 0)
        dist.monitored_barrier(dist.new_group(backend="gloo"))
    assert sum("not known" in text and "test_alone.py:" in text for text in gpu.trace.assumptions) == 3


def test_what_this_rank_sends_is_its_own() -> None:
    with rank(0, 4):
        objects: list[Any] = ["a"]
        dist.broadcast_object_list(objects, 0)
        given: list[Any] = [None]
        dist.scatter_object_list(given, [1, 2, 3, 4], 0)
        gathered: list[Any] = [None] * 4
        dist.gather_object("b", gathered, 0)
        assert (objects, given, gathered) == (["a"], [1], ["b"] * 4)


def test_lists_of_one_size_are_laid_flat() -> None:
    with rank(2, 4) as gpu:
        part = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        parts = [torch.empty_like(part) for _ in range(4)]
        flat = [("ALLOC", 4), ("FREE", 4)]
        assert made(gpu, lambda: dist.all_gather(parts, part)) == flat
        assert made(gpu, lambda: dist.reduce_scatter(part, parts)) == flat
        assert made(gpu, lambda: dist.all_to_all(parts, parts)) == []
        assert made(gpu, lambda: dist.gather(part, None, 0)) == []
        parts[0] = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
        assert made(gpu, lambda: dist.all_gather(parts, part)) == []


def test_what_a_call_is_given_lives_until_it_is_waited_for() -> None:
    with rank(2, 4):
        output = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        before = torch.cuda.memory_allocated()
        work = dist.all_gather_into_tensor(output, torch.empty(MIB, dtype=torch.uint8, device="cuda"), async_op=True)
        assert work is not None and torch.cuda.memory_allocated() == before + MIB
        work.wait()
        assert torch.cuda.memory_allocated() == before


def test_functional_collectives_make_one_result_each() -> None:
    with rank(2, 4) as gpu:
        tensor, world = torch.empty(MIB, dtype=torch.uint8, device="cuda"), dist.group.WORLD
        for call, size in (
            (lambda: functional.all_reduce(tensor, "sum", world).wait(), 1),
            (lambda: functional.all_gather_tensor(tensor, 0, world).wait(), 4),
            (lambda: functional.all_to_all_single(tensor, None, None, world).wait(), 1),
        ):
            assert made(gpu, call) == [("ALLOC", size), ("FREE", size)]
        assert functional.all_reduce(numbers(), "sum", world).tolist() == [0, 4, 8, 12]


def test_what_a_functional_gather_is_given_lives_until_it_is_waited_for() -> None:
    with rank(2, 4):
        before = torch.cuda.memory_allocated()
        part = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        gathered = functional.all_gather_tensor(part, 0, dist.group.WORLD)
        del part
        assert torch.cuda.memory_allocated() == before + 5 * MIB
        gathered.wait()
        assert torch.cuda.memory_allocated() == before + 4 * MIB


def test_shapes_that_nccl_refuses() -> None:
    with rank(0, 4), pytest.raises(ValueError, match="world_size times input"):
        dist.all_gather_into_tensor(torch.empty(8, device="cuda"), torch.empty(4, device="cuda"))


def test_groups_of_some_ranks() -> None:
    with rank(5, 8):
        assert dist.get_rank(dist.new_group([4, 5])) == 1
        assert dist.new_group([0, 1]) == dist.GroupMember.NON_GROUP_MEMBER
        own, all_of_them = dist.new_subgroups(4)
        assert (dist.get_rank(own), dist.get_world_size(own), len(all_of_them)) == (1, 4, 2)
        assert dist.get_process_group_ranks(dist.split_group(None, [[0, 1, 2, 3], [4, 5, 6, 7]])) == [4, 5, 6, 7]
        mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        assert mesh.get_coordinate() == (1, 0, 1) and mesh["dp"].get_group().size() == 2


def test_a_group_of_many_is_made_at_once() -> None:
    begin = time.process_time()
    with rank(300, 512):
        mesh = init_device_mesh("cuda", (64, 8), mesh_dim_names=("dp", "tp"))
        assert mesh.get_coordinate() == (37, 4) and mesh["dp"].size() == 64
    assert time.process_time() - begin < 5


def test_stores_hold_what_this_rank_puts_there() -> None:
    with rank(1, 2):
        store = dist.TCPStore("localhost", 1, 2, is_master=False)
        store.set("own", "1")
        assert store.get("own") == b"1"
        with pytest.raises(MemprofError, match=r"test_alone\.py.* waits for \['theirs'\] of another process"):
            store.get("theirs")


def test_no_such_rank() -> None:
    with pytest.raises(MemprofError, match="rank 2 of 2, and there is none"), rank(2, 2):
        pass


def test_spawned_processes_are_one_of_them() -> None:
    seen: list[tuple[int, int]] = []
    with VirtualGpu(find_gpu("a100-80gb"), gpus=4, rank=2) as gpu:
        torch.multiprocessing.spawn(lambda *given: seen.append(given), args=(7,), nprocs=torch.cuda.device_count())
    assert seen == [(2, 7)]
    assert "torch.multiprocessing.spawn with 4 processes" in " ".join(gpu.trace.assumptions)


def _joins(number: int, size: int) -> None:
    dist.init_process_group("nccl", rank=number, world_size=size)
    assert torch.cuda.max_memory_allocated() == 4 * MIB, "what was there before"
    weight = torch.ones(4, 4, device="cuda", requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda given: weight.add_(0))  # which no garbage collector finds
    (weight @ weight).sum().backward()
    assert torch.cuda.memory_allocated() > MIB, "cuBLAS has its workspace"


def test_each_spawned_process_begins_anew() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), gpus=2) as gpu:
        kept = torch.ones(MIB, device="cuda")
        for _ in range(2):
            torch.multiprocessing.spawn(_joins, args=(2,), nprocs=2)
            assert gpu.recorder.storages.live_bytes == kept.nbytes
        assert not dist.is_initialized()


def test_a_storage_resized_to_nothing_stays_on_its_gpu() -> None:
    with rank(1, 2):
        tensor = torch.ones(4, device="cuda")
        for num_bytes in (0, 16):
            tensor.untyped_storage().resize_(num_bytes)
            assert tensor.device == torch.device("cuda", 1)


def test_a_ring_gives_back_what_it_was_given() -> None:
    with rank(1, 2):
        vote, result = torch.tensor([0], device="cuda"), torch.tensor([7], device="cuda")
        dist.send(vote, 0)
        dist.recv(result, 0)
        assert result.item() == 0


def test_what_is_sent_is_lent_to_a_stream_of_nccl() -> None:
    """`pointToPoint` of ProcessGroupNCCL.cpp records both sides' tensors on its stream; collectives record nothing."""
    with rank(2, 4) as gpu:
        tensor, world = torch.empty(MIB, dtype=torch.uint8, device="cuda"), torch.empty(4 * MIB, dtype=torch.uint8)
        dist.all_gather_into_tensor(world.cuda(), tensor)
        assert gpu.trace.uses == []
        work = dist.isend(tensor, 3)
        assert work is not None and len(gpu.trace.uses) == 1 and gpu.trace.uses[0].stream != 0
        waits = len(gpu.trace.waits)
        work.wait()
        (wait,) = gpu.trace.waits[waits:]
        assert not wait.by_host and gpu.trace.uses[0].stream in [done.stream for done in wait.done]
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 3), dist.P2POp(dist.irecv, tensor, 1)]):
            work.wait()
        assert len(gpu.trace.uses) == 3
        dist.send(torch.zeros(4), 3, group=dist.new_group(backend="gloo"))
        assert len(gpu.trace.uses) == 3


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_groups_of_hosts_take_nothing_of_nccl(backend: str) -> None:
    """MPI says itself how many there are: torch asks for a group of -1."""
    with rank(1, 2, backend) as gpu:
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == (backend, 1, 2)
        total = numbers()
        dist.all_reduce(total)
        dist.new_group([0, 1])
        assert total.tolist() == [0, 2, 4, 6]
        assert gpu.trace.facts.rank == RankFacts(1, 2, without_nccl=True)
        assert not any("NCCL" in text for text in gpu.trace.assumptions)
        dist.new_group([0, 1], backend="nccl")
    assert gpu.trace.facts.rank == RankFacts(1, 2) and any("NCCL" in text for text in gpu.trace.assumptions)


def test_a_collective_uses_what_it_sends() -> None:
    with rank(0, 2) as gpu:
        sent = numbers()
        before = gpu.num_events
        dist.all_reduce(sent)
        assert gpu.trace.last_uses[gpu.recorder.storages.get_index(sent)] == before


@pytest.mark.parametrize("asynchronous", [False, True])
def test_collectives_that_a_manager_joins(asynchronous: bool) -> None:
    """`torch.distributed._coalescing_manager`, in which all_gather and others start and end together."""
    with rank(0, 2):
        outputs = [torch.zeros(8, device="cuda", dtype=torch.int64) for _ in range(2)]
        with dist._coalescing_manager(device=torch.device("cuda"), async_ops=asynchronous) as joined:
            for output in outputs:
                dist.all_gather_into_tensor(output, numbers(), async_op=asynchronous)
        if asynchronous:
            joined.wait()
        assert [output.tolist() for output in outputs] == [[0, 1, 2, 3] * 2] * 2
