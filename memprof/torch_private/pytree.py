"""Private names of functions on nested containers: flatten, unflatten, and map over leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memprof.torch_private.names import bind

tree_flatten: Callable[..., tuple[list[Any], Any]] = bind("torch.utils._pytree:tree_flatten")
tree_iter: Callable[..., Any] = bind("torch.utils._pytree:tree_iter")
tree_leaves: Callable[..., list[Any]] = bind("torch.utils._pytree:tree_leaves")
tree_map: Callable[..., Any] = bind("torch.utils._pytree:tree_map")
tree_map_only: Callable[..., Any] = bind("torch.utils._pytree:tree_map_only")
tree_unflatten: Callable[..., Any] = bind("torch.utils._pytree:tree_unflatten")
