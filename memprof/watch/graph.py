"""Traversal of an autograd graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch


def collect_nodes(roots: Iterable[torch.Tensor], limit: int) -> list[Any]:
    """Return up to `limit` autograd nodes reachable from the tensors `roots`, breadth first."""
    queue = deque(root.grad_fn for root in roots)
    seen: dict[Any, None] = {}
    while queue and len(seen) < limit:
        node = queue.popleft()
        if node is not None and node not in seen:
            seen[node] = None
            queue.extend(next_node for next_node, _ in node.next_functions)
    return list(seen)
