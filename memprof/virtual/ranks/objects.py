"""Objects that other ranks send: alone they are not known, and what the program has in their place stays.

What this rank sends itself, and what it gathers, goes through torch's own code: pickled, as bytes on the card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from memprof.virtual.ranks.alone import Alone

_c10d: Any = getattr(dist, "distributed_c10d", None)


def patches(others: Alone) -> Iterator[tuple[Any, str, Any]]:
    """The patches (owner, name, replacement) of what takes objects of one other rank."""
    received = {
        name: _from_one(getattr(dist, name), others) for name in ("broadcast_object_list", "scatter_object_list")
    }

    def recv_object_list(object_list: list[Any], src: int | None = None, *args: Any, **options: Any) -> int | None:
        others.say("objects", _NOT_KNOWN)
        return src

    for owner in (dist, _c10d):
        for name, replacement in received.items():
            yield owner, name, replacement
        if hasattr(owner, "recv_object_list"):
            yield owner, "recv_object_list", recv_object_list


_NOT_KNOWN = (
    "Objects that another rank sends are not known, for this one runs alone: lists that take them stay as they are"
)


def _from_one(original: Callable[..., Any], others: Alone) -> Callable[..., Any]:
    at = 2 if original.__name__ == "scatter_object_list" else 1
    """Place of the sender among the arguments; the group follows."""

    def send(*args: Any, **options: Any) -> Any:
        source = args[at] if len(args) > at else options.get("src")
        group = args[at + 1] if len(args) > at + 1 else options.get("group")
        if options.get("group_src") is not None:
            is_sender = dist.get_rank(group) == options["group_src"]
        else:
            is_sender = dist.get_rank() == (source or 0)
        if is_sender or dist.get_rank(group) < 0:
            return original(*args, **options)
        others.say("objects", _NOT_KNOWN)
        return None

    return send
