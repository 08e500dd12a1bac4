"""Programs for several processes, unmodified and each by torchrun: one rank of four, alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from memprof.flows.script import run_script
from memprof.run_spec import RunSpec
from memprof.script import EndReason, Program, StopRule
from memprof.trace.facts import RankFacts
from tests.lanes import of_lane
from tests.programs import parallel

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
]
RANKS = {"pipeline": (0, 3), "pipeline-gpipe": (1,)}  # Stages of a pipeline are of several kinds.
# Settings of what the others show, and what tests/accuracy/test_ranks_against_gloo.py shows in every run.
NIGHTLY = {
    "ddp-views", "ddp-static", "ddp-unused", "ddp-half-gradients", "fsdp1-half", "fsdp1-synced", "fsdp2-kept",
    "fsdp2-saved", "fsdp2-half", "tensor-parallel", "pipeline", "hsdp", "loss-parallel", "fsdp1-saved",
}  # fmt: skip


def _named(program: str) -> object:
    return pytest.param(program, marks=pytest.mark.nightly) if program in NIGHTLY else program


@pytest.mark.parametrize("program", of_lane(_named(program) for program in parallel.PROGRAMS))
def test_one_rank_of_four(program: str) -> None:
    for rank in RANKS.get(program, (2,)):
        launched = Program("torchrun", ("--nproc-per-node", "4", str(Path(parallel.__file__)), program))
        run = run_script(launched, StopRule(None), RunSpec(gpu="a100-80gb", rank=rank))
        assert run.outcome.ended is EndReason.EXIT, run.outcome.error
        assert run.document is not None and run.document.rank == RankFacts(rank, 4)
        assert not run.document.gpus and run.document.verdict.fits, "only its own GPU is used"
        assert run.trace.mismatches == []
