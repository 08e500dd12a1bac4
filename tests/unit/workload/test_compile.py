"""`--compile`: the model as a whole, or its layers, as torch.compile makes them on the virtual GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.errors import UsageError
from memprof.flows.profile import profile
from memprof.spec import TargetSpec
from tests.lanes import by_day

MODEL = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)) ** 2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def memprof_inputs(self, batch_size, context_length):
        return {"x": torch.zeros(batch_size, context_length, 512)}

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:Model"


@pytest.mark.parametrize("layers", by_day([False, True], False))
def test_a_compiled_model_makes_fewer_tensors_and_they_are_of_its_modules(model: str, layers: bool) -> None:
    pytest.importorskip("triton", reason="Inductor writes no kernels for a GPU without it")
    asked = TargetSpec(model=model, batch_size=8, context_length=512)
    eager, _ = profile(asked)
    compiled = TargetSpec(model=model, batch_size=8, context_length=512, compile=True, compile_layers=layers)
    trace, _ = profile(compiled)
    assert len(trace.storages) < len(eager.storages)
    assert not any("runs eagerly" in line for line in trace.assumptions)
    made = {trace.modules[s.module].path for s in trace.storages if s.num_bytes == 4 * 8 * 512 * 2048}
    assert {f"layers.{at}.up" for at in range(3)} <= made


def test_how_to_compile_is_for_what_is_compiled(model: str) -> None:
    with pytest.raises(UsageError, match="nothing is to be compiled"):
        TargetSpec(model=model, compile_layers=True)
    with pytest.raises(UsageError, match="not compiled here"):
        TargetSpec(model=model, compile=True, parallel="ddp", gpus=2)
