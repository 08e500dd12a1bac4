"""A report is read back from what each tool wrote, without a network; only `make nightly` installs these tools."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import memprof
from memprof.integrations import loggers
from memprof.report.documents.report import Report
from memprof.units import GIB


@pytest.fixture(scope="module")
def report() -> Report:
    with memprof.virtual_gpu("rtx-4090") as gpu:
        layer = torch.nn.Linear(1024, 1024).cuda()
        layer(torch.zeros(64, 1024, device="cuda")).sum().backward()
    return gpu.report()


def test_values_are_in_gib_and_by_name(report: Report) -> None:
    values = loggers.collect_values(report)
    assert values["memprof/fits"] == 1
    assert values["memprof/peak_gib"] * GIB == report.peak.allocated_bytes
    assert values["memprof/at_peak_gib/parameters"] * GIB == (1024 * 1024 + 1024) * 4


@pytest.mark.nightly
def test_tensorboard(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="only make nightly installs it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        loggers.log_to_tensorboard(report, writer, step=3)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (peak,) = events.Scalars("memprof/peak_gib")
    assert peak.step == 3 and peak.value * GIB == pytest.approx(report.peak.allocated_bytes)
    (picture,) = events.Images("memprof/run")
    assert picture.width > 500
    (text,) = events.Tensors("memprof/report/text_summary")
    assert b"memprof: Fits" in text.tensor_proto.string_val[0]


@pytest.mark.nightly
def test_mlflow(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow", reason="only make nightly installs it")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    with mlflow.start_run() as run:
        loggers.log_to_mlflow(report)
    client = mlflow.MlflowClient()
    assert client.get_run(run.info.run_id).data.metrics["memprof/fits"] == 1
    names = {file.path for file in client.list_artifacts(run.info.run_id, "memprof")}
    assert {"memprof/run.png", "memprof/tensors.json"} <= names
    tensors = mlflow.load_table("memprof/tensors.json", run_ids=[run.info.run_id])
    assert list(tensors["bytes"]) == list(report.frames()["tensors"]["bytes"])


@pytest.mark.nightly
def test_wandb(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    wandb = pytest.importorskip("wandb", reason="only make nightly installs it")
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.delattr(matplotlib, "pyplot", raising=False)  # as in a program that has drawn nothing
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    run = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True))
    loggers.log_to_wandb(report, run)
    folder = Path(run.dir)
    assert run.summary["memprof/fits"] == 1
    run.finish()
    (table,) = folder.glob("media/table/memprof/tensors_*.table.json")
    columns, rows = (json.loads(table.read_text())[name] for name in ("columns", "data"))
    assert [row[columns.index("bytes")] for row in rows] == list(report.frames()["tensors"]["bytes"])
    assert list(folder.glob("media/images/memprof/run_*.png"))
