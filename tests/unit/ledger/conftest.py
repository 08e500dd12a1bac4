"""A builder of small traces."""

from __future__ import annotations

import pytest

from memprof.trace.events import (
    NONE,
    Event,
    EventKind,
    Module,
    ModuleRole,
    Owner,
    Phase,
    PhaseKind,
    Role,
    Storage,
    Trace,
)


class Builder:
    def __init__(self) -> None:
        self.trace = Trace()
        self._modules: dict[str, int] = {}
        self._stack: list[int] = []

    def phase(self, kind: PhaseKind, step: int = 0, micro_batch: int = 0) -> None:
        self.trace.phases.append(Phase(kind, step, micro_batch))
        self.trace.events.append(Event(EventKind.PHASE, len(self.trace.phases) - 1))

    def enter(self, path: str, role: ModuleRole = ModuleRole.OTHER, stack: str = "") -> None:
        if path not in self._modules:
            self._modules[path] = len(self.trace.modules)
            self.trace.modules.append(Module(path, "Module", role, stack))
        self._stack.append(self._modules[path])
        self.trace.events.append(Event(EventKind.ENTER, self._stack[-1]))

    def exit(self) -> None:
        self.trace.events.append(Event(EventKind.EXIT, self._stack.pop()))

    def alloc(
        self,
        num_bytes: int,
        op: str = "aten.empty",
        *,
        source: str | None = "train.py:1 main",
        device: str = "cuda:0",
        forward_event: int = NONE,
        hidden: bool = False,
        role: Role | None = None,
        name: str = "",
        module: int | None = None,
    ) -> int:
        trace = self.trace
        for table, entry in ((trace.ops, op), (trace.sources, source)):
            if entry is not None and entry not in table:
                table.append(entry)
        if module is None:
            module = self._stack[-1] if self._stack else NONE
        index = len(trace.storages)
        trace.storages.append(
            Storage(
                num_bytes,
                (num_bytes,),
                "uint8",
                device,
                trace.ops.index(op),
                module,
                NONE if source is None else trace.sources.index(source),
                len(trace.phases) - 1,
                forward_event,
                hidden,
            )
        )
        trace.events.append(Event(EventKind.ALLOC, index))
        if role is not None:
            trace.owners[index] = Owner(role, name)
        return index

    def free(self, *indices: int) -> None:
        for index in indices:
            self.trace.events.append(Event(EventKind.FREE, index))


@pytest.fixture
def build() -> Builder:
    return Builder()
