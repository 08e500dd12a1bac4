"""Golden renders: the report of a small hand-written trace.

`MEMPROF_BLESS=1 pytest tests/golden` writes them anew; read the difference before you commit it.
"""

import difflib
import functools
import os
from pathlib import Path

import pytest

from memprof.flows.account import analyze
from memprof.report.documents.report import Report
from memprof.report.terminal.console import to_text
from memprof.report.terminal.report import render
from memprof.spec import TargetSpec
from memprof.trace.events import ModuleRole, PhaseKind, Role, Trace
from memprof.trace.facts import DeviceFacts, Facts, Target
from tests.unit.traces import TraceBuilder

HERE = Path(__file__).parent
MIB = 2**20
MODEL, LAYER, LOSS = "/src/tiny/model.py:12 forward", "/src/tiny/model.py:20 forward", "/src/tiny/loss.py:7 loss"


def training_run() -> Trace:
    """Two steps of a three-layer model: 4,096 tokens, 64,000 words, hidden size 512."""
    b = TraceBuilder(None)
    new = functools.partial(b.new, dtype="bfloat16", line=None)
    b.phase(PhaseKind.MODEL, 0, 0)
    new(64000, 512, op="aten.empty", owner=(Role.PARAMETER, "embed.weight"))
    for layer in range(3):
        new(512, 2048, op="aten.empty", owner=(Role.PARAMETER, f"layers.{layer}.weight"))
    new(64000, 512, op="aten.empty", owner=(Role.PARAMETER, "head.weight"))
    for step in (1, 2):
        b.phase(PhaseKind.INPUTS, step)
        ids = new(1, 4096, dtype="int64", op="aten._to_copy", owner=(Role.INPUT, "input_ids"))
        b.phase(PhaseKind.FORWARD, step)
        b.enter("", "TinyForCausalLM", ModuleRole.ROOT)
        b.enter("embed", "Embedding", ModuleRole.EMBEDDING)
        hidden = [new(1, 4096, 512, op="aten.embedding", line=MODEL)]
        b.leave()
        for layer in range(3):
            b.enter(f"layers.{layer}", "Layer", ModuleRole.LAYER)
            temporary = new(4096, 2048, line=LAYER)
            hidden.append(new(1, 4096, 2048, dtype="float32", op="aten.mul", line=LAYER))
            b.free(temporary)
            b.leave()
        b.enter("norm", "RMSNorm", ModuleRole.NORM)
        hidden.append(new(1, 4096, 512, op="aten.mul", line=MODEL))
        b.leave()
        b.enter("head", "Linear", ModuleRole.HEAD)
        begin = len(b.trace.events)
        logits = new(4096, 64000, line=LAYER)
        if step == 1:
            new(8519680, dtype="uint8", op="cublas workspace", line=LAYER, hidden=True)
        b.leave()
        upcast = new(4096, 64000, dtype="float32", op="aten._to_copy", line=LOSS)
        softmax = new(4096, 64000, dtype="float32", op="aten._log_softmax", line=LOSS)
        b.free(upcast)
        b.leave()
        b.phase(PhaseKind.BACKWARD, step)
        backward = "aten._log_softmax_backward_data"
        grad = new(4096, 64000, dtype="float32", op=backward, line=LOSS, module=0, forward_event=begin + 4)
        b.free(softmax, logits)
        owner = (Role.GRADIENT, "head.weight")
        gradients = [new(64000, 512, module=6, line=LAYER, owner=owner, forward_event=begin)]
        b.free(grad)
        for layer in (2, 1, 0):
            owner = (Role.GRADIENT, f"layers.{layer}.weight")
            gradients.append(new(512, 2048, module=layer + 2, line=LAYER, owner=owner))
            b.free(hidden.pop())
        b.free(*hidden)
        b.phase(PhaseKind.OPTIMIZER_STEP, step, 0)
        if step == 1:
            for name in ("exp_avg", "exp_avg_sq"):
                new(131072 + 3072, 512, op="aten.zeros_like", owner=(Role.OPTIMIZER_STATE, name))
        b.free(new(64000, 512, op="aten._foreach_sqrt"))
        b.phase(PhaseKind.ZERO_GRAD, step, 0)
        b.free(*gradients, ids)
    b.trace.assumptions = ["A hand-written run."]
    return b.trace


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
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    lines = difflib.unified_diff(
        before.splitlines(), actual.splitlines(), f"{name} before", f"{name} now", "", "", 1, ""
    )
    difference = "\n".join(lines)
    if os.environ.get("MEMPROF_BLESS"):
        file.write_text(actual, encoding="utf-8")
        assert actual == before, f"{name} is written anew, and the next run passes:\n{difference}"
    assert actual == before, f"look, then bless it with MEMPROF_BLESS=1:\n{difference}"


@pytest.mark.parametrize(("name", "total_mib"), [("fits", 8192), ("does_not_fit", 2048)])
def test_text(name, total_mib):
    check(f"{name}.txt", to_text(render(document(total_mib * MIB), explain=True), 80))
