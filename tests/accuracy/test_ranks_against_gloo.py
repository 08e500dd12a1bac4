"""Programs for several processes, really run by as many over gloo: what each rank allocates on the virtual GPU, where
it runs alone, is what it allocates on the CPU.

Every allocation and free of the GPU has one of as many bytes, in the same order, there. What the CPU has beyond is
named in cpu_temporaries.py and in OOM_END_NOTE. Of what gloo's threads were given, frees are not compared: who lets go
of it last is a race.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from tests.accuracy.cpu_events import OF_A_THREAD, Change
from tests.accuracy.cpu_temporaries import NUMBER_BYTES, Comparison, _calls_at_death, _renumbered, laid_beside
from tests.accuracy.rank_events import SIZES
from tests.accuracy.test_against_cpu import check, check_documented
from tests.processes import ROOT, python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]


def _inside(*names: str) -> Callable[[Change], bool]:
    return lambda change: set(names) <= {call.name for call in change.calls}


GLOO = "gloo's copies: what it sends and receives is laid flat, or is not to change what it was given"
# What the CPU allocates beyond the GPU.
OOM_END_NOTE: dict[str, Callable[[Change], bool]] = {
    GLOO: (
        lambda change: any(call.name == OF_A_THREAD or call.name.startswith("c10d::") for call in change.calls)
    ),
    "casts in _chunk_cat, which is one kernel on CUDA": _inside("aten::_chunk_cat", "aten::cat"),
    "booleans, cast to integers before their sum": _inside("aten::sum", "aten::_to_copy"),
}  # fmt: skip
# Operators of which what the CPU makes and releases inside (casts, buffers) CUDA does not.
KERNELS = frozenset(
    {
        "aten::add_", "aten::gather", "aten::log_sigmoid", "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    }
)  # fmt: skip
# What the CPU has for the host, which comes first.
HOST_BYTES = {
    480: "sizes and strides of DDP's parameters, made on the host and then on the GPU, so that the CPU has them twice",
    92: "the same of the order of their gradients",
    88: "the same of which were used",
    16: "where a rank is in a mesh of ranks",
}
NCCL_BYTES = {16: "the ranks' numbers of parameters, which NCCL gathers into one tensor"}  # What the GPU has beyond.
HALF, FLOAT = 2, 4


class Ranks(NamedTuple):
    sides: Comparison
    beyond: Counter[str]  # Blocks that the CPU has beyond, by reason.
    of_given: int  # The GPU's frees of blocks that gloo's threads were given on the CPU, which are not compared.
    unseen: int  # How many of them the CPU's record lacks: a thread was last.


def _statistics_in_float(cpu: list[Change]) -> list[Change]:
    """Mean and deviation of layers in half precision: the CPU's are of the input's dtype, CUDA's float32
    (native/cuda/layer_norm_kernel.cu)."""
    halves = set()
    for change in cpu:
        call = next((call for call in reversed(change.calls) if call.name == "aten::native_layer_norm"), None)
        if call is not None and not change.free and call.shapes[0] is not None:
            *rows, _ = call.shapes[0]
            if change.num_bytes == HALF * math.prod(rows):
                halves.add(change.block)
    return [c._replace(num_bytes=c.num_bytes * FLOAT // HALF) if c.block in halves else c for c in cpu]


def _beyond(cpu: list[Change], virtual: list[Change]) -> dict[int, str]:
    found: dict[int, str] = {}
    more = Counter(c.num_bytes for c in cpu if not c.free)
    more.subtract(c.num_bytes for c in virtual if not c.free)
    outlived = _calls_at_death(cpu)
    for change in (change for change in cpu if not change.free):
        reason = next((reason for reason, is_so in OOM_END_NOTE.items() if is_so(change)), None)
        inside = (call for call in change.calls if call.name in KERNELS)
        if change.num_bytes > NUMBER_BYTES and any(call.number in outlived[change.block] for call in inside):
            reason = "of the CPU's own kernels"
        if reason is None and change.num_bytes in HOST_BYTES and more[change.num_bytes] > 0:
            more[change.num_bytes] -= 1
            reason = HOST_BYTES[change.num_bytes]
        if reason is not None:
            found[change.block] = reason
    return found


def _until_the_last_allocation(changes: list[Change]) -> list[Change]:
    """What dies later dies with the program."""
    last = max(position for position, change in enumerate(changes) if not change.free)
    return changes[: last + 1]


def compare(cpu: list[Change], virtual: list[Change]) -> Ranks:
    of_nccl = {c.block for c in virtual if not c.free and c.num_bytes in NCCL_BYTES and c.op == "aten.empty"}
    virtual = [change for change in virtual if change.block not in of_nccl]
    cpu = _statistics_in_float(cpu)
    beyond = _beyond(cpu, virtual)
    found = laid_beside(virtual, cpu, set(beyond))
    both = ([c for c in side if c.num_bytes > NUMBER_BYTES] for side in (found.virtual, found.cpu))
    ours, theirs = (_until_the_last_allocation(_renumbered(side)) for side in both)
    freed = {change.block for change in theirs if change.free}
    # Lists of lists, which a scatter is given, are not in the profiler's record: only a missing free tells.
    unseen = {change.block for change in ours if change.free and change.block not in freed}
    given = unseen | {change.block for change in theirs if change.given}
    of_given = sum(change.free and change.block in given for change in ours)
    ours, theirs = ([c for c in side if not (c.free and c.block in given)] for side in (ours, theirs))
    return Ranks(found._replace(virtual=ours, cpu=theirs), Counter(beyond.values()), of_given, len(unseen))


# Program -> allocations and frees of its GPU, at least.
PROGRAMS = {
    "tensor-parallel": 1100,
    "ddp": 700, "ddp-views": 700, "ddp-unused": 700, "ddp-static": 700, "zero": 450, "fsdp1": 600, "fsdp1-half": 650,
    "fsdp2": 1050, "fsdp2-half": 1200, "fsdp2-kept": 950, "hsdp": 1050, "loss-parallel": 1300,
    "pipeline-gpipe": 500, "pipeline": 500,
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS)
def test_ranks(program: str, tmp_path: Path) -> None:
    done = python("-m", "tests.accuracy.rank_events", tmp_path / "events", program, folder=ROOT)
    assert not done.exit_code, done.stderr[-4000:]
    recorded = pickle.loads((tmp_path / "events").read_bytes())[program]
    assert len(recorded) == SIZES.get(program, 2)
    ranks = [compare(sides["cpu"], sides["virtual"]) for sides in recorded]
    for found in ranks:
        check(found.sides)
        assert found.unseen <= found.beyond[GLOO], "gloo's threads release what they were given, and nothing else"
        assert len(found.sides.virtual) + found.of_given > PROGRAMS[program]
    check_documented(_row(program, ranks))


def _row(program: str, ranks: list[Ranks]) -> str:
    """Of the table in docs/accuracy-tables.md."""

    def told(numbers: Iterable[int]) -> str:
        texts = [f"{number:,}" for number in numbers]
        return " / ".join(texts if len(set(texts)) > 1 else texts[:1])

    made = told(sum(not change.free for change in found.sides.virtual) for found in ranks)
    freed = told(sum(change.free for change in found.sides.virtual) + found.of_given for found in ranks)
    of_gloo = told(found.beyond[GLOO] for found in ranks)
    others = told(found.beyond.total() - found.beyond[GLOO] for found in ranks)
    return f"| `{program}` | {len(ranks)} | {made} | {freed} | yes | {of_gloo} | {others} |"


def test_a_difference_is_seen() -> None:
    made = [Change(False, block, 1024 + block, "aten.mm") for block in range(60)]
    freed = [Change(True, block, 1024 + block, "aten.mm") for block in range(40)]
    changes = [*made[:40], *freed, *made[40:]]
    check(compare(changes, changes).sides)
    assert compare([change for change in changes if change != freed[7]], changes).unseen == 1
    for edited in (
        [*changes[:50], *changes[51:49:-1], *changes[52:]],
        [change for change in changes if change.block != 20],
        [change._replace(num_bytes=9) if change.block == 20 else change for change in changes],
    ):
        with pytest.raises(AssertionError):
            check(compare(edited, changes).sides)
        with pytest.raises(AssertionError):
            check(compare(changes, edited).sides)


def test_who_frees_what_gloo_was_given_is_a_race() -> None:
    made = [Change(False, block, 1024 + block, "aten.mm") for block in range(60)]
    freed = Change(True, 20, 1044, "aten.mm")
    virtual = [*made[:40], freed, *made[40:]]
    for cpu in (made, virtual, [*made[:50], freed, *made[50:]]):
        given = [change._replace(given=change.block == 20) for change in cpu]
        found = compare(given, virtual)
        check(found.sides)
        assert found.of_given == 1
