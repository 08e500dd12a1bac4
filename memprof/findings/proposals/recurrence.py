"""Proposes truncated backpropagation through time, where one backward waits for many calls of a recurrent cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from memprof.findings.evidence import file_and_line, find_own_line
from memprof.findings.finding import Context
from memprof.findings.proposals.batches import resize_rows
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import free_earlier
from memprof.trace.events import EventKind, Forward, Trace

MIN_CALLS = 64  # of a cell in one call of the model; fewer are layers that share weights, rather than a sequence

NUM_WINDOWS = 8  # into which the calls are divided: torch's word language model has 35 calls in one

MIN_STEPS = 512  # of a sequence: shorter ones are sentences, which a backward goes through as a whole

_SHORTER = "train on shorter sequences: parts of {size:,} of the {num:,} {steps}, with a backward() after each"

_RNN = "aten._cudnn_rnn"

_CELL = "Cell"  # how the classes of torch.nn end (LSTMCell, GRUCell, RNNCell), and those of programs


@proposes(57)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change for the cell that is called most often: what a window keeps is freed when the next begins."""
    trace, deaths = context.ledger.trace, context.lifetimes.deaths
    frees: dict[int, int] = {}
    longest: tuple[int, int] = (0, 0)  # calls of a cell, and its index in Trace.modules
    for forward in trace.list_calls():
        begins = _find_longest_loop(trace, forward)
        if len(begins) < MIN_CALLS or not forward.nodes:
            continue
        longest = max(longest, (len(begins), trace.events[begins[0]].ref))
        size = -(-len(begins) // NUM_WINDOWS)
        for begin, end in zip(begins[::size], [*begins[::size][1:], forward.end], strict=True):
            made = (ref for kind, ref in trace.events[begin:end] if kind is EventKind.ALLOC)
            frees |= {
                index: end
                for index in made
                if deaths[index] > end and index not in trace.owners and index not in forward.outputs
            }
    if frees:
        num_calls, module = longest
        size = -(-num_calls // NUM_WINDOWS)
        line = _find_line(trace, module)
        yield Proposal(
            free_earlier(trace, {index: time for index, time in frees.items() if time < len(trace.events)}),
            _SHORTER.format(
                size=size, num=num_calls, steps=f"calls of `{trace.modules[module].path}` at {file_and_line(line)}"
            ),
            source=line,
        )


@proposes(58)
def propose_windows(context: Context) -> Iterator[Proposal]:
    """Yield the same for the longest sequence that torch's own nn.LSTM, nn.GRU or nn.RNN is trained on: what the call
    saves, and what has a row for each of its steps, is that of a window."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    made = [index for index, one in enumerate(trace.storages) if trace.op(one) == _RNN and index not in trace.owners]
    outputs = [index for index in made if len(trace.storages[index].shape) == 3]
    longest = max(outputs, key=lambda index: trace.storages[index].shape[0], default=None)
    saved = [index for index in made if trace.storages[index].dtype == "uint8" and not trace.storages[index].hidden]
    num_steps = 0 if longest is None else trace.storages[longest].shape[0]
    if longest is None or num_steps < MIN_STEPS or lifetimes.at_peak.isdisjoint(saved):
        return
    along = {
        index
        for index, one in enumerate(trace.storages)
        if index not in trace.owners and not one.hidden and num_steps in one.shape[:2]
    }
    size, line = -(-num_steps // NUM_WINDOWS), find_own_line(trace, longest)
    change = _SHORTER.format(size=size, num=num_steps, steps=f"steps at {file_and_line(line)}")
    yield Proposal(resize_rows(trace, along.union(made), size, num_steps), change, source=line)


def _find_longest_loop(trace: Trace, forward: Forward) -> list[int]:
    """Return the events at which the cell that `forward` calls most often is called."""
    begins: dict[int, list[int]] = defaultdict(list)
    for time in range(forward.begin, min(forward.end, len(trace.events))):
        kind, ref = trace.events[time]
        if kind is EventKind.ENTER and trace.modules[ref].class_name.endswith(_CELL):
            begins[ref].append(time)
    return max(begins.values(), key=len, default=[])


def _find_line(trace: Trace, module: int) -> str | None:
    """Return the line that calls a cell, or within it: of its first tensor."""
    made = (index for index, storage in enumerate(trace.storages) if storage.module == module)
    return next((find_own_line(trace, index) for index in made), None)
