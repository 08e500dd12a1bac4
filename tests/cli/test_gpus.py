"""`memprof run --gpus N`: a program that places its layers on several GPUs itself."""

from __future__ import annotations

import json
import textwrap

import pytest

from tests.processes import python

PIPELINE = """
import torch
from torch import nn

first = nn.Linear(1024, 2048, bias=False).to("cuda:0")
second = nn.Linear(2048, 4096, bias=False).to("cuda:1")
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
for step in range(2):
    hidden = first(torch.randn(64, 1024, device="cuda:0"))
    second(hidden.to("cuda:1")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if torch.cuda.device_count() != 3:
        raise SystemExit(9)
"""
MIB = 1 << 20
FIRST, SECOND = 8 * MIB, 32 * MIB  # Bytes of the weights.


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpus")
    (folder / "pipeline.py").write_text(textwrap.dedent(PIPELINE), encoding="utf-8")
    ran = python("-m", "memprof", "run", "--gpus", "3", "--gpu", "a100-80gb", "--json", "--save", "run.memprof",
                 "pipeline.py", folder=folder)  # fmt: skip
    assert ran.exit_code == 0, ran.stderr
    return folder, json.loads(ran.stdout)


def test_a_row_for_each_gpu(done):
    _, document = done
    assert document["gpu"] == "cuda:1"
    rows = document["gpus"]
    assert [(row["device"], row["used"], row["fits"], row["decides"], row["shown"]) for row in rows] == [
        ("cuda:0", True, True, False, False), ("cuda:1", True, True, True, True), ("cuda:2", False, True, False, False)
    ]  # fmt: skip
    # Weights and their gradients, what the layers give out and take in, and a workspace for each handle.
    for row, weight, largest in zip(rows, (FIRST, SECOND), (MIB // 2, MIB), strict=False):
        beyond = row["peak_allocated_bytes"] - 2 * weight
        assert 0 < beyond < 2 * 8_519_680 + 6 * largest
        assert row["device_used_bytes"] == row["peak_reserved_bytes"] + row["context_bytes"]
    assert rows[2]["device_used_bytes"] == rows[2]["context_bytes"] == 0
    assert document["peak"]["allocated_bytes"] == rows[1]["peak_allocated_bytes"]
    assert document["peak"]["categories"]["parameters"] == SECOND
    assert document["verdict"]["required_bytes"] == rows[1]["required_bytes"]


def test_another_gpu_in_full(done):
    folder, document = done
    shown = python("-m", "memprof", "show", "run.memprof", "--gpu-index", "0", "--json", folder=folder)
    other = json.loads(shown.stdout)
    assert other["gpu"] == "cuda:0" and other["peak"]["categories"]["parameters"] == FIRST
    assert other["verdict"] == document["verdict"]
    text = python("-m", "memprof", "show", "run.memprof", folder=folder).stdout
    assert "3 such GPUs in one process; shown in full: cuda:1" in text
    assert (
        "cuda:1  <- shown in full" in text
        and "not used" in text
        and "with cached memory and the CUDA context on cuda:1" in text
    )


def test_a_recording_is_of_the_fullest_gpu(done):
    analyzed = python("-m", "memprof", "analyze", "run.memprof", "--json", folder=done[0]).stdout
    assert "Of 3 GPUs, the one that holds most is taken: cuda:1." in analyzed


@pytest.mark.parametrize(
    ("gpu", "said"), [("3", "the run had no such GPU"), ("2", "nothing was allocated on this GPU")]
)
def test_a_gpu_that_cannot_be_shown(done, gpu, said):
    shown = python("-m", "memprof", "show", "run.memprof", "--gpu-index", gpu, folder=done[0])
    assert shown.exit_code == 2 and said in shown.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "0"], "--gpus must be at least 1"),
        (["--gpus", "2", "--ladder"], "a ladder has one"),
        (["--gpus", "2", "--gpu-index", "2"], "there is no such GPU"),
    ],
)
def test_what_cannot_be_asked(tmp_path, options, said):
    ran = python("-m", "memprof", "run", *options, "train.py", folder=tmp_path)
    assert ran.exit_code == 2 and said in ran.stderr
