"""Programs of frameworks for several processes, unmodified and each by its launcher: one rank of four, alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.accuracy.test_parallel_rows import checkout, git, measured
from tests.processes import ROOT, python
from tests.programs import frameworks

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
]
SCRIPT = str(Path(frameworks.__file__))
TORCHRUN = ("torchrun", "--nproc-per-node", "4")
ACCELERATE = ("accelerate", "launch", "--num_processes", "4")
SHARDED = (
    *ACCELERATE,
    "--use_fsdp",
    "--fsdp_version",
    "2",
    "--fsdp_transformer_layer_cls_to_wrap",
    "LlamaDecoderLayer",
)
TORCHTITAN = "261819688"  # Of April 2026: later ones need what is in no release of torch.
# Bytes of Adam's two states in float32.
_REPLICATED = 8 * (2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128) + 2 * 512 * 128 + 128)


def state_bytes(folder: Path, program: str, launcher: tuple[str, ...] = TORCHRUN, *, beside: bool = False) -> int:
    """Of the optimizer at the peak of one rank of four, which runs in a process of its own: frameworks keep groups.

    `beside`: with what PYTHONPATH has, and rank 0, which DeepSpeed asks for numbers that it sends as objects.
    """
    rank = 0 if beside else 2
    command = ["-m", "memprof", "run", "--json", "--until-exit", "--gpu", "a100-80gb", "--rank", str(rank), *launcher]
    if beside:
        path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        done: Any = subprocess.run(
            [sys.executable, *command, SCRIPT, program],
            cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        exit_code = done.returncode
    else:
        done = python(*command, SCRIPT, program, folder=folder)
        exit_code = done.exit_code
    assert exit_code == 0, done.stderr[-3000:]
    found = json.loads(done.stdout[done.stdout.index('{\n "schema"') :])
    assert (found["rank"]["rank"], found["rank"]["world_size"]) == (rank, 4) and found["verdict"]["fits"]
    return int(found["peak"]["categories"]["optimizer state"])


@pytest.mark.parametrize(
    ("program", "launcher", "share"),
    [
        ("trainer-fsdp2", TORCHRUN, 4),
        pytest.param("trainer-ddp", TORCHRUN, 1, marks=pytest.mark.nightly),
        pytest.param("trainer-fsdp1", TORCHRUN, 4, marks=pytest.mark.nightly),
        pytest.param("accelerate", ACCELERATE, 1, marks=pytest.mark.nightly),
        pytest.param("accelerate", SHARDED, 4, marks=pytest.mark.nightly),
    ],
)
def test_hugging_face(tmp_path: Path, program: str, launcher: tuple[str, ...], share: int) -> None:
    """Adam's two states are of all parameters, or of this rank's part of them."""
    assert state_bytes(tmp_path, program, launcher) == pytest.approx(_REPLICATED / share, rel=0.03)


@pytest.mark.parametrize(
    ("program", "share"), [pytest.param("lightning-ddp", 1, marks=pytest.mark.nightly), ("lightning-fsdp", 4)]
)
def test_lightning(tmp_path: Path, program: str, share: int) -> None:
    pytest.importorskip("pytorch_lightning")
    assert state_bytes(tmp_path, program) == pytest.approx(_REPLICATED / share, rel=0.03)


@pytest.mark.parametrize("program", ["deepspeed-1", "deepspeed-2", "deepspeed-3"])
def test_deepspeed(tmp_path: Path, program: str) -> None:
    """With the package beside: it installs without a GPU."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    assert state_bytes(tmp_path, program, beside=True) == pytest.approx(_REPLICATED / 4, rel=0.03)


def unpack_torchtitan(folder: Path, commit: str) -> None:
    packed = git(checkout("pytorch+torchtitan"), "archive", commit, "torchtitan", "tests/assets/tokenizer")
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    texts = folder / "tests" / "assets" / "c4_test" / "data.json"
    texts.parent.mkdir()
    texts.write_text((json.dumps({"text": "one GPU holds it " * 400}) + "\n") * 500, encoding="utf-8")


@pytest.mark.nightly
def test_torchtitan_runs_the_configuration_that_is_recommended(tmp_path: Path) -> None:
    """By the line that is printed, with a tokenizer and texts that are here: it fits, and needs no more than was
    claimed for memprof's own model."""
    unpack_torchtitan(tmp_path, "v0.2.2")
    gpu = ("--gpu", "h100-80gb")
    asked = ("recommend", "--model", "qwen3-8b", "--train", "full", *gpu, "--gpus", "8")
    answered = python("-m", "memprof", *asked, "--json", folder=tmp_path)
    assert answered.exit_code == 0, answered.stderr[-2000:]
    answer = json.loads(answered.stdout)
    written_for = answer["written_for"].get("torchtitan", "").partition(";")[0]
    row = next(row for row in answer["choices"] if row["name"] == written_for or not written_for)
    toml = answer["snippets"]["torchtitan"]
    for yours, here in (("./assets/hf", "./tests/assets/tokenizer"), ('dataset = "c4"', 'dataset = "c4_test"')):
        assert yours in toml
        toml = toml.replace(yours, here)
    (tmp_path / "train.toml").write_text(toml, encoding="utf-8")
    printed = measured(tmp_path, [tmp_path], "--json", *gpu, *answer["launch"]["torchtitan"].split(), stands=False)
    found = json.loads(printed[printed.index('{\n "schema"') :])
    assert found["rank"]["world_size"] == 8 and found["verdict"]["fits"] and len(found["steps"]) == 2
    assert found["verdict"]["required_bytes"] <= row["needed_bytes"]


def test_torchtitan(tmp_path: Path) -> None:
    """Its own trainer on its own small configuration, which shards a Llama over four ranks."""
    unpack_torchtitan(tmp_path, TORCHTITAN)
    command = ("-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_debugmodel")
    printed = measured(tmp_path, [tmp_path], "--json", *TORCHRUN, *command, stands=False)
    found = json.loads(printed[printed.index('{\n "schema"') :])
    assert found["rank"]["world_size"] == 4 and found["verdict"]["fits"]
    assert len(found["steps"]) and found["peak"]["categories"]["optimizer state"] > 1 << 20
