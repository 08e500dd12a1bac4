"""Each callback puts what was measured into the logs of its trainer."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import memprof
from memprof.integrations.steps import StepMeter
from tests.unit.test_out_of_memory import small_gpu

STAGES = {"memprof/forward_peak_gib", "memprof/backward_peak_gib", "memprof/optimizer_peak_gib"}
FIGURES = STAGES | {"memprof/peak_gib", "memprof/reserved_gib", "memprof/allocated_gib"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


def make_trainer(folder: Path, **options):
    from transformers import Trainer, TrainingArguments

    data = [{"x": torch.zeros(256), "labels": torch.zeros(1)} for _ in range(8)]
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, logging_steps=2, report_to="none", disable_tqdm=True,
        save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    return Trainer(model=Model(), args=arguments, train_dataset=data, **options)


def test_transformers(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from memprof.integrations.transformers import MemprofCallback

    logged = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others):
            logged.append(set(logs))

    with memprof.virtual_gpu("rtx-4090"):
        trainer = make_trainer(tmp_path, callbacks=[Reporter()])
        MemprofCallback.add_to(trainer, snapshot=tmp_path / "oom.pickle")
        trainer.train()
    history = trainer.state.log_history
    assert history[0].keys() >= FIGURES and history[1]["memprof/growth_mib_per_step"] == 0
    assert logged[0] >= FIGURES
    assert StepMeter._active is None and not (tmp_path / "oom.pickle").exists()


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.loggers import CSVLogger

    from memprof.integrations.lightning import MemprofCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(256, 256)

        def training_step(self, batch, index):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    with memprof.virtual_gpu("rtx-4090"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger = CSVLogger(tmp_path)
        trainer = lightning.Trainer(
            accelerator="gpu", devices=1, max_epochs=1, logger=logger, log_every_n_steps=2, enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False, accumulate_grad_batches=2,
            callbacks=[MemprofCallback(snapshot=None)],
        )  # fmt: skip
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(16, 256), batch_size=2))
    rows = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["2", "4"] and rows[0].keys() >= FIGURES
    # The optimizer's step calls the forward: it is measured before its state is made.
    assert float(rows[0]["memprof/forward_peak_gib"]) < float(rows[0]["memprof/optimizer_peak_gib"])
    assert StepMeter._active is None


def test_lightning_explains_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pytorch_lightning")
    from memprof.integrations.lightning import MemprofCallback

    with small_gpu():
        callback = MemprofCallback(tmp_path / "oom.pickle")
        callback.on_train_start(None, None)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(1 << 31, device="cuda")
        callback.on_exception(None, None, caught.value)
    assert "Ran out of memory" in capsys.readouterr().err and (tmp_path / "oom.pickle").exists()


def test_accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    from memprof.integrations.accelerate import MemprofTracker

    class Other(GeneralTracker):
        name, requires_logging_directory, tracker = "other", False, None

        def log(self, values, step=None, **others):
            logged.append(dict(values))

    logged: list[dict[str, float]] = []
    with memprof.virtual_gpu("rtx-4090"):
        model = Model()
        accelerator = Accelerator(log_with=[MemprofTracker(model, snapshot=None), Other()])
        accelerator.init_trackers("project")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for step in range(2):
            accelerator.backward(model(torch.zeros(2, 256, device="cuda"))["loss"])
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": 0.0}, step=step)
        accelerator.end_training()
    assert logged[0].keys() >= FIGURES | {"loss"} and logged[1]["memprof/growth_mib_per_step"] == 0
    assert StepMeter._active is None


def test_metric_loggers_of_torchtitan_and_torchtune() -> None:
    from memprof.integrations.metric_logger import MetricLogger

    class Logger:
        def __init__(self) -> None:
            self.calls: list[tuple[object, ...]] = []

        def log(self, *arguments):
            self.calls.append(arguments)

        log_dict = log_config = log

        def close(self):
            self.calls.append(("closed",))

    inner = Logger()
    with memprof.virtual_gpu("rtx-4090"):
        logger = MetricLogger(inner, snapshot=None)
        logger.log({"loss": 1.0}, 1)  # torchtitan
        logger.log("loss", 1.0, 1)  # torchtune
        logger.log_dict({"loss": 1.0}, 2)
        logger.log_config({"model": "llama"})
        logger.close()
    first, second, third, *others = inner.calls
    assert first[0].keys() > {"loss", "memprof/peak_gib"} and first[1] == 1
    assert second == ("loss", 1.0, 1)
    assert third[0].keys() > {"loss", "memprof/peak_gib"} and third[1] == 2
    assert others == [({"model": "llama"},), ("closed",)]
