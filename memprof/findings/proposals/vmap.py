"""Proposes chunks for calls of torch.func.vmap, jacrev, jacfwd and hessian, which compute all rows at once, and one row
after another for torch.autograd.functional."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

from memprof.findings.evidence import file_and_line
from memprof.findings.finding import Context
from memprof.findings.proposals.batches import find_fitting_rows, resize_rows
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import edit_events
from memprof.trace.events import Event, EventKind, Trace, VmapCall


@proposes(45)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change of each line that calls such a function for more than one row."""
    trace = context.ledger.trace
    calls: dict[tuple[int, str, int], list[VmapCall]] = defaultdict(list)
    for call in trace.vmaps:
        if call.rows > 1:
            calls[call.source, call.function, call.rows].append(call)
    for (source, function, num_rows), own in calls.items():
        is_vectorized = function.startswith("autograd.")
        results = {index for call in own for index in _find_results(context, call)}
        inner = [index for call in own for index in _find_batched(context, call) if index not in results]
        if not inner:
            continue
        rows = 1 if is_vectorized else find_fitting_rows(context, inner, num_rows)
        births = {index: context.lifetimes.births[index] for index in results}
        changed = _join_results(resize_rows(trace, inner, rows, num_rows), births, own)
        source_line = trace.source_at(source)
        line = file_and_line(source_line)
        how = "vmap of jvp (jacfwd has none)" if function == "jacfwd" else function
        change = f"pass chunk_size={rows} to torch.func.{how} at {line}"
        if is_vectorized:
            setting = "is_grads_batched" if function == "autograd.grad" else "vectorize"
            change = f"pass {setting}=False to torch.{function} at {line}: one row after another"
        yield Proposal(changed, f"{change}, which takes {num_rows} rows at once", source=source_line)


def _find_batched(context: Context, call: VmapCall) -> list[int]:
    """Return the storages that the call allocates with its rows as a factor."""
    trace, workspaces = context.ledger.trace, context.ledger.trace.optional_storages()  # of convolutions
    made = [ref for kind, ref in trace.events[call.begin : call.end] if kind is EventKind.ALLOC]
    shapes = ((index, trace.storages[index].shape) for index in made if not trace.storages[index].hidden)
    batched = [index for index, shape in shapes if shape and (shape[0] % call.rows == 0 or call.rows in shape)]
    return batched + [index for index in made if index in workspaces]


def _find_results(context: Context, call: VmapCall) -> list[int]:
    """Return the storages of the call's results, which chunks make as large: those that it leaves.

    In a call that has ended without memory, they are those with a row of the shape of an earlier tensor, which neither
    these lines nor the function that they call made: a gradient for each row.
    """
    trace, lifetimes = context.ledger.trace, context.lifetimes
    batched = _find_batched(context, call)
    out_of_memory = context.ledger.out_of_memory
    if not trace.ended_out_of_memory or out_of_memory is None or not call.begin <= out_of_memory.event < call.end:
        return [index for index in batched if lifetimes.deaths[index] >= call.end]
    if call.function.startswith("autograd."):  # results are of the inputs, and small beside what is computed for them
        return []
    earlier = lifetimes.find_live(call.begin, range(len(trace.storages))).storages
    lines = {call.source, *(trace.storages[index].source for index in batched)}
    inputs = (index for index in earlier if lines.isdisjoint(_list_sources(trace, index)))
    shapes = {(call.rows, *trace.storages[index].shape) for index in inputs}
    return [index for index in batched if trace.storages[index].shape in shapes]


def _list_sources(trace: Trace, index: int) -> list[int]:
    """Return the line that allocated the storage `index`, and those of its callers."""
    return [trace.storages[index].source, *(caller.source for caller in trace.list_callers(index))]


def _join_results(trace: Trace, results: dict[int, int], calls: list[VmapCall]) -> Trace:
    """Return the trace with a second copy of each result at the end of its call: the chunks are concatenated."""
    storages = list(trace.storages)
    inserted: dict[int, list[Event]] = defaultdict(list)
    for index, birth in results.items():
        end = next(call.end for call in calls if call.begin <= birth < call.end)
        inserted[end] += [Event(EventKind.ALLOC, len(storages)), Event(EventKind.FREE, len(storages))]
        storages.append(storages[index])
    return edit_events(dataclasses.replace(trace, storages=storages), inserted, ())
