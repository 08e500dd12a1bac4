"""The rows of a comparison of two small runs, of which every figure is written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.ledger.stage_amounts import Stage
from memprof.report.documents.comparison import (
    SCHEMA,
    BridgeRow,
    CategoryRow,
    Comparison,
    FindingRow,
    KernelMemory,
    RunDescription,
    SettingRow,
    StageBytes,
    TensorGroup,
    TotalRow,
)
from memprof.report.matching.comparison_build import build_comparison
from memprof.report.matching.runs import BRIDGE_STEPS, TOTALS, ComparedRun
from memprof.report.matching.tolerance import Tolerance


def run(source: str = "simulated", on_gpu: bool = True, **changes: Any) -> ComparedRun:
    """Return a run of which nothing but `changes` is known."""
    fields: dict[str, Any] = {
        "settings": {}, "has_all_settings": True, "stages": {}, "categories": {}, "tensors": [], "has_shapes": True,
        **changes, "totals": dict.fromkeys(TOTALS) | changes.get("totals", {}),
        "bridge": dict.fromkeys(BRIDGE_STEPS) | changes.get("bridge", {}),
    }  # fmt: skip
    return ComparedRun(RunDescription("run.json", "memprof report", source, None, on_gpu, True, None), **fields)


def compare(a: ComparedRun, b: ComparedRun, **tolerance: Any) -> Comparison:
    return build_comparison(a, b, Tolerance(**tolerance))


@pytest.mark.parametrize(
    ("a", "b", "has_all", "rows", "num_same"),
    [
        ({"x": 1, "y": 2}, {"y": 3, "z": 4, "x": 1}, True, [("y", 2, 3), ("z", None, 4)], 1),
        # What is unset is not given, in whatever form.
        ({"a": False, "b": "", "c": [], "d": (), "e": None}, {}, True, [], 5),
        ({"a": 0, "b": [False]}, {}, True, [("a", 0, None), ("b", [False], None)], 0),
        ({"a": ("x", "y")}, {"a": ["x", "y"]}, True, [], 1),
        # An option that a file does not have was at its default.
        ({"optimizer": "adamw", "batch_size": 2}, {}, True, [("batch_size", 2, 1)], 1),
        # A snapshot has some settings alone.
        ({"x": 1, "y": 2}, {"y": 3}, False, [("y", 2, 3)], 0),
    ],
)  # fmt: skip
def test_settings(a: dict, b: dict, has_all: bool, rows: list, num_same: int) -> None:
    found = compare(run(settings=a), run(settings=b, has_all_settings=has_all))
    assert found.settings == tuple(SettingRow(*row) for row in rows)
    assert found.same_settings == num_same
    back = compare(run(settings=b, has_all_settings=has_all), run(settings=a))
    assert sorted((row.name, row.b, row.a) for row in back.settings) == sorted(rows)


def test_a_total_is_compared_if_both_know_it() -> None:
    a = run(totals={"parameters": 100, "gradients": 7, "buffers": 3})
    found = compare(a, run(totals={"parameters": 130, "gradients": 7, "allocated": 5}))
    assert [row.name for row in found.totals] == list(TOTALS)
    rows = {row.name: row for row in found.totals}
    assert rows["parameters"] == TotalRow("parameters", 100, 130, 30, True, False)
    assert rows["gradients"] == TotalRow("gradients", 7, 7, 0, True, True)
    assert rows["allocated"] == TotalRow("allocated", None, 5, None, False, None, "not known of both")
    assert rows["buffers"] == TotalRow("buffers", 3, None, None, False, None, "not known of both")
    assert not found.within and found.tolerance == "0"
    within = compare(a, run(totals={"parameters": 130, "gradients": 7}), text="30", bytes=30)
    assert within.within and within.tolerance == "30"


def test_kernels_of_a_cpu_are_others_and_other_processes_are_not_simulated() -> None:
    all_known = dict.fromkeys(TOTALS, 8)
    on_gpu, on_cpu = run(totals=all_known), run(on_gpu=False, totals=all_known)
    on_cpu.totals["allocated"] = 9
    assert [row.name for row in compare(on_gpu, on_cpu).totals if row.compared] == [
        "parameters", "gradients", "optimizer state", "buffers",
    ]  # fmt: skip
    assert compare(on_gpu, on_cpu).within
    assert all(row.compared for row in compare(on_cpu, on_cpu).totals)
    measured = compare(on_gpu, run("measured", totals=all_known))
    assert [(row.name, row.why_not) for row in measured.totals if not row.compared] == [
        ("device used", "other processes are not simulated")
    ]


def test_ranks_with_the_same_bytes_have_one_row() -> None:
    a, b = run(ranks={8: 7, 1: 20, 2: 20, 4: 10}), run(ranks={2: 21, 1: 21, 4: 10, 3: 9})
    assert compare(a, b).totals[len(TOTALS) :] == (
        TotalRow("allocated, ranks 1-2", 20, 21, 1, True, False),
        TotalRow("allocated, rank 3", None, 9, None, False, None, "not run in both"),
        TotalRow("allocated, rank 4", 10, 10, 0, True, True),
        TotalRow("allocated, rank 8", 7, None, None, False, None, "not run in both"),
    )
    assert not compare(a, b).within and compare(a, b, bytes=1).within
    assert not any(row.compared for row in compare(a, run(on_gpu=False, ranks=b.ranks)).totals)


def stage(name: str, peak: int = 0, step: int = 1, **fields: Any) -> dict:
    """Return a stage under its key."""
    return {(name, step, 0): Stage(name, step, peak_allocated_bytes=peak, **{"micro_batch": 1, **fields})}


def test_stages_are_in_the_order_of_both_runs_largest_difference_first() -> None:
    a = run(stages=stage("model", 5) | stage("forward", 50) | stage("head") | stage("backward", 70) | stage("step", 9))
    b = run(stages=stage("inputs", 1) | stage("model", 5) | stage("forward", 51) | stage("loss", 8) | stage("zero", 2)
            | stage("backward", 60))  # fmt: skip
    rows = compare(a, b).stages
    assert [(row.order, row.name, row.status, row.difference_bytes) for row in rows] == [
        (6, "backward", "differs", -10),
        (2, "forward", "differs", 1),
        (0, "inputs", "only in B", None),
        (1, "model", "same", 0),
        (3, "loss", "only in B", None),
        (4, "zero", "only in B", None),
        (5, "head", "only in A", None),
        (7, "step", "only in A", None),
    ]
    assert [(row.a is None, row.b is None) for row in rows] == [
        (False, False), (False, False), (True, False), (False, False), (True, False), (True, False), (False, True),
        (False, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("allocated_bytes", True), ("delta_bytes", True), ("peak_allocated_bytes", True), ("requested_bytes", False),
        ("reserved_bytes", False),
    ],
)  # fmt: skip
def test_a_stage_differs_by_what_is_allocated(name: str, differs: bool) -> None:
    a, b = stage("loss"), stage("loss", **{"peak": 3} if name == "peak_allocated_bytes" else {name: 3})
    (row,) = compare(run(stages=a), run(stages=b)).stages
    assert row.status == ("differs" if differs else "same")


def test_a_row_of_a_stage_has_its_layer_of_either_run() -> None:
    amounts = {"allocated_bytes": 1, "delta_bytes": 2, "requested_bytes": 3, "reserved_bytes": 4, "seconds": 0.5}
    a = run(stages=stage("layer 3", 9, 2, micro_batch=4, **amounts))
    b = run(stages=stage("layer 3", 9, 2, micro_batch=5, stack="layers", index=3))
    for one, other in ((a, b), (b, a)):
        (row,) = compare(one, other).stages
        assert (row.name, row.step, row.micro_batch, row.stack, row.index) == ("layer 3", 2, 5, "layers", 3)
    (row,) = compare(a, b).stages
    assert row.a == StageBytes(1, 2, 9, 3, 4, 0.5)
    (row,) = compare(a, run()).stages
    assert (row.micro_batch, row.stack, row.b) == (4, "", None)


def test_categories_are_by_difference_and_then_by_size() -> None:
    a, b = run(categories={"x": 5, "same": 9, "y": 4, "z": 1}), run(categories={"same": 9, "y": 1, "z": 4, "new": 20})
    assert compare(a, b).categories == (
        CategoryRow("new", 0, 20, 20), CategoryRow("x", 5, 0, -5), CategoryRow("y", 4, 1, -3),
        CategoryRow("z", 1, 4, 3), CategoryRow("same", 9, 9, 0),
    )  # fmt: skip
    a, b = run(categories={"small": 8, "large": 4}), run(categories={"small": 3, "large": 9})
    for found in (compare(a, b), compare(b, a)):
        assert [row.category for row in found.categories] == ["large", "small"]


def group(num_bytes: int, count: int = 1, category: str = "library workspace", **fields: Any) -> TensorGroup:
    return TensorGroup(num_bytes, count, **{"shape": None, "dtype": None, "op": "cublas", "source": None, **fields,
                                            "category": category})  # fmt: skip


def test_kernels_are_not_among_the_tensors() -> None:
    small, large = group(5), group(3, 2)
    a, b = run(tensors=[small, large, group(8, category="activations")]), run(on_gpu=False, tensors=[small])
    found = compare(a, b)
    assert found.kernels_a == KernelMemory("CUDA kernels", 11, (large, small))
    assert found.kernels_b == KernelMemory("CPU kernels", 5, (small,))
    assert [(row.status, row.difference_bytes) for row in found.tensors] == [("only in A", -8)]
    assert [(row.status, row.difference_bytes) for row in compare(b, a).tensors] == [("only in B", 8)]
    assert (found.same_tensors, found.same_tensors_bytes) == (0, 0)


@pytest.mark.parametrize(("a_has", "b_has"), [(True, True), (True, False), (False, True)])
def test_shapes_are_compared_if_both_have_them(a_has: bool, b_has: bool) -> None:
    a = run(has_shapes=a_has, tensors=[group(8, 3, "gradients", shape=(2,), where="head")])
    b = run(has_shapes=b_has, tensors=[group(8, 3, "gradients", shape=(4,), where="head")])
    found = compare(a, b)
    by_shape = a_has and b_has
    assert found.tensors_matched_by == ("category, place, shape and dtype" if by_shape else "bytes")
    assert (len(found.tensors), found.same_tensors, found.same_tensors_bytes) == ((1, 0, 0) if by_shape else (0, 1, 24))


def test_the_bridge_has_the_steps_that_either_run_knows() -> None:
    a, b = run(bridge={"reserved": 10, "rounding": 3}), run(bridge={"reserved": 14, "CUDA context": 7})
    assert compare(a, b).reserved == (
        BridgeRow("rounding", 3, None, None), BridgeRow("reserved", 10, 14, 4),
        BridgeRow("CUDA context", None, 7, None),
    )  # fmt: skip


def test_seconds_are_those_of_all_stages() -> None:
    a = run(stages=stage("model", seconds=0.0) | stage("forward", seconds=1.5) | stage("loss") | stage("x", seconds=2))
    found = compare(a, run(stages=stage("model")))
    assert (found.seconds_a, found.seconds_b) == (3.5, None)
    assert compare(run(stages=stage("model", seconds=0.0)), a).seconds_a == 0.0


def test_findings_that_differ() -> None:
    a = run(findings={"same": 5, "more": 2, "gone": None, "unknown": None})
    b = run(findings={"same": 5, "more": 9, "new": 8, "unknown": 1})
    assert compare(a, b).findings == (
        FindingRow("new", False, True, None, 8), FindingRow("more", True, True, 2, 9),
        FindingRow("unknown", True, True, None, 1), FindingRow("gone", True, False, None, None),
    )  # fmt: skip
    assert compare(a, run()).findings is None and compare(run(), a).findings is None


def test_a_comparison_has_the_assumptions_of_one_run_alone() -> None:
    found = compare(run(assumptions=("both", "first")), run(assumptions=("second", "both")))
    assert (found.assumptions_only_in_a, found.assumptions_only_in_b) == (("first",), ("second",))
    assert (found.command, found.schema, found.a.file) == ("compare", SCHEMA, "run.json")
