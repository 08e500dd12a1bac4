"""Tensors that a compiled forward keeps for its backward, beside those that eager autograd keeps.

AOTAutograd traces forward and backward into one graph; what a node of the backward takes from a node of the forward is
what autograd has saved there. The partitioner then merges nodes that compute the same, also of forward and backward,
and cuts the graph anew where least is to be kept, but never computes products and reductions again. So a backward that
computes again what it does not want kept (a `torch.autograd.Function` written to save memory) has it kept all the same.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from memprof.torch_private import inductor
from memprof.virtual.compiled.origins import origin_of

MIN_BYTES = 1 << 20  # in one call of a graph: less is not noted
# Tags of nodes that were traced before the backward began; what passes have put there since has none.
_FORWARD = ("is_forward", "must_be_in_forward")


class SavedResult(NamedTuple):
    """One result of a compiled graph, as `CompiledSavedTensors` has several."""

    source: str
    op: str
    num_bytes: int
    again: bool


def patches(told: Callable[[list[SavedResult], int], None]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patch (owner, name, replacement) of the partitioner.

    Args:
        told: of each graph that keeps more than eager code would: what, the largest first, and how much more in all.
    """
    partition = inductor.min_cut_rematerialization_partition.get()

    def partitioned(joint: Any, inputs: Any, *args: Any, num_fwd_outputs: int, **options: Any) -> Any:
        eager, again = _eagerly(joint.graph)
        forward, backward = partition(joint, inputs, *args, num_fwd_outputs=num_fwd_outputs, **options)
        results = next(node for node in forward.graph.nodes if node.op == "output").args[0]
        given = {base.name for base in _bases(results[:num_fwd_outputs])}
        saved = {base.name: base for base in _bases(results[num_fwd_outputs:]) if base.name not in given}
        before = sum(num_bytes for name, num_bytes in eager.items() if name not in given)
        more = sum(_num_bytes(node) for node in saved.values()) - before
        if more >= MIN_BYTES:
            nodes = sorted((node for name, node in saved.items() if name not in eager), key=_num_bytes, reverse=True)
            told([_kept(node, node.name in again) for node in nodes if _num_bytes(node) >= MIN_BYTES], more)
        return forward, backward

    yield inductor.min_cut_rematerialization_partition.patch(partitioned)


def _eagerly(graph: Any) -> tuple[dict[str, int], set[str]]:
    """Return the names and bytes of what autograd has saved; names of what the backward computes again."""
    saved: dict[str, int] = {}
    again: set[str] = set()
    numbers: dict[Any, int] = {}  # what is computed -> its number
    known: dict[Any, int] = {}  # node -> the number of what it computes
    first: dict[int, str] = {}  # that number -> the first node of the forward
    nodes = list(graph.nodes)
    traced = [at for at, node in enumerate(nodes) if node.meta.get("partitioner_tag") in _FORWARD]
    backward = {*nodes[max(traced, default=len(nodes)) + 1 :]}
    for node in nodes:
        given = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: known[argument])
        key = (node.name if node.op == "placeholder" else "", str(node.target), str(given))
        number = known[node] = numbers.setdefault(key, len(numbers))
        if node in backward:
            if number in first:
                again.add(first[number])
            continue
        first.setdefault(number, node.name)
        if not backward.isdisjoint(user for user in node.users if user.op != "output"):
            saved |= {base.name: _num_bytes(base) for base in _bases([node])}
    return saved, again


def _bases(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes that made the memory in which these lie, but for what the graph was given."""
    for node in nodes:
        while isinstance(node, torch.fx.Node) and node.args and _is_view(node):
            node = node.args[0]
        if isinstance(node, torch.fx.Node) and node.op == "call_function" and _num_bytes(node):
            yield node


def _is_view(node: Any) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], torch.fx.Node) and _is_view(node.args[0])
    return bool(getattr(node.target, "is_view", False))


def _num_bytes(node: Any) -> int:
    return traced_bytes(node.meta.get("val"))


def traced_bytes(value: Any) -> int:
    """Return the bytes of a traced tensor, at the sizes that it was traced with; 0 for another value."""
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = (size if isinstance(size, int) else size.node.hint or 0 for size in value.shape)
    return math.prod(sizes, start=value.element_size())


def _kept(node: Any, again: bool) -> SavedResult:
    origin = origin_of(node)
    return SavedResult(
        origin.source if origin else "", origin.op if origin else str(node.target), _num_bytes(node), again
    )
