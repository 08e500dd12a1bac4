"""Sequence parallelism gives what the whole sequence gives, in processes that really exchange."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("sequence_parallel_program.py")


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_the_whole():
    """One head of keys and values for two ranks: it is repeated. transformers takes the loss in float32."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM)]
    result = subprocess.run(launch, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    far = json.loads(result.stdout)
    assert far["loss"] < 1e-6 and far["gradients"] < 1e-14 and far["logits"] < 1e-12
