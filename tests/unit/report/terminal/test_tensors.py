"""Rows of the largest tensors: no two say the same."""

from __future__ import annotations

import torch
from torch import nn

import memprof
from memprof.report.documents.report import Report
from memprof.report.terminal.console import to_text
from memprof.report.terminal.report import render
from memprof.report.terminal.summary import format_summary
from memprof.report.terminal.tensors import merge_equal_tensors


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
