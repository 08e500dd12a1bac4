"""What torch's profiler saw of a run: operators, and what was allocated and freed inside them.

The profiler's tree of events (torch/csrc/profiler/collection.h) has an `Allocation` for every allocation and free in
the threads that it watches, with address and bytes, below the operators that asked; and for every operator the tensors
that it was given, with their storage's address. A GPU's allocations outside everything that was recorded are not in it:
an event without a parent is put into the tree only if its device is the CPU.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

_FACTORIES = frozenset(
    f"aten::{name}"
    for name in (
        "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "set_", "zero_", "fill_",
        "to", "contiguous", "lift_fresh", "detach", "expand", "as_strided", "view", "reshape", "copy_", "resolve_conj",
    )
)  # fmt: skip
"""Inside another operator these allocate on its behalf, or not at all."""
_ENGINE = "autograd::engine::evaluate_function"


class Place(NamedTuple):
    """Where in the program memory was allocated or freed."""

    op: str = ""
    """The operator that it is for, as in `aten.mm`; empty outside operators."""
    op_end_ns: int = 0
    """When that operator returned; 0 outside operators."""
    sequence: int = -1
    """Of the autograd node that is being differentiated; -1 outside backward passes."""
    source: str | None = None
    """`file:line function` of the innermost line outside torch; None if no stacks were recorded."""


OUTSIDE = Place()


class Seen(NamedTuple):
    """One allocation or free."""

    time_ns: int
    device: str
    address: int
    num_bytes: int
    """Of its block; negative: it was freed."""
    place: Place


class Use(NamedTuple):
    """An operator was given a tensor."""

    time_ns: int
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(slots=True)
class Profile:
    """All that the profiler saw of one run."""

    memory: list[Seen] = field(default_factory=list)
    """In order of time."""
    uses: dict[int, list[Use]] = field(default_factory=dict)
    """Of the storage at an address."""
    forward: list[tuple[int, int]] = field(default_factory=list)
    """Sequence number and time of operators that autograd differentiates, ascending by number."""
    end_ns: int = 0
    """When the run ended."""


def read_events(tree: list[Any], end_ns: int) -> Profile:
    """Read what the profiler saw.

    Args:
        tree: as `kineto_results.experimental_event_tree()` gives it.
        end_ns: when the run ended.
    """
    memory: list[Seen] = []
    uses: dict[int, list[Use]] = defaultdict(list)
    forward: list[tuple[int, int]] = []
    stack: list[tuple[Any, tuple[Any, ...], int, str | None]] = [(root, (), -1, None) for root in reversed(tree)]
    while stack:
        node, ops, sequence, source = stack.pop()
        kind = node.typed[0].name
        if kind == "Allocation":
            fields = node.extra_fields
            place = _place(ops, sequence, source)
            memory.append(Seen(node.start_time_ns, str(fields.device), fields.ptr, fields.alloc_size, place))
            continue
        if kind.startswith("Py"):
            caller = node.extra_fields.caller
            if _is_program(caller.file_name):
                source = f"{caller.file_name}:{caller.line_number} {caller.function_name}"
        if kind == "TorchOp":
            fields = node.extra_fields
            if node.name.startswith(_ENGINE):
                sequence = fields.sequence_number
            elif "::" in node.name:
                if fields.sequence_number >= 0 and sequence == -1:
                    forward.append((fields.sequence_number, node.start_time_ns))
                for value in fields.inputs:
                    _note_uses(value, node.start_time_ns, uses)
                ops = (*ops, node)
        stack += [(child, ops, sequence, source) for child in reversed(node.children)]
    memory.sort(key=lambda seen: seen.time_ns)
    return Profile(memory, uses, ascending(forward), end_ns)


def ascending(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the last time of each sequence number, in their order.

    An operator has the number that the next autograd node will take, so that those before the one that makes it (and
    make none) have the same.
    """
    return sorted(dict(sorted(pairs)).items())


def _place(ops: tuple[Any, ...], sequence: int, source: str | None) -> Place:
    """The innermost operator that computes something; the outermost if none does."""
    if not ops:
        return Place(sequence=sequence, source=source)
    op = next((op for op in reversed(ops) if op.name not in _FACTORIES), ops[0])
    return Place(op.name.replace("::", "."), op.end_time_ns, sequence, source)


def _is_program(file_name: str) -> bool:
    """The profiler names files from below the folder that they were imported from."""
    if file_name.startswith("memprof/workload/"):
        return True
    return not file_name.startswith(("torch/", "memprof/", "<frozen", "<string>", "contextlib.py", "functools.py"))


def _note_uses(value: Any, time_ns: int, uses: dict[int, list[Use]]) -> None:
    if isinstance(value, list):
        for part in value:
            _note_uses(part, time_ns, uses)
    elif hasattr(value, "storage_data_ptr") and value.storage_data_ptr:
        dtype, shape = value.dtype, tuple(value.sizes)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        uses[value.storage_data_ptr].append(Use(time_ns, shape, str(dtype).removeprefix("torch."), num_bytes))
