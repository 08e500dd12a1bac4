"""Tensors live at the peak, merged and described for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rich.text import Text

from memprof.ledger.ledger import LiveTensor
from memprof.report.terminal.cells import name_operator
from memprof.trace.events import short_source


def merge_equal_tensors(tensors: Iterable[LiveTensor]) -> list[LiveTensor]:
    """Return `tensors`, largest first; those whose displayed fields are equal are merged into one with their count."""
    merged: dict[tuple[object, ...], LiveTensor] = {}
    for tensor in tensors:
        owner = tensor.name or (tensor.module, tensor.source)
        key = tensor.num_bytes, tensor.shape, tensor.dtype, tensor.category, tensor.op, owner
        if match := merged.get(key):
            total_bytes = match.allocated_bytes + tensor.allocated_bytes
            tensor = replace(match, count=match.count + tensor.count, allocated_bytes=total_bytes)
        merged[key] = tensor
    return sorted(merged.values(), key=lambda tensor: (-tensor.num_bytes, -tensor.count))


def render_origin(tensor: LiveTensor, *, in_table: bool = False, with_category: bool = True) -> Text:
    """Return the origin of a tensor: category, name or module, operator, and source line; shorter `in_table`."""
    owner = tensor.name or (tensor.module or "").lstrip("*.")  # numbers at its begin, of several modules, say nothing
    owner = f"{'module ' * owner.isdecimal()}{owner}"
    of = " " if tensor.name else " of "
    text = Text(of.join(filter(None, [tensor.category if with_category else "", owner])))
    operator = name_operator(tensor.op)
    if tensor.source and not tensor.name:
        line, space = short_source(tensor.source), " " * bool(operator)
        called = "" if tensor.caller is None else f", called at {short_source(tensor.caller)}"
        by = "by " * bool(operator and not in_table)
        operator = f" {operator}{space}{line}" if in_table else f", {by}{operator}{space}at {line}{called}"
    elif operator:
        operator = "" if tensor.name else f" {operator}"
    return text.append(operator if text else operator.removeprefix(", "), style="dim")
