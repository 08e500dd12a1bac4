"""Writes traces by hand, a line per event, for whatever reads a trace to be tried on."""

from __future__ import annotations

import math
from typing import Any

from memprof.allocator import GpuMemory, replay_on_gpu
from memprof.findings import Context
from memprof.ledger.ledger import build_ledger
from memprof.trace.events import (
    GPU,
    NONE,
    DeviceMismatch,
    Event,
    EventKind,
    Module,
    ModuleRole,
    Operand,
    Owner,
    Phase,
    PhaseKind,
    Role,
    Storage,
    Trace,
)

SIZES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "bool": 1,
    "uint8": 1,
}


class TraceBuilder:
    """Collects events in `trace`; `context` gives what rules take. It begins in the phase `first`, if any."""

    def __init__(self, first: PhaseKind | None = PhaseKind.MODEL) -> None:
        self.trace = Trace()
        self._calls: list[int] = []
        if first is not None:
            self.phase(first, 0)

    def phase(self, kind: PhaseKind, step: int = 1, micro_batch: int = 1) -> None:
        self.trace.phases.append(Phase(kind, step, micro_batch))
        self.add(EventKind.PHASE, len(self.trace.phases) - 1)

    def enter(self, path: str, class_name: str = "Module", role: ModuleRole = ModuleRole.OTHER) -> None:
        """Call a module; a layer's list is what its path says."""
        stack = path.rpartition(".")[0] if role is ModuleRole.LAYER else ""
        self._calls.append(self._index(self.trace.modules, Module(path, class_name, role, stack)))
        self.add(EventKind.ENTER, self._calls[-1])

    def leave(self) -> None:
        self.add(EventKind.EXIT, self._calls.pop())

    def new(
        self,
        *shape: int,
        dtype: str = "float32",
        op: str = "aten.mm",
        line: str | None = "model.py:1 forward",
        owner: tuple[Role, str] | None = None,
        forward_event: int = NONE,
        device: str = GPU,
        hidden: bool = False,
        module: int | None = None,
    ) -> int:
        """Allocate a tensor in the module that is being called, or in that of the index `module`. Return its index."""
        trace = self.trace
        index = len(trace.storages)
        module = self._module() if module is None else module
        source = NONE if line is None else self._index(trace.sources, line)
        trace.storages.append(
            Storage(
                math.prod(shape) * SIZES[dtype], shape, dtype, device, self._index(trace.ops, op), module,
                source, len(trace.phases) - 1, forward_event, hidden,
            )
        )  # fmt: skip
        if owner is not None:
            trace.owners[index] = Owner(*owner)
        self.add(EventKind.ALLOC, index)
        return index

    def alloc(self, num_bytes: int, op: str = "aten.empty", line: str | None = "train.py:1 main", **more: Any) -> int:
        """Allocate so many bytes outside the model."""
        return self.new(num_bytes, dtype="uint8", op=op, line=line, **more)

    def free(self, *indices: int) -> None:
        for index in indices:
            self.add(EventKind.FREE, index)

    def empty_cache(self) -> None:
        self.add(EventKind.EMPTY_CACHE, 0)

    def parameter(self, name: str, *shape: int, dtype: str = "float32") -> int:
        return self.new(*shape, dtype=dtype, op="aten.empty", owner=(Role.PARAMETER, name))

    def inputs(self, *shape: int) -> None:
        """A batch of token ids arrives, and the forward pass begins."""
        self.phase(PhaseKind.INPUTS)
        self.new(*shape, dtype="int64", op="aten._to_copy", line="train.py:1 step")
        self.phase(PhaseKind.FORWARD)

    def mismatch(self, op: str, line: str, *operands: tuple[str, tuple[int, ...], str]) -> None:
        """An operator meets tensors, each a device, a shape and the line that made it."""
        trace = self.trace
        tensors = tuple(Operand(d, s, "float32", self._index(trace.sources, made)) for d, s, made in operands)
        place = (self._index(trace.ops, op), self._module(), self._index(trace.sources, line))
        trace.mismatches.append(DeviceMismatch(len(trace.events), *place, tensors))

    def context(self, usable_bytes: int | None = None, **known: Any) -> Context:
        """What rules look at, on a GPU that offers `usable_bytes` (None: there is no GPU)."""
        gpu = None if usable_bytes is None else GpuMemory(usable_bytes, 0)
        return Context(build_ledger(self.trace, replay_on_gpu(self.trace, gpu)), usable_bytes, **known)

    def _module(self) -> int:
        return self._calls[-1] if self._calls else NONE

    def add(self, kind: EventKind, ref: int) -> None:
        """Append an event, of a kind that has no method here too."""
        self.trace.events.append(Event(kind, ref))

    @staticmethod
    def _index(table: list[Any], value: Any) -> int:
        if value not in table:
            table.append(value)
        return table.index(value)
