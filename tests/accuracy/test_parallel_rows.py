"""Published measurements of programs for several processes: their own scripts, as one rank, alone.

The scripts are taken from checkouts in the folder that MEMPROF_PROGRAMS names, as OWNER+NAME; nothing of them is here.
"""

from __future__ import annotations

import csv
import json
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
# Checkouts of the same course -> the commit that was measured.
OTHERS = {
    "kbjiang+cs336-assignment2-systems-mine": "79814e6",
    "damek+cs336-assignment2-systems": "749e968",
}
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
ACCOUNTS = """
import torch.multiprocessing as mp
from cs336_systems import sharded_optimizer_accounting as measured

batch = measured.get_batch
# The commit's own get_batch takes names of devices alone, and is given a torch.device: it fails on a GPU as well.
measured.get_batch = lambda *given: batch(*given[:3], str(given[3]))

if __name__ == "__main__":
    mp.spawn(measured.worker, args=(2, 4, 2, 3), nprocs=2)
"""
TRAINS = """
import torch.multiprocessing as mp
from cs336_systems.benchmarking_scripts import optimizer_state_sharding_accounting as measured

MODEL = {"vocab_size": 10000, "d_model": 1600, "num_layers": 48, "num_heads": 25, "d_ff": 6400, "rope_theta": 10000}

if __name__ == "__main__":
    for length in (128, 256, 512):
        for sharded in (True, False):
            print(f"measured {'sharded' if sharded else 'unsharded'}-seq{length}")
            arguments = (2, 2, {**MODEL, "context_length": length}, {"lr": 1e-3, "weight_decay": 0.01}, 2, 1, sharded)
            mp.spawn(measured.train, args=arguments, nprocs=2)
"""
ASSERTS = """
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal import common_utils

NAMES = ("test_fsdp_memory_ckpt_no_ckpt", "test_fsdp_memory_ckpt_ckpt")


def worker(rank, name):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    # The test is of a later torch, which has these names.
    if not hasattr(common_utils, "HardwareClassification"):
        common_utils.HardwareClassification = type("Any", (), {"CUDA": None})
    if not hasattr(torch.cuda, "_clear_cublas_workspaces"):
        torch.cuda._clear_cublas_workspaces = torch._C._cuda_clearCublasWorkspaces
    import test_fsdp_memory as measured

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    case = measured.TestFSDPMemory(name)
    case.rank = rank
    getattr(case, name)()
    print("passed", name)


if __name__ == "__main__":
    for name in NAMES:
        mp.spawn(worker, args=(name,), nprocs=2)
"""
# Before 1.9, parameters were given to ranks as they came.
OF_TORCH_1_8 = """
from torch.distributed.optim import zero_redundancy_optimizer as sharding

sharding.sorted = lambda parameters, **order: list(parameters)  # it did not sort them by size
"""
# Stand for what launches the scripts elsewhere, and for names under which a package is installed here.
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


def measured(folder: Path, path: list[Path], *command: str, stands: bool = True) -> str:
    for name, text in MODULES.items() if stands else ():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    modules = os.pathsep.join(map(str, (ROOT, folder, *path, os.environ.get("PYTHONPATH", ""))))
    gpu = () if "--gpu" in command else ("--gpu", "a100-80gb")
    arguments = ("-m", "memprof", "run", "--until-exit", *gpu, *command)
    environment = {**os.environ, "PYTHONPATH": modules}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    lacks = re.search(r"^ModuleNotFoundError: (No module .*)$", done.stderr, re.MULTILINE)
    if lacks:
        pytest.skip(lacks[1])
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def of_course(folder: Path, name: str, commit: str, script: str, *options: str) -> str:
    """What a script says that calls functions of one commit of course work."""
    source = folder / "source"
    packed = git(checkout(name), "archive", commit, "cs336_systems", "cs336-basics/cs336_basics")
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(source, filter="data")
    (folder / "spawns.py").write_text(script, encoding="utf-8")
    return measured(folder, [source, source / "cs336-basics"], "--gpus", "2", *options, "spawns.py")


@pytest.mark.parametrize(
    ("module", "argument", "commit", "prefix", "tolerance"),
    [
        ("sharded_optim_memory", False, COMMIT_OF_ZERO, "cs336-duoan-zero1-standard-", 0),
        ("sharded_optim_memory", True, COMMIT_OF_ZERO, "cs336-duoan-zero1-sharded-", 0),
        ("fsdp_benchmark", "ddp", COMMIT_OF_FSDP, "cs336-duoan-fsdpbench-ddp-", 0),
        # Its prefetches are released when the GPU has caught up: three runs differ by as much.
        ("fsdp_benchmark", "fsdp_fp32", COMMIT_OF_FSDP, "cs336-duoan-fsdpbench-fsdp_fp32-", 0.0003),
    ],
)
def test_course_work(shared_dir, tmp_path, module, argument, commit, prefix, tolerance):
    """Data parallelism, ZeRO and FSDP by hand, in bytes as torch counted them on two A100."""
    expected = published(shared_dir, prefix)
    script = SPAWNS.format(module=module, argument=repr(argument))
    printed = of_course(tmp_path, COURSE, commit, script)
    found = dict(re.findall(r"^measured (\w+) (\d+)$", printed, re.MULTILINE))
    for name, value in expected.items():
        assert abs(int(found[name]) - int(value)) <= tolerance * int(value), name


