"""Golden renders: the report of a small hand-written trace, as text and as JSON.

`MEMPROF_BLESS=1 pytest tests/golden` writes them anew; read the difference before you commit it.
"""

import json
import os
from pathlib import Path

import pytest

from memprof.flows.account import analyze
from memprof.report.documents.report import Report
from memprof.report.terminal.console import text_of
from memprof.report.terminal.report import view
from memprof.spec import TargetSpec
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
from memprof.trace.facts import DeviceFacts, Facts, Target

HERE = Path(__file__).parent
MIB = 2**20
MODULES = [
    Module("", "TinyForCausalLM", ModuleRole.ROOT, ""),
    Module("embed", "Embedding", ModuleRole.EMBEDDING, ""),
    Module("layers.0", "Layer", ModuleRole.LAYER, "layers"),
    Module("layers.1", "Layer", ModuleRole.LAYER, "layers"),
    Module("layers.2", "Layer", ModuleRole.LAYER, "layers"),
    Module("norm", "RMSNorm", ModuleRole.NORM, ""),
    Module("head", "Linear", ModuleRole.HEAD, ""),
]
SOURCES = ["/src/tiny/model.py:12 forward", "/src/tiny/model.py:20 forward", "/src/tiny/loss.py:7 loss"]


class Script:
    def __init__(self) -> None:
        self.trace = Trace(modules=list(MODULES), sources=list(SOURCES))

    def phase(self, kind: PhaseKind, step: int = 0, micro_batch: int = 0) -> None:
        self.trace.events.append(Event(EventKind.PHASE, len(self.trace.phases)))
        self.trace.phases.append(Phase(kind, step, micro_batch))

    def enter(self, module: int) -> None:
        self.trace.events.append(Event(EventKind.ENTER, module))

    def leave(self, module: int) -> None:
        self.trace.events.append(Event(EventKind.EXIT, module))

    def alloc(
        self, op, shape, dtype="bfloat16", module=NONE, source=NONE, owner=None, forward=NONE, hidden=False
    ) -> int:
        width = {"bfloat16": 2, "float32": 4, "int64": 8, "uint8": 1}[dtype]
        size = width
        for extent in shape:
            size *= extent
        if op not in self.trace.ops:
            self.trace.ops.append(op)
        index = len(self.trace.storages)
        phase = len(self.trace.phases) - 1
        op_index = self.trace.ops.index(op)
        self.trace.storages.append(
            Storage(size, tuple(shape), dtype, "cuda:0", op_index, module, source, phase, forward, hidden)
        )
        self.trace.events.append(Event(EventKind.ALLOC, index))
        if owner:
            self.trace.owners[index] = owner
        return index

    def free(self, *indices: int) -> None:
        self.trace.events += [Event(EventKind.FREE, index) for index in indices]


