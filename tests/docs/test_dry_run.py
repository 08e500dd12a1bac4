"""docs/dry-run-in-ci.md: its test suite passes, and fails as the page says."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

pytest_plugins = "pytester"
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "dry-run-in-ci.md").read_text(encoding="utf-8")
SUITE = re.search(r"^```py\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[1]
SHOWN = re.search(r"^```text\n(memprof: .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[1]


@pytest.mark.nightly
def test_the_suite_passes_and_fails_as_shown(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    folder = pytester.mkdir("tests")
    (folder / "test_memory.py").write_text(SUITE, encoding="utf-8")
    lower = pytester.mkdir("lower").joinpath("tests")
    lower.mkdir()
    (lower / "test_memory.py").write_text(SUITE.replace('limit="6GiB"', 'limit="3GiB"'), encoding="utf-8")
    arguments = ("-p", "memprof.pytest_plugin", "-p", "no:cacheprovider", "--import-mode=importlib")
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=3, failed=1)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if f"torch=={importlib.metadata.version('torch').partition('+')[0]}" in constraints.split():
        assert SHOWN in result.stdout.str()
