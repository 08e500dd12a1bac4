"""Rows of single operators: Liger-Kernel's benchmark and Cut Cross-Entropy's, both contestants of each.

The plain PyTorch halves are the workloads of tests/accuracy/baselines.py; the other halves run the published packages'
own code, with the launches of their Triton kernels passed over: liger_kernels.py.
"""

from __future__ import annotations

import os
from unittest import mock

import torch

from memprof.virtual import VirtualGpu
from tests.accuracy import baselines, liger_kernels
from tests.accuracy.published.libraries import MissingLibraryError, imported
from tests.accuracy.published.prediction import GPUS, Prediction, not_predicted, run
from tests.accuracy.published.rows import Row

STEPS = 3


# All were measured before torch 2.15, which frees cuBLAS workspaces after every call.
_with_old_workspaces = mock.patch.dict(os.environ, {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"})


@_with_old_workspaces
def liger(row: Row) -> Prediction:
    """The most that a step held: the benchmark resets the peak before each (`_test_memory` in its utils.py)."""
    published = baselines.published_row(vars(row))
    if published.method != "liger":
        return _steps(baselines.WORKLOADS[published.kernel, published.axis], published)
    release = liger_kernels.release(row.note, published.kernel)
    try:
        with imported("liger-kernel", release, "liger_kernel", "liger_kernel.transformers"):
            return _steps(liger_kernels.WORKLOADS[published.kernel], published)
    except MissingLibraryError as missing:
        return not_predicted(f"needs liger-kernel {release} and Triton: {missing}")


def _steps(setup: baselines.Setup, published: baselines.Published) -> Prediction:
    def program(gpu: VirtualGpu) -> int:
        step = setup(published)
        start = len(gpu.trace.events)
        for _ in range(STEPS):
            step()
        return start

    done = run(program, GPUS[published.gpu], skips_kernels=published.method == "liger")
    return Prediction(done.allocated, rounding=published.rounding)


CCE = ("cut-cross-entropy", "25.1.1")


@_with_old_workspaces
def cut_cross_entropy(row: Row) -> Prediction:
    """How far a forward (fw), a backward (bw) or both rise above what was allocated before (benchmark/memory.py)."""
    published = baselines.published_row(vars(row))
    if published.method == "cce":
        try:
            with imported(*CCE, "cut_cross_entropy"):
                return Prediction(_rise_of_cce(published), rounding=published.rounding)
        except MissingLibraryError as missing:
            return not_predicted(f"needs {' '.join(CCE)} and Triton: {missing}")
    if published.method != "baseline":
        return not_predicted(baselines.NOT_PREDICTED[published.method])
    compared = baselines.cut_cross_entropy(published)
    return Prediction(round(compared.simulated * baselines.MIB), rounding=published.rounding)


def _rise_of_cce(published: baselines.Published) -> int:
    from cut_cross_entropy import linear_cross_entropy

    width, vocabulary = published.config["D"], published.config["V"]
    marks: list[int] = []

    def program(gpu: VirtualGpu) -> None:
        states = torch.randn(published.x, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        head = torch.randn(vocabulary, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        target = torch.randint(vocabulary, (published.x,), device="cuda")
        linear_cross_entropy(states, head, target, softcap=baselines.SOFTCAP).backward()
        states.grad = head.grad = None
        marks.append(len(gpu.trace.events))
        loss = linear_cross_entropy(states, head, target, softcap=baselines.SOFTCAP)
        marks.append(len(gpu.trace.events))
        if published.axis != "fw":
            loss.backward()
        marks.append(len(gpu.trace.events))

    done = run(program, GPUS[published.gpu], skips_kernels=True)
    begin, end = marks[1] if published.axis == "bw" else marks[0], marks[2]
    return max(done.replay.allocated[begin:end]) - done.replay.allocated[begin - 1]
