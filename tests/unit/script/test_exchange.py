"""Where ranks meet: what is passed on, and what is said of calls that never will."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.script.exchange import PEER, STEPS, Exchange
from memprof.virtual.peers.channel import CollectiveCall

WORLD = (0, 1, 2)


class Meeting:
    """An exchange of three ranks, or of some of four, and what each was told."""

    def __init__(self, ranks: tuple[int, ...] = WORLD) -> None:
        self.told: dict[int, list[tuple[str, Any]]] = {rank: [] for rank in ranks}
        self.exchange = Exchange(ranks, lambda rank, word, answer: self.told[rank].append((word, answer)))

    def __call__(self, rank: int, what: str, *said: Any) -> list[tuple[str, Any]]:
        self.exchange.handle_message(rank, what, *said)
        told, self.told[rank] = self.told[rank], []
        return told

    @property
    def problem(self) -> str:
        assert self.exchange.problem is not None
        return self.exchange.problem.problem


def call(
    line: int, name: str = "all_reduce", number: int = 0, *, numel: int = 4, ranks: tuple[int, ...] = WORLD, **more: Any
) -> CollectiveCall:
    sizes = (numel,) * len(ranks)
    fields = {
        "detail": "SUM",
        "dtype": "int64",
        "send_counts": sizes,
        "receive_counts": sizes,
        "description": f"{name} of [{numel}]",
    } | more
    return CollectiveCall("0", ranks, number, name=name, line=f"/home/a/train.py:{line} main", **fields)


def test_a_collective_is_there_once_all_have_called_it():
    meet = Meeting()
    for rank in (0, 1):
        assert meet(rank, "call", call(3), [rank]) == []
        assert meet(rank, "collect", call(3).collective_id) == []
    assert meet(2, "call", call(3), [2]) == []
    everything = [("go", {0: [0], 1: [1], 2: [2]})]
    assert meet.told[0] == meet.told[1] == everything
    assert meet(2, "collect", call(3).collective_id) == everything
    assert not meet.exchange.problem and meet.exchange.running_ranks == {0, 1, 2}


def test_of_a_group_those_that_run_are_awaited():
    meet = Meeting((0, 3))
    for rank in (3, 0):
        meet(rank, "call", call(3, ranks=(0, 1, 3)), [rank])
    assert meet(0, "collect", call(3, ranks=(0, 1, 3)).collective_id) == [("go", {3: [3], 0: [0]})]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (call(7, "broadcast"), "rank 0 calls all_reduce of [4] at a/train.py:3, and rank 1 broadcast of [4] at"),
        (call(7, detail="MAX"), "rank 1 all_reduce of [4] at a/train.py:7: these do not go together"),
        (call(7, dtype="float32"), "these do not go together"),
        (call(7, numel=8), "rank 1 all_reduce of [8] at a/train.py:7: these do not go together (4 against 8 elements)"),
    ],
)
def test_calls_that_differ_are_named_with_both_lines(other, said):
    meet = Meeting()
    meet(0, "call", call(3), [])
    meet(0, "collect", call(3).collective_id)
    meet(2, "call", call(3), [])
    meet(1, "call", other, [])
    assert said in meet.problem
    assert meet.told[0] == [("stop", PEER)] == meet(1, "collect", other.collective_id), "nobody is left waiting"


def test_splits_of_all_to_all_are_compared_pair_by_pair():
    meet = Meeting()
    for rank, gives in enumerate([(1, 2, 3), (1, 2, 3), (1, 9, 3)]):
        meet(rank, "call", call(rank, "all_to_all", send_counts=gives, receive_counts=(rank + 1,) * 3), [])
    assert "rank 1 calls" in meet.problem and "rank 2" in meet.problem and "(9 against 2 elements)" in meet.problem


def test_a_rank_that_never_calls_is_named_with_what_it_did():
    meet = Meeting()
    for rank in WORLD:
        meet(rank, "call", call(3), [])
    for rank in WORLD:
        meet(rank, "collect", call(3).collective_id)
    for rank in (0, 2):
        meet(rank, "call", call(9, number=1), [])
        meet(rank, "collect", call(9, number=1).collective_id)
    meet.exchange.record_end(1, "has ended")
    expected = (
        "rank 0 waits for ever in all_reduce of [4] at a/train.py:9: rank 1 has ended, after all_reduce of [4] at"
    )
    assert expected in meet.problem and meet.told[2][-1] == ("stop", PEER)


def test_ranks_that_wait_for_each_other_are_found():
    meet = Meeting()
    meet(0, "receive", 1, 0, call(3, "recv"))
    meet(1, "receive", 0, 0, call(5, "recv"))
    meet(2, "store", "get", ("init/key",), "/home/a/train.py:8 main")
    assert "rank 0 waits for ever in recv of [4] at a/train.py:3: rank 1 waits in recv of [4] at a/train.py:5" in (
        meet.problem
    )


def test_messages_wait_for_their_receiver():
    meet = Meeting()
    sent = call(3, "send", send_counts=(4,))
    meet(1, "send", 0, 0, sent, "first")
    meet(1, "send", 0, 0, sent, "second")
    taken = call(5, "recv", receive_counts=(4,))
    assert meet(0, "receive", 1, 0, taken) == [("go", (1, "first"))]
    assert meet(0, "receive", None, 0, taken) == [("go", (1, "second"))]
    assert meet(0, "receive", 1, 0, taken) == []
    meet(1, "send", 0, 0, call(3, "send", send_counts=(8,)), "too long")
    assert "rank 0 calls recv of [4] at a/train.py:5, and rank 1 send of [4] at a/train.py:3" in meet.problem


def test_steps_are_agreed_on_once_nobody_runs():
    meet = Meeting()
    assert meet(0, "step", True) == [] == meet(1, "step", False)
    meet(2, "call", call(3), [])
    meet(2, "collect", call(3).collective_id)
    assert meet.told[0] == meet.told[1] == [("go", False)], "one has not seen enough"
    meet.told[0].clear()
    meet.told[1].clear()
    meet(0, "step", True)
    last = meet(1, "step", True)
    assert [meet.told[0], last, meet.told[2]] == [[("stop", STEPS)]] * 3, "the third waits in vain, and all is seen"
    assert meet.exchange.problem is None


def test_measured_ranks_go_on_where_one_does_not_come():
    meet = Meeting()
    meet(0, "step", True)
    meet.exchange.resume_steps()
    assert meet.told[0] == [("go", False)] and 0 in meet.exchange.running_ranks


def test_a_store_is_shared():
    meet = Meeting()
    assert meet(0, "store", "get", ("a/key",), "") == []
    assert meet(1, "store", "add", ("a/sum", 2), "") == [("go", 2)]
    assert meet(1, "store", "add", ("a/sum", 3), "") == [("go", 5)]
    assert meet(1, "store", "compare_set", ("a/new", b"", b"x"), "") == [("go", b"x")]
    assert meet(1, "store", "compare_set", ("a/new", b"y", b"z"), "") == [("go", b"x")]
    assert meet(1, "store", "append", ("a/new", b"!"), "") == [("go", None)]
    assert meet(1, "store", "get", ("a/new",), "") == [("go", b"x!")]
    assert meet(1, "store", "check", ("a/key",), "") == [("go", False)]
    meet(1, "store", "set", ("a/key", b"here"), "")
    assert meet.told[0] == [("go", b"here")]
    assert meet(1, "store", "count", ("a/",), "") == [("go", 3)]
    assert meet(1, "store", "delete", ("a/key",), "") == [("go", True)]


def test_who_waits_too_long_is_told_for_whom():
    meet = Meeting()
    meet(0, "call", call(3), [])
    meet(0, "collect", call(3).collective_id)
    meet.exchange.fail_overdue(0, 600)
    assert (
        "rank 0 has waited 10 minutes in all_reduce of [4] at a/train.py:3, and ranks 1-2 did not come" in meet.problem
    )
