"""`memprof run --device cpu torchrun ...`: ranks that are really there, over gloo, each measured and in one report."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import ROOT, Done, python

PROGRAMS = ROOT / "tests" / "programs"
pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no processes to fork"),
]


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def run(*options: str | Path, program: str = "fsdp2", backend: str = "gloo") -> Done:
    launcher = ("torchrun", "--nproc-per-node", "2", "--master-port", free_port())
    environment = {**os.environ, "BACKEND": backend}
    return python("-m", "memprof", "run", *options, *launcher, PROGRAMS / "parallel.py", program, env=environment)


@pytest.mark.nightly
def test_each_rank_is_measured_and_they_stop_together(tmp_path):
    done = run("--device", "cpu", "--steps", "2", "--json", "--save", tmp_path / "measured.memprof", program="pipeline")
    assert done.exit_code == 0, done.stderr
    measured: dict[str, Any] = json.loads(done.stdout)
    assert measured["source"] == "measured" and measured["program"]["ended"] == "steps"
    assert [(row["rank"], row["ended"]) for row in measured["ranks"]] == [(0, "steps"), (1, "steps")]
    assert not any("exchanged" in one for one in measured["assumptions"])
    done = run("--ranks", "all", "--json", "--save", tmp_path / "virtual.memprof", program="pipeline", backend="nccl")
    state = json.loads(done.stdout)["model_state"]
    for kind in ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes"):
        assert measured["model_state"][kind] == state[kind], kind
    compared = python("-m", "memprof", "compare", tmp_path / "measured.memprof", tmp_path / "virtual.memprof", "--json")
    names = [row["name"] for row in json.loads(compared.stdout)["totals"]]
    assert names[-2:] == ["allocated, rank 0", "allocated, rank 1"]
    text = python("-m", "memprof", "show", tmp_path / "measured.memprof").stdout
    assert "ranks 0-1 of 2, together; shown in full: rank" in text
    (header,) = (line for line in text.splitlines() if line.startswith(" ranks "))
    assert header.split() == ["ranks", "allocated", "in"]


@pytest.mark.nightly
def test_parts_of_spread_parameters_are_measured():
    done = run("--device", "cpu", "--json")
    assert done.exit_code == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["ranks"][1]["like"] in (0, None) and measured["model_state"]["optimizer_state_bytes"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--device", "cpu", "--ranks", "0"), "all ranks are measured, on this machine\n  value: 1 of 2 on 1 machines"),
        (("--device", "cpu", "--ladder"), "a ladder runs on the virtual GPU"),
        pytest.param(
            ("--device", "cuda"), "there is no CUDA GPU to measure on",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="there may be one"),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_one_error(options, said):
    done = run(*options)
    assert done.exit_code in (1, 2) and done.stdout == "" and done.stderr.count("memprof: ") == 1
    assert said in done.stderr


def test_a_port_in_use_and_ranks_of_the_scripts_own_are_errors():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        launched = ("torchrun", "--nproc-per-node", "2", "--master-port", port, PROGRAMS / "parallel.py", "ddp")
        done = python("-m", "memprof", "run", "--device", "cpu", *launched)
    assert done.exit_code == 2 and f"cannot be used\n  value: {port} (" in done.stderr
    script = (PROGRAMS / "several_ranks.py", "spawn", "train", "2")
    done = python("-m", "memprof", "run", "--device", "cpu", "--ranks", "all", "--gpus", "2", *script)
    assert done.exit_code == 2
    assert "--gpus" in done.stderr
