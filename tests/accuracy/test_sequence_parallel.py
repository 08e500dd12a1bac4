"""Sequence parallelism gives what the whole sequence gives, in processes that really exchange."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import python

PROGRAM = Path(__file__).with_name("sequence_parallel_program.py")
LAUNCH = """
import os, runpy, socket, sys
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
ranks = []
for rank in range(2):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        runpy.run_path(sys.argv[1], run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks))
"""


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_the_whole():
    """One head of keys and values for two ranks: it is repeated. transformers takes the loss in float32."""
    result = python("-c", LAUNCH, PROGRAM, seconds=120)
    assert result.exit_code == 0, result.stderr[-2000:]
    far = json.loads(result.stdout)
    assert far["loss"] < 1e-6 and far["gradients"] < 1e-14 and far["logits"] < 1e-12
