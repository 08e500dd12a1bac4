"""The training scripts run, and what they record is what their comparison reads: here from the virtual GPU itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.steps import SCRIPTS, TRAINING_SCRIPTS
from tests.lanes import by_day
from tests.processes import python

GPU = "h100-80gb"
RECORD = f"""
import runpy, sys
import memprof
sys.path.insert(0, {str(SCRIPTS)!r})
with memprof.virtual_gpu({GPU!r}):
    runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("name", by_day(TRAINING_SCRIPTS, "lstm"))
def test_a_recording_is_equal_to_its_own_simulation(name: str, tmp_path: Path) -> None:
    script = SCRIPTS / f"{name}.py"
    recorded = python("-c", RECORD, script, folder=tmp_path)
    assert recorded.exit_code == 0, recorded.stderr
    assert recorded.stdout.startswith(f"peaks of {name} [[")
    options = [f"{name}.pickle", "--gpu", GPU, "--path", SCRIPTS, "--cwd", "."]
    compared = python("-m", "tests.benchmarks.recordings", *options, "--", script, folder=tmp_path)
    assert compared.exit_code == 0, compared.stdout + compared.stderr
    assert "(100.00%), too many 0" in compared.stdout
    assert "within the bars" in compared.stdout