def training_run() -> Trace:
    """Two steps of a three-layer model: 4,096 tokens, 64,000 words, hidden size 512."""
    s = Script()
    s.phase(PhaseKind.MODEL)
    s.alloc("aten.empty", (64000, 512), owner=Owner(Role.PARAMETER, "embed.weight"))
    for layer in range(3):
        s.alloc("aten.empty", (512, 2048), owner=Owner(Role.PARAMETER, f"layers.{layer}.weight"))
    s.alloc("aten.empty", (64000, 512), owner=Owner(Role.PARAMETER, "head.weight"))
    for step in (1, 2):
        s.phase(PhaseKind.INPUTS, step, 1)
        ids = s.alloc("aten._to_copy", (1, 4096), "int64", owner=Owner(Role.INPUT, "input_ids"))
        s.phase(PhaseKind.FORWARD, step, 1)
        s.enter(0)
        s.enter(1)
        hidden = [s.alloc("aten.embedding", (1, 4096, 512), module=1, source=0)]
        s.leave(1)
        for layer in (2, 3, 4):
            s.enter(layer)
            temporary = s.alloc("aten.mm", (4096, 2048), module=layer, source=1)
            hidden.append(s.alloc("aten.mul", (1, 4096, 2048), "float32", module=layer, source=1))
            s.free(temporary)
            s.leave(layer)
        s.enter(5)
        hidden.append(s.alloc("aten.mul", (1, 4096, 512), module=5, source=0))
        s.leave(5)
        s.enter(6)
        begin = len(s.trace.events)
        logits = s.alloc("aten.mm", (4096, 64000), module=6, source=1)
        if step == 1:
            s.alloc("cublas workspace", (8519680,), "uint8", module=6, source=1, hidden=True)
        s.leave(6)
        upcast = s.alloc("aten._to_copy", (4096, 64000), "float32", module=0, source=2)
        softmax = s.alloc("aten._log_softmax", (4096, 64000), "float32", module=0, source=2)
        s.free(upcast)
        s.leave(0)
        s.phase(PhaseKind.BACKWARD, step, 1)
        grad = s.alloc("aten._log_softmax_backward_data", (4096, 64000), "float32", 0, 2, forward=begin + 4)
        s.free(softmax, logits)
        gradients = [
            s.alloc(
                "aten.mm", (64000, 512), module=6, source=1, owner=Owner(Role.GRADIENT, "head.weight"), forward=begin
            )
        ]
        s.free(grad)
        for layer in (4, 3, 2):
            owner = Owner(Role.GRADIENT, f"layers.{layer - 2}.weight")
            gradients.append(s.alloc("aten.mm", (512, 2048), module=layer, source=1, owner=owner))
            s.free(hidden.pop())
        s.free(*hidden)
        s.phase(PhaseKind.OPTIMIZER_STEP, step)
        if step == 1:
            for name in ("exp_avg", "exp_avg_sq"):
                s.alloc("aten.zeros_like", (131072 + 3072, 512), owner=Owner(Role.OPTIMIZER_STATE, name))
        temporary = s.alloc("aten._foreach_sqrt", (64000, 512))
        s.free(temporary)
        s.phase(PhaseKind.ZERO_GRAD, step)
        s.free(*gradients, ids)
    s.trace.assumptions = ["A hand-written run."]
    return s.trace


def document(total_bytes: int) -> Report:
    trace = training_run()
    context = 426 * MIB
    trace.facts = Facts(
        command="profile",
        memprof_version="0.1.0",
        target=Target(
            asked=TargetSpec(model="tiny"),
            model="tiny",
            num_parameters=68681728,
            context_length=4096,
            dtype="bfloat16",
            vocab_size=64000,
            max_positions=8192,
        ),
        device=DeviceFacts("Golden GPU", total_bytes, total_bytes - context, context),
    )
    return analyze(trace)


def check(name: str, actual: str) -> None:
    file = HERE / name
    if os.environ.get("MEMPROF_BLESS"):
        file.write_text(actual, encoding="utf-8")
    assert file.is_file(), f"no {name}: bless it with MEMPROF_BLESS=1"
    assert actual == file.read_text(encoding="utf-8"), f"{name} differs: look, then bless it with MEMPROF_BLESS=1"


@pytest.mark.parametrize(("name", "total_mib"), [("fits", 8192), ("does_not_fit", 2048)])
def test_text(name, total_mib):
    check(f"{name}.txt", text_of(view(document(total_mib * MIB), explain=True), 80))


def test_json():
    check("does_not_fit.json", json.dumps(document(2048 * MIB).to_json(), indent=1) + "\n")


def test_no_line_is_wider_than_the_terminal():
    for width in (80, 110, 160):
        lines = text_of(view(document(2048 * MIB), explain=True), width).splitlines()
        assert max(map(len, lines)) <= width


def test_json_names_are_those_of_the_design():
    report = document(2048 * MIB).to_json()
    assert set(report) >= {
        "schema", "memprof_version", "command", "source", "target", "device", "stages", "peak", "findings", "ladder",
        "verdict", "assumptions",
    }  # fmt: skip
    assert set(report["stages"][0]) >= {
        "name", "allocated_bytes", "delta_bytes", "peak_allocated_bytes", "reserved_bytes", "device_used_bytes",
        "seconds",
    }  # fmt: skip
    assert set(report["peak"]) >= {
        "stage", "allocated_bytes", "reserved_bytes", "device_used_bytes", "categories", "tensors",
    }  # fmt: skip
    assert set(report["peak"]["tensors"][0]) >= {"bytes", "shape", "dtype", "category", "module", "op", "source"}
    assert set(report["findings"][0]) >= {"id", "severity", "title", "bytes", "evidence", "fixes"}
    assert set(report["verdict"]) >= {"fits", "oom_stage", "tried_to_allocate_bytes", "required_bytes"}
