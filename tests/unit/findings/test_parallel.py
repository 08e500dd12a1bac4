"""Findings on a rank: of programs that have them, whose fixed form takes as much less as was said, and of no others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import memprof
from memprof.findings import Finding, Severity, state_not_sharded
from memprof.flows.account import analyze
from memprof.flows.rank_reports import merge_traces
from memprof.report.documents.report import Report
from memprof.trace.events import Trace
from tests.lanes import by_day

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
    pytest.mark.filterwarnings("ignore"),
]
IDS = {
    "gradients-twice", "optimizer-state-not-sharded", "unsharded-group", "kept-unsharded", "prefetch-too-deep",
    "float32-reduction", "unreduced-gradients",
}  # fmt: skip
WIDTH, WORDS = 1024, 2000
MIB = 1 << 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def ddp(**options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(Model().cuda(), **options)


def fsdp1(layers: bool = True, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block}) if layers else None
    return FullyShardedDataParallel(Model(), auto_wrap_policy=policy, device_id=torch.device("cuda", 1), **options)


def fsdp2(layers: bool = True, ahead: int = 0, half: Any = None, reduced: Any = None, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Model().cuda()
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduced)
    for block in model.blocks if layers else ():
        fully_shard(block, **options)
    fully_shard(model, **options)
    blocks: list[Any] = list(model.blocks)
    for at, block in enumerate(blocks if ahead else ()):
        block.set_modules_to_forward_prefetch(blocks[at + 1 : at + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(at - ahead, 0) : at][::-1])
    return model


def by_hand(ahead: int) -> nn.Module:
    """Each rank keeps a part of each block; hooks gather so many blocks ahead of the one that computes."""
    model = Model()
    blocks = list(model.blocks)
    kept: dict[nn.Parameter, tuple[torch.Tensor, torch.Size]] = {}
    for parameter in (one for block in blocks for one in block.parameters()):
        part = parameter.data.view(-1).chunk(dist.get_world_size())[dist.get_rank()].cuda()
        kept[parameter] = part, parameter.shape
        parameter.data = part
    model.embedding.cuda()
    model.head.cuda()

    def gather(block: nn.Module) -> None:
        for parameter in block.parameters():
            part, shape = kept[parameter]
            if parameter.data.numel() == part.numel():
                whole = torch.empty(shape, device="cuda")
                dist.all_gather_into_tensor(whole, part)
                parameter.data = whole

    def give_back(block: nn.Module, *args: Any) -> None:
        for parameter in block.parameters():
            parameter.data = kept[parameter][0]
            parameter.grad = None

    def comes(at: int) -> Any:
        def gather_ahead(*args: Any) -> None:
            for block in blocks[at : at + 1 + ahead]:
                gather(block)

        return gather_ahead

    for at, block in enumerate(blocks):
        block.register_forward_pre_hook(comes(at))
        block.register_forward_hook(give_back)
    return model


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), foreach=False)


def zero(model: nn.Module) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, foreach=False)


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), foreach=False)


def run(
    parallel: Callable[[], nn.Module], optimizer: Callable[[nn.Module], Any] = sgd, batch: int = 2, waits: Any = None
) -> Report:
    """Two steps of rank 1 of 8; `waits` makes the first of two micro-batches leave its gradients as they are."""
    with memprof.virtual_gpus(8, "a100-80gb", rank=1) as gpus:
        dist.init_process_group("nccl")
        torch.cuda.set_device(1)
        model = parallel()
        stepper = optimizer(model)
        for _ in range(2):
            for last in (False, True) if waits else (True,):
                with contextlib.nullcontext() if last else waits(model):
                    tokens = torch.zeros(batch, 16, dtype=torch.long, device="cuda")
                    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            stepper.step()
            stepper.zero_grad()
    return gpus.report()


@contextlib.contextmanager
def unsynchronized(model: Any) -> Any:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def infer(parallel: Callable[[], nn.Module]) -> Report:
    """One forward of rank 1 of 8."""
    with memprof.virtual_gpus(8, "a100-80gb", rank=1) as gpus, torch.no_grad():
        dist.init_process_group("nccl")
        torch.cuda.set_device(1)
        model = parallel()
        for _ in range(2):
            model(torch.zeros(2, 16, dtype=torch.long, device="cuda"))
    return gpus.report()


def reduced_by_hand(copies: bool) -> Report:
    with memprof.virtual_gpus(8, "a100-80gb", rank=1) as gpus:
        dist.init_process_group("nccl")
        torch.cuda.set_device(1)
        model = Model().cuda().bfloat16()
        for _ in range(2):
            model(torch.zeros(2, 16, dtype=torch.long, device="cuda")).sum().backward()
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            whole = [one.float() for one in gradients] if copies else gradients
            for one in whole:
                dist.all_reduce(one)
            for one, reduced in zip(gradients, whole, strict=True):
                one.copy_(reduced)
            del whole
            model.zero_grad()
    return gpus.report()


def told(document: Report) -> list[Finding]:
    return [finding for finding in document.findings if finding.id in IDS]


def strategy(name: str) -> Any:
    from torch.distributed.fsdp import ShardingStrategy

    return ShardingStrategy[name]


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "ddp": (
        "gradients-twice",
        {"parallel": ddp},
        {"parallel": lambda: ddp(gradient_as_bucket_view=True)},
        "gradient_as_bucket_view=True",
    ),
    "ddp with adamw": (
        "optimizer-state-not-sharded",
        {"parallel": lambda: ddp(gradient_as_bucket_view=True), "optimizer": adamw},
        {"parallel": lambda: ddp(gradient_as_bucket_view=True), "optimizer": zero},
        "ZeroRedundancyOptimizer",
    ),
    "fully_shard, the root alone": (
        "unsharded-group",
        {"parallel": lambda: fsdp2(layers=False)},
        {"parallel": fsdp2},
        "for layer in model.blocks: fully_shard(layer), before it",
    ),
    "FSDP, the root alone": (
        "unsharded-group",
        {"parallel": lambda: fsdp1(layers=False)},
        {"parallel": fsdp1},
        "auto_wrap_policy=ModuleWrapPolicy({Block})",
    ),
    "fully_shard, kept": (
        "kept-unsharded",
        {"parallel": lambda: fsdp2(reshard_after_forward=False)},
        {"parallel": lambda: fsdp2(reshard_after_forward=True)},
        "reshard_after_forward=True",
    ),
    "FSDP, kept": (
        "kept-unsharded",
        {"parallel": lambda: fsdp1(sharding_strategy=strategy("SHARD_GRAD_OP"))},
        {"parallel": lambda: fsdp1(sharding_strategy=strategy("FULL_SHARD"))},
        "ShardingStrategy.FULL_SHARD",
    ),
    "fully_shard, prefetching": (
        "prefetch-too-deep",
        {"parallel": lambda: fsdp2(ahead=5)},
        {"parallel": lambda: fsdp2(ahead=1)},
        "one module each",
    ),
    "fully_shard, reduced in float32": (
        "float32-reduction",
        {"parallel": lambda: fsdp2(half=torch.bfloat16, reduced=torch.float32, layers=False)},
        {"parallel": lambda: fsdp2(half=torch.bfloat16, layers=False)},
        "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)",
    ),
    "fully_shard, accumulating": (
        "unreduced-gradients",
        {"parallel": fsdp2, "waits": unsynchronized},
        {"parallel": fsdp2, "waits": contextlib.nullcontext},
        "set_requires_gradient_sync(False)",
    ),
    "FSDP, accumulating": (
        "unreduced-gradients",
        {"parallel": fsdp1, "waits": lambda model: model.no_sync()},
        {"parallel": fsdp1, "waits": contextlib.nullcontext},
        "no_sync()",
    ),
}


@pytest.mark.parametrize("case", by_day(CASES, *[*CASES][::2]))
def test_a_fixed_program_takes_as_much_less(case: str) -> None:
    name, has, fixed, what = CASES[case]
    before, after = run(**has), run(**fixed)
    finding = next(one for one in before.findings if one.id == name)
    assert name not in [one.id for one in after.findings] and len(told(after)) < len(told(before))
    saved = before.peak.allocated_bytes - after.peak.allocated_bytes
    assert finding.num_bytes == pytest.approx(saved, rel=0.15)
    assert what in finding.evidence[0].text and (finding.evidence[0].source or "").startswith(__file__)
    assert finding.severity is not Severity.ERROR


@pytest.mark.parametrize(
    ("make", "id", "line"),
    [
        (lambda right: infer(lambda: by_hand(1 if right else 5)), "prefetch-too-deep", "whole = torch.empty(shape"),
        (lambda right: reduced_by_hand(not right), "float32-reduction", "whole = [one.float()"),
    ],
)
def test_what_programs_do_by_hand(make: Callable[[bool], Report], id: str, line: str) -> None:
    before, after = make(False), make(True)
    (finding,) = told(before)
    assert finding.id == id and told(after) == []
    saved = before.peak.allocated_bytes - after.peak.allocated_bytes
    assert finding.num_bytes == pytest.approx(saved, rel=0.15)
    number = int((finding.evidence[0].source or "").removeprefix(f"{__file__}:").split()[0])
    assert Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1].strip().startswith(line)


def test_nothing_limits_what_is_gathered() -> None:
    before, after = run(lambda: fsdp1(limit_all_gathers=False)), run(fsdp1)
    (finding,) = told(before)
    assert finding.id == "prefetch-too-deep" and told(after) == []
    assert before.streams is not None and after.streams is not None
    saved = (before.streams.upper_bound_bytes or 0) - (after.streams.upper_bound_bytes or 0)
    # The limit makes the host wait, by which it knows that gradients are done with as well.
    assert finding.num_bytes is not None and 0.5 * saved < finding.num_bytes < saved
    assert (finding.evidence[0].source or "").startswith(__file__)


def shards_in_pairs() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Model().cuda()
    blocks: list[Any] = list(model.blocks)
    for at in range(0, len(blocks), 2):
        fully_shard(blocks[at : at + 2])
    return fully_shard(model)


def hybrid() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    return fsdp2(mesh=init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard")))


INNOCENT: dict[str, dict[str, Any]] = {
    "ddp, little": {"parallel": lambda: nn.parallel.DistributedDataParallel(Model(1).cuda()), "optimizer": adamw},
    "FSDP, forward prefetch": {"parallel": lambda: fsdp1(forward_prefetch=True), "optimizer": adamw},
    "fully_shard, in pairs": {"parallel": shards_in_pairs, "optimizer": adamw},
    "fully_shard, half": {"parallel": lambda: fsdp2(half=torch.bfloat16), "optimizer": adamw},
    "fully_shard, hybrid": {"parallel": hybrid, "optimizer": adamw},
}


@pytest.mark.parametrize("case", INNOCENT)
def test_no_program_in_order_is_told_anything(case: str) -> None:
    assert told(run(**INNOCENT[case])) == []


def test_one_process_has_no_ranks_to_be_told_of() -> None:
    with memprof.virtual_gpu("a100-80gb") as gpu:
        dist.init_process_group("nccl", rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(Model().cuda())
        optimizer = adamw(model)
        tokens = torch.zeros(2, 16, dtype=torch.long, device="cuda")
        for _ in range(2):
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert told(gpu.report()) == []


def test_the_largest_part_of_sharded_state_is_torchs_own() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    sizes = [7, 100, 3, 40, 41, 12, 12, 60]
    with memprof.virtual_gpus(4, rank=0):
        dist.init_process_group("nccl")
        optimizer: Any = ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(size)) for size in sizes], torch.optim.Adam)
        parts = optimizer._partition_parameters()
        largest = max(sum(one.numel() for group in part for one in group["params"]) for part in parts)
    assert state_not_sharded._compute_largest_shard(sizes, 4) == largest


def stage(blocks: int, rank: int) -> Trace:
    """One of two ranks, each with some of eight blocks."""
    with memprof.virtual_gpus(2, "a100-80gb", rank=rank) as gpus:
        dist.init_process_group("nccl")
        torch.cuda.set_device(rank)
        layers = nn.Sequential(*(Block() for _ in range(blocks))).cuda()
        optimizer = adamw(layers)
        for _ in range(2):
            layers(torch.zeros(16, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return gpus.trace.select_device(f"cuda:{rank}")


def test_ranks_that_differ_much() -> None:
    uneven, even = analyze(merge_traces([stage(7, 0), stage(1, 1)])), analyze(merge_traces([stage(4, 0), stage(4, 1)]))
    finding = next(one for one in uneven.findings if one.id == "ranks-differ")
    assert "ranks-differ" not in [one.id for one in even.findings]
    saved = uneven.peak.allocated_bytes - even.peak.allocated_bytes
    assert finding.num_bytes == pytest.approx(saved, rel=0.15)
    assert finding.title.startswith("Ranks differ: rank 0 takes ") and "rank 1" in finding.title
    assert (finding.evidence[0].source or "").startswith(__file__)
    assert sum("more on rank 0" in line.text for line in finding.evidence) == 3
