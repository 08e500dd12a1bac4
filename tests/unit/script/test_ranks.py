"""Processes of ranks: what they give back, and how they end. In a process of its own, which forks them."""

from __future__ import annotations

import os

import pytest

from tests.processes import python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no processes to fork")
HEAD = """
import os, signal, sys, time
from memprof.script import Ended
from memprof.script.ranks import Ran, run_together
def done(result): return Ran(Ended.EXIT, 0, result)
"""
TAIL = """
ran, problem = run_together([0, 1], 2, body, longest_wait=2.0)
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
    channel.store("set", str(channel.rank), b"7")
    other = channel.store("get", str(1 - channel.rank))
    return done((channel.rank, channel.size, other))
"""
    )
    assert said == "[(0, 'exit', (0, 2, b'7')), (1, 'exit', (1, 2, b'7'))] None"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("sys.exit(5)", "rank 1 ended without a word, with exit code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed by SIGKILL"),
        (
            "[pow(3, 70_000) for _ in iter(int, 1)]",
            "rank 0 has waited 0 minutes in a store for 'key' at tests/process_server.py",
        ),
    ],
)
def test_a_rank_that_is_gone_or_does_not_come_is_named(what, said):
    body = f"def body(channel):\n    if channel.rank: {what}\n    channel.store('get', 'key')\n    return done(1)\n"
    assert said in run(body)


def test_ranks_that_wait_for_what_nobody_sees_end():
    body = "def body(channel):\n    signal.pause()\n"
    assert run(body) == "[] no rank has done anything for 0 minutes"
