"""What torch's profiler saw of a run's memory: allocations and frees, each with the operators around it.

The profiler's tree of events (torch/csrc/profiler/collection.h) has an `Allocation` for every allocation and free of
the CPU's allocator and of CUDA's, with address and bytes, inside the operators that asked; and for every operator the
tensors that it was given, with their storage's address. So an allocation gets its shape from its next use.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(slots=True)
class Allocation:
    """One allocation, and its free if there was one."""

    time_ns: int
    address: int
    num_bytes: int
    device: str
    op: str
    """The operator that it is for, as in `aten.mm`; empty outside operators."""
    op_end_ns: int
    """When that operator returned; 0 outside operators."""
    sequence: int
    """Of the autograd node that is being differentiated; -1 outside backward passes."""
    source: str | None = None
    """`file:line function` of the innermost line outside torch; None if no stacks were recorded."""
    freed_ns: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    @property
    def is_temporary(self) -> bool:
        """Whether its own operator freed it again: a kernel's scratch memory, which no tensor shows."""
        return self.freed_ns is not None and 0 < self.freed_ns <= self.op_end_ns


@dataclass(slots=True)
class Recorded:
    """All of one run, by time."""

    allocations: list[Allocation] = field(default_factory=list)
    forward: list[tuple[int, int]] = field(default_factory=list)
    """Sequence number and time of operators that autograd differentiates, ascending by number."""


def read_events(tree: list[Any], end_ns: int) -> Recorded:
    """Allocations of a run from the profiler's tree; `end_ns` is when it ended."""
    found: list[tuple[int, int, Any, tuple[Any, ...], int, str | None]] = []
    uses: dict[int, list[tuple[int, tuple[int, ...], str, int]]] = defaultdict(list)
    forward: list[tuple[int, int]] = []
    stack: list[tuple[Any, tuple[Any, ...], int, str | None]] = [(root, (), -1, None) for root in reversed(tree)]
    while stack:
        node, ops, sequence, source = stack.pop()
        kind = node.typed[0].name
        if kind == "Allocation":
            found.append((node.start_time_ns, len(found), node.extra_fields, ops, sequence, source))
            continue
        if kind.startswith("Py"):
            caller = node.extra_fields.caller
            if _is_program(caller.file_name):
                source = f"{caller.file_name}:{caller.line_number} {caller.function_name}"
        if kind == "TorchOp":
            fields = node.extra_fields
            if node.name.startswith(_ENGINE):
                sequence = fields.sequence_number
            elif node.name.startswith("aten::") or "::" in node.name:
                if fields.sequence_number >= 0 and sequence == -1:
                    forward.append((fields.sequence_number, node.start_time_ns))
                for value in fields.inputs:
                    _note_uses(value, node.start_time_ns, uses)
                ops = (*ops, node)
        stack += [(child, ops, sequence, source) for child in reversed(node.children)]
    found.sort(key=lambda item: item[:2])
    recorded = Recorded(forward=_ascending(forward))
    alive: dict[tuple[str, int], Allocation] = {}
    for time_ns, _, fields, ops, sequence, source in found:
        device = str(fields.device)
        key = (device, fields.ptr)
        if fields.alloc_size < 0:
            freed = alive.pop(key, None)
            if freed is not None:
                freed.freed_ns = time_ns
            continue
        op = _operator(ops)
        allocation = Allocation(
            time_ns, fields.ptr, fields.alloc_size, device, "" if op is None else op.name.replace("::", "."),
            0 if op is None else op.end_time_ns, sequence, source,
        )  # fmt: skip
        alive[key] = allocation
        recorded.allocations.append(allocation)
    for allocation in recorded.allocations:
        _describe(allocation, uses.get(allocation.address, ()), end_ns)
    return recorded


def _operator(ops: tuple[Any, ...]) -> Any:
    """The innermost operator that computes something; the outermost if none does."""
    for op in reversed(ops):
        if op.name not in _FACTORIES:
            return op
    return ops[0] if ops else None


def _is_program(file_name: str) -> bool:
    """The profiler names files from below the folder that they were imported from."""
    if file_name.startswith("memprof/workload/"):
        return True
    return not file_name.startswith(("torch/", "memprof/", "<frozen", "<string>", "contextlib.py", "functools.py"))


def _note_uses(value: Any, time_ns: int, uses: dict[int, list[tuple[int, tuple[int, ...], str, int]]]) -> None:
    if isinstance(value, list):
        for part in value:
            _note_uses(part, time_ns, uses)
    elif hasattr(value, "storage_data_ptr") and value.storage_data_ptr:
        dtype = value.dtype
        shape = tuple(value.sizes)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        uses[value.storage_data_ptr].append((time_ns, shape, str(dtype).removeprefix("torch."), num_bytes))


def _describe(allocation: Allocation, uses: Any, end_ns: int) -> None:
    """Shape and dtype, from the first use of the memory that covers it, or else from the first."""
    end = end_ns if allocation.freed_ns is None else allocation.freed_ns
    first = None
    for time_ns, shape, dtype, num_bytes in uses:
        if allocation.time_ns <= time_ns <= end:
            if num_bytes == allocation.num_bytes:
                allocation.shape, allocation.dtype = shape, dtype
                return
            first = first or (shape, dtype)
    if first is not None:
        allocation.dtype = first[1]


def _ascending(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The last time of each sequence number, in their order: an operator has the number that the next autograd node
    will take, so that those before the one that makes it (and make none) have the same."""
    return sorted(dict(sorted(pairs)).items())