def test_optimizer_sharded_by_hand(shared_dir, tmp_path):
    """Means over 50 steps, of which three are run: what is left of blocks that are not split differs from step to
    step. The source does not name its GPU: cuBLAS's workspaces are a Hopper's."""
    name = "kbjiang+cs336-assignment2-systems-mine"
    printed = of_course(tmp_path, name, OTHERS[name], ACCOUNTS, "--gpu", "h100-80gb")
    for result in json.loads(printed[printed.index("{\n") : printed.rindex("\n}") + 2])["results"]:
        means = {phase["phase"].partition("/")[0]: phase for phase in result["phase_means"]}
        expected = published(shared_dir, f"cs336-kbjiang-{result['scenario']}-")
        found = {
            "after_model_init-0": means["after_model_init"]["current_GB_mean"],
            "before_step-1": means["after backward"]["current_GB_mean"],
            "before_step-2": means["after backward"]["peak_GB_mean"],
            "after_step-3": means["after_optimizer_step"]["current_GB_mean"],
        }
        assert found == {row: pytest.approx(float(value), rel=0.0002) for row, value in expected.items()}


def test_optimizer_sharded_by_hand_in_each_of_several_spawns(shared_dir, tmp_path):
    name, expected = "damek+cs336-assignment2-systems", published(shared_dir, "cs336-damek-")
    printed = of_course(tmp_path, name, OTHERS[name], TRAINS)
    assert f"creation: {expected.pop('init-seq128')} GB" in printed
    before = re.findall(r"measured (\S+)$.*?before step: tensor\(\[([\d.]+)\]", printed, re.MULTILINE | re.DOTALL)
    assert dict(before) == expected, "all four decimals"
    after = re.findall(r"after step: tensor\(\[([\d.]+)\]", printed)
    assert after == [figure for _, figure in before]


def test_fsdp_as_torch_asserts_it(tmp_path):
    """Its own test, to one MiB after each part of a step."""
    folder = checkout("pytorch+pytorch") / "test" / "distributed" / "fsdp"
    (tmp_path / "asserts.py").write_text(ASSERTS, encoding="utf-8")
    printed = measured(tmp_path, [folder], "--gpus", "2", "asserts.py")
    assert printed.count("passed test_fsdp_memory_ckpt") == 2


@pytest.mark.parametrize("as_of_torch_1_8", [False, True])
def test_recipe_of_zero(shared_dir, tmp_path, monkeypatch, as_of_torch_1_8):
    """Measured under torch 1.8: DDP had buckets of 25 MB from the first step on (now it has one of all parameters until
    it knows their order, but for find_unused_parameters), Adam went through its parameters one by one, and cuBLAS had
    no workspace of the allocator's."""
    page = (checkout("pytorch+tutorials") / "recipes_source" / "zero_redundancy_optimizer.rst").read_text("utf-8")
    example = re.search(r"^::\n\n((?: {4}.*\n|\n)+)", page, re.MULTILINE)
    assert example is not None
    script = textwrap.dedent(example[1])
    if as_of_torch_1_8:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        script = script.replace("device_ids=[rank]", "device_ids=[rank], find_unused_parameters=True")
        script = OF_TORCH_1_8 + script.replace("lr=0.01", "lr=0.01, foreach=False")
    (tmp_path / "zero.py").write_text(script, encoding="utf-8")
    printed = measured(tmp_path, [], "--gpus", "2", "zero.py")
    found = [float(number) for number in re.findall(r"([\d.]+)MB", printed)]
    wanted = [
        float(value) for kind in ("zero1", "adam") for value in published(shared_dir, f"pt-zerorecipe-{kind}-").values()
    ]
    assert len(found) == len(wanted) == 8
    for number, value, place in zip(found, wanted, 2 * ("model", "ddp", "before", "after"), strict=True):
        if as_of_torch_1_8 or place in ("model", "ddp"):
            assert number == pytest.approx(value, rel=0.0015), place


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
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


LAYERS = "FSDPStrategy(auto_wrap_policy={nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}"
# Of Lightning's Trainer, and how near they come: what is gathered ahead depends on time where layers are sharded.
STRATEGIES = {
    "DDP": ("'ddp'", 0.0001),
    "NO_SHARD": (f"{LAYERS}, sharding_strategy='NO_SHARD')", 0.0015),
    "SHARD_GRAD_OP": (f"{LAYERS}, sharding_strategy='SHARD_GRAD_OP')", 0.0001),
    "FULL_SHARD": (f"{LAYERS})", 0.004),
    "FULL_SHARD+cpu_offload": (f"{LAYERS}, cpu_offload=True)", 0.02),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trainer_of_lightning(shared_dir, tmp_path, strategy):
    """A transformer of a billion parameters, as the page has it, with text of as many words as its own."""
    folder, (chosen, tolerance) = checkout("Lightning-AI+pytorch-lightning"), STRATEGIES[strategy]
    page = git(folder, "show", "7f0c3436:docs/source-pytorch/advanced/model_parallel/fsdp.rst").decode()
    example = re.search(r"\.\. code-block:: python\n((?: {4}.*\n|\n)+)", page.split("full code example")[1])
    assert example is not None
    script = textwrap.dedent(example[1]).replace("strategy=FSDPStrategy()", f"strategy={chosen}, max_steps=10")
    script = script.replace("torch.cuda.memory_summary()", "'peak', torch.cuda.max_memory_allocated() / 2**20")
    (tmp_path / "trains.py").write_text(script, encoding="utf-8")
    (tmp_path / "data").mkdir()
    words = "\n".join(f"w{number}" for number in range(33277))  # and one for the end of a line
    (tmp_path / "data" / "wikitext-2.txt").write_text(words + "\n", encoding="utf-8")
    command = ("--gpu", "a100-40gb", "torchrun", "--nproc-per-node", "2", "trains.py")
    printed = measured(tmp_path, [], *command, stands=False)
    found = re.search(r"^peak ([\d.]+)$", printed, re.MULTILINE)
    expected = float(published(shared_dir, "lightning-trainer-")[strategy])
    assert found is not None and float(found[1]) == pytest.approx(expected, rel=tolerance)
