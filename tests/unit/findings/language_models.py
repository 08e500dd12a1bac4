"""Writes runs of small language models by hand, and asks one rule of them."""

from __future__ import annotations

from memprof.findings import Context, Finding, find_all
from memprof.trace.events import ModuleRole, PhaseKind
from tests.unit.traces import TraceBuilder


def of(context: Context, identifier: str) -> list[Finding]:
    """Findings of one rule; all of them are well-formed."""
    findings = find_all(context)
    for finding in findings:
        assert finding.evidence and finding.title and "\n" not in finding.title
        assert finding.num_bytes is None or finding.num_bytes > 0
    return [finding for finding in findings if finding.id == identifier]


def training(tokens: int, vocabulary: int, hidden: int = 512, dtype: str = "bfloat16", layers: int = 1) -> TraceBuilder:
    """A small language model up to its head: parameters, inputs, layers."""
    b = TraceBuilder()
    b.parameter("embed.weight", vocabulary, hidden, dtype=dtype)
    for layer in range(layers):
        b.parameter(f"layers.{layer}.mlp.weight", 4 * hidden, hidden, dtype=dtype)
    b.inputs(1, tokens)
    for layer in range(layers):
        b.enter(f"layers.{layer}", "Layer", ModuleRole.LAYER)
        b.new(tokens, 4 * hidden, dtype=dtype, line="model.py:20 forward")
        b.leave()
    return b


def head_and_loss(b: TraceBuilder, tokens: int, vocabulary: int) -> None:
    """Logits in half precision, their upcast, log-softmax and gradients; four of them live together at the end."""
    b.enter("lm_head", "Linear", ModuleRole.HEAD)
    head = len(b.trace.events)
    b.new(tokens, vocabulary, dtype="bfloat16", op="aten.mm", line="model.py:30 forward")
    b.leave()
    up = b.new(1, tokens, vocabulary, op="aten._to_copy", line="loss.py:5 loss")
    b.new(tokens, vocabulary, op="aten._log_softmax", line="loss.py:6 loss")
    b.free(up)
    b.phase(PhaseKind.BACKWARD)
    b.new(tokens, vocabulary, op="aten.nll_loss_backward", line="loss.py:6 loss", forward_event=head + 2)
    b.new(tokens, vocabulary, op="aten._log_softmax_backward_data", line="loss.py:6 loss", forward_event=head + 2)
