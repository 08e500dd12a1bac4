"""micro-batch: the gradients of the parts add up to those of the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import memprof
from memprof.errors import UsageError
from tests.unit.fixes import models


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step_of(model: nn.Module, **options: object):
    return memprof.apply(model, "micro-batch", **options).results["micro-batch"]


def assert_alike(model: nn.Module, twin: nn.Module, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """transformers computes its losses in float32, also of a float64 model."""
    wanted = gradients(model)
    assert wanted
    torch.testing.assert_close(gradients(twin), wanted, rtol=rtol, atol=atol)


def uneven(rows: int = 5, tokens: int = 11, ignored: int = -100) -> dict[str, torch.Tensor]:
    """Rows of which very different shares of labels count; one has none, and the first labels differ."""
    torch.manual_seed(3)
    ids = torch.randint(0, models.VOCAB, (rows, tokens))
    labels = ids.clone()
    labels[torch.rand(rows, tokens) < torch.linspace(0, 1, rows)[:, None]] = ignored
    labels[1, 0] = ignored
    labels[-1] = ignored
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_gradients_of_language_models(name, size):
    model = models.MODELS[name]().double()
    twin, batch = copy.deepcopy(model), uneven()
    wanted = model(**batch).loss
    wanted.backward()
    torch.testing.assert_close(step_of(twin, micro_batch_size=size)(**batch), wanted.detach(), rtol=1e-6, atol=0)
    assert_alike(model, twin)


@pytest.mark.parametrize("by_position", [True, False])
def test_a_model_that_compares_with_the_same_label(by_position):
    model = models.Handwritten().double()
    twin, batch = copy.deepcopy(model), uneven(ignored=-1)
    pair = (batch["input_ids"], batch["labels"])
    wanted = model(*pair)[1]
    wanted.backward()
    step = step_of(twin, ignore_index=-1, micro_batch_size=2)
    found = step(*pair) if by_position else step(idx=pair[0], targets=pair[1])
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=0)
    assert_alike(model, twin, rtol=1e-10, atol=1e-13)


def test_gradients_are_added_and_a_scaler_is_used():
    model = models.llama().double()
    twin, batch = copy.deepcopy(model), uneven()
    step = step_of(twin, micro_batch_size=2)
    step.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        model(**batch).loss.mul(8.0).backward()
        step(**batch)
    assert_alike(model, twin)


def test_sums_over_items_are_added():
    model = models.llama().double()
    twin, batch = copy.deepcopy(model), {**uneven(), "num_items_in_batch": 17}
    wanted = model(**batch).loss
    wanted.backward()
    torch.testing.assert_close(step_of(twin)(**batch), wanted.detach(), rtol=1e-6, atol=0)
    assert_alike(model, twin)


def test_all_labels_ignored():
    """No number, and no gradient, as of the whole batch."""
    model = models.llama().double()
    twin, batch = copy.deepcopy(model), models.batch()
    batch["labels"].fill_(-100)
    assert model(**batch).loss.isnan()
    model(**batch).loss.backward()
    assert step_of(twin)(**batch).isnan()
    assert_alike(model, twin)


def test_a_loss_of_ones_own_over_rows():
    model = nn.Linear(4, 3).double()
    twin = copy.deepcopy(model)
    torch.manual_seed(0)
    x, y = torch.randn(7, 4).double(), torch.randn(7, 3).double()

    class WithTarget(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, goal):
            return self.inner(x), goal

    functional.mse_loss(model(x), y).backward()
    step = step_of(WithTarget(twin), micro_batch_size=3, loss=lambda out, batch: functional.mse_loss(*out))
    step(x, goal=y)
    torch.testing.assert_close(twin.weight.grad, model.weight.grad, rtol=1e-12, atol=0)


def test_with_chunked_loss_and_checkpointing():
    model = models.llama().double()
    twin, batch = copy.deepcopy(model), uneven()
    model(**batch).loss.backward()
    names = ["chunked-loss", "activation-checkpointing", "micro-batch"]
    memprof.apply(twin, names, chunk_size=4, micro_batch_size=2).results["micro-batch"](**batch)
    # The chunked loss sums in float32.
    wanted = gradients(model)
    torch.testing.assert_close(gradients(twin), wanted, rtol=1e-5, atol=1e-8)


def test_the_peak_shrinks():
    def peak(split):
        with memprof.virtual_gpu("h100-80gb") as gpu:
            model = models.llama(vocab_size=8_000).to("cuda")
            batch = {name: torch.zeros(8, 512, dtype=torch.int64, device="cuda") for name in ("input_ids", "labels")}
            if split:
                step_of(model, micro_batch_size=1)(**batch)
            else:
                model(**batch).loss.backward()
        return gpu.report().peak.allocated_bytes

    whole, split = peak(False), peak(True)
    assert whole > 8 * 512 * 8_000 * 4 * 2
    assert split < whole / 4  # workspaces and weights stay


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    def forward(self, x):
        return self.features(x)


@pytest.mark.parametrize(
    ("model", "given", "problem"),
    [
        (Normalised(), {}, "features.1 (BatchNorm2d)"),
        (nn.Linear(2, 2), {"micro_batch_size": 0}, "at least 1"),
        (nn.Linear(2, 2), {"micro_batch_size": True}, "at least 1"),
        (nn.Linear(2, 2), {"loss": "mse"}, "must be a function"),
    ],
)
def test_wrong_use(model, given, problem):
    with pytest.raises(UsageError) as raised:
        memprof.apply(model, "micro-batch", **given)
    assert problem in str(raised.value)


def test_what_cannot_be_told():
    with pytest.raises(UsageError, match="have no loss"):
        step_of(nn.Linear(2, 2))(torch.zeros(3, 2))
    with pytest.raises(UsageError, match="needs a batch with rows"):
        step_of(nn.Linear(2, 2))()

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 5)

        def forward(self, x, labels):
            return (self.embed(x).gather(-1, labels[..., None]).mean(),)

    ids = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(UsageError, match="which labels the loss counts"):
        step_of(Own())(ids, labels=ids)
    assert step_of(Own(), shift_labels=False)(ids, labels=ids).isfinite()
    with pytest.raises(UsageError, match="do not go together"):
        memprof.apply(Own(), ["micro-batch", "optimizer-in-backward"], optimizer=torch.optim.SGD)
