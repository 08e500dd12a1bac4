"""`MetricLogger` around a metric logger in the style of torchtitan or torchtune, or any object with `log`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from memprof.integrations.steps import DEFAULT_SNAPSHOT, StepMeter


class MetricLogger:
    """Adds measured memory to the metrics that pass through it to another logger (`StepMeter.read` has the names).

    It has the methods of that logger. `log(metrics, step)` is that of torchtitan's `BaseLogger`
    (torchtitan/components/metrics.py), `log_dict(payload, step)` that of torchtune's `MetricLoggerInterface`
    (torchtune/training/metric_logging.py).

    Args:
        logger: the logger that writes.
        model: the model, whose forward is told from the backward; None: both are one stage.
        snapshot: the snapshot that an out-of-memory error leaves (`StepMeter`); None: none.

    Raises:
        UsageError: `snapshot` cannot be written, or is another file than a snapshot.
    """

    def __init__(
        self,
        logger: Any,
        model: nn.Module | None = None,
        snapshot: str | os.PathLike[str] | None = DEFAULT_SNAPSHOT,
    ) -> None:
        self._logger = logger
        self._meter = StepMeter(snapshot)
        self._meter.start(model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def log(self, metrics: Any, *others: Any, **named: Any) -> None:
        """Log `metrics` with what was measured since the last call; a single value is passed on as it is."""
        metrics = {**metrics, **self._meter.read()} if isinstance(metrics, Mapping) else metrics
        self._logger.log(metrics, *others, **named)

    def log_dict(self, payload: Mapping[str, Any], *others: Any, **named: Any) -> None:
        """Log `payload` with what was measured since the last call."""
        self._logger.log_dict({**payload, **self._meter.read()}, *others, **named)

    def close(self) -> None:
        """Stop measuring, and close the other logger."""
        self._meter.stop()
        self._logger.close()
