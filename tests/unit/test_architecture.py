"""The layering holds, and what must start fast imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "pandas", "numpy")

HELP = """
from memprof.cli.main import run
try:
    run(["--help"])
except SystemExit as done:
    assert not done.code, done.code
"""


def _imported(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has imported after `code`."""
    report = "\nimport json, sys\nsys.stderr.write(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code + report], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr))


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import memprof", id="memprof"),
        pytest.param("import memprof.flows.profile", id="memprof.flows.profile"),
        pytest.param(
            "import memprof.catalog; memprof.catalog.list_models(); memprof.catalog.list_gpus()", id="memprof.catalog"
        ),
        pytest.param("import memprof.trace.io", id="memprof.trace.io"),
        pytest.param("import memprof.ledger.ledger", id="memprof.ledger.ledger"),
        pytest.param("import memprof.findings", id="memprof.findings"),
        pytest.param("import memprof.remedy_catalog", id="memprof.remedy_catalog"),
        pytest.param("import memprof.allocator", id="memprof.allocator"),
        pytest.param("import memprof.trace.snapshot_file", id="memprof.trace.snapshot_file"),
        pytest.param("import memprof.report.documents.report", id="memprof.report.documents.report"),
        pytest.param("import memprof.device.nvml, memprof.device.environment", id="memprof.device"),
        pytest.param("import memprof.report.terminal.monitor", id="memprof.report.terminal.monitor"),
        pytest.param(HELP.replace("--help", "monitor"), id="memprof monitor"),
        pytest.param("import memprof.flows.compare", id="memprof.flows.compare"),
        pytest.param("import memprof.pytest_plugin", id="memprof.pytest_plugin"),
        pytest.param("import memprof.report.documents.estimate", id="memprof.report.documents.estimate"),
        pytest.param(HELP, id="memprof --help"),
        pytest.param(
            HELP.replace('"--help"', '"estimate", "--params", "1.2B", "--dtype", "float16", "--explain"'),
            id="memprof estimate",
        ),
        pytest.param(HELP.replace("--help", "models"), id="memprof models"),
        pytest.param(HELP.replace('"--help"', '"profile", "--help"'), id="memprof profile --help"),
        pytest.param(HELP.replace('"--help"', '"verify", "--help"'), id="memprof verify --help"),
        pytest.param(HELP.replace('"--help"', '"compare", "--help"'), id="memprof compare --help"),
        pytest.param(HELP.replace('"--help"', '"recipes", "ls"'), id="memprof recipes ls"),
    ],
)
def test_imports_nothing_heavy(code):
    imported = _imported(code)
    assert "memprof" in imported
    assert not imported & set(HEAVY)


def test_heavy_imports_would_be_noticed():
    assert "numpy" in _imported("import numpy")


def test_imports_point_one_way():
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed beside this Python: pip install -e '.[dev]'")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
