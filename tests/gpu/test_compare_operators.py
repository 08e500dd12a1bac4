"""Requests of operators on both sides, compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import compare_operators
from tests.gpu.compare_operators import compare, outcome


def rows(**lists: Any) -> dict[str, dict[str, Any]]:
    return {name: one if isinstance(one, dict) else {"first": one, "again": one} for name, one in lists.items()}


def test_bytes_and_order_decide() -> None:
    assert outcome([1, 2], [1, 2]) == "equal"
    assert outcome([1, 2], [2, 1]) == "reordered"
    assert outcome([1, 2], [1, 2, 2]) == "different"
    assert outcome(None, [1]) == "not recorded"


def test_every_operator_is_counted_and_differences_are_shown() -> None:
    error = {"error": "no"}
    real = rows(mm=[8, 8], sort=[8, 16], fft=[4], eig=error, svd=error, only=[1])
    virtual = rows(mm=[8, 8], sort=[16, 8], fft=[4, 6], eig=error, svd=[2])
    counts, lines = compare(real, virtual)
    assert counts == {
        "equal": 2, "reordered": 2, "different": 2, "failed": 1, "failed on one side": 1, "on one side alone": 1,
    }  # fmt: skip
    assert lines == [
        "eig: real no; virtual no",
        "fft, again call: real alone [], virtual alone [6]",
        "fft, first call: real alone [], virtual alone [6]",
        "svd: real no; virtual runs",
    ]


def test_files_that_are_not_there_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare", "real.jsonl", "virtual.jsonl", "beside.jsonl"])
    assert compare_operators.main() == 1
    assert capsys.readouterr().err == "real.jsonl is not there: no operator was recorded on the GPU\n"
    for name in ("real", "virtual"):
        Path(f"{name}.jsonl").write_text(json.dumps({"operator": "mm", "first": [1], "again": [1]}) + "\n")
    assert compare_operators.main() == 0
    assert capsys.readouterr().out == "virtual: 2 equal, 0 on one side alone\n"
