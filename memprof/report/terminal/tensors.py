"""Tensors live at the peak, merged and described for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rich.text import Text

from memprof.ledger.ledger import LiveTensor
from memprof.trace.events import short_source


def merge_equal_tensors(tensors: Iterable[LiveTensor]) -> list[LiveTensor]:
    """Return tensors, largest first, with those merged that look the same (cuBLAS workspaces of two threads, say)."""
    found: dict[tuple[object, ...], LiveTensor] = {}
    for one in tensors:
        where = one.name or (one.module, one.source)
        key = one.num_bytes, one.shape, one.dtype, one.category, one.op, where
        if known := found.get(key):
            total = known.allocated_bytes + one.allocated_bytes
            one = replace(known, count=known.count + one.count, allocated_bytes=total)
        found[key] = one
    return sorted(found.values(), key=lambda tensor: (-tensor.num_bytes, -tensor.count))


def render_origin(tensor: LiveTensor) -> Text:
    """Return the origin of a tensor: category, name or module, operator, and source line."""
    text = Text(tensor.category)
    where = tensor.name or tensor.module
    if where:
        text.append(f" {where}")
    text.append(f" {tensor.op.removeprefix('aten.')}", style="dim")
    if tensor.source and not tensor.name:
        text.append(f" {short_source(tensor.source)}", style="dim")
    return text
