"""The work of a step in seconds, on a GPU whose rates are powers of ten, and what a fix adds to it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memprof.device.catalog import find_gpu
from memprof.findings import Finding, Severity
from memprof.flows.account import analyze
from memprof.flows.cost import StepWork, compute_cost, compute_step_work, find_bottleneck
from memprof.report.documents.ladder import Bottleneck
from memprof.report.documents.report import FailureRow
from memprof.trace.events import GPU, HOST, PhaseKind, Work
from tests.unit.report.runs import MIB, facts
from tests.unit.traces import TraceBuilder

# Each second 1e12 float32 operations, 1e9 bytes of memory, 1e8 of the link to the host, and 1e7 of that to other GPUs.
RATES = dataclasses.replace(
    find_gpu("h100-80gb"),
    peak_flops={"float32": 10**12, "bfloat16": 10**13},
    memory_bandwidth=10**9,
    host_bandwidth=10**8,
    nvlink_bandwidth=10**7,
)


def _work(*works: Work, micro_batches: tuple[tuple[int, int], ...] = ((1, 1),)):
    """Return a trace with a forward phase for each (step, micro-batch), and this work."""
    builder = TraceBuilder(None)
    for step, micro_batch in micro_batches:
        builder.phase(PhaseKind.FORWARD, step, micro_batch)
    builder.trace.work.extend(works)
    return builder.trace


def _call(phase=0, device=GPU, dtype="float32", operations=0, num_bytes=0, to_device=0, to_host=0, calls=1, link=0):
    return Work(phase, 0, device, dtype, operations, num_bytes, to_device, to_host, calls, link)


def test_a_run_without_counted_work_has_no_cost():
    assert compute_step_work(_work(), RATES) is None


@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        # 2 s of operations and 1 s of memory: the longer, and not the sum.
        (_call(operations=2 * 10**12, num_bytes=10**9), 2.0),
        (_call(operations=10**12, num_bytes=3 * 10**9), 3.0),
        (_call(operations=2 * 10**12, num_bytes=10**9, calls=5), 10.0),
        (_call(dtype="bfloat16", operations=2 * 10**13), 2.0),
        (_call(dtype="float64", operations=2 * 10**12), 2.0),  # no rate of its own: that of float32
    ],
)
def test_an_operator_takes_the_longer_of_operations_and_bytes(call, seconds):
    work = compute_step_work(_work(call), RATES)
    assert work.compute_seconds == pytest.approx(seconds)
    assert work.operations == call.operations * call.calls
    assert (work.bus_seconds, work.link_seconds) == (0, 0)
    assert work.seconds == pytest.approx(seconds)


def test_calls_take_their_time_one_after_another():
    calls = [
        _call(operations=10**12, link=10**7), _call(num_bytes=2 * 10**9), _call(to_device=10**8),
        _call(to_host=3 * 10**8, link=2 * 10**7), _call(device=HOST, num_bytes=3), _call(device=HOST, num_bytes=4),
    ]  # fmt: skip
    assert compute_step_work(_work(*calls), RATES) == StepWork(10**12, 4 * 10**8, 7, 3.0, 4.0, 3 * 10**7, 3.0)


def test_without_a_known_rate_only_bytes_take_time():
    gpu = dataclasses.replace(RATES, peak_flops={})
    assert compute_step_work(_work(_call(operations=10**12, num_bytes=2 * 10**7)), gpu).compute_seconds == 0.02


def test_the_bus_carries_both_directions_and_computes_nothing():
    work = compute_step_work(
        _work(_call(operations=10**12, num_bytes=10**9, to_device=10**8, to_host=3 * 10**8, calls=2)), RATES
    )
    assert work == StepWork(0, 8 * 10**8, 0, 0.0, 8.0, 0, 0.0)


def test_other_gpus_are_reached_by_their_own_link():
    work = compute_step_work(_work(_call(link=10**7, calls=3)), RATES)
    assert (work.link_bytes, work.link_seconds, work.bus_bytes) == (3 * 10**7, 3.0, 0)


def test_without_nvlink_other_gpus_are_reached_over_the_bus():
    work = compute_step_work(_work(_call(link=10**8)), dataclasses.replace(RATES, nvlink_bandwidth=None))
    assert work.link_seconds == 1.0


def test_operators_of_the_host_count_their_bytes_alone():
    work = compute_step_work(_work(_call(device=HOST, operations=10**12, num_bytes=5, calls=3)), RATES)
    assert work == StepWork(0, 0, 15, 0.0, 0.0, 0, 0.0)


def test_seconds_are_the_sum_of_all_three():
    assert StepWork(0, 0, 0, 1.0, 2.0, 0, 4.0).seconds == 7.0


def test_only_the_last_step_counts():
    trace = _work(_call(0, operations=10**12), _call(1, operations=10**13), micro_batches=((1, 1), (2, 1)))
    assert compute_step_work(trace, RATES).operations == 10**13


@pytest.mark.parametrize(("micro_batches", "operations"), [(0, 7), (2, 7), (3, 9), (4, 11)])
def test_the_last_micro_batch_stands_for_those_that_were_not_run(micro_batches, operations):
    works = [_call(phase, operations=operations) for phase, operations in enumerate((8, 16, 5, 2))]
    trace = _work(*works, micro_batches=((4, 2), (4, 3), (5, 1), (5, 2)))
    assert compute_step_work(trace, RATES, micro_batches).operations == operations


def test_the_cost_of_a_fix_is_what_it_adds():
    before = StepWork(10, 20, 30, 1.0, 2.0, 40, 3.0)
    after = StepWork(11, 22, 33, 1.5, 2.25, 44, 3.125)
    cost = compute_cost(after, before, "exact", "a note", (7.0, 8))
    assert (cost.operations, cost.bus_bytes, cost.host_bytes, cost.link_bytes, cost.step_seconds) == (
        11,
        22,
        33,
        44,
        6.875,
    )
    assert (cost.extra_operations, cost.extra_bus_bytes, cost.extra_link_bytes) == (1, 2, 4)
    assert (cost.extra_seconds, cost.extra_compute_seconds, cost.extra_bus_seconds) == (0.875, 0.5, 0.25)
    assert cost.extra_link_seconds == 0.125
    assert (cost.numerics, cost.note, cost.compile_seconds, cost.compiled_kernels) == ("exact", "a note", 7.0, 8)


def test_without_counted_work_a_fix_has_no_cost():
    work = StepWork(1, 1, 1, 1.0, 1.0, 1, 1.0)
    assert compute_cost(work, None, "exact", "") == compute_cost(None, work, "exact", "")
    cost = compute_cost(None, work, "exact", "", (7.0, 8))
    assert (cost.operations, cost.step_seconds, cost.extra_seconds, cost.numerics) == (None, None, None, "exact")
    assert (cost.compile_seconds, cost.compiled_kernels) == (7.0, 8)
    assert compute_cost(None, None, "exact", "").compile_seconds is None


def _report(usable_bytes: int | None = 0, findings: tuple = (), failure: FailureRow | None = None, **verdict: Any):
    """Return a report on a peak of 8 MiB in the second step's forward, of which 6 MiB are activations."""
    builder = TraceBuilder(None)
    builder.phase(PhaseKind.FORWARD, 2)
    builder.alloc(MIB)
    builder.trace.facts = facts()
    report = analyze(builder.trace)
    return dataclasses.replace(
        report,
        peak=dataclasses.replace(
            report.peak, stage="forward", step=2, allocated_bytes=8 * MIB,
            categories={"activations": 6 * MIB, "parameters": 2 * MIB},
        ),
        device=dataclasses.replace(report.device, usable_bytes=usable_bytes),
        verdict=dataclasses.replace(report.verdict, **verdict),
        findings=findings,
        failure=failure,
    )  # fmt: skip


