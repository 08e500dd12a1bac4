"""Traces with last uses, for tests of what stays on the GPU after its last use."""

from __future__ import annotations

import dataclasses

from memprof.findings import Finding
from memprof.findings.idle_memory import find
from memprof.trace.events import NONE, Holder, PhaseKind
from memprof.trace.facts import ProgramFacts
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

OUT = Holder(0, "", "out", "/x/train.py:9 main", False, None, (), 0, 0, None)


class UsesBuilder(TraceBuilder):
    """Builds a trace with last uses: `use` says that an operator reads storages now."""

    def use(self, *indices: int) -> None:
        uses = self.trace.last_uses
        uses += [NONE] * (len(self.trace.storages) - len(uses))
        for index in indices:
            uses[index] = len(self.trace.events)

    def find(self, usable_bytes: int | None = None) -> list[Finding]:
        self.use()
        return find(self.context(usable_bytes))


def exits(b: TraceBuilder) -> None:
    """The program has come to its end."""
    program = ProgramFacts(("train.py",), "exit", 0, 4, ())
    b.trace.facts = dataclasses.replace(b.trace.facts, command="run", program=program)


def logits_bound(idle_mib: int = 100, other_mib: int = 300, *, held: bool = True) -> UsesBuilder:
    """Logits that the first step made lie beside the second step's forward, whose peak has `other_mib` more."""
    b = UsesBuilder(PhaseKind.FORWARD)
    logits = b.alloc(idle_mib * MIB, line="model.py:3 forward")
    b.phase(PhaseKind.BACKWARD)
    b.use(logits)
    b.free(b.alloc(2 * MIB))
    b.phase(PhaseKind.FORWARD, 2)
    activation = b.alloc(other_mib * MIB)
    b.use(activation)
    b.free(logits)
    b.phase(PhaseKind.BACKWARD, 2)
    b.use(activation)
    b.free(activation)
    if held:
        b.trace.idle_holders.append(OUT._replace(storages=(logits,)))
    return b
