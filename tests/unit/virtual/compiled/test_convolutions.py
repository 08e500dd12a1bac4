"""Convolutions that are compiled: in the layouts that cuDNN gives on a GPU, which Inductor's code checks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.virtual.device_properties import DeviceProperties
from tests.lanes import by_day

pytest.importorskip("triton", reason="Inductor writes no kernels for a GPU without it")

GPU = find_gpu("a100-80gb")


class Images(nn.Module):
    """Each kind that has a rule of its own: many channels, depthwise, transposed, over one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, 4)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.norm = nn.BatchNorm2d(32)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.line = nn.Conv1d(16, 4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        states = self.stem(images)
        states = torch.relu(self.norm(states + self.depthwise(states)))
        return self.line(self.up(states).flatten(2)).mean()


def trained(*, compiled: bool, channels_last: bool) -> tuple[int, list[str]]:
    """Most bytes of tensors in two steps, and what the run says of code that was not compiled."""
    with VirtualGpu(GPU) as gpu:
        model = Images().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        called = torch.compile(model) if compiled else model
        for _ in range(2):
            images = torch.randn(16, 3, 64, 64, device="cuda")
            if channels_last:
                images = images.to(memory_format=torch.channels_last)
            called(images).backward()
            optimizer.step()
            optimizer.zero_grad()
        assumed = [line for line in gpu.trace.assumptions if "runs eagerly" in line]
        return torch.cuda.max_memory_allocated(), assumed


@pytest.mark.parametrize("channels_last", by_day([False, True]))
def test_a_model_of_images_trains_compiled(channels_last: bool) -> None:
    """Inductor lays images out with their channels last; what a convolution then gives has to be so, too."""
    peak, eager = trained(compiled=True, channels_last=channels_last)
    assert not eager
    assert 0 < peak < 1.25 * trained(compiled=False, channels_last=channels_last)[0]


def test_the_gpu_says_which_layout_its_kernels_give() -> None:
    from torch._subclasses import FakeTensorMode

    from memprof.patching import PatchSet
    from memprof.virtual.compiled import convolution_formats

    strides = {}
    own = PatchSet()
    own.apply_all(convolution_formats.patches(DeviceProperties.from_gpu(GPU)))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            for name, groups, dtype in (("dense", 1, torch.float32), ("double", 1, torch.float64)):
                images = torch.empty(2, 8, 6, 6, dtype=dtype, device="cuda").to(memory_format=torch.channels_last)
                weight = torch.empty(8, 8 // groups, 3, 3, dtype=dtype, device="cuda")
                strides[name] = torch.conv2d(images, weight, groups=groups).stride()
    finally:
        own.undo()
    assert strides == {"dense": (128, 1, 32, 8), "double": (128, 16, 4, 1)}
