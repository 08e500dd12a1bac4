"""Training steps are measured by stage, by torch's counters on a virtual GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import memprof
from memprof.integrations.steps import StepMeter
from memprof.units import MIB
from tests.unit.test_out_of_memory import fill, small_gpu

FORWARD, BACKWARD, OPTIMIZER = 64, 32, 128  # MiB that each takes for a moment


def take(num_mib: int) -> torch.Tensor:
    return torch.empty(num_mib * MIB, dtype=torch.uint8, device="cuda")


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, data):
        take(FORWARD)
        return data * 2

    @staticmethod
    def backward(ctx, gradient):
        take(BACKWARD)
        return gradient * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, device="cuda"))

    def forward(self) -> torch.Tensor:
        return Scale.apply(self.weight)


class Optimizer(torch.optim.Optimizer):
    def step(self, closure=None):
        take(OPTIMIZER)


@pytest.fixture(autouse=True)
def nothing_measures() -> Iterator[None]:
    yield
    if StepMeter._active is not None:
        StepMeter._active.stop()
    StepMeter._has_said_no_gpu = False


def mib(figures: dict[str, float]) -> dict[str, float]:
    return {
        name.removeprefix("memprof/").removesuffix("_gib"): round(value * 1024)
        for name, value in figures.items()
        if name.endswith("_gib")
    }


def test_each_stage_has_its_peak_and_a_step_its_growth() -> None:
    kept = []
    with memprof.virtual_gpu("rtx-4090"):
        meter, model = StepMeter(snapshot=None), Model()
        meter.start(model)
        optimizer = Optimizer(model.parameters(), {})
        for step in range(3):
            for _ in range(2):  # micro-batches
                model().sum().backward()
            if step:
                kept.append(take(8))
            optimizer.step()
        with torch.no_grad():
            model()
        figures = meter.read()
        meter.stop()
        again = meter.read()
    assert figures.pop("memprof/growth_mib_per_step") == 8
    assert mib(figures) == {
        "peak": OPTIMIZER + 16, "forward_peak": FORWARD + 8, "backward_peak": BACKWARD + 8,
        "optimizer_peak": OPTIMIZER + 16, "other_peak": 16, "inference_peak": FORWARD + 16,
        "reserved": 2 + FORWARD + OPTIMIZER, "allocated": 16,
    }  # fmt: skip
    assert not again and not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_without_a_model_forward_and_backward_are_one_stage() -> None:
    with memprof.virtual_gpu("rtx-4090"):
        meter, model = StepMeter(snapshot=None), Model()
        meter.start()
        model().sum().backward()
        Optimizer(model.parameters(), {}).step()
        peaks = mib(meter.read())
    assert peaks["forward_and_backward_peak"] == FORWARD and peaks["optimizer_peak"] == OPTIMIZER
    assert "forward_peak" not in peaks and "growth_mib_per_step" not in peaks


def test_an_optimizer_in_an_optimizer_is_one_step_and_a_closure_keeps_its_stages() -> None:
    class Outer(Optimizer):
        def step(self, closure=None):
            closure()
            inner.step()

    kept = []

    def closure() -> None:
        meter.begin_forward()
        model().sum().backward()
        kept.append(take(8))

    with memprof.virtual_gpu("rtx-4090"):
        meter, model = StepMeter(snapshot=None), Model()
        inner, outer = Optimizer(model.parameters(), {}), Outer(model.parameters(), {})
        meter.start(model)
        for _ in range(3):
            meter.begin_forward()
            outer.step(closure)
        figures = meter.read()
    assert figures["memprof/growth_mib_per_step"] == 8
    assert mib(figures)["forward_peak"] < mib(figures)["optimizer_peak"]


def test_a_second_meter_ends_the_first() -> None:
    with memprof.virtual_gpu("rtx-4090"):
        first, second = StepMeter(snapshot=None), StepMeter(snapshot=None)
        first.start()
        second.start()
        assert not first.read() and second.read()


def test_a_gpu_that_has_ended_is_no_error(tmp_path: Path) -> None:
    meter = StepMeter(tmp_path / "oom.pickle")
    with memprof.virtual_gpu("rtx-4090"):
        meter.start()
        meter.read()
    layer = nn.Linear(2, 2)
    torch.optim.SGD(layer.parameters()).step()
    assert not meter.read()
    meter.stop()


def test_without_a_gpu_it_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        meter = StepMeter(snapshot=None)
        meter.start(nn.Linear(2, 2))
        assert not meter.read()
    assert capsys.readouterr().err.count("no GPU") == 1


def test_an_uncaught_error_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook, path = sys.excepthook, tmp_path / "oom.pickle"
    with small_gpu():
        meter = StepMeter(path)
        meter.start()
        with pytest.raises(torch.OutOfMemoryError) as caught:
            fill(1024)
        sys.excepthook(caught.type, caught.value, caught.tb)
    told = capsys.readouterr().err
    assert "Ran out of memory" in told and "OutOfMemoryError" in told  # ... and the traceback
    assert path.exists() and sys.excepthook is hook


@pytest.mark.nightly
def test_it_takes_less_than_a_fiftieth_of_a_step_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five stages a step, with counters of the size that torch answers with, beside a small step."""
    kinds = ("all", "small_pool", "large_pool")
    monkeypatch.setattr(
        "torch.cuda.memory_stats_as_nested_dict",
        lambda: {
            name: {kind: dict.fromkeys(("current", "peak", "allocated", "freed"), 0) for kind in kinds}
            for name in ("allocated_bytes", "reserved_bytes", *map(str, range(9)))
        },
    )
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    layer, data = nn.Linear(1024, 1024), torch.zeros(1024, 1024)
    layer(data).sum().backward()
    begin = time.process_time()
    layer(data).sum().backward()
    step_seconds = time.process_time() - begin
    meter = StepMeter(snapshot=None)
    begin = time.process_time()
    for _ in range(500):
        meter._record_stage()
    assert (time.process_time() - begin) / 100 < step_seconds / 50
