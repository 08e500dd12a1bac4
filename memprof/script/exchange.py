"""Exchange between ranks that run together: contributions to collectives, waits, and detection of deadlocks.

Plain rules without processes or time: `hear` gets a rank's message, and answers go out by `reply`. A rank waits only in
few places (for a collective, a message, a key of a store, the others' steps), so a deadlock is detected at once: no
rank runs, and no rank can go on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from memprof.errors import MemprofError
from memprof.trace.events import short_source
from memprof.units import format_ranges
from memprof.virtual.peers.channel import CollectiveCall, Payload

PEER = "another rank"  # reason to stop a rank without an error of its own
STEPS = "steps"  # reason to stop all ranks after enough steps
_DIFFERENT_CALLS_HINT = (
    "on GPUs this hangs or mixes up data: have all ranks of a group make the same calls in the same order"
)
_MISSING_CALL_HINT = "on GPUs this hangs: have every rank of a group call it, or leave the group out that does not"
_UNEVEN_CALLS_HINT = (
    "on GPUs this hangs: have every rank of a group call it as often; give all as many batches (drop_last), or train "
    "inside model.join()"
)


class _Wait(NamedTuple):
    """Event that a rank waits for; `key` is a call's place (collect), (source, tag) (receive), a key (store), or
    whether the rank can stop (step)."""

    kind: str
    key: Any
    call: CollectiveCall | None
    line: str


class Exchange:
    """Meeting point of `ranks`. `reply` sends a rank an answer: a word (`go`, or `stop` with a reason) and data.

    Each kind of message has a method of its own (`_handle_call`, ...): hence the number of methods.
    """

    def __init__(self, ranks: Sequence[int], reply: Callable[[int, str, Any], None]) -> None:
        self._reply = reply
        self._ranks = tuple(ranks)
        self.running = set(ranks)
        self.waiting: dict[int, _Wait] = {}
        self.ended: dict[int, str] = {}  # how a rank has ended, as the end of a sentence
        self.stop_reason: str | None = None  # reason to stop all ranks; None: they go on
        self.problem: MemprofError | None = None  # error between ranks
        self._slots: dict[Any, dict[int, tuple[CollectiveCall, Payload]]] = defaultdict(dict)
        self._collected_by: dict[Any, set[int]] = defaultdict(set)
        # By group, sender, receiver and tag.
        self._messages: dict[tuple[Any, int, int, int], deque[tuple[CollectiveCall, Payload]]] = defaultdict(deque)
        self._last_calls: dict[int, CollectiveCall] = {}
        self._store: dict[str, bytes] = {}

    def handle_message(self, rank: int, kind: str, *arguments: Any) -> None:
        """Process the message `kind` of a rank, and let waiting ranks go on where they can."""
        if self.stop_reason is not None:
            if kind in ("collect", "receive", "store", "step"):
                self._reply(rank, "stop", self.stop_reason)
            return
        getattr(self, f"_handle_{kind}")(rank, *arguments)
        self._resume_ready_ranks()

    def record_end(self, rank: int, description: str) -> None:
        """Record that a rank has ended, by itself or not."""
        self.running.discard(rank)
        self.waiting.pop(rank, None)
        self.ended[rank] = description
        if self.stop_reason is None:
            self._resume_ready_ranks()

    def stop(self, reason: str) -> None:
        """Stop all ranks: waiting ranks now, other ranks at their next message."""
        self.stop_reason = self.stop_reason or reason
        for rank in list(self.waiting):
            self._resume(rank, self.stop_reason, "stop")

    def fail(self, problem: str, hint: str) -> None:
        """Stop all ranks because of an error between ranks."""
        if self.problem is None:
            self.problem = MemprofError(problem, hint=hint)
        self.stop(PEER)

    def resume_steps(self) -> None:
        """Let the ranks that wait for the others' steps make another step."""
        for rank in [rank for rank, waiting in self.waiting.items() if waiting.kind == "step"]:
            self._resume(rank, False)

    def fail_overdue(self, rank: int, seconds: float) -> None:
        """Stop all ranks because one has waited `seconds` while others still run."""
        others = "rank" + "s" * (len(self.running) > 1)
        self.fail(
            f"rank {rank} has waited {seconds / 60:.0f} minutes in {self._describe_wait(rank)}, and {others} "
            f"{format_ranges(sorted(self.running))} did not come",
            "see what these do; --timeout stops a run after so many seconds",
        )

    def _handle_call(self, rank: int, call: CollectiveCall, payload: Payload) -> None:
        slot = self._slots[call.collective_id]
        slot[rank] = call, payload
        self._last_calls[rank] = call
        if self._is_complete(call):
            self._compare_calls(slot)

    def _handle_collect(self, rank: int, key: Any) -> None:
        call, _ = self._slots[key][rank]
        self._add_waiting(rank, _Wait("collect", key, call, call.line))

    def _handle_send(self, rank: int, receiver: int, tag: int, call: CollectiveCall, payload: Payload) -> None:
        self._messages[call.collective_id[:2], rank, receiver, tag].append((call, payload))
        self._last_calls[rank] = call

    def _handle_receive(self, rank: int, source: int | None, tag: int, call: CollectiveCall) -> None:
        self._last_calls[rank] = call
        self._add_waiting(rank, _Wait("receive", (source, tag), call, call.line))

    def _handle_store(self, rank: int, operation: str, arguments: tuple[Any, ...], line: str) -> None:
        keys, (key, *values) = self._store, arguments
        if operation == "get" and key not in keys:
            self._add_waiting(rank, _Wait("store", key, None, line))
            return
        self._reply(rank, "go", _apply_store_operation(keys, operation, key, *values))

    def _handle_step(self, rank: int, can_stop: bool) -> None:
        self._add_waiting(rank, _Wait("step", can_stop, None, ""))

    def _add_waiting(self, rank: int, waiting: _Wait) -> None:
        self.running.discard(rank)
        self.waiting[rank] = waiting

    def _resume(self, rank: int, answer: Any, word: str = "go") -> None:
        del self.waiting[rank]
        self.running.add(rank)
        self._reply(rank, word, answer)

    def _resume_ready_ranks(self) -> None:
        """Let the ranks go on that can; if no rank runs then, agree on steps, or report a deadlock."""
        for rank, waiting in list(self.waiting.items()):
            if self.stop_reason is None and waiting.kind != "step":
                self._try_to_resume(rank, waiting)
        if self.stop_reason is not None or self.running or not self.waiting:
            return
        steps = {rank: waiting.key for rank, waiting in self.waiting.items() if waiting.kind == "step"}
        if steps and all(steps.values()):
            self.stop(STEPS)
        elif steps:
            self.resume_steps()
        else:
            for slot in list(self._slots.values()):
                if self.stop_reason is None:
                    self._compare_calls(slot)
            if self.stop_reason is None:
                self._fail_for_deadlock()

    def _try_to_resume(self, rank: int, waiting: _Wait) -> None:
        if waiting.kind == "collect":
            if self._is_complete(waiting.call):
                slot = self._slots[waiting.key]
                taken = self._collected_by[waiting.key]
                taken.add(rank)
                self._resume(rank, {number: payload for number, (_, payload) in slot.items()})
                if len(taken) == len(slot):
                    del self._slots[waiting.key], self._collected_by[waiting.key]
        elif waiting.kind == "receive":
            self._try_receive(rank, waiting)
        elif waiting.key in self._store:
            self._resume(rank, self._store[waiting.key])

    def _try_receive(self, rank: int, waiting: _Wait) -> None:
        source, tag = waiting.key
        call = waiting.call
        assert call is not None
        for sender in call.ranks if source is None else (source,):
            messages = self._messages.get((call.collective_id[:2], sender, rank, tag))
            if messages:
                sent, payload = messages.popleft()
                if (sent.dtype, sent.send_counts) == (call.dtype, call.receive_counts):
                    self._resume(rank, (sender, payload))
                else:
                    self._fail_for_different_calls(sender, sent, rank, call)
                return

    def _is_complete(self, call: CollectiveCall | None) -> bool:
        assert call is not None
        return len(self._slots[call.collective_id]) == len(self._select_simulated_ranks(call.ranks))

    def _select_simulated_ranks(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if rank in self._ranks]

    def _compare_calls(self, slot: dict[int, tuple[CollectiveCall, Payload]]) -> None:
        """Fail unless all ranks' calls agree; called once all are there: the error does not depend on their order."""
        lowest = min(slot)
        call = slot[lowest][0]
        for rank in sorted(slot):
            if slot[rank][0].signature != call.signature:
                self._fail_for_different_calls(lowest, call, rank, slot[rank][0])
                return
        for at, giver in enumerate(call.ranks):
            for to, taker in enumerate(call.ranks):
                if giver in slot and taker in slot and call.send_counts:
                    gives, takes = slot[giver][0], slot[taker][0]
                    if gives.send_counts[to] != takes.receive_counts[at]:
                        self._fail_for_different_calls(
                            giver,
                            gives,
                            taker,
                            takes,
                            f"{gives.send_counts[to]:,} against {takes.receive_counts[at]:,}",
                        )
                        return

    def _fail_for_different_calls(
        self, rank: int, call: CollectiveCall, other_rank: int, other_call: CollectiveCall, sizes: str = ""
    ) -> None:
        (rank, call), (other_rank, other_call) = sorted(
            [(rank, call), (other_rank, other_call)], key=lambda pair: pair[0]
        )
        elements = f" ({sizes} elements)" if sizes else ""
        self.fail(
            f"rank {rank} calls {_format_call(call)}, and rank {other_rank} {_format_call(other_call)}: "
            f"these do not go together{elements}",
            _DIFFERENT_CALLS_HINT,
        )

    def _fail_for_deadlock(self) -> None:
        """Report the lowest rank that waits for ranks elsewhere, and the places of these."""
        for rank in sorted(self.waiting):
            missing = self._find_missing_ranks(rank)
            if missing:
                absent = [self._describe_absence(one) for one in missing[:3]]
                more = f", and {len(missing) - 3} more" if len(missing) > 3 else ""
                uneven = any(one in self.ended for one in missing)
                self.fail(
                    f"rank {rank} waits for ever in {self._describe_wait(rank)}: {', '.join(absent)}{more}",
                    _UNEVEN_CALLS_HINT if uneven else _MISSING_CALL_HINT,
                )
                return

    def _find_missing_ranks(self, rank: int) -> list[int]:
        waiting = self.waiting[rank]
        if waiting.kind == "collect":
            return [one for one in self._select_simulated_ranks(waiting.key[1]) if one not in self._slots[waiting.key]]
        source = waiting.key[0] if waiting.kind == "receive" else None
        return [source] if source is not None else [one for one in self._ranks if one != rank]

    def _describe_absence(self, rank: int) -> str:
        last = self._last_calls.get(rank)
        if rank in self.ended:
            after = f", after {_format_call(last)}" if last else " without a call"
            return f"rank {rank} {self.ended[rank]}{after}"
        return f"rank {rank} waits in {self._describe_wait(rank)}"

    def _describe_wait(self, rank: int) -> str:
        waiting = self.waiting[rank]
        if waiting.call is not None:
            return _format_call(waiting.call)
        return f"a store for {waiting.key!r} at {short_source(waiting.line)}"


def _format_call(call: CollectiveCall) -> str:
    return f"{call.description} at {short_source(call.line)}"


def _apply_store_operation(store: dict[str, bytes], operation: str, key: str, *values: Any) -> Any:
    """Do an operation on a store whose keys begin with the store's name."""
    held = store.get(key)
    if operation == "get":
        return held
    if operation == "check":
        return key in store
    if operation == "count":
        return sum(one.startswith(key) for one in store)
    if operation == "delete":
        return store.pop(key, None) is not None
    if operation == "add":
        total = int(held or b"0") + values[0]
        store[key] = str(total).encode()
        return total
    if operation == "append":
        store[key] = (held or b"") + values[0]
        return None
    if operation == "compare_set":
        expected, desired = values
        if (held is None and not expected) or held == expected:
            store[key] = desired
        return store.get(key, expected)
    store[key] = values[0]
    return None
