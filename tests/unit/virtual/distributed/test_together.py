"""Programs for several processes, unmodified and each by torchrun: four ranks together do what each does alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from memprof.trace.events import EventKind, Trace
from memprof.trace.io import load_trace
from tests.processes import python
from tests.programs import parallel

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
    pytest.mark.nightly,
]
# Programs in which another rank decides what this one allocates.
OF_OTHERS = {
    "fsdp1-saved": "alone, objects that are gathered are as long as its own, and the last rank's is longer",
    "fsdp2-saved": "alone, a checkpoint is of one rank's parts, and no plans are sent",
}


def requests(trace: Trace) -> list[tuple[str, int]]:
    found = []
    for kind, ref in trace.events:
        if kind in (EventKind.ALLOC, EventKind.FREE) and trace.storages[ref].device != "cpu":
            found.append((kind.name, trace.storages[ref].num_bytes))
    return found


@pytest.mark.parametrize("program", parallel.PROGRAMS)
def test_four_ranks(program: str, tmp_path: Path) -> None:
    launched = ("torchrun", "--nproc-per-node", "4", Path(parallel.__file__), program)

    def run(*options: str) -> Trace:
        kept = tmp_path / "run.memprof"
        done = python("-m", "memprof", "run", "--until-exit", "--save", kept, *options, *launched)
        assert done.exit_code == 0, done.stderr
        return load_trace(kept)

    together = run("--ranks", "all")
    ranks = [together, *together.others]
    assert [one.facts.rank and one.facts.rank.rank for one in ranks] == [0, 1, 2, 3]
    alone = run("--rank", "2")
    assert (requests(ranks[2]) == requests(alone)) is (program not in OF_OTHERS)
