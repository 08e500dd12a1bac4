"""`--csv FOLDER` of every command that has tables."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.processes import Done, python

REPORT = {
    "stages", "steps", "batches", "reserved", "categories", "tensors", "ledger", "findings", "evidence", "suggestions",
    "ladder",
}  # fmt: skip
SCRIPT = """
import os
import torch
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
model = torch.nn.Linear(64, 64).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


def memprof(folder: Path, *arguments: str) -> Done:
    return python("-m", "memprof", *arguments, folder=folder)


def names(folder: Path) -> set[str]:
    return {file.stem for file in folder.glob("*.csv")}


@pytest.fixture(scope="module")
def captured(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("captured")
    (folder / "train.py").write_text(SCRIPT)
    done = memprof(folder, "run", "--json", "--csv", "tables/run", "--save", "run.memprof", "train.py")
    assert done.exit_code == 0, done.stderr
    (folder / "run.json").write_text(done.stdout)
    return folder


def test_run_writes_them_where_it_was_started(captured):
    written = json.loads((captured / "run.json").read_text())
    assert names(captured / "tables" / "run") == REPORT
    with (captured / "tables" / "run" / "stages.csv").open(newline="") as file:
        peaks = [int(row["peak_allocated_bytes"]) for row in csv.DictReader(file)]
    assert peaks == [row["peak_allocated_bytes"] for row in written["stages"]]


@pytest.mark.parametrize(
    ("command", "tables"),
    [
        (("show", "run.memprof"), {"stages", "ladder"}),
        (("analyze", "run.memprof"), {"groups", "what_if"}),
        (("compare", "run.memprof", "run.memprof"), {"totals", "kernels"}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_beside_what_is_printed(captured, command, tables):
    plain, both = memprof(captured, *command), memprof(captured, *command, "--csv", command[0])
    assert (both.exit_code, both.stdout) == (plain.exit_code, plain.stdout)
    assert "Tables: " in both.stderr
    assert names(captured / command[0]) >= tables


def test_a_file_in_the_way_is_said_before_the_run(captured):
    done = memprof(captured, "profile", "--model", "gpt2", "--csv", "train.py")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "not a folder" in done.stderr
    assert len(done.stderr.splitlines()) == 3, done.stderr
