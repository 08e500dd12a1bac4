"""memprof in a zip file, as a wheel that was not unpacked is: its tables, pages and recipes are read from there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.golden.test_report import document
from tests.lanes import by_day
from tests.processes import ROOT


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("zip") / "memprof.zip"
    parts = {"memprof": "memprof", "docs": "memprof/_docs", "recipes": "memprof/_recipes"}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
        for folder, name in parts.items():
            for path in (ROOT / folder).rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    zipped.write(path, Path(name) / path.relative_to(ROOT / folder))
    return file


def run(archive: Path, folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(archive), "MEMPROF_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 3), done.stderr
    return done.stdout


COMMANDS = (
    "estimate --params 7B", "show {report} --explain", f"doctor {ROOT / 'docs' / 'doctor_example.log'}", "recipes ls",
    "models", "gpus", "help", "help findings",
)  # fmt: skip


@pytest.mark.parametrize(
    "command", by_day(COMMANDS, "estimate --params 7B", "show {report} --explain", "help findings")
)
def test_it_says_the_same(memprof, archive, tmp_path, command) -> None:
    document(2 << 30).save(tmp_path / "report.json")
    command = command.format(report=tmp_path / "report.json")
    assert run(archive, tmp_path, "-m", "memprof", *command.split()) == memprof(*command.split()).stdout != ""


def test_it_is_imported_from_there(archive, tmp_path) -> None:
    assert run(archive, tmp_path, "-c", "import memprof; print(memprof.__file__)").startswith(f"{archive}{os.sep}")
    assert "recommend" in run(archive, tmp_path, "-m", "memprof", "--help")


@pytest.mark.nightly
def test_a_recipe_runs_and_is_copied(archive, tmp_path) -> None:
    assert "--no-clock" in run(archive, tmp_path, "-m", "memprof", "recipes", "run", "5", "--help")
    run(archive, tmp_path, "-m", "memprof", "recipes", "cp", "5", "copy")
    (folder,) = (ROOT / "recipes").glob("5-*")
    for file in (one for one in folder.rglob("*") if one.is_file() and "__pycache__" not in one.parts):
        assert (tmp_path / "copy" / file.relative_to(folder)).read_bytes() == file.read_bytes()


PROFILE = "profile --model gpt2 --context-length 16 --quiet"


@pytest.mark.parametrize("command", by_day([PROFILE, "run --quiet step.py"]))
def test_a_model_is_run(archive, tmp_path, command) -> None:
    (tmp_path / "step.py").write_text("import torch\ntorch.nn.Linear(1000, 1000).cuda()(torch.ones(9, 1000).cuda())\n")
    assert run(archive, tmp_path, "-m", "memprof", *command.split()).startswith("Fits: needs ")
