"""`memprof run --ranks`: ranks that run together, what they exchange, and what they do wrong: said, and no hang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from memprof.errors import UsageError
from memprof.script.launchers import parse_ranks
from tests.lanes import by_day
from tests.processes import ROOT, Done, python

PROGRAM = ROOT / "tests" / "programs" / "several_ranks.py"
LAUNCHED = ("torchrun", "--nproc-per-node", "4", PROGRAM)
SECONDS = 120
pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no processes to fork"),
]


def run(*arguments: str | Path, folder: Path | None = None) -> Done:
    options = ("--gpu-vram", "6", "--ranks", "all", "--until-exit")
    return python("-m", "memprof", "run", *options, *arguments, folder=folder, seconds=SECONDS)


def processes(mark: Path) -> int:
    """How many have `mark` among their arguments."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += bytes(mark) in entry.read_bytes()
    return found


def test_what_is_known_is_really_exchanged(tmp_path):
    done = run("--json", "--save", tmp_path / "run.memprof", *LAUNCHED, "exchanged")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    rows = document["ranks"]
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert [row["peak_allocated_bytes"] >> 22 for row in rows] == [1, 2, 4, 8]
    assert document["rank"]["rank"] == 3 and rows[3]["decides"] and rows[3]["shown"]
    assert not any("taken to be" in one or "not known, for" in one for one in document["assumptions"])
    shown = python("-m", "memprof", "show", tmp_path / "run.memprof", "--rank", "1", "--json")
    assert json.loads(shown.stdout)["ranks"] == [row | {"shown": row["rank"] == 1} for row in rows]


@pytest.mark.nightly
def test_stages_of_a_pipeline_tell_each_other_their_shapes():
    done = run("--json", *LAUNCHED, "pipeline")
    assert done.exit_code == 0, done.stderr
    assert [row["ended"] for row in json.loads(done.stdout)["ranks"]] == ["exit"] * 4


@pytest.mark.nightly
def test_ranks_that_are_alike_are_said_once():
    done = run("-q", *LAUNCHED, "train")
    assert done.exit_code == 0 and done.stdout.startswith("Fits: needs"), done.stderr
    done = run("--gpus", "4", PROGRAM, "spawn", "train", "4")
    assert done.exit_code == 0, done.stderr
    assert "Ranks 0-3 are equal to the byte." in done.stdout


@pytest.mark.parametrize(
    ("what", "said"),
    by_day(
        [
            ("order", "rank 0 calls all_reduce of [4] int64, SUM at programs/several_ranks.py:"),
            ("raises", "Rank 2:\nTraceback"),
            ("killed", "rank 1 was killed by SIGKILL"),
            ("uneven", "rank 0 has ended, after all_reduce of [72] float32, SUM at programs/several_ranks.py:"),
            ("store", "rank 0 waits for ever in a store for 'localhost:29513/never set' at programs/several_ranks.py:"),
        ],
        ("raises", "Rank 2:\nTraceback"),
    ),
)
def test_what_hangs_on_gpus_is_an_error(what, said, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = run(*LAUNCHED, what)
    assert done.exit_code == 1 and said in done.stderr, done.stderr
    assert done.stderr.count("memprof: ") == (what != "raises")
    assert "stopped with others" in done.stdout and "Fits" not in done.stdout
    assert not list(tmp_path.glob("memprof*"))


@pytest.mark.nightly
def test_what_a_forked_child_does_is_its_own():
    done = run(*LAUNCHED, "forks")
    assert done.exit_code == 1
    assert "talks to other ranks from a process of its own (os.fork)" in " ".join(done.stdout.split())


def test_one_gpu_that_is_full_ends_all():
    done = run("--json", *LAUNCHED, "full")
    assert done.exit_code == 3
    document = json.loads(done.stdout)
    assert [row["ended"] for row in document["ranks"]] == ["another rank", "another rank", "refused", "another rank"]
    assert document["verdict"]["fits"] is False and document["rank"]["rank"] == 2


@pytest.mark.nightly
def test_a_port_in_use_is_nobodys_business():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        done = run("torchrun", "--nproc-per-node", "4", "--master-port", port, PROGRAM, "train")
    assert done.exit_code == 0, done.stderr


NOTHING = "no verdict: nothing was put on the GPU"


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        pytest.param(
            ("--gpus", "4", PROGRAM, "spawn", "train", "2"),
            "starts 2 processes, where 4 ranks run together",
            1,
            marks=pytest.mark.nightly,
        ),
        (("--gpus", "2", *LAUNCHED, "train"), "is to start 4 processes on a machine with 2 of the GPUs", 2),
        (("--ranks", "9", *LAUNCHED, "train"), "there is no such rank\n  value: --ranks 9 of 4", 2),
        (("--ranks", "0,1", "--rank", "3", *LAUNCHED, "train"), "no such rank is run", 2),
        ((PROGRAM, "train"), "the program has one process", 2),
        pytest.param(
            (*LAUNCHED, "smaller"), "joins as rank 0 of 3, where rank 0 of 4 runs", 1, marks=pytest.mark.nightly
        ),
        (("--ladder", *LAUNCHED, "train"), "a ladder and a search run one rank", 2),
        pytest.param((*LAUNCHED, "gloo"), NOTHING, 1, marks=pytest.mark.nightly),
        pytest.param((*LAUNCHED, "mpi"), NOTHING, 1, marks=pytest.mark.nightly),
    ],
)
def test_bad_input_is_one_error(arguments, said, code):
    done = run(*arguments)
    assert (done.exit_code, said in done.stderr, done.stdout) == (code, True, ""), done.stderr


