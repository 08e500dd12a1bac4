"""Exchange between ranks that run together: contributions to collectives, waits, and detection of deadlocks.

This has no processes and no clock: `handle_message` gets a rank's message, and answers are sent by `reply`. A rank
waits only for a collective, a message, a key of a store, or the steps of other ranks. So a deadlock is detected at
once: no rank runs, and no waiting rank can be resumed.
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
    """Event that a rank waits for. By `kind`, `key` is the id of a collective (collect), (source rank, tag) (receive),
    a store's key (store), or whether the rank can stop (step)."""

    kind: str
    key: Any
    call: CollectiveCall | None
    line: str


class Exchange:
    """Message exchange of `ranks`; `reply(rank, kind, data)` sends an answer: "go" with data, or "stop" with a reason.
    Each kind of message has its own method (`_handle_call`, ...)."""

    def __init__(self, ranks: Sequence[int], reply: Callable[[int, str, Any], None]) -> None:
        self._reply = reply
        self._ranks = tuple(ranks)
        self.running_ranks = set(ranks)
        self.waits: dict[int, _Wait] = {}
        self.endings: dict[int, str] = {}  # rank -> how it has ended, such as "has ended"
        self.stop_reason: str | None = None  # reason to stop all ranks; None: not stopped
        self.problem: MemprofError | None = None  # error between ranks
        self._slots: dict[Any, dict[int, tuple[CollectiveCall, Payload]]] = defaultdict(dict)
        self._collected_by: dict[Any, set[int]] = defaultdict(set)
        # By group, sender, receiver and tag.
        self._messages: dict[tuple[Any, int, int, int], deque[tuple[CollectiveCall, Payload]]] = defaultdict(deque)
        self._last_calls: dict[int, CollectiveCall] = {}
        self._store: dict[str, bytes] = {}

    def handle_message(self, rank: int, kind: str, *arguments: Any) -> None:
        """Process a message of `rank`, of the given kind, and resume the waiting ranks that can go on."""
        if self.stop_reason is not None:
            if kind in ("collect", "receive", "store", "step"):
                self._reply(rank, "stop", self.stop_reason)
            return
        getattr(self, f"_handle_{kind}")(rank, *arguments)
        self._resume_ready_ranks()

    def record_end(self, rank: int, description: str) -> None:
        """Record that `rank` has ended; `description`, such as "has ended", is for error messages."""
        self.running_ranks.discard(rank)
        self.waits.pop(rank, None)
        self.endings[rank] = description
        if self.stop_reason is None:
            self._resume_ready_ranks()

    def stop(self, reason: str) -> None:
        """Stop all ranks for `reason`: waiting ranks now, running ranks at their next message."""
        self.stop_reason = self.stop_reason or reason
        for rank in list(self.waits):
            self._resume(rank, self.stop_reason, "stop")

    def fail(self, problem: str, hint: str) -> None:
        """Record the error `problem` between ranks, with a `hint`, and stop all ranks."""
        if self.problem is None:
            self.problem = MemprofError(problem, hint=hint)
        self.stop(PEER)

    def resume_steps(self) -> None:
        """Resume the ranks that wait at the end of a step, for another step."""
        for rank in [rank for rank, wait in self.waits.items() if wait.kind == "step"]:
            self._resume(rank, False)

    def fail_overdue(self, rank: int, seconds: float) -> None:
        """Stop all ranks with an error, because `rank` has waited for `seconds` while others still run."""
        noun = "rank" + "s" * (len(self.running_ranks) > 1)
        self.fail(
            f"rank {rank} has waited {seconds / 60:.0f} minutes in {self._describe_wait(rank)}, and {noun} "
            f"{format_ranges(sorted(self.running_ranks))} did not come",
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
        self._record_wait(rank, _Wait("collect", key, call, call.line))

    def _handle_send(self, rank: int, receiver: int, tag: int, call: CollectiveCall, payload: Payload) -> None:
        self._messages[call.collective_id[:2], rank, receiver, tag].append((call, payload))
        self._last_calls[rank] = call

    def _handle_receive(self, rank: int, source: int | None, tag: int, call: CollectiveCall) -> None:
        self._last_calls[rank] = call
        self._record_wait(rank, _Wait("receive", (source, tag), call, call.line))

    def _handle_store(self, rank: int, operation: str, arguments: tuple[Any, ...], line: str) -> None:
        keys, (key, *values) = self._store, arguments
        if operation == "get" and key not in keys:
            self._record_wait(rank, _Wait("store", key, None, line))
            return
        self._reply(rank, "go", _apply_store_operation(keys, operation, key, *values))

    def _handle_step(self, rank: int, can_stop: bool) -> None:
        self._record_wait(rank, _Wait("step", can_stop, None, ""))

    def _record_wait(self, rank: int, wait: _Wait) -> None:
        self.running_ranks.discard(rank)
        self.waits[rank] = wait

    def _resume(self, rank: int, answer: Any, reply_kind: str = "go") -> None:
        del self.waits[rank]
        self.running_ranks.add(rank)
        self._reply(rank, reply_kind, answer)

    def _resume_ready_ranks(self) -> None:
        """Resume the waiting ranks that can go on; if no rank runs then, end the step, or report a deadlock."""
        for rank, wait in list(self.waits.items()):
            if self.stop_reason is None and wait.kind != "step":
                self._try_to_resume(rank, wait)
        if self.stop_reason is not None or self.running_ranks or not self.waits:
            return
        steps = {rank: wait.key for rank, wait in self.waits.items() if wait.kind == "step"}
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

    def _try_to_resume(self, rank: int, wait: _Wait) -> None:
        if wait.kind == "collect":
            if self._is_complete(wait.call):
                slot = self._slots[wait.key]
                collected_ranks = self._collected_by[wait.key]
                collected_ranks.add(rank)
                self._resume(rank, {sender: payload for sender, (_, payload) in slot.items()})
                if len(collected_ranks) == len(slot):
                    del self._slots[wait.key], self._collected_by[wait.key]
        elif wait.kind == "receive":
            self._try_receive(rank, wait)
        elif wait.key in self._store:
            self._resume(rank, self._store[wait.key])

    def _try_receive(self, rank: int, wait: _Wait) -> None:
        source, tag = wait.key
        call = wait.call
        assert call is not None
        for sender in call.ranks if source is None else (source,):
            messages = self._messages.get((call.collective_id[:2], sender, rank, tag))
            if messages:
                sent_call, payload = messages.popleft()
                if (sent_call.dtype, sent_call.send_counts) == (call.dtype, call.receive_counts):
                    self._resume(rank, (sender, payload))
                else:
                    self._fail_for_different_calls(sender, sent_call, rank, call)
                return

    def _is_complete(self, call: CollectiveCall | None) -> bool:
        assert call is not None
        return len(self._slots[call.collective_id]) == len(self._select_simulated_ranks(call.ranks))

    def _select_simulated_ranks(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if rank in self._ranks]

    def _compare_calls(self, slot: dict[int, tuple[CollectiveCall, Payload]]) -> None:
        """Stop all ranks with an error unless their calls of a collective, `slot`, have equal signatures and sizes."""
        lowest = min(slot)
        call = slot[lowest][0]
        for rank in sorted(slot):
            if slot[rank][0].signature != call.signature:
                self._fail_for_different_calls(lowest, call, rank, slot[rank][0])
                return
        for i, sender in enumerate(call.ranks):
            for j, receiver in enumerate(call.ranks):
                if sender in slot and receiver in slot and call.send_counts:
                    sent, received = slot[sender][0], slot[receiver][0]
                    if sent.send_counts[j] != received.receive_counts[i]:
                        self._fail_for_different_calls(
                            sender,
                            sent,
                            receiver,
                            received,
                            f"{sent.send_counts[j]:,} against {received.receive_counts[i]:,}",
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
        """Stop all ranks with an error that names the lowest waiting rank, and where the missing ranks are."""
        for rank in sorted(self.waits):
            missing_ranks = self._find_missing_ranks(rank)
            if missing_ranks:
                absences = [self._describe_absence(missing_rank) for missing_rank in missing_ranks[:3]]
                rest_text = f", and {len(missing_ranks) - 3} more" if len(missing_ranks) > 3 else ""
                has_ended_rank = any(missing_rank in self.endings for missing_rank in missing_ranks)
                self.fail(
                    f"rank {rank} waits for ever in {self._describe_wait(rank)}: {', '.join(absences)}{rest_text}",
                    _UNEVEN_CALLS_HINT if has_ended_rank else _MISSING_CALL_HINT,
                )
                return

    def _find_missing_ranks(self, rank: int) -> list[int]:
        wait = self.waits[rank]
        if wait.kind == "collect":
            return [r for r in self._select_simulated_ranks(wait.key[1]) if r not in self._slots[wait.key]]
        source = wait.key[0] if wait.kind == "receive" else None
        return [source] if source is not None else [r for r in self._ranks if r != rank]

    def _describe_absence(self, rank: int) -> str:
        last_call = self._last_calls.get(rank)
        if rank in self.endings:
            call_text = f", after {_format_call(last_call)}" if last_call else " without a call"
            return f"rank {rank} {self.endings[rank]}{call_text}"
        return f"rank {rank} waits in {self._describe_wait(rank)}"

    def _describe_wait(self, rank: int) -> str:
        wait = self.waits[rank]
        if wait.call is not None:
            return _format_call(wait.call)
        return f"a store for {wait.key!r} at {short_source(wait.line)}"


def _format_call(call: CollectiveCall) -> str:
    return f"{call.description} at {short_source(call.line)}"


def _apply_store_operation(store: dict[str, bytes], operation: str, key: str, *values: Any) -> Any:
    """Apply a c10d store operation, such as "get" or "add", to `key` of `store`, and return its result."""
    current = store.get(key)
    if operation == "get":
        return current
    if operation == "check":
        return key in store
    if operation == "count":
        return sum(stored_key.startswith(key) for stored_key in store)
    if operation == "delete":
        return store.pop(key, None) is not None
    if operation == "add":
        total = int(current or b"0") + values[0]
        store[key] = str(total).encode()
        return total
    if operation == "append":
        store[key] = (current or b"") + values[0]
        return None
    if operation == "compare_set":
        expected, desired = values
        if (current is None and not expected) or current == expected:
            store[key] = desired
        return store.get(key, expected)
    store[key] = values[0]
    return None
