"""Processes of ranks: what they release, and how they end. In a process of its own, which forks them."""

from __future__ import annotations

import os

import pytest

from tests.processes import python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no processes to fork")
HEAD = """
import os, signal, sys, time
from memprof.script import EndReason
from memprof.script.ranks import RankResult, run_ranks_together
def done(result): return RankResult(EndReason.EXIT, 0, result)
"""
TAIL = """
ran, problem = run_ranks_together([0, 1], 2, body, max_wait_seconds=2.0)
print(sorted((rank, one.ended.value, one.result) for rank, one in ran.items()), problem and problem.problem)
"""


def run(body: str) -> str:
    done = python("-c", HEAD + body + TAIL, seconds=60)
    assert done.exit_code == 0, done.stderr
    return done.stdout.strip()


def test_they_give_back_what_they_found():
    said = run(
        """
def body(channel):
    channel.call_store("set", str(channel.rank), b"7")
    other = channel.call_store("get", str(1 - channel.rank))
    return done((channel.rank, channel.size, other))
"""
    )
    assert said == "[(0, 'exit', (0, 2, b'7')), (1, 'exit', (1, 2, b'7'))] None"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("sys.exit(5)", "rank 1 ended without a word, with exit code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed by SIGKILL"),
        pytest.param(
            "[pow(3, 70_000) for _ in iter(int, 1)]",
            "rank 0 has waited 0 minutes in a store for 'key' at tests/process_server.py",
            marks=pytest.mark.nightly,  # all the while it computes
        ),
    ],
)
def test_a_rank_that_is_gone_or_does_not_come_is_named(what, said):
    body = (
        f"def body(channel):\n    if channel.rank: {what}\n    channel.call_store('get', 'key')\n    return done(1)\n"
    )
    assert said in run(body)


@pytest.mark.nightly
def test_ranks_that_wait_for_what_nobody_sees_end():
    body = "def body(channel):\n    signal.pause()\n"
    assert run(body) == "[] no rank has done anything for 0 minutes"


def test_what_a_rank_has_forked_holds_nobody_up():
    """Neither a rank that has ended, nor one that was killed; and what they left in shared memory is unlinked."""
    body = f"""
from multiprocessing import shared_memory
def body(channel):
    shared_memory.SharedMemory(f"memprof-{os.getpid()}-{{channel.rank}}", create=True, size=64)
    if os.fork() == 0:
        time.sleep(600)
    if channel.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return done(1)
"""
    assert run(body) == "[(0, 'exit', 1)] rank 1 was killed by SIGKILL"
    if os.path.isdir("/dev/shm"):
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"memprof-{os.getpid()}-")]


def test_a_run_that_is_told_to_end_ends_its_ranks():
    done = python(
        "-c",
        HEAD
        + """
def body(channel):
    if channel.rank:
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)
try:
    run_ranks_together([0, 1], 2, body)
except SystemExit as end:
    print(end.code, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
try:
    os.wait()
except ChildProcessError:
    print("no child")
""",
        seconds=60,
    )
    assert done.stdout.split("\n")[:2] == ["143 True", "no child"], done.stderr
