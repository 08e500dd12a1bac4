"""A report in Weights & Biases, MLflow and TensorBoard: its figures as values, its tables, and its picture."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

from memprof.report.documents.report import Report
from memprof.report.export.image import draw_run
from memprof.report.export.markdown import to_markdown
from memprof.units import GIB


def log_to_wandb(report: Report, run: Any) -> None:
    """Log a report to a run of Weights & Biases (`wandb.init()`); the picture needs matplotlib.

    Values are in the run's summary, so that they do not count as a step.

    Raises:
        UsageError: matplotlib is not installed, or the report has no memory over time.
    """
    import wandb

    tables = {f"memprof/{name}": wandb.Table(dataframe=frame) for name, frame in _list_tables(report)}
    with tempfile.TemporaryDirectory() as folder:
        # A file: of a figure, wandb.Image looks at matplotlib.pyplot, which nobody may have imported.
        path = os.path.join(folder, "run.png")
        draw_run(report).savefig(path)
        run.summary.update(collect_values(report))
        run.log({**tables, "memprof/run": wandb.Image(path)})


def log_to_mlflow(report: Report, run_id: str | None = None) -> None:
    """Log a report to a run of MLflow, by default the active one; the picture needs matplotlib.

    Raises:
        UsageError: matplotlib is not installed, or the report has no memory over time.
    """
    import mlflow

    client, run_id = mlflow.MlflowClient(), run_id or mlflow.active_run().info.run_id
    client.log_figure(run_id, draw_run(report), "memprof/run.png")
    for name, value in collect_values(report).items():
        client.log_metric(run_id, name, value)
    for name, frame in _list_tables(report):
        client.log_table(run_id, frame, f"memprof/{name}.json")


def log_to_tensorboard(report: Report, writer: Any, step: int = 0) -> None:
    """Log a report to a `torch.utils.tensorboard.SummaryWriter`; the picture needs matplotlib.

    TensorBoard has no tables: the first screen is a text.

    Raises:
        UsageError: matplotlib is not installed, or the report has no memory over time.
    """
    writer.add_figure("memprof/run", draw_run(report), step)
    for name, value in collect_values(report).items():
        writer.add_scalar(name, value, step)
    writer.add_text("memprof/report", to_markdown(report), step)


def collect_values(report: Report) -> dict[str, float]:
    """Return the sizes of a report in GiB by name, and `memprof/fits`: 1.0 or 0.0, missing without a verdict.

    No name is another one's folder: MLflow keeps them as files.
    """
    peak, verdict = report.peak, report.verdict
    sizes = {"peak": peak.allocated_bytes, "reserved": peak.reserved_bytes, "required": verdict.required_bytes}
    values = {f"memprof/{name}_gib": size / GIB for name, size in sizes.items() if size is not None}
    values |= {f"memprof/at_peak_gib/{category}": size / GIB for category, size in peak.categories.items()}
    return values if verdict.fits is None else values | {"memprof/fits": float(verdict.fits)}


def _list_tables(report: Report) -> Iterator[tuple[str, Any]]:
    """Yield name and pandas data frame of each table that has rows; unknown values are None, as wandb needs them."""
    for name, frame in report.frames().items():
        if len(frame):
            yield name, frame.astype(object).where(frame.notna(), None)
