"""Writes traces by hand, a line per event, for rules to be tried on."""

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

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "bool": 1}


class Builder:
    """Collects events; `context` closes the trace and gives what rules take."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._module = NONE
        self.phase(PhaseKind.MODEL, 0)

    def phase(self, kind: PhaseKind, step: int = 1, micro_batch: int = 1) -> None:
        self.trace.phases.append(Phase(kind, step, micro_batch))
        self._event(EventKind.PHASE, len(self.trace.phases) - 1)

    def enter(self, path: str, class_name: str = "Module", role: ModuleRole = ModuleRole.OTHER) -> None:
        stack = path.rpartition(".")[0] if role is ModuleRole.LAYER else ""
        self._module = self._index(self.trace.modules, Module(path, class_name, role, stack))
        self._event(EventKind.ENTER, self._module)

    def leave(self) -> None:
        self._event(EventKind.EXIT, self._module)
        self._module = NONE

    def new(
        self,
        *shape: int,
        dtype: str = "float32",
        op: str = "aten.mm",
        line: str | None = "model.py:1 forward",
        owner: tuple[Role, str] | None = None,
        forward_event: int = NONE,
    ) -> int:
        trace = self.trace
        index = len(trace.storages)
        source = NONE if line is None else self._index(trace.sources, line)
        trace.storages.append(
            Storage(
                math.prod(shape) * SIZES[dtype], shape, dtype, GPU, self._index(trace.ops, op), self._module, source,
                len(trace.phases) - 1, forward_event, False,
            )
        )  # fmt: skip
        if owner is not None:
            trace.owners[index] = Owner(*owner)
        self._event(EventKind.ALLOC, index)
        return index

    def free(self, *indices: int) -> None:
        for index in indices:
            self._event(EventKind.FREE, index)

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
        place = (self._index(trace.ops, op), self._module, self._index(trace.sources, line))
        trace.mismatches.append(DeviceMismatch(len(trace.events), *place, tensors))

    def context(self, usable_bytes: int | None = None, **known: Any) -> Context:
        """What rules look at, on a GPU that offers `usable_bytes` (None: there is no GPU)."""
        gpu = None if usable_bytes is None else GpuMemory(usable_bytes, 0)
        return Context(build_ledger(self.trace, replay_on_gpu(self.trace, gpu)), usable_bytes, **known)

    def _event(self, kind: EventKind, ref: int) -> None:
        self.trace.events.append(Event(kind, ref))

    @staticmethod
    def _index(table: list[Any], value: Any) -> int:
        if value not in table:
            table.append(value)
        return table.index(value)
