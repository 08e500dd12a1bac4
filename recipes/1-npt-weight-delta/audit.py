"""Which figures of case study 1 hold, and the right ones: every number here is computed or comes out of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from specs import AFTER, AS_WRITTEN, BEFORE, CONFIGURATIONS, ONE_TOKEN, PER_TOKEN, ROWS

from memprof import virtual_gpu
from memprof.findings.lifetimes import Lifetimes
from memprof.flows.profile import profile
from memprof.ledger.ledger import build_ledger
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.units import GIB, format_bytes
from memprof.workload import npt_layers
from memprof.workload.npt import ModulatedDelta


class Claim(NamedTuple):
    """A sentence of the report, whether it holds, and what is right."""

    text: str
    verdict: str
    right: str


class Run(NamedTuple):
    """One specification that was run."""

    document: Report
    largest_bytes: int
    """The largest tensor of an NPT component."""
    component_bytes: int
    """The most that tensors of NPT components, their results and parameters among them, take at one moment."""


def run(spec: TargetSpec) -> Run:
    """Profile `spec` and look at what its components hold."""
    trace, document = profile(spec)
    largest, most = component_bytes(trace)
    return Run(document, largest, most)


def component_bytes(trace: Trace) -> tuple[int, int]:
    """The largest tensor made in modules whose path ends in `.npt`, and the most of them together."""
    inside = {i for i, s in enumerate(trace.storages) if (trace.module_path(s) or "").endswith(".npt") and not s.hidden}
    inside |= {i for i, owner in trace.owners.items() if ".npt." in owner.name}
    most_bytes = Lifetimes(build_ledger(trace)).find_max_live(inside).num_bytes
    return max(trace.storages[i].num_bytes for i in inside), most_bytes


def training_loop_bytes(recompute: bool) -> int:
    """Most bytes of a per-token loop over 4 x 512 tokens, forward and backward, in the middle of a trained model."""
    with virtual_gpu("a100-80gb") as gpu:
        component = ModulatedDelta(4096, 14336, 16, mode="per-token", recompute=recompute).to("cuda")
        hidden, attention = (torch.randn(4, 512, 4096, device="cuda", requires_grad=True) for _ in range(2))
        component(hidden, attention).sum().backward()
    return gpu.report().peak.allocated_bytes


@torch.no_grad()
def deviation() -> float:
    """The largest difference of the low-rank form from the dense one, in float64, relative to the largest result."""
    torch.manual_seed(0)
    component = ModulatedDelta(48, 96, 16, dtype=torch.float64)
    hidden, attention = (torch.randn(4, 32, 48, dtype=torch.float64) for _ in range(2))
    low_rank = component(hidden, attention)
    component.mode = "dense"
    dense = component(hidden, attention)
    return float((low_rank - dense).abs().max() / dense.abs().max())


def megabytes(num_bytes: int) -> str:
    """As the report counts, in millions of bytes, and as memprof does."""
    return f"{num_bytes / 1e6:.1f} MB = {format_bytes(num_bytes)}"


def claims(before: Run, after: Run, per_token: Run) -> list[Claim]:
    """The report's figures about the delta."""
    as_written, one = run(AS_WRITTEN), run(ONE_TOKEN)
    rank, tokens = 16, 512
    kept, recomputed = training_loop_bytes(False), training_loop_bytes(True)
    difference = deviation()
    return [
        Claim(
            "4 x 512 tokens, 4096 x 11008: ~448 GB for one delta",
            "holds" if as_written.largest_bytes == 448 * GIB else "does not hold",
            f"{format_bytes(as_written.largest_bytes)} in float32, {format_bytes(as_written.largest_bytes // 2)} in "
            f"half precision; {format_bytes(before.largest_bytes)} is d_ffn = 14336 (Llama-3.1-8B) in float32",
        ),
        Claim(
            "modulation factors: ~32 KB at rank 16",
            "at batch 1" if tokens * rank * 4 == 32 * 1024 else "does not hold",
            f"{format_bytes(4 * tokens * rank * 4)} at batch 4, {format_bytes(tokens * rank * 4)} at batch 1 (float32)",
        ),
        Claim(
            "delta of one token: ~180 MB",
            "holds" if round(one.largest_bytes / 1e6) == 180 else "does not hold",
            f"{megabytes(one.largest_bytes)} at d_ffn 11008, batch 1, float32. For the model of the 448 GiB, at its "
            f"batch of 4: {format_bytes(per_token.largest_bytes)}",
        ),
        Claim(
            "new approach: < 1 GB, on demand per token",
            "forward only" if kept > 400 * GIB else "holds",
            f"in training, autograd keeps the delta of every token: {format_bytes(kept)} after all; "
            f"{format_bytes(recomputed)} if each is computed again in the backward",
        ),
        Claim(
            "reduction: > 400x",
            "holds" if before.component_bytes > 400 * after.component_bytes else "does not hold",
            f"{format_bytes(before.component_bytes)} to {format_bytes(per_token.component_bytes)} per token with "
            f"recomputation ({before.component_bytes / per_token.component_bytes:,.0f}x), to "
            f"{format_bytes(after.component_bytes)} low-rank ({before.component_bytes / after.component_bytes:,.0f}x)",
        ),
        Claim(
            "h W + ((h A) * m) B is the same as h (W + delta)",
            "holds" if difference < 1e-12 else "does not hold",
            "the same in float64 to 12 digits" if difference < 1e-12 else f"relative difference {difference:.1e}",
        ),
    ]


def configurations() -> list[tuple[str, Run]]:
    """The whole run in each of the report's configurations, with the low-rank form."""
    return [(name, run(spec)) for name, spec in CONFIGURATIONS.items()]


class Row(NamedTuple):
    """A row of the report's table of memory beside the same run here."""

    name: str
    report: str
    document: Report
    about: str


def rows() -> Iterator[Row]:
    """The report's six rows."""
    for name, (figure, spec, about) in ROWS.items():
        with keeping_deltas() if name == "Basic Optimization" else contextlib.nullcontext():
            document = profile(spec)[1]
        yield Row(name, figure, document, about)


@contextlib.contextmanager
def keeping_deltas() -> Iterator[None]:
    """Inside, components are made as the report's were: autograd keeps what a loop over tokens computes."""
    make = npt_layers.make_component

    def made(*args: Any, **options: Any) -> Any:
        component = make(*args, **options)
        component.recompute = False
        return component

    npt_layers.make_component = made
    try:
        yield
    finally:
        npt_layers.make_component = make


def main_runs() -> tuple[Run, Run, Run]:
    """Before, after, and on demand per token."""
    return run(BEFORE), run(AFTER), run(PER_TOKEN)
