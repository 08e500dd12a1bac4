"""A report and a snapshot in the form in which two runs are compared, with every figure in its place."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memprof.findings import Finding, Severity
from memprof.flows.account import analyze
from memprof.ledger.bridge import BridgeMoment
from memprof.ledger.categories import Category
from memprof.ledger.ledger import LiveTensor
from memprof.ledger.stage_amounts import Stage
from memprof.ledger.state import ModelState
from memprof.report.documents.comparison import RunDescription, TensorGroup
from memprof.report.documents.ranks import RankRow
from memprof.report.documents.report import FailureRow, Report
from memprof.report.matching.runs import BRIDGE_STEPS, TOTALS, convert_recording, convert_report
from memprof.snapshots.recording import Recording, build_recordings
from memprof.trace.events import PhaseKind
from memprof.trace.snapshot import Action
from tests.unit.report.runs import facts, on_cpu
from tests.unit.snapshots.builder import ACTIVATION, MIB, OPTIMIZER, WEIGHT, Program
from tests.unit.traces import TraceBuilder


def report(cpu: bool = False, **asked: Any) -> Report:
    """Return a report whose figures are all different."""
    builder = TraceBuilder(None)
    builder.phase(PhaseKind.FORWARD)
    builder.alloc(MIB)
    builder.trace.facts = facts(**asked)
    found = analyze(on_cpu(builder.trace) if cpu else builder.trace)
    peak = dataclasses.replace(
        found.peak, stage="loss", step=2, micro_batch=3, allocated_bytes=20, reserved_bytes=21, device_used_bytes=22,
        categories={"activations": 12, "library workspace": 8},
        tensors=(
            LiveTensor(4, 3, 12, (1,), "float32", Category.ACTIVATIONS, "layers.1.mlp", "mm", "a.py:1 f", None),
            LiveTensor(8, 1, 8, (2,), "int64", Category.PARAMETERS, "layers.1", "add", None, "layers.10.weight"),
            LiveTensor(8, 1, 8, (8,), "uint8", Category.LIBRARY_WORKSPACE, None, "cublas", None, None),
        ),
    )  # fmt: skip
    rank = RankRow(5, None, (), "", 50, "loss", 1, 51, 52, 53, True, {}, decides=True, shown=True)
    return dataclasses.replace(
        found, peak=peak, host_peak_bytes=23, model_state=ModelState(1, 2, 3, 4, 5),
        bridge=None if cpu else dataclasses.replace(
            found.bridge, peak_reserved=BridgeMoment("loss", 2, 3, *range(30, 41), (), ())
        ),
        stages=(Stage("loss", 1, 1), Stage("loss", 1, 2), Stage("loss", 2, 1), Stage("loss", 1, 3)),
        assumptions=("one", "two"),
        ranks=(rank, dataclasses.replace(rank, rank=6, peak_allocated_bytes=60)),
    )  # fmt: skip


def convert(document: Report):
    return convert_report(document, "run.json", "memprof report")


def test_a_report_of_a_gpu() -> None:
    document = report(steps=3)
    found = convert(document)
    assert found.summary == RunDescription(
        "run.json", "memprof report", "simulated", "a GPU", True, True, None, (), "loss of step 2, micro-batch 3"
    )
    assert found.summary.over_time is document.over_time is not None
    assert found.totals == {
        "parameters": 1, "gradients": 2, "optimizer state": 3, "buffers": 4, "all tensors": 5, "allocated": 20,
        "reserved": 21, "device used": 22, "host memory": 23,
    }  # fmt: skip
    assert found.bridge == {
        "requested by tensors": 30, "rounding": 31, "allocated": 32, "free in segments": 33, "released at once": 34,
        "reserved": 35, "CUDA context": 36, "libraries outside": 37, "other processes": 38, "libraries, others": 39,
        "device used": 40,
    }  # fmt: skip
    assert found.stages == dict(zip(
        (("loss", 1, 0), ("loss", 1, 1), ("loss", 2, 0), ("loss", 1, 2)), document.stages, strict=True
    ))  # fmt: skip
    assert (found.categories, found.ranks, found.has_shapes) == ({"activations": 12}, {5: 50, 6: 60}, True)
    # Layers have one place; a name says more than a module.
    assert found.tensors == [
        TensorGroup(4, 3, (1,), "float32", "mm", "a.py:1 f", "activations", "layers.*.mlp"),
        TensorGroup(8, 1, (2,), "int64", "add", None, "parameters", "layers.*.weight"),
        TensorGroup(8, 1, (8,), "uint8", "cublas", None, "library workspace", None),
    ]
    assert found.assumptions == ("one", "two")
    assert found.has_all_settings
    expected = {
        "source": "simulated", "memprof": "0.1.0", "device name": "a GPU", "device memory": "1,024.00 GiB",
        "torch": "2.8.0", "alloc_conf": None, "steps": 3, "batch_size": 1, "optimizer_impl": "foreach",
    }  # fmt: skip
    assert {name: found.settings[name] for name in expected} == expected
    assert not {"asked", "sequence_lengths"} & found.settings.keys()


def test_a_report_of_a_cpu_has_no_reserved_memory() -> None:
    found = convert(report(cpu=True))
    assert {name for name, size in found.totals.items() if size is None} == {"reserved", "device used"}
    assert set(found.bridge.values()) == {None}
    assert not found.summary.on_gpu and found.settings["optimizer_impl"] == "single"
    device = dataclasses.replace(report().device, total_bytes=None)
    assert convert(dataclasses.replace(report(), device=device)).settings["device memory"] is None


@pytest.mark.parametrize(
    ("asked", "implementation"),
    [
        *(({"optimizer": name}, "foreach") for name in ("adamw", "adam", "sgd", "sgd-momentum", "adagrad", "rmsprop")),
        *(({"optimizer": name}, None) for name in ("adafactor", "adamw-8bit", "none")),
        ({"optimizer_impl": "fused"}, "fused"),
    ],
)
def test_the_implementation_that_torch_chooses(asked: dict[str, Any], implementation: str | None) -> None:
    assert convert(report(**asked)).settings["optimizer_impl"] == implementation


def test_what_an_earlier_report_lacks_is_unknown() -> None:
    found = convert(dataclasses.replace(report(), model_state=None, bridge=None, target=None))
    assert {name for name, size in found.totals.items() if size is None} == {
        "parameters", "gradients", "optimizer state", "buffers", "all tensors",
    }  # fmt: skip
    assert len(found.summary.notes) == 1 and "optimizer_impl" not in found.settings


def test_a_failure_and_findings() -> None:
    failure = FailureRow("error", "backward", "RuntimeError", "", None, None, None)
    sizes = (("b", None), ("a", 3), ("b", 4), ("a", None), ("c", None), ("a", 2))
    findings = tuple(Finding(name, Severity.NOTE, "", size, (), ()) for name, size in sizes)
    found = convert(dataclasses.replace(report(), failure=failure, findings=findings))
    assert found.summary.failure == "RuntimeError in backward"
    assert found.findings == {"b": 4, "a": 5, "c": None}


def recording(num_other_events: int = 0) -> Recording:
    """Return a recording that has most reserved, 72 MiB, with 46 in use, and later most allocated, 70 MiB.

    So many events that say nothing lie between the new segment and the allocation that it is for.
    """
    program = Program()
    program.malloc(30 * MIB - 100, WEIGHT)
    for size in (12, 14):
        program.free(program.malloc(size * MIB, ACTIVATION))
    program.malloc(16 * MIB, OPTIMIZER)
    program.malloc(12 * MIB, ACTIVATION)
    program.free(program.malloc(12 * MIB, ACTIVATION))
    snapshot = program.snapshot()
    events = list(snapshot.traces[0])
    events[11:11] = [events[10]._replace(action=Action.SNAPSHOT, size=0) for _ in range(num_other_events)]
    snapshot.traces[0] = events
    (found,) = build_recordings(snapshot)
    return found


def test_a_snapshot() -> None:
    one = recording()
    one.stages = [("model", 0, 2), ("forward (step 1)", 2, 10), ("empty", 3, 3), ("backward (step 12)", 10, 16),
                  ("x (step 3) y", 10, 11)]  # fmt: skip
    found = convert_recording(one, "file", "max_split_size_mb:64", ("a note",))
    assert found.summary == RunDescription(
        "file", "torch snapshot", "measured", None, True, None, None, ("a note",), "backward of step 12"
    )
    assert (found.settings, found.has_all_settings) == (
        {"source": "measured", "alloc_conf": "max_split_size_mb:64"}, False,
    )  # fmt: skip
    assert {name: size for name, size in found.totals.items() if size is not None} == {
        "allocated": 70 * MIB, "reserved": 72 * MIB,
    }  # fmt: skip
    assert (list(found.totals), list(found.bridge)) == (list(TOTALS), list(BRIDGE_STEPS))
    # At the allocation for which the last segment was reserved.
    assert {name: size for name, size in found.bridge.items() if size is not None} == {
        "requested by tensors": 46 * MIB - 100, "rounding": 100, "allocated": 46 * MIB, "free in segments": 26 * MIB,
        "reserved": 72 * MIB,
    }  # fmt: skip
    amounts = ("micro_batch", "allocated_bytes", "delta_bytes", "peak_allocated_bytes", "requested_bytes",
               "reserved_bytes")  # fmt: skip
    assert {key: [getattr(row, name) for name in amounts] for key, row in found.stages.items()} == {
        ("model", 0, 0): [0, 30 * MIB, 30 * MIB, 30 * MIB, 30 * MIB - 100, 30 * MIB],
        ("forward", 1, 0): [0, 30 * MIB, 0, 44 * MIB, 30 * MIB - 100, 56 * MIB],
        ("backward", 12, 0): [0, 58 * MIB, 28 * MIB, 70 * MIB, 58 * MIB - 100, 72 * MIB],
        ("x (step 3) y", 0, 0): [0, 30 * MIB, 0, 30 * MIB, 30 * MIB - 100, 72 * MIB],
    }
    assert found.categories == {
        "parameters": 30 * MIB, "optimizer state": 16 * MIB, "activations": 12 * MIB, "temporaries": 12 * MIB,
    }  # fmt: skip
    assert [(row.num_bytes, row.count, row.op, row.category, row.where) for row in found.tensors] == [
        (30 * MIB - 100, 1, "empty", "parameters", None), (16 * MIB, 1, "zeros_like", "optimizer state", None),
        (12 * MIB, 1, "mul", "activations", "model:12"), (12 * MIB, 1, "mul", "temporaries", "model:12"),
    ]  # fmt: skip
    assert found.tensors[2] == TensorGroup(
        12 * MIB, 1, None, None, "mul", "/home/me/model.py:12 forward", "activations", "model:12"
    )
    assert not found.has_shapes and found.findings is None


def test_equal_blocks_of_a_snapshot_are_counted() -> None:
    program = Program()
    for size in (2, 12, 12, 14, 12):
        program.malloc(size * MIB, OPTIMIZER)
    (one,) = build_recordings(program.snapshot())
    one.lives[-1].category = Category.LIBRARY_WORKSPACE
    found = convert_recording(one, "file", "", ())
    assert [(row.num_bytes, row.count, row.category) for row in found.tensors] == [
        (2 * MIB, 1, "optimizer state"),
        (12 * MIB, 2, "optimizer state"),
        (14 * MIB, 1, "optimizer state"),
        (12 * MIB, 1, "library workspace"),
    ]
    # What kernels have is no category of the program's.
    assert (found.categories, found.settings["alloc_conf"]) == ({"optimizer state": 40 * MIB}, None)


@pytest.mark.parametrize(
    ("stages", "peak_at"),
    [
        ([("loss", 0, 13), ("after", 14, 16)], None),
        ([("loss", 13, 14)], "loss"),
        ([("loss", 0, 14), ("inner", 13, 14)], "loss"),
    ],
)
def test_the_stage_of_a_peak_is_the_outermost(stages: list[tuple[str, int, int]], peak_at: str | None) -> None:
    one = recording()
    one.stages = stages
    assert convert_recording(one, "file", "", ()).summary.peak_at == peak_at


@pytest.mark.parametrize(("num_other_events", "is_found"), [(0, True), (7, True), (8, False)])
def test_a_segment_is_for_the_allocation_that_follows_within_eight_events(num_other_events, is_found) -> None:
    found = convert_recording(recording(num_other_events), "file", "", ())
    assert found.bridge["allocated"] == (46 if is_found else 30) * MIB
    assert found.bridge["free in segments"] == (26 if is_found else 42) * MIB


def test_a_recording_without_events_has_what_was_there_before() -> None:
    program = Program()
    program.malloc(12 * MIB, WEIGHT)
    (one,) = build_recordings(program.snapshot(0))
    found = convert_recording(one, "file", "", ())
    assert (found.totals["allocated"], found.totals["reserved"]) == (12 * MIB, 12 * MIB)
    assert found.bridge["requested by tensors"] == 12 * MIB
