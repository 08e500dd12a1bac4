"""Rows of the largest tensors: no two say the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import memprof
from memprof.report.documents.report import Report
from memprof.report.terminal.cells import describe_tensor, name_operator
from memprof.report.terminal.console import to_text
from memprof.report.terminal.report import render
from memprof.report.terminal.summary import format_summary
from memprof.report.terminal.tensors import merge_equal_tensors, render_origin


def document() -> Report:
    """A product outside of every layer, forward and backward, on one line: each thread's cuBLAS has a workspace."""
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = nn.Linear(256, 100).cuda()
        for _ in range(2):
            model(torch.randn(64, 256, device="cuda")).sum().backward()
    return gpu.report()


def test_the_workspaces_of_forward_and_backward_are_one_row() -> None:
    found = document()
    both = [tensor for tensor in found.peak.tensors if tensor.op == "cublas workspace"]
    assert [tensor.count for tensor in both] == [1, 1] and {tensor.phase for tensor in both} == {"forward", "backward"}
    rows = [line.split() for line in to_text(render(found)).splitlines() if "cublas workspace" in line]
    assert [row[:2] for row in rows] == [["32.00", "2"]]
    (one,) = (tensor for tensor in merge_equal_tensors(found.peak.tensors) if tensor.op == "cublas workspace")
    assert one.count == 2 and one.allocated_bytes == sum(tensor.allocated_bytes for tensor in both)
    assert sum("library workspace" in line for line in format_summary(found).splitlines()) == 1


def test_what_differs_in_what_is_said_stays_apart() -> None:
    found = merge_equal_tensors(document().peak.tensors)
    says = [(t.num_bytes, t.shape, t.dtype, t.category, t.op, t.name or (t.module, t.source)) for t in found]
    assert len(set(says)) == len(says) > 3
    assert sum(one.count for one in found) == sum(one.count for one in document().peak.tensors)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("aten._to_copy", ".to()"), ("aten._softmax", "softmax"), ("aten.addmm", "addmm"), ("aten.empty", ""),
        ("aten.empty_like", ""), ("aten.zeros", "zeros"), ("cublas workspace", "cublas workspace"),
    ],
)  # fmt: skip
def test_an_operator_is_named_as_programs_call_it(op: str, name: str) -> None:
    assert name_operator(op) == name


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [((7,), "uint8", "a buffer"), ((7, 2), "uint8", "[7x2] uint8"), ((7,), "int8", "[7] int8")],
)
def test_bytes_in_one_dimension_are_a_buffer(shape: tuple[int, ...], dtype: str, text: str) -> None:
    assert describe_tensor(shape, dtype) == text


@pytest.mark.parametrize(
    ("op", "name", "text"),
    [
        ("aten.mm", None, "activations of layer, by mm at a.py:7"),
        ("aten.empty", None, "activations of layer, at a.py:7"),
        ("aten.mm", "weight", "activations weight"), ("aten.empty", "weight", "activations weight"),
    ],
)  # fmt: skip
def test_origin(op: str, name: str | None, text: str) -> None:
    """A module of which only a number is known is said to be one."""
    found = document().peak.tensors[0]
    tensor = replace(found, category="activations", module="layer", name=name, op=op, source="a.py:7 forward")
    assert render_origin(tensor).plain == text
    numbered = render_origin(replace(tensor, module="1")).plain
    assert numbered == text.replace("of layer", "of module 1")
    masked = {module: render_origin(replace(tensor, module=module)).plain for module in ("*", "*.net.*")}
    assert masked["*"] == text.replace(" of layer", "")
    assert masked["*.net.*"] == text.replace("of layer", "of net.*")
    called = render_origin(replace(tensor, caller="b.py:9 main")).plain
    assert called == text + ", called at b.py:9" * (name is None)