@pytest.mark.nightly
def test_some_ranks_run_and_the_first_speaks_for_the_rest():
    done = run("--json", "--ranks", "1,3", *LAUNCHED, "train")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["rank"] for row in document["ranks"]] == [1, 3] and document["rank"]["world_size"] == 4
    assert any("Of the 4 ranks 2 ran together" in one for one in document["assumptions"])


@pytest.mark.nightly
@pytest.mark.parametrize("how", by_day([signal.SIGINT, signal.SIGKILL], signal.SIGKILL))
def test_no_process_is_left_behind(how, tmp_path):
    command = [sys.executable, "-m", "memprof", "run", "--ranks", "all", *map(str, LAUNCHED), "sleeps", str(tmp_path)]
    run = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell in the background ignores it
    )  # fmt: skip
    end = time.monotonic() + SECONDS
    while processes(tmp_path) < 5 and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(1.0)
    run.send_signal(how)
    run.communicate(timeout=SECONDS)
    assert run.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
    while processes(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    assert not processes(tmp_path)


@pytest.mark.nightly
def test_a_time_limit_ends_all():
    started = time.monotonic()
    done = python("-m", "memprof", "run", "--ranks", "all", "--timeout", "4", *LAUNCHED, "sleeps", seconds=SECONDS)
    assert done.exit_code in (0, 1) and time.monotonic() - started < SECONDS / 2
    assert "timeout" in done.stdout


@pytest.mark.nightly
def test_eight_ranks_of_llama_are_quick(tmp_path):
    """The bar: three minutes of two cores, and less memory than a laptop has."""
    pytest.importorskip("transformers")
    launched = ("torchrun", "--nproc-per-node", "8", ROOT / "tests" / "programs" / "llama_fully_shard.py")
    done = python("-m", "memprof", "run", "--ranks", "all", "--json", *launched, seconds=600)
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout)["ranks"]
    assert [row["like"] for row in rows] == [None, *[0] * 7]
    assert done.processor_seconds < 180 and 27 << 30 < rows[0]["peak_allocated_bytes"] < 28 << 30


def test_names_of_ranks():
    assert parse_ranks("all", 3) == [0, 1, 2] and parse_ranks("0, 2-3,2", 4) == [0, 2, 3]
    for text in ("", "a", "3-1", "-1", "0,4", "1-"):
        with pytest.raises(UsageError):
            parse_ranks(text, 4)
