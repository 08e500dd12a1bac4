"""Operators that torch's profiler recorded in a run, and the allocations and frees inside them.

The profiler's tree of events (torch/csrc/profiler/collection.h) has an `Allocation` with address and bytes for every
allocation and free in the profiled threads, below the allocating operators; every operator has its input tensors, with
their storage's address. GPU allocations outside all recorded events are missing: an event without a parent is put into
the tree only if its device is the CPU.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

# Inside another operator, these operators allocate for the outer operator, or not at all.
_FACTORIES = frozenset(
    f"aten::{name}"
    for name in (
        "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "set_", "zero_", "fill_",
        "to", "contiguous", "lift_fresh", "detach", "expand", "as_strided", "view", "reshape", "copy_", "resolve_conj",
    )
)  # fmt: skip
_ENGINE = "autograd::engine::evaluate_function"


class OperatorOrigin(NamedTuple):
    """Operator and source line that allocated or freed memory."""

    op: str = ""  # allocating operator, as in `aten.mm`; empty outside operators
    op_end_ns: int = 0  # when that operator returned; 0 outside operators
    sequence: int = -1  # sequence number of the running autograd node; -1 outside backward passes
    # `file:line function` of the innermost line outside torch; None if no stacks were recorded.
    source: str | None = None


OUTSIDE_OPERATORS = OperatorOrigin()


class MemoryEvent(NamedTuple):
    """One allocation or free."""

    time_ns: int
    device: str
    address: int
    num_bytes: int  # bytes of the block; negative for a free
    origin: OperatorOrigin


class TensorInput(NamedTuple):
    """Tensor that was an operator's input."""

    time_ns: int
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(slots=True)
class Profile:
    """All events that the profiler recorded in one run."""

    memory: list[MemoryEvent] = field(default_factory=list)  # in order of time
    uses: dict[int, list[TensorInput]] = field(default_factory=dict)  # inputs by storage address
    # Sequence number and time of operators that autograd differentiates, ascending by number.
    forward: list[tuple[int, int]] = field(default_factory=list)
    end_ns: int = 0  # when the run ended


def read_events(tree: list[Any], end_ns: int) -> Profile:
    """Return the profile from `tree`, torch's `kineto_results.experimental_event_tree()`; the run ended at `end_ns`."""
    memory: list[MemoryEvent] = []
    uses: dict[int, list[TensorInput]] = defaultdict(list)
    forward: list[tuple[int, int]] = []
    stack: list[tuple[Any, tuple[Any, ...], int, str | None]] = [(root, (), -1, None) for root in reversed(tree)]
    while stack:
        node, ops, sequence, source = stack.pop()
        kind = node.typed[0].name
        if kind == "Allocation":
            fields, origin = node.extra_fields, _find_origin(ops, sequence, source)
            memory.append(MemoryEvent(node.start_time_ns, str(fields.device), fields.ptr, fields.alloc_size, origin))
            continue
        if kind.startswith("Py"):
            caller = node.extra_fields.caller
            if _is_program_file(caller.file_name):
                source = f"{caller.file_name}:{caller.line_number} {caller.function_name}"
        if kind == "TorchOp":
            fields = node.extra_fields
            if node.name.startswith(_ENGINE):
                sequence = fields.sequence_number
            elif "::" in node.name:
                if fields.sequence_number >= 0 and sequence == -1:
                    forward.append((fields.sequence_number, node.start_time_ns))
                for value in fields.inputs:
                    _append_uses(value, node.start_time_ns, uses)
                ops = (*ops, node)
        stack += [(child, ops, sequence, source) for child in reversed(node.children)]
    memory.sort(key=lambda event: event.time_ns)
    return Profile(memory, uses, sort_by_sequence(forward), end_ns)


def sort_by_sequence(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the last time of each sequence number in `pairs` (number, time), ascending by number.

    Operators without an autograd node have the sequence number of the next node, so that a number may occur repeatedly.
    """
    return sorted(dict(sorted(pairs)).items())


def _find_origin(ops: tuple[Any, ...], sequence: int, source: str | None) -> OperatorOrigin:
    """Return the origin with the innermost operator of `ops` that is no factory or view, else with the outermost."""
    if not ops:
        return OperatorOrigin(sequence=sequence, source=source)
    op = next((op for op in reversed(ops) if op.name not in _FACTORIES), ops[0])
    return OperatorOrigin(op.name.replace("::", "."), op.end_time_ns, sequence, source)


def _is_program_file(file_name: str) -> bool:
    """Return whether a file belongs to the program; the profiler gives paths relative to the folder in sys.path."""
    if file_name.startswith("memprof/workload/"):
        return True
    return not file_name.startswith(("torch/", "memprof/", "<frozen", "<string>", "contextlib.py", "functools.py"))


def _append_uses(value: Any, time_ns: int, uses: dict[int, list[TensorInput]]) -> None:
    if isinstance(value, list):
        for item in value:
            _append_uses(item, time_ns, uses)
    elif hasattr(value, "storage_data_ptr") and value.storage_data_ptr:
        dtype, shape = value.dtype, tuple(value.sizes)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        uses[value.storage_data_ptr].append(TensorInput(time_ns, shape, str(dtype).removeprefix("torch."), num_bytes))


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Context manager: discard stderr, to which the profiler's C++ library writes when it starts and stops."""
    sys.stderr.flush()
    saved_stderr = os.dup(2)
    try:
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, 2)
        os.close(null_device)
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)
