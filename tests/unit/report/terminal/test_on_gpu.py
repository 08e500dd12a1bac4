"""The table of a run that was measured on a GPU: what was read off the GPU stands beside the replay."""

from __future__ import annotations

from memprof.flows.account import analyze
from memprof.report.documents.report import Report
from memprof.report.terminal.console import to_text
from memprof.report.terminal.report import render
from memprof.trace.events import ModuleRole, PhaseKind, Sample
from memprof.trace.facts import DeviceFacts, Facts, NvmlFacts
from tests.unit.traces import TraceBuilder

MIB = 1 << 20


def measured(more: int = 0) -> Report:
    """One step: a layer, the loss, the backward; the counters are read where phases end."""
    b = TraceBuilder()
    b.parameter("weight", 4 * MIB)
    b.phase(PhaseKind.FORWARD)
    b.enter("layers.0", "Layer", ModuleRole.LAYER)
    made = b.new(10 * MIB)
    other = b.new(20 * MIB)
    b.free(other)
    b.leave()
    b.enter("head", "Linear", ModuleRole.HEAD)
    b.new(MIB)
    b.leave()
    b.new(MIB)
    forward_ends = len(b.trace.events) - 1
    b.phase(PhaseKind.BACKWARD)
    b.free(made)
    b.new(2 * MIB)
    trace = b.trace
    trace.source = "measured"
    trace.times = list(range(len(trace.events)))
    trace.samples = [
        Sample(1, 0.1, 16 * MIB, 16 * MIB, 20 * MIB, 700 * MIB, None),
        Sample(forward_ends, 0.2, 64 * MIB, (136 + more) * MIB, 160 * MIB, 900 * MIB, None),
        Sample(len(trace.events) - 1, 0.3, 32 * MIB, 72 * MIB, 160 * MIB, 900 * MIB, None),
    ]
    nvml = NvmlFacts(reserved_bytes=160 * MIB, process_bytes=600 * MIB, used_bytes=900 * MIB)
    trace.facts = Facts(command="run", device=DeviceFacts("GPU", 9999 * MIB, 9300 * MIB, 426 * MIB), nvml=nvml)
    return analyze(trace)


def test_a_peak_is_of_the_stage_in_which_the_replay_has_it() -> None:
    peaks = {row.name: row.measured_peak_bytes for row in measured().stages}
    assert peaks["layer 0"] == 136 * MIB
    assert peaks["loss"] is None and peaks["logits"] is None
    assert peaks["parameters"] == 16 * MIB
    assert peaks["backward"] == 72 * MIB


def test_the_gpu_stands_beside_the_replay() -> None:
    text = to_text(render(measured()))
    assert "torch.cuda" in text and "NVML" in text and "on this GPU" not in text
    (layer,) = [line for line in text.splitlines() if line.lstrip().startswith("layer 0")]
    assert "136.00" in layer
    assert "a replay of what the program requested, torch.cuda is the GPU" in " ".join(text.split())


def test_the_difference_is_said() -> None:
    flat = " ".join(to_text(render(measured(more=9))).split())
    assert "peak 9.00 MiB more (layer 0 of step 1)" in flat
    assert "NVML counts the context and other processes too" in flat


def test_others_are_in_one_step_of_the_bridge() -> None:
    """900 in use: 160 reserved and 426 of context are this process's, of whose 600 are 14 of libraries; 300 others'."""
    document = measured()
    assert document.bridge is not None
    moment = document.bridge.peak_reserved
    assert (moment.context_bytes, moment.libraries_bytes, moment.other_processes_bytes) == (
        426 * MIB, 14 * MIB, 300 * MIB,
    )  # fmt: skip
    assert any("as NVML says of this process" in sentence for sentence in document.assumptions)
    assert document.device.usable_bytes == 9300 * MIB
    assert document.peak.device_used_bytes == document.peak.reserved_bytes + (426 + 14) * MIB
    assert document.stages[0].device_used_bytes is None  # it was not read then
    assert document.verdict.fits
