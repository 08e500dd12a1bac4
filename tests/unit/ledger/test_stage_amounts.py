"""The amounts of each stage, by hand: bytes of the replay, and what a measured run has samples of."""

from __future__ import annotations

import pytest

from memprof.allocator import GpuMemory, parse_config, replay_in_host_memory, replay_on_gpu
from memprof.ledger.bridge import build_bridge
from memprof.ledger.ledger import build_ledger
from memprof.ledger.stage_amounts import Stage
from memprof.trace.events import CPU, Caller, EventKind, ModuleRole, PhaseKind, Sample
from memprof.trace.facts import DeviceFacts, Facts
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

CONTEXT = 426 * MIB


def three_stages() -> TraceBuilder:
    """After each event are allocated 0, 1024 | 1024, 6144, 7168, 2048 | 2048, 2560, 1536 bytes."""
    b = TraceBuilder()
    b.alloc(1000)
    b.phase(PhaseKind.FORWARD, 3, 2)
    large, small = b.alloc(5000), b.alloc(700)
    b.free(large)
    b.phase(PhaseKind.BACKWARD, 3, 2)
    b.alloc(100)
    b.free(small)
    b.trace.facts = Facts(device=DeviceFacts(context_bytes=CONTEXT))
    return b


def stages_of(b: TraceBuilder):
    return build_ledger(b.trace).stages


def test_amounts_at_the_end_and_peaks() -> None:
    stages = stages_of(three_stages())
    assert [(s.name, s.step, s.micro_batch, s.kind) for s in stages] == [
        ("parameters", 0, 1, PhaseKind.MODEL),
        ("loss", 3, 2, PhaseKind.FORWARD),
        ("backward", 3, 2, PhaseKind.BACKWARD),
    ]
    assert [(s.allocated_bytes, s.delta_bytes, s.peak_allocated_bytes) for s in stages] == [
        (1024, 1024, 1024), (2048, 1024, 7168), (1536, -512, 2560),
    ]  # fmt: skip
    assert [(s.requested_bytes, s.requested_delta_bytes, s.peak_requested_bytes) for s in stages] == [
        (1000, 1000, 1000), (1700, 700, 6700), (1100, -600, 1800),
    ]  # fmt: skip


def test_a_models_own_code_between_its_children_has_a_line_too() -> None:
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD)
    b.enter("", "Net")
    for child in ("first", "second"):
        b.enter(child, "Linear", ModuleRole.CHILD)
        b.alloc(100, line="linear.py:1 forward")
        b.leave()
        b.alloc(200, line=f"net.py:{len(child)} forward")
    b.leave()
    b.phase(PhaseKind.FORWARD, 2)
    b.alloc(300, line="train.py:9 main")
    assert [(stage.name, stage.source) for stage in stages_of(b)] == [
        ("first Linear", None), ("own code", "net.py:5 forward"),
        ("second Linear", None), ("own code", "net.py:6 forward"), ("output", "train.py:9 main"),
    ]  # fmt: skip


def test_code_outside_modules_has_the_line_that_allocates_most() -> None:
    """Of a line of a library, the line that called it; modules have a name instead."""
    b = TraceBuilder()
    b.phase(PhaseKind.OTHER)
    largest = b.alloc(700, line="/site-packages/torch/functional.py:8 one_hot")
    b.alloc(100, line="train.py:4 main")
    b.trace.sources += ["losses.py:2 dice", "train.py:3 main"]
    b.trace.callers = [
        Caller(largest, b.trace.sources.index(line), "one_hot") for line in ("losses.py:2 dice", "train.py:3 main")
    ]
    b.phase(PhaseKind.FORWARD)
    b.enter("first", "Linear", ModuleRole.CHILD)
    b.alloc(900, line="model.py:5 forward")
    b.leave()
    found = {stage.name: stage.source for stage in stages_of(b)}
    assert found["other"] == "losses.py:2 dice" and found["first Linear"] is None
    b.trace.sources[b.trace.sources.index("/site-packages/torch/functional.py:8 one_hot")] = "model.py:8 encode"
    assert stages_of(b)[0].source == "model.py:8 encode"


def test_the_device_uses_what_is_reserved_and_the_context() -> None:
    b = three_stages()
    b.free(b.alloc(30 * MIB))
    b.phase(PhaseKind.OPTIMIZER_STEP, 3)
    b.empty_cache()
    b.free(b.alloc(100))
    stages = stages_of(b)
    assert [(s.reserved_bytes, s.peak_reserved_bytes) for s in stages] == [
        (2 * MIB, 2 * MIB), (2 * MIB, 2 * MIB), (32 * MIB, 32 * MIB), (2 * MIB, 32 * MIB),
    ]  # fmt: skip
    assert [s.device_used_bytes for s in stages] == [CONTEXT + s.reserved_bytes for s in stages]


