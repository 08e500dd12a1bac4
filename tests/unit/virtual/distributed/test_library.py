"""`memprof.virtual_gpus`: several GPUs of one process, and one rank of several, in one's own code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import memprof
from memprof.trace.facts import RankFacts

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


def join() -> str:
    dist.init_process_group("nccl")
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.empty(1 << 20, device=device)
    return device


def test_a_rank_has_what_torchrun_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "7")
    before = {name: os.environ.get(name) for name in NAMES}
    with memprof.virtual_gpus(4, "a100-80gb", rank=9, world_size=11) as gpus:
        assert [os.environ[name] for name in NAMES[:5]] == ["9", "1", "11", "3", "2"]
        device = join()
        assert (dist.get_rank(), dist.get_world_size(), torch.cuda.device_count()) == (9, 11, 4)
    assert {name: os.environ.get(name) for name in NAMES} == before and not dist.is_initialized()
    report = gpus.report()
    assert report.rank == RankFacts(9, 11) and device == "cuda:1"
    assert report.peak.allocated_bytes == 4 << 20 and not report.gpus, "the others' GPUs are not its own"
    assert "rank 9 of 11" in str(report)
    gpus.save(tmp_path / "rank.memprof")
    loaded = memprof.load(tmp_path / "rank.memprof").to_json()["rank"]
    assert (loaded["rank"], loaded["world_size"]) == (9, 11)


def test_a_rank_on_each_gpu() -> None:
    with memprof.virtual_gpus(8, rank=3) as gpus:
        join()
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
    assert gpus.report().rank == RankFacts(3, 8)
    with memprof.virtual_gpus(1, world_size=2) as gpus:
        join()
        assert os.environ["GROUP_RANK"] == "0"
    assert gpus.report().rank == RankFacts(0, 2)


def test_code_that_starts_its_own_ranks() -> None:
    ran = []

    def work(rank: int) -> None:
        dist.init_process_group("nccl", rank=rank, world_size=4)
        ran.append(torch.empty(1 << 20, device=f"cuda:{rank}").device.index)

    with memprof.virtual_gpus(4, rank=2) as gpus:
        torch.multiprocessing.spawn(work, nprocs=4)
    assert ran == [2] and gpus.report().rank == RankFacts(2, 4)


def test_one_process_with_several_gpus_is_no_rank() -> None:
    with memprof.virtual_gpus(2) as gpus:
        assert not set(NAMES) & set(os.environ)
        torch.empty(1 << 20, device="cuda:1")
    report = gpus.report()
    assert report.rank is None and [row.peak_allocated_bytes for row in report.gpus] == [0, 4 << 20]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"n": 0}, "n must be at least 1"),
        ({"n": 2, "world_size": 0}, "world_size must be at least 1"),
        ({"n": 2, "rank": 2}, "there is no such rank"),
        ({"n": 2, "rank": -1, "world_size": 4}, "there is no such rank"),
    ],
)
def test_what_there_is_not(asked: dict[str, int], said: str) -> None:
    with pytest.raises(memprof.UsageError, match=said):
        memprof.virtual_gpus(**asked)
