"""`memprof.profile` of a function: what it runs on, what it is given, what is returned and raised."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memprof
from memprof.errors import RunFailedError, UsageError
from memprof.ledger.ledger import EmptyTraceError
from memprof.spec import TargetSpec

MIB = 1 << 20
WEIGHT = 1024 * 1024 * 4


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict, scale: float = 1.0) -> None:
    assert batch["x"].device == torch.device("cuda", 0) == next(model.parameters()).device
    (model(batch["x"]).sum() * scale).backward()
    optimizer.step()
    optimizer.zero_grad()


def parts() -> tuple[nn.Module, torch.optim.Optimizer, dict]:
    model = nn.Linear(1024, 1024, bias=False)
    return model, torch.optim.AdamW(model.parameters()), {"x": torch.ones(256, 1024)}


def test_arguments_are_copied_to_the_gpu() -> None:
    model, optimizer, batch = parts()
    before = model.weight.detach().clone()
    document = memprof.profile(train_step, model, optimizer, batch, scale=0.5, gpu="rtx-4090", steps=3)
    assert document.device.name == "NVIDIA GeForce RTX 4090"
    assert [row.step for row in document.steps] == [1, 2, 3]
    assert document.model_state.parameters_bytes == document.model_state.gradients_bytes == WEIGHT
    assert document.model_state.optimizer_state_bytes >= 2 * WEIGHT
    # What was given is as it was.
    assert model.weight.device.type == "cpu" and torch.equal(model.weight, before)
    assert not optimizer.state and batch["x"].device.type == "cpu"


def test_state_of_an_optimizer_that_has_stepped_comes_along() -> None:
    model, optimizer, batch = parts()
    model(batch["x"]).sum().backward()
    optimizer.step()
    document = memprof.profile(train_step, model, optimizer, batch)
    assert not [finding for finding in document.findings if finding.id == "device-mismatch"]
    assert document.model_state.optimizer_state_bytes >= 2 * WEIGHT
    assert optimizer.state[model.weight]["exp_avg"].device.type == "cpu"


def test_a_gpu_by_its_capacity() -> None:
    document = memprof.profile(lambda: torch.empty(2000 * MIB, dtype=torch.uint8, device="cuda"), vram="2GiB")
    assert document.device.total_bytes == 2 << 30 and document.verdict.fits is False


@pytest.mark.slow
@pytest.mark.nightly
def test_growth_is_found() -> None:
    kept = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> None:
        out = model(batch["x"])
        out.sum().backward()
        optimizer.step()
        kept.append(out)

    document = memprof.profile(step, *parts(), steps=4)
    (finding,) = (finding for finding in document.findings if finding.id == "memory-growth")
    assert "list `kept`" in finding.title


def test_what_the_function_raises_comes_with_the_report() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> None:
        train_step(model, optimizer, batch)
        raise KeyError("labels")

    with pytest.raises(RunFailedError, match="the function raised KeyError") as raised:
        memprof.profile(step, *parts())
    assert isinstance(raised.value.__cause__, KeyError)
    assert raised.value.document.failure.error == "KeyError" and raised.value.trace.failure is not None
    with pytest.raises(RunFailedError) as early:
        memprof.profile(lambda: 1 // 0)
    assert early.value.document is None


def test_a_specification_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr("memprof.api.profile_spec", lambda *given: seen.append(given) or ("trace", "document"))
    spec = TargetSpec(model="gpt2")
    assert memprof.profile(spec, print) == ("trace", "document")
    assert seen == [(spec, print)]


def test_wrong_use() -> None:
    with pytest.raises(UsageError, match="nothing that could be profiled"):
        memprof.profile("gpt2")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="steps=0"):
        memprof.profile(print, steps=0)
    with pytest.raises(UsageError, match="unknown GPU"):
        memprof.profile(print, gpu="rtx-4909")
    with pytest.raises(UsageError, match="cannot be copied"):
        memprof.profile(print, (number for number in range(3)))
    with pytest.raises(EmptyTraceError):
        memprof.profile(lambda: None)