def test_what_simulated_runs_do_not_have() -> None:
    b = three_stages()
    for stage in stages_of(b):
        assert (
            stage.seconds is stage.resident_bytes is stage.measured_allocated_bytes is stage.measured_peak_bytes is None
        )
        assert not stage.oom and (stage.stack, stage.index) == ("", -1)


def test_a_stage_of_which_nothing_is_known_has_no_bytes() -> None:
    stage = Stage("context", 0, 0)
    unknown = {
        "device_used_bytes",
        "source",
        "seconds",
        "resident_bytes",
        *(f for f in Stage.__slots__ if f.startswith("measured")),
    }
    assert {name for name in Stage.__slots__ if getattr(stage, name) is None} == unknown
    amounts = {getattr(stage, name) for name in Stage.__slots__ if name.endswith("_bytes") and name not in unknown}
    assert amounts == {0} and (stage.stack, stage.index, stage.oom, stage.kind) == ("", -1, False, PhaseKind.OTHER)


def test_the_stage_of_the_failed_allocation() -> None:
    b = TraceBuilder()
    b.alloc(30 * MIB)
    for step in (1, 2):
        b.phase(PhaseKind.FORWARD, step)
        b.alloc(30 * MIB)
    ledger = build_ledger(b.trace, replay_on_gpu(b.trace, GpuMemory(89 * MIB, 0)))
    assert [stage.oom for stage in ledger.stages] == [False, False, True]
    assert ledger.out_of_memory is not None and ledger.out_of_memory.limit_bytes == 89 * MIB


@pytest.mark.parametrize(("fraction", "limit"), [(0.5, 44.5), (1, 89)])
def test_a_fraction_limits_what_may_be_reserved(fraction: float, limit: float) -> None:
    b = TraceBuilder()
    for _ in range(3):
        b.alloc(30 * MIB)
    config = parse_config(f"per_process_memory_fraction:{fraction}")
    moment = build_ledger(b.trace, replay_on_gpu(b.trace, GpuMemory(89 * MIB, 0), config)).out_of_memory
    assert moment is not None and moment.limit_bytes == limit * MIB


