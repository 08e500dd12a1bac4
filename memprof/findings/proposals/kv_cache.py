"""Proposes `use_cache=False` for calls of a model whose KV cache no later call uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memprof.findings.calls import new_storages
from memprof.findings.evidence import file_and_line
from memprof.findings.finding import Context, cache_per_context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import free_earlier
from memprof.trace.events import NONE, Forward

_GENERATION = "/generation/"  # of transformers: its calls make a cache for those that follow


class UnusedCaches(NamedTuple):
    """KV caches that calls make, and that no later call uses."""

    call: Forward  # the last of the calls
    num_calls: int
    frees: dict[int, int]  # keys and values -> event after which the call, or its backward, is done with them
    is_certain: bool  # whether a later call has begun without them; of one call alone nobody knows


@proposes(22)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change if such calls were made."""
    caches = find_unused_caches(context)
    if caches is not None:
        source = context.ledger.trace.source_at(caches.call.source)
        unless = "" if caches.is_certain else ", if no later call is to use the KV cache"
        change = f"pass use_cache=False in the call at {file_and_line(source)}{unless}"
        yield Proposal(free_earlier(context.ledger.trace, caches.frees), change, source=source)


@cache_per_context
def find_unused_caches(context: Context) -> UnusedCaches | None:
    """Return the KV caches of the model that makes most of them; None if any of its calls uses that of another call, as
    in a loop that generates."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    if not trace.last_uses:
        return None
    by_module: dict[int, list[tuple[Forward, list[int]]]] = {}
    for call in trace.list_calls():
        source = trace.source_at(call.source)
        if source is not None and _GENERATION not in source.replace("\\", "/"):
            made = new_storages(context, call.begin, call.end, caches=True)
            by_module.setdefault(call.module, []).append((call, made))
    found = []
    for calls in by_module.values():
        begins = [call.begin for call, _ in calls]
        caches = [(call, made) for call, made in calls if made]
        uses = [(call, trace.last_uses[index]) for call, made in caches for index in made]
        if caches and not any(call.end < begin < used for call, used in uses for begin in begins):
            frees = {i: trace.last_uses[i] for _, made in caches for i in made if trace.last_uses[i] != NONE}
            is_certain = any(call.end < begin for call, _ in caches for begin in begins)
            found.append(UnusedCaches(caches[-1][0], len(caches), frees, is_certain))
    return max(found, key=lambda one: lifetimes.find_max_live(one.frees).num_bytes, default=None)
