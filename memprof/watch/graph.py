"""Traversal of an autograd graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch


def find_node(tensor: torch.Tensor) -> Any:
    """Return the autograd node that computed `tensor`, or None where there is none, or where autograd has given it up.

    One of several views that one operator has made, as of `unbind`, has no node any more once their base is modified in
    place: torch raises an error as soon as `grad_fn` or `is_leaf` is read. A program may have such views, unused.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a leaf of autograd graphs; see `find_node` on views that have lost their node."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def collect_nodes(roots: Iterable[torch.Tensor], limit: int) -> list[Any]:
    """Return up to `limit` autograd nodes reachable from the tensors `roots`, breadth first."""
    queue = deque(find_node(root) for root in roots)
    seen: dict[Any, None] = {}
    while queue and len(seen) < limit:
        node = queue.popleft()
        if node is not None and node not in seen:
            seen[node] = None
            queue.extend(next_node for next_node, _ in node.next_functions)
    return list(seen)
