"""Published measurements of programs for several processes: their own scripts, as one rank, alone.

The scripts are taken from checkouts in the folder that MEMPROF_PROGRAMS names, as OWNER+NAME; nothing of them is here.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tarfile
import textwrap
from io import BytesIO
from pathlib import Path

import pytest

from tests.processes import ROOT

pytestmark = pytest.mark.slow
COURSE, COMMIT_OF_ZERO, COMMIT_OF_FSDP = "duoan+cs336-assignment2-systems", "3f26030", "9f01dab"
PAGE = "docs/source-fabric/advanced/model_parallel/tp.rst"
SPAWNS = """
import sys
import torch.multiprocessing as mp
from cs336_systems import {module} as measured

measured.BENCH_STEPS = 1  # these come after all that is measured of memory


class Printed:
    def put(self, found):
        print(*(f"measured {{name}} {{value}}" for name, value in found.items() if name.startswith("mem_")), sep="\\n")


if __name__ == "__main__":
    mp.spawn(measured._worker, args=(2, Printed(), {argument}), nprocs=2)
"""
MODULES = {
    "modal.py": """
class Any:
    def __getattr__(self, name):
        return self

    def __call__(self, *args, **more):
        return args[0] if args and callable(args[0]) else self


App = Image = Any()
""",
    "humanfriendly.py": "def format_size(size, binary=False):\n    return str(size)\n",
    "cs336_systems-0.0.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: cs336-systems\nVersion: 0.0.0\n",
    "cs336_basics-0.0.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: cs336_basics\nVersion: 0.0.0\n",
    "lightning.py": """
import sys

import lightning_fabric
import lightning_fabric.strategies as strategies
import pytorch_lightning.demos.boring_classes as classes
from lightning_fabric import Fabric

__path__ = []
sys.modules |= {"lightning.fabric": lightning_fabric, "lightning.fabric.strategies": strategies}
sys.modules |= {"lightning.pytorch": classes, "lightning.pytorch.demos": classes}
sys.modules["lightning.pytorch.demos.boring_classes"] = classes
""",
}
"""Stand for what launches the scripts elsewhere, and for names under which a package is installed here."""


def checkout(name: str) -> Path:
    folder = os.environ.get("MEMPROF_PROGRAMS")
    if not folder:
        pytest.skip("MEMPROF_PROGRAMS names no folder with checkouts of public programs")
    found = Path(folder) / name
    if not found.is_dir():
        pytest.skip(f"no checkout of {name} in {folder}")
    return found


def git(repository: Path, *command: str) -> bytes:
    return subprocess.run(["git", "-C", str(repository), *command], check=True, capture_output=True).stdout


def published(shared_dir: Path, prefix: str) -> dict[str, str]:
    with (shared_dir / "published_parallel.csv").open(encoding="utf-8") as table:
        rows = {row["id"]: row["value"] for row in csv.DictReader(table)}
    found = {name.removeprefix(prefix): value for name, value in rows.items() if name.startswith(prefix)}
    assert found, prefix
    return found


def measured(folder: Path, path: list[Path], *command: str) -> str:
    for name, text in MODULES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    modules = os.pathsep.join(map(str, (ROOT, folder, *path, os.environ.get("PYTHONPATH", ""))))
    arguments = ("-m", "memprof", "run", "--until-exit", "--gpu", "a100-80gb", *command)
    environment = {**os.environ, "PYTHONPATH": modules}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    lacks = re.search(r"^ModuleNotFoundError: (No module .*)$", done.stderr, re.MULTILINE)
    if lacks:
        pytest.skip(lacks[1])
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("module", "argument", "commit", "prefix", "tolerance"),
    [
        ("sharded_optim_memory", False, COMMIT_OF_ZERO, "cs336-duoan-zero1-standard-", 0),
        ("sharded_optim_memory", True, COMMIT_OF_ZERO, "cs336-duoan-zero1-sharded-", 0),
        ("fsdp_benchmark", "ddp", COMMIT_OF_FSDP, "cs336-duoan-fsdpbench-ddp-", 0),
        # Its prefetches are given back when the card has caught up: three runs differ by as much.
        ("fsdp_benchmark", "fsdp_fp32", COMMIT_OF_FSDP, "cs336-duoan-fsdpbench-fsdp_fp32-", 0.0003),
    ],
)
def test_course_work(shared_dir, tmp_path, module, argument, commit, prefix, tolerance):
    """Data parallelism, ZeRO and FSDP by hand, in bytes as torch counted them on two A100."""
    repository, expected = checkout(COURSE), published(shared_dir, prefix)
    source = tmp_path / "source"
    packed = git(repository, "archive", commit, "cs336_systems", "cs336-basics/cs336_basics")
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(source, filter="data")
    (tmp_path / "spawns.py").write_text(SPAWNS.format(module=module, argument=repr(argument)), encoding="utf-8")
    printed = measured(tmp_path, [source, source / "cs336-basics"], "--gpus", "2", "spawns.py")
    found = dict(re.findall(r"^measured (\w+) (\d+)$", printed, re.MULTILINE))
    for name, value in expected.items():
        assert abs(int(found[name]) - int(value)) <= tolerance * int(value), name


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_tensor_parallelism_of_lightning(shared_dir, tmp_path, ranks):
    page = git(checkout("Lightning-AI+pytorch-lightning"), "show", f"HEAD:{PAGE}").decode()
    expected = float(published(shared_dir, "lightning-tp-")[f"{ranks}gpu"])
    example = re.search(r"\.\. code-block:: python\n((?: {8}.*\n|\n)+)", page.split("Full training example")[1])
    assert example is not None
    script = textwrap.dedent(example[1]).replace("devices=2", f"devices={ranks}")
    (tmp_path / "tp.py").write_text(script, encoding="utf-8")
    printed = measured(tmp_path, [], "torchrun", "--nproc-per-node", str(ranks), "tp.py")
    found = re.search(r"Peak memory usage: ([\d.]+) GB", printed)
    assert found is not None and float(found[1]) == pytest.approx(expected, abs=0.001)
