"""`--github` and `--markdown`: for a job of GitHub Actions, and for a comment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import python

SUMMARY = "GITHUB_STEP_SUMMARY"
SCRIPT = """
import torch
model = torch.nn.Linear(1 << 14, 1 << 14).cuda().eval()
print(model(torch.ones(1 << 18, 1 << 14, device="cuda")).shape)
"""


def test_a_run_is_added_to_the_summary(script: Callable[..., str], tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    name = script(SCRIPT, "infer.py")
    options = ("--gpu", "rtx-4090", "--github", "--markdown", "out.md")
    done = python("-m", "memprof", "run", *options, name, folder=tmp_path, env={**os.environ, SUMMARY: str(summary)})
    assert done.exit_code == 3, done.stderr
    text = (tmp_path / "out.md").read_text()
    assert summary.read_text() == f"before\n{text}" and text.startswith("### memprof: Does not fit\n")
    assert any(line.startswith("::error file=infer.py,line=4,") for line in done.stderr.splitlines())


def test_elsewhere_it_is_a_usage_error(
    memprof: Callable[..., Any], script: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SUMMARY, raising=False)
    done = memprof("run", "--github", script(SCRIPT))
    assert done.exit_code == 2 and "--github needs GITHUB_STEP_SUMMARY" in done.stderr
