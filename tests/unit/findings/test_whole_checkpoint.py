"""One checkpoint around all layers, a few segments, and one for each layer, on the virtual GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from memprof.device.catalog import find_gpu
from memprof.findings import Context, Finding, find_all, whole_checkpoint
from memprof.findings.proposals.checkpointing import LayerCall
from memprof.ledger.ledger import build_ledger
from memprof.trace.events import Module, ModuleRole, Trace
from memprof.units import MIB
from memprof.virtual import VirtualGpu

NUM_LAYERS = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, segments: int, *, use_reentrant: bool) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(16, 256), nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))
        self.segments, self.use_reentrant = segments, use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.segments > 1:
            return checkpoint_sequential(self.layers, self.segments, x, use_reentrant=self.use_reentrant)
        return checkpoint(self.layers, x, use_reentrant=self.use_reentrant)


def run(segments: int, *, use_reentrant: bool = False, rows: int = 16384) -> Context:
    """Return what findings take of two steps."""
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        net = Net(segments, use_reentrant=use_reentrant).cuda()
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(2):
            net(torch.randn(rows, 16, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return Context(build_ledger(gpu.trace), None)


def train(segments: int, *, use_reentrant: bool = False) -> tuple[list[Finding], int]:
    """Return the findings of two steps, and their peak in bytes."""
    context = run(segments, use_reentrant=use_reentrant)
    return [one for one in find_all(context) if one.id == "whole-checkpoint"], context.ledger.peak_bytes


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_all_layers_in_one(use_reentrant: bool) -> None:
    (finding,), peak = train(1, use_reentrant=use_reentrant)
    assert finding.evidence[0].source is not None and finding.evidence[0].source.endswith(" forward")
    _, peak_of_each = train(NUM_LAYERS, use_reentrant=use_reentrant)
    assert finding.num_bytes == pytest.approx(peak - peak_of_each, rel=0.15)


def test_half_of_the_layers() -> None:
    assert train(2)[0] == []


@pytest.mark.parametrize(("rows", "least"), [(16384, lambda peak: 64 * MIB), (65536, lambda peak: -(-peak // 20))])
def test_from_64_mib_and_5_percent_of_the_peak_on(
    monkeypatch: pytest.MonkeyPatch, rows: int, least: Callable[[int], int]
) -> None:
    """Of a peak of 687 MiB the former decides, of one four times as high the latter."""
    context = run(1, rows=rows)
    peak = context.ledger.peak_bytes
    for saved, is_found in ((least(peak), True), (least(peak) - 1, False)):
        monkeypatch.setattr(whole_checkpoint, "compute_allocated_peak", lambda trace, saved=saved: peak - saved)
        assert bool(whole_checkpoint.find(context)) is is_found


@pytest.mark.parametrize(
    ("in_checkpoint", "all_layers", "is_most"), [(3, 5, True), (3, 6, False), (4, 7, True), (2, 3, False), (3, 3, True)]
)
def test_three_layers_that_are_more_than_half(in_checkpoint: int, all_layers: int, is_most: bool) -> None:
    trace = Trace(modules=[Module(f"layers.{i}", "Layer", ModuleRole.LAYER, "layers") for i in range(all_layers)])
    group = [LayerCall(i, i, i + 1, 99) for i in range(in_checkpoint)]
    assert whole_checkpoint._has_most(trace, group) is is_most
