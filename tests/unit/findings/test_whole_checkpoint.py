"""One checkpoint around all layers, a few segments, and one for each layer, on the virtual GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from memprof.device.catalog import find_gpu
from memprof.findings import Context, Finding, find_all
from memprof.ledger.ledger import build_ledger
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


def train(segments: int, *, use_reentrant: bool = False) -> tuple[list[Finding], int]:
    """Return the findings of two steps, and their peak in bytes."""
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        net = Net(segments, use_reentrant=use_reentrant).cuda()
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(2):
            net(torch.randn(16384, 16, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    context = Context(build_ledger(gpu.trace), None)
    return [one for one in find_all(context) if one.id == "whole-checkpoint"], context.ledger.peak_bytes


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_all_layers_in_one(use_reentrant: bool) -> None:
    (finding,), peak = train(1, use_reentrant=use_reentrant)
    assert finding.evidence[0].source is not None and finding.evidence[0].source.endswith(" forward")
    _, peak_of_each = train(NUM_LAYERS, use_reentrant=use_reentrant)
    assert finding.num_bytes == pytest.approx(peak - peak_of_each, rel=0.15)


def test_half_of_the_layers() -> None:
    assert train(2)[0] == []
