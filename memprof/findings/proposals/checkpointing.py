"""Proposes activation checkpointing: layers save their result only, and run again in the backward."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from memprof.findings.finding import Context, cache_per_context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import edit_events
from memprof.trace.events import NONE, Event, EventKind, ModuleRole, PhaseKind, Trace


class LayerCall(NamedTuple):
    """A call of a layer in a forward pass: the events at which it begins and ends, and at which its backward begins."""

    module: int  # index in Trace.modules
    begin: int
    end: int
    backward: int  # the trace's length if there is none


@proposes(60, fix="activation-checkpointing")
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change for a model with layers that keep tensors for the backward."""
    changed = checkpoint_layers(context)
    if changed is not None:
        yield Proposal(changed)


@cache_per_context
def checkpoint_layers(context: Context) -> Trace | None:
    """Return the trace with layers that run again in the backward; None if they keep nothing for it.

    What a layer leaves is freed when it returns, but for its result, the last storage that it allocates. Its
    allocations and frees are repeated when its backward begins. Its result lives until then, as the input of the next
    layer.
    """
    trace, births, deaths = context.ledger.trace, context.lifetimes.births, context.lifetimes.deaths
    inserted: dict[int, list[Event]] = defaultdict(list)
    removed: list[int] = []
    calls = list_layer_calls(trace)
    for number, call in enumerate(calls):
        made = {ref for kind, ref in trace.events[call.begin : call.end] if kind is EventKind.ALLOC}
        made -= {index for index in made if index in trace.owners or trace.storages[index].hidden}
        left = sorted((index for index in made if deaths[index] > call.end), key=births.__getitem__)
        saved = [index for index in left[:-1] if deaths[index] >= call.backward]
        if not saved:
            continue
        inserted[call.end] += [Event(EventKind.FREE, index) for index in saved]
        repeated = made - {index for index in left if index not in saved}
        inserted[call.backward] += [
            event
            for event in trace.events[call.begin : call.end]
            if event.ref in repeated and event.kind in (EventKind.ALLOC, EventKind.FREE)
        ]
        result_death = deaths[left[-1]]
        is_input = number + 1 < len(calls) and calls[number + 1].backward < call.backward
        if is_input and result_death < call.backward:
            removed.append(result_death)
            inserted[call.backward].append(Event(EventKind.FREE, left[-1]))
    return edit_events(trace, inserted, removed) if inserted else None


def list_layer_calls(trace: Trace) -> list[LayerCall]:
    """Return the calls of layers in forward passes, in order, without those within another layer's call."""
    spans: list[tuple[int, int, int]] = []
    open_layer = begin = NONE
    in_forward = False
    for time, (kind, ref) in enumerate(trace.events):
        if kind is EventKind.PHASE:
            in_forward = trace.phases[ref].kind is PhaseKind.FORWARD
        elif kind is EventKind.ENTER and open_layer == NONE and trace.modules[ref].role is ModuleRole.LAYER:
            open_layer, begin = ref, time
        elif kind is EventKind.EXIT and ref == open_layer:
            if in_forward:
                spans.append((ref, begin, time))
            open_layer = NONE
    begins = [begin for _, begin, _ in spans]
    backward: dict[int, int] = defaultdict(lambda: len(trace.events))
    births, _ = trace.lifetimes()
    for storage, birth in zip(trace.storages, births, strict=True):
        position = bisect.bisect_left(begins, storage.forward_event) - 1
        if storage.forward_event != NONE and position >= 0 and storage.forward_event <= spans[position][2]:
            backward[position] = min(backward[position], birth)
    return [LayerCall(*span, backward[position]) for position, span in enumerate(spans)]