def test_memory_that_is_mapped_and_released_within_one_request() -> None:
    """The request of 80 MiB maps the 20 MiB before a free range; for the 40 MiB behind it the GPU of 130 is too full,
    until 60 MiB of another stream are released."""
    b = TraceBuilder()
    _, hole, last = (b.alloc(20 * MIB) for _ in range(3))
    b.free(hole)
    b.empty_cache()
    b.free(last)
    b.add(EventKind.STREAM, 1)
    b.free(b.alloc(60 * MIB))
    b.add(EventKind.STREAM, 0)
    b.phase(PhaseKind.FORWARD)
    b.enter("", role=ModuleRole.ROOT)
    b.alloc(512)
    b.leave()
    b.alloc(80 * MIB)  # the first event of its stage
    b.phase(PhaseKind.BACKWARD)
    b.alloc(100)
    ledger = build_ledger(
        b.trace, replay_on_gpu(b.trace, GpuMemory(130 * MIB, 0), parse_config("expandable_segments:True"))
    )
    assert [(s.reserved_bytes // MIB, s.peak_reserved_bytes // MIB) for s in ledger.stages] == [
        (100, 100), (102, 102), (102, 122), (102, 102),
    ]  # fmt: skip
    bridge = build_bridge(ledger)
    assert bridge is not None
    moment = bridge.peak_reserved
    assert (moment.stage, moment.step, moment.micro_batch) == ("loss", 1, 1)
    assert (moment.reserved_bytes, moment.released_bytes) == (122 * MIB, 20 * MIB)
    assert (moment.allocated_bytes, moment.fragmentation_bytes) == (100 * MIB + 512, 2 * MIB - 512)
    assert (bridge.peak_allocated.stage, bridge.peak_allocated.released_bytes) == ("backward", 0)


# -- measured runs -----------------------------------------------------------------------------------------------------


def sample(event: int, peak: int | None = None, **known: object) -> Sample:
    return Sample(event, 0.0, None, peak, None, None, None)._replace(**known)


@pytest.mark.parametrize(
    ("samples", "peaks"),
    [
        ([(1, 1100), (5, 7000), (8, 2600)], [1100, 7000, 2600]),
        ([(1, 1100), (8, 7000)], [1100, 7000, None]),  # of two stages, in the one in which the replay has the peak
        ([(8, 7000)], [None, 7000, None]),
        ([(0, 7), (1, 5), (8, 2)], [7, 2, None]),  # the larger of two in one stage
        ([(3, 6000), (5, 7000), (7, None), (8, 9)], [None, 7000, 9]),
        ([(5, None), (8, 2600)], [None, None, 2600]),  # the sample before tells where this one's stretch begins
        ([(4, 7000), (4, 8000), (6, 9000)], [None, 9000, None]),  # the second is over no event; 2048 bytes twice
    ],
)
def test_measured_peaks_are_of_the_stage_in_which_the_replay_has_them(samples, peaks) -> None:
    b = three_stages()
    b.trace.samples = [sample(event, peak) for event, peak in samples]
    assert [stage.measured_peak_bytes for stage in stages_of(b)] == peaks


def measured(device: str | None = None) -> TraceBuilder:
    b = three_stages()
    b.trace.source = "measured"
    b.trace.times = [1_000_000_000 * second for second in (0, 1, 3, 6, 10, 15, 21, 28, 36)]
    if device is not None:
        b.trace.device = device
        b.trace.storages = [storage._replace(device=device) for storage in b.trace.storages]
    return b


def test_the_last_sample_of_a_stage() -> None:
    b = measured()
    b.trace.samples = [
        Sample(event, seconds, 10 * event, None, 20 * event, 30 * event, 40 * event)
        for event, seconds in ((2, 0.5), (5, 2.0), (8, 3.25))
    ]
    before, loss, backward = stages_of(b)
    # None in the first stage, and of its device no figure of the replay instead.
    assert (before.device_used_bytes, before.resident_bytes, before.measured_reserved_bytes) == (None, None, None)
    assert (loss.measured_allocated_bytes, loss.measured_reserved_bytes) == (50, 100)
    assert (loss.device_used_bytes, loss.resident_bytes) == (150, 200)
    assert backward.measured_allocated_bytes == 80


@pytest.mark.parametrize(("event", "allocated"), [(1, [7, None, None]), (2, [None, 7, None]), (5, [None, 7, None])])
def test_a_sample_is_of_the_stage_that_its_event_is_in(event, allocated) -> None:
    b = measured()
    b.trace.samples = [sample(event, allocated_bytes=7)]
    assert [stage.measured_allocated_bytes for stage in stages_of(b)] == allocated


@pytest.mark.parametrize(
    ("samples", "seconds"),
    [
        ([(1, 1.0), (5, 3.0), (8, 7.0)], [None, 2.0, 4.0]),  # from the last event before the stage
        ([(2, 1.0), (6, 3.0), (8, 7.0)], [None, 2.0, 4.0]),  # to the first event after it
        ([(0, 1.0), (2, 3.0), (7, 7.0)], [2.0, None, None]),
        ([(1, 1.0), (3, 2.0), (4, 2.5), (7, 7.0)], [None, 1.5, None]),
        ([(-1, 1.0), (1, 3.0)], [2.0, None, None]),
    ],
)
def test_seconds_on_a_gpu_lie_between_two_samples(samples, seconds) -> None:
    b = measured()
    b.trace.samples = [sample(event, seconds=when) for event, when in samples]
    assert [stage.seconds for stage in stages_of(b)] == seconds


def test_layers_on_a_gpu_have_no_seconds() -> None:
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD)
    b.enter("", role=ModuleRole.ROOT)
    b.enter("layers.0", role=ModuleRole.LAYER)
    b.alloc(512)
    b.leave()
    b.leave()
    b.alloc(512)
    b.trace.times = [0] * len(b.trace.events)
    b.trace.samples = [sample(event, seconds=float(event)) for event in range(len(b.trace.events))]
    assert [(stage.name, stage.seconds is None) for stage in stages_of(b)] == [("layer 0", True), ("output", False)]


def test_seconds_on_a_cpu_are_those_of_the_events() -> None:
    """A stage ends where the next one begins; the last one at the last event."""
    b = measured(CPU)
    ledger = build_ledger(b.trace, replay_in_host_memory(b.trace))
    assert [(stage.seconds, stage.device_used_bytes) for stage in ledger.stages] == [
        (3.0, None),
        (18.0, None),
        (15.0, None),
    ]
