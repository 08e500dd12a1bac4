"""Proposes sparse matrices for graphs: for a row of features for each edge, and for a dense matrix of all nodes; and
parts of the pairs that are scored, whose indices look like a graph's."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.findings.evidence import file_and_line, find_call_at, format_shape, is_inference, is_peak_in_evaluation
from memprof.findings.finding import Context
from memprof.findings.proposals.batches import find_fitting_rows, resize_rows
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize
from memprof.trace.events import PhaseKind, Trace

GATHERS = {"aten.index", "aten.index_select", "aten.gather", "aten.embedding"}

MIN_NODES = 1024  # of a dense matrix, so that a size of the model is not taken for the number of nodes

_INDEX_BYTES, _VALUE_BYTES = 16, 4  # of an edge in a sparse matrix: its row and column, and its weight


@proposes(48)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change if rows of features that are gathered for all edges are the largest tensors at the peak.

    Edges are recognized by their indices, int64 [2 x edges], as graph libraries have them. Pairs that are scored have
    such indices too: they are scored in parts, where no gradients are needed.
    """
    trace, lifetimes = context.ledger.trace, context.lifetimes
    largest = trace.storages[lifetimes.find_largest_at_peak()]
    if len(largest.shape) < 2 or largest.shape[0] not in _list_edge_counts(trace, lifetimes.at_peak):
        return
    num_edges = largest.shape[0]
    messages = [i for i, other in enumerate(trace.storages) if len(other.shape) > 1 and other.shape[0] == num_edges]
    gathered = next((i for i in messages if trace.op(trace.storages[i]) in GATHERS), None)
    if gathered is None:
        return
    where = f"{format_shape(largest.shape)} at {file_and_line(trace.source_line(largest))}"
    if not _are_put_together(context, gathered):
        if is_inference(trace) or is_peak_in_evaluation(context):
            of_pairs = [i for i, other in enumerate(trace.storages) if other.shape[:1] == (num_edges,)]
            rows = find_fitting_rows(context, of_pairs, num_edges)
            change = f"compute in chunks of {rows:,} of the {num_edges:,} pairs, one after another: {where}"
            yield Proposal(resize_rows(trace, of_pairs, rows, num_edges), change, source=trace.source_line(largest))
        return
    sizes = dict.fromkeys(messages, 0)
    sizes[gathered] = num_edges * (_INDEX_BYTES + _VALUE_BYTES)
    change = (
        f"multiply by the sparse matrix of the graph (torch.sparse.mm) instead of making messages of all edges {where}"
    )
    yield Proposal(
        resize(trace, sizes),
        f"{change}, if each is a row of features times a weight, else train on sampled neighborhoods of some nodes",
        source=trace.source_line(largest),
    )


@proposes(52)
def propose_adjacency(context: Context) -> Iterator[Proposal]:
    """Yield the change if a dense matrix [nodes x nodes] is the largest tensor at the peak, beside the indices of the
    graph's edges, which take less: the matrices of this shape have an element for each edge."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    largest = lifetimes.find_largest_at_peak()
    storage = trace.storages[largest]
    shape, num_edges = storage.shape, max(_list_edge_counts(trace, lifetimes.at_peak), default=0)
    sparse_bytes = num_edges * (_INDEX_BYTES + _VALUE_BYTES)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < MIN_NODES or largest in trace.owners:
        return
    if not num_edges or sparse_bytes >= storage.num_bytes:
        return
    alike = [index for index, one in enumerate(trace.storages) if one.shape == shape and index not in trace.owners]
    first = trace.storages[alike[0]]
    if trace.phases[first.phase].kind is PhaseKind.BACKWARD:  # of a sparse product, as a dense gradient
        return
    change = (
        f"use a sparse matrix of the graph's {num_edges:,} edges (torch.sparse_coo_tensor, torch.sparse.mm; degrees by "
        f"bincount) instead of a dense one: {format_shape(shape)} at {file_and_line(trace.source_line(first))}"
    )
    yield Proposal(resize(trace, dict.fromkeys(alike, sparse_bytes)), change)


def _are_put_together(context: Context, gathered: int) -> bool:
    """Return whether rows of features such as those of the storage `gathered` are put together for nodes: the last call
    in which its line gathered rows has made a tensor of other rows after them, or there is none to tell, as that is the
    one in which memory ran out."""
    trace, births = context.ledger.trace, context.lifetimes.births
    storage = trace.storages[gathered]
    cut = find_call_at(trace, context.ledger.peak_event) if trace.ended_out_of_memory else None
    for call in reversed([one for one in trace.list_calls() if one is not cut]):
        made = [index for index in range(len(trace.storages)) if call.begin <= births[index] < call.end]
        rows = [i for i in made if (trace.storages[i].source, trace.storages[i].op) == (storage.source, storage.op)]
        if rows:
            num_rows = trace.storages[rows[-1]].shape[0]
            others = (trace.storages[index].shape for index in made if index > rows[-1])
            return any(len(shape) > 1 and shape[0] != num_rows for shape in others)
    return True


def _list_edge_counts(trace: Trace, storages: frozenset[int]) -> set[int]:
    """Return the numbers of edges of the graphs whose indices are among `storages`."""
    indices = (trace.storages[index] for index in storages if trace.storages[index].dtype == "int64")
    return {one.shape[1] for one in indices if len(one.shape) == 2 and one.shape[0] == 2}
