"""`MemprofTracker` for `Accelerator(log_with=...)`."""

from __future__ import annotations

import os
from typing import Any

from accelerate.tracking import GeneralTracker
from torch import nn

from memprof.integrations.steps import DEFAULT_SNAPSHOT, StepMeter


class MemprofTracker(GeneralTracker):
    """Adds measured memory to the values that `accelerator.log` gets, for all trackers that follow in `log_with`.

    `Accelerator(log_with=[MemprofTracker(model), "tensorboard"])`; `StepMeter.read` has the names of the values.

    Args:
        model: the model, whose forward is told from the backward; None: both are one stage.
        snapshot: the snapshot that an out-of-memory error leaves (`StepMeter`); None: none.

    Raises:
        UsageError: `snapshot` cannot be written, or is another file than a snapshot.
    """

    name = "memprof"
    requires_logging_directory = False

    def __init__(
        self, model: nn.Module | None = None, snapshot: str | os.PathLike[str] | None = DEFAULT_SNAPSHOT
    ) -> None:
        super().__init__()
        self._model = model
        self._meter = StepMeter(snapshot)

    @property
    def tracker(self) -> StepMeter:
        """Return what measures."""
        return self._meter

    def start(self) -> None:
        """Begin to measure; `accelerator.init_trackers` calls it."""
        self._meter.start(self._model)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Add what was measured since the last call to `values`."""
        values.update(self._meter.read())

    def finish(self) -> None:
        """Stop measuring; `accelerator.end_training` calls it."""
        self._meter.stop()
