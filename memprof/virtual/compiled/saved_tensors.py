"""Tensors that a compiled forward saves for its backward, besides those that eager autograd saves.

AOTAutograd traces forward and backward into one graph; a result of a forward node that a backward node reads is a
tensor that eager autograd saves. The partitioner then merges equal nodes, also of forward and backward, and cuts the
graph where the fewest bytes are saved, but never recomputes products and reductions. So the results that a backward
recomputes to save memory (in a `torch.autograd.Function`) are saved in compiled code.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from memprof.torch_private import inductor
from memprof.virtual.compiled.origins import find_node_origin

MIN_BYTES = 1 << 20  # smallest excess, and smallest result, that is reported of a graph
# Tags of nodes that were traced in the forward; nodes that passes insert have no tag.
_FORWARD_TAGS = ("is_forward", "must_be_in_forward")


class SavedResult(NamedTuple):
    """Result in a compiled graph that is saved for the backward; `is_recomputed`: eager code recomputes it instead."""

    source: str
    op: str
    num_bytes: int
    is_recomputed: bool


def patches(report: Callable[[list[SavedResult], int], None]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patch (owner, name, replacement) of the partitioner.

    Args:
        report: called for each graph that saves more than eager code: results, largest first, and excess bytes.
    """
    partition = inductor.min_cut_rematerialization_partition.get()

    def partition_and_report(joint: Any, inputs: Any, *args: Any, num_fwd_outputs: int, **options: Any) -> Any:
        eager, recomputed_names = _find_eager_saved(joint.graph)
        forward, backward = partition(joint, inputs, *args, num_fwd_outputs=num_fwd_outputs, **options)
        results = next(node for node in forward.graph.nodes if node.op == "output").args[0]
        output_names = {base.name for base in _find_base_nodes(results[:num_fwd_outputs])}
        saved = {
            base.name: base for base in _find_base_nodes(results[num_fwd_outputs:]) if base.name not in output_names
        }
        eager_bytes = sum(num_bytes for name, num_bytes in eager.items() if name not in output_names)
        excess_bytes = sum(_count_bytes(node) for node in saved.values()) - eager_bytes
        if excess_bytes >= MIN_BYTES:
            nodes = sorted((node for name, node in saved.items() if name not in eager), key=_count_bytes, reverse=True)
            large_nodes = [node for node in nodes if _count_bytes(node) >= MIN_BYTES]
            report([_make_saved_result(node, node.name in recomputed_names) for node in large_nodes], excess_bytes)
        return forward, backward

    yield inductor.min_cut_rematerialization_partition.patch(partition_and_report)


def _find_eager_saved(graph: Any) -> tuple[dict[str, int], set[str]]:
    """Return the bytes of results that eager autograd saves, by name, and the names of those that it recomputes."""
    bytes_by_name: dict[str, int] = {}
    recomputed_names: set[str] = set()
    computations: dict[Any, int] = {}  # key of a computation -> index
    computation_by_node: dict[Any, int] = {}
    first_names: dict[int, str] = {}  # index of a computation -> name of the first forward node
    nodes = list(graph.nodes)
    forward_indices = [i for i, node in enumerate(nodes) if node.meta.get("partitioner_tag") in _FORWARD_TAGS]
    backward_nodes = {*nodes[max(forward_indices, default=len(nodes)) + 1 :]}
    for node in nodes:
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: computation_by_node[argument])
        key = (node.name if node.op == "placeholder" else "", str(node.target), str(arguments))
        computation = computation_by_node[node] = computations.setdefault(key, len(computations))
        if node in backward_nodes:
            if computation in first_names:
                recomputed_names.add(first_names[computation])
            continue
        first_names.setdefault(computation, node.name)
        if not backward_nodes.isdisjoint(user for user in node.users if user.op != "output"):
            bytes_by_name |= {base.name: _count_bytes(base) for base in _find_base_nodes([node])}
    return bytes_by_name, recomputed_names


def _find_base_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes whose results own the memory of the results of `nodes`, except inputs of the graph."""
    for node in nodes:
        while isinstance(node, torch.fx.Node) and node.args and _is_view(node):
            node = node.args[0]
        if isinstance(node, torch.fx.Node) and node.op == "call_function" and _count_bytes(node):
            yield node


def _is_view(node: Any) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], torch.fx.Node) and _is_view(node.args[0])
    return bool(getattr(node.target, "is_view", False))


def _count_bytes(node: Any) -> int:
    return count_traced_bytes(node.meta.get("val"))


def count_traced_bytes(value: Any) -> int:
    """Return the bytes of a traced tensor, with the hints of symbolic sizes; 0 for other values."""
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = (size if isinstance(size, int) else size.node.hint or 0 for size in value.shape)
    return math.prod(sizes, start=value.element_size())


def _make_saved_result(node: Any, is_recomputed: bool) -> SavedResult:
    origin = find_node_origin(node)
    return SavedResult(origin.source, origin.op, _count_bytes(node), is_recomputed)