OOM: dict[str, Any] = {
    "fits": False, "oom_stage": "backward", "oom_step": 3, "tried_to_allocate_bytes": 4 * MIB,
    "reserved_bytes": 7 * MIB, "in_use_bytes": 2 * MIB,
}  # fmt: skip
MISMATCH = Finding("device-mismatch", Severity.ERROR, "", None, (), ())
OTHER = Finding("fragmentation", Severity.NOTE, "", None, (), ())
FAILURE = FailureRow("error", "backward", "RuntimeError", "", None, None, None)
LARGEST = "activations, 6.00 MiB (75% of the peak), in forward"
REFUSED = "out of memory in backward of step 3: 4.00 MiB requested"


@pytest.mark.parametrize(
    ("report", "bottleneck"),
    [
        (_report(), Bottleneck("forward", 2, "activations", 6 * MIB, LARGEST)),
        # Neither is the GPU's: what it has most of is what there is to say.
        (_report(fits=None), Bottleneck("forward", 2, "activations", 6 * MIB, LARGEST)),
        (
            _report(fits=False, host_over_bytes=3 * MIB),
            Bottleneck("forward", 2, "activations", 6 * MIB, "3.00 MiB more host memory than there is (--host-memory)"),
        ),
        (
            _report(None, **OOM),
            Bottleneck("backward", 3, "activations", 6 * MIB, f"{REFUSED}; at the peak activations, 6.00 MiB"),
        ),
        # One byte too small for all tensors, and just large enough: then pieces are.
        (
            _report(8 * MIB - 1, **OOM),
            Bottleneck("backward", 3, "activations", 6 * MIB, f"{REFUSED}; at the peak activations, 6.00 MiB"),
        ),
        (
            _report(8 * MIB, **OOM),
            Bottleneck("backward", 3, "fragmentation", 5 * MIB, f"{REFUSED}, 5.00 MiB reserved in pieces too small"),
        ),
        (
            _report(**{**OOM, "oom_stage": "model", "oom_step": 0}),
            Bottleneck(
                "model", 0, "activations", 6 * MIB,
                "out of memory in model: 4.00 MiB requested; at the peak activations, 6.00 MiB",
            ),
        ),
        (
            _report(findings=(OTHER, MISMATCH), **OOM),
            Bottleneck("forward", 2, "activations", 6 * MIB, "stops where tensors of two devices meet"),
        ),
        (_report(findings=(OTHER,)), Bottleneck("forward", 2, "activations", 6 * MIB, LARGEST)),
        (
            _report(failure=FAILURE, findings=(MISMATCH,), **OOM),
            Bottleneck("forward", 2, "activations", 8 * MIB, "fails in backward"),
        ),
    ],
)  # fmt: skip
def test_a_bottleneck_is_where_a_run_fails_or_has_its_peak(report, bottleneck):
    assert find_bottleneck(report) == bottleneck
