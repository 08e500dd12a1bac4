"""Proposes activation checkpointing: layers save their result only, and run again in the backward."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memprof.findings.evidence import file_and_line, is_inference
from memprof.findings.finding import Context, cache_per_context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import edit_events
from memprof.trace.events import NONE, Event, EventKind, Forward, ModuleRole, PhaseKind, Trace

MIN_REPEATS = 16  # calls of one module in one call of a model, or before one backward: fewer are parts of it

_ENDS = (PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP)  # of what a graph waits for


class LayerCall(NamedTuple):
    """A call of a layer in a forward pass: the events at which it begins and ends, and at which its backward begins."""

    module: int  # index in Trace.modules
    begin: int
    end: int
    backward: int  # the trace's length if there is none


@proposes(61, fix="activation-checkpointing")
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change for a model with layers that keep tensors for the backward."""
    changed = checkpoint_layers(context)
    if changed is not None:
        yield Proposal(changed)


@proposes(62)
def propose_repeated(context: Context) -> Iterator[Proposal]:
    """Yield the change for a model without layers that calls one module many times: the steps of a solver."""
    trace = context.ledger.trace
    modules = _find_repeated_modules(trace)
    if not modules or is_inference(trace) or list_layer_calls(trace):
        return
    calls = make_layer_calls(trace, _list_spans(trace, PhaseKind.FORWARD, modules))
    changed = checkpoint_calls(context, calls)
    if changed is not None:
        first, module = calls[0], trace.modules[calls[0].module]
        num_calls = sum(call.module == first.module for call in calls)
        made = (ref for kind, ref in trace.events[first.begin : first.end] if kind is EventKind.ALLOC)
        line = next((line for ref in made if (line := trace.source_line(trace.storages[ref])) is not None), None)
        change = (
            f"run each of the {num_calls} calls of `{module.path}` ({module.class_name}, {file_and_line(line)}) under "
            "torch.utils.checkpoint, or solve an ODE with odeint_adjoint, whose backward needs no graph of them"
        )
        yield Proposal(changed, change)


@proposes(63)
def propose_calls_of_a_loop(context: Context) -> Iterator[Proposal]:
    """Yield the change for a model that one line calls many times before a backward: the steps of a sampler, the parts
    of a sequence."""
    trace, peak = context.ledger.trace, context.ledger.peak_event
    if context.spec is not None or is_inference(trace):
        return
    since = max((time for time, phase in context.phases if phase.kind in _ENDS and time < peak), default=0)
    by_line: dict[tuple[int, int], list[Forward]] = defaultdict(list)
    for call in trace.list_calls():
        if call.nodes and since <= call.begin <= peak and not trace.modules[call.module].class_name.endswith("Cell"):
            by_line[call.module, call.source].append(call)
    calls = max(by_line.values(), key=len, default=[])
    if len(calls) < MIN_REPEATS:
        return
    spans = [(call.module, call.begin, call.end - 1) for call in calls]
    changed = checkpoint_calls(context, make_layer_calls(trace, spans))
    if changed is not None:
        source = trace.source_at(calls[0].source)
        name, line = trace.modules[calls[0].module].class_name, file_and_line(source)
        change = (
            f"run each of the {len(calls)} calls of {name} at {line}, whose graphs wait for one backward, under "
            "torch.utils.checkpoint; fewer calls need less too"
        )
        yield Proposal(changed, change, source=source)


def _find_repeated_modules(trace: Trace) -> frozenset[int]:
    """Return the modules that one outermost call in a forward calls MIN_REPEATS times; none that is a recurrent cell,
    whose state is as large as what it saves."""
    counts: Counter[int] = Counter()
    found, depth = set[int](), 0
    for event in trace.events:
        if event.kind is EventKind.ENTER:
            counts[event.ref] += depth > 0
            depth += 1
            if counts[event.ref] == MIN_REPEATS and not trace.modules[event.ref].class_name.endswith("Cell"):
                found.add(event.ref)
        elif event.kind is EventKind.EXIT:
            depth = max(depth - 1, 0)
            if not depth:
                counts.clear()
    return frozenset(found)


@cache_per_context
def checkpoint_layers(context: Context) -> Trace | None:
    """Return the trace with layers that run again in the backward; None if they keep nothing for it."""
    return checkpoint_calls(context, list_layer_calls(context.ledger.trace))


def checkpoint_calls(context: Context, calls: Sequence[LayerCall]) -> Trace | None:
    """Return the trace with each of `calls` run again in its backward; None if they keep nothing for it.

    What a layer leaves is freed when it returns, but for its result, the last storage that it allocates. Its
    allocations and frees are repeated when its backward begins. Its result lives until then, as the input of the next
    layer.
    """
    trace, births, deaths = context.ledger.trace, context.lifetimes.births, context.lifetimes.deaths
    inserted: dict[int, list[Event]] = defaultdict(list)
    removed: list[int] = []
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
    return make_layer_calls(trace, _list_spans(trace, PhaseKind.FORWARD, _find_layers(trace)))


def make_layer_calls(trace: Trace, spans: Sequence[tuple[int, int, int]]) -> list[LayerCall]:
    """Return the calls with module, begin and end as in `spans`, with the events at which their backwards begin."""
    return [LayerCall(*span, backward) for span, backward in zip(spans, _list_backwards(trace, spans), strict=True)]


def _find_layers(trace: Trace) -> frozenset[int]:
    return frozenset(index for index, module in enumerate(trace.modules) if module.role is ModuleRole.LAYER)


def list_recomputed_calls(trace: Trace) -> list[LayerCall]:
    """Return the same of layers that run again in backward passes, as activation checkpointing has it.

    Their backward is that of the operators that ran again (`use_reentrant=True`), or of the call in the forward.
    """
    forwards: dict[int, list[LayerCall]] = defaultdict(list)
    for call in list_layer_calls(trace):
        forwards[call.module].append(call)
    spans = _list_spans(trace, PhaseKind.BACKWARD, _find_layers(trace))
    calls = []
    for span, backward in zip(spans, _list_backwards(trace, spans), strict=True):
        earlier = [call.backward for call in forwards[span[0]] if call.end <= span[1] < call.backward]
        calls.append(LayerCall(*span, min(backward, *earlier[-1:], len(trace.events))))
    return calls


def _list_spans(trace: Trace, kind: PhaseKind, modules: frozenset[int]) -> list[tuple[int, int, int]]:
    """Return module, begin and end of each call of one of `modules` in phases of `kind`, outside calls of others."""
    spans: list[tuple[int, int, int]] = []
    open_layer = begin = NONE
    is_in_phase = False
    for time, event in enumerate(trace.events):
        if event.kind is EventKind.PHASE:
            is_in_phase = trace.phases[event.ref].kind is kind
        elif event.kind is EventKind.ENTER and open_layer == NONE and event.ref in modules:
            open_layer, begin = event.ref, time
        elif event.kind is EventKind.EXIT and event.ref == open_layer:
            if is_in_phase:
                spans.append((event.ref, begin, time))
            open_layer = NONE
    return spans


def _list_backwards(trace: Trace, spans: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return the event at which the backward of each span's operators begins; the trace's length if there is none."""
    begins = [begin for _, begin, _ in spans]
    backward: dict[int, int] = defaultdict(lambda: len(trace.events))
    births, _ = trace.lifetimes()
    for storage, birth in zip(trace.storages, births, strict=True):
        position = bisect.bisect_left(begins, storage.forward_event) - 1
        if storage.forward_event != NONE and position >= 0 and storage.forward_event <= spans[position][2]:
            backward[position] = min(backward[position], birth)
    return [backward[position] for position in range(len(spans))]
