"""Random runs for comparisons: any phases, modules, roles and devices, in any order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from memprof.flows.account import analyze
from memprof.report.matching.runs import ComparedRun, convert_report
from memprof.spec import TargetSpec
from memprof.trace.events import (
    CPU,
    GPU,
    HOST,
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
from memprof.trace.facts import AllocatorFacts, DeviceFacts, Facts, Target

MIB = 1 << 20
OPS = ["aten.mm", "aten.mul", "cublas workspace"]
MODULES = [
    Module("", "Net", ModuleRole.ROOT, ""),
    Module("layers.0", "Layer", ModuleRole.LAYER, "layers"),
    Module("layers.1", "Layer", ModuleRole.LAYER, "layers"),
    Module("head", "Linear", ModuleRole.HEAD, ""),
]
PHASES = [PhaseKind.FORWARD, PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP, PhaseKind.ZERO_GRAD]
CONTEXT = 426 * MIB


def facts(**asked: Any) -> Facts:
    """What a profile writes beside the events."""
    return Facts(
        command="profile",
        memprof_version="0.1.0",
        target=Target(TargetSpec(model="net", **asked), "net", num_parameters=1, context_length=8, dtype="float32"),
        device=DeviceFacts("a GPU", 1 << 40, (1 << 40) - CONTEXT, CONTEXT),
        allocator=AllocatorFacts("2.8.0"),
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """A run with at least one tensor on the GPU."""
    trace = Trace(modules=list(MODULES), ops=list(OPS), sources=["/a/b.py:1 f"])
    alive: list[int] = []

    def phase(kind: PhaseKind, step: int) -> None:
        trace.events.append(Event(EventKind.PHASE, len(trace.phases)))
        trace.phases.append(Phase(kind, step, 1 if step else 0))

    def alloc(module: int) -> None:
        num_bytes = draw(st.one_of(st.integers(1, 5000), st.integers(MIB, 40 * MIB)))
        device = draw(st.sampled_from([GPU, GPU, GPU, HOST]))
        op = draw(st.integers(0, 2))
        index = len(trace.storages)
        trace.storages.append(
            Storage(num_bytes, (num_bytes,), "uint8", device, op, module, 0, len(trace.phases) - 1, NONE, op == 2)
        )
        role = draw(st.sampled_from([None, None, *Role]))
        if role is not None and op != 2:
            trace.owners[index] = Owner(role, draw(st.sampled_from(["layers.0.weight", "layers.1.weight", "exp_avg"])))
        trace.events.append(Event(EventKind.ALLOC, index))
        alive.append(index)

    phase(PhaseKind.MODEL, 0)
    trace.storages.append(Storage(4096, (1024,), "float32", GPU, 0, NONE, NONE, 0, NONE, False))
    trace.events.append(Event(EventKind.ALLOC, 0))
    for step in range(1, draw(st.integers(1, 3))):
        for kind in PHASES:
            phase(kind, step)
            for module in draw(st.lists(st.integers(1, 3), max_size=4)):
                if kind is PhaseKind.FORWARD:
                    trace.events.append(Event(EventKind.ENTER, module))
                alloc(module)
                if alive and draw(st.booleans()):
                    trace.events.append(Event(EventKind.FREE, alive.pop(draw(st.integers(0, len(alive) - 1)))))
                if kind is PhaseKind.FORWARD:
                    trace.events.append(Event(EventKind.EXIT, module))
    trace.facts = facts()
    return trace


def report_of(trace: Trace) -> dict[str, Any]:
    return analyze(trace).to_json()


def run_of(trace: Trace) -> ComparedRun:
    """The form that is compared."""
    return convert_report(analyze(trace), "run.memprof", "memprof capture")


def on_cpu(trace: Trace) -> Trace:
    """The same run as if it had been measured on a CPU."""
    trace.source, trace.device = "measured", CPU
    trace.storages = [one._replace(device=CPU) if one.device == GPU else one for one in trace.storages]
    trace.facts = replace(facts(device="cpu"), device=DeviceFacts("a CPU", 1, 1))
    return trace
