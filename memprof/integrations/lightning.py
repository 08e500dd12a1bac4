"""`MemprofCallback` for the `Trainer` of Lightning."""

from __future__ import annotations

import os
from typing import Any

from memprof.integrations.steps import DEFAULT_SNAPSHOT, StepMeter

try:
    from lightning.pytorch import Callback
except ImportError:  # the older package, with the same classes
    from pytorch_lightning import Callback


class MemprofCallback(Callback):
    """Adds measured memory to the loggers of a trainer, every `log_every_n_steps` (`StepMeter.read` has the names).

    Args:
        snapshot: the snapshot that an out-of-memory error leaves (`StepMeter`); None: none.

    Raises:
        UsageError: `snapshot` cannot be written, or is another file than a snapshot.
    """

    def __init__(self, snapshot: str | os.PathLike[str] | None = DEFAULT_SNAPSHOT) -> None:
        self._meter = StepMeter(snapshot)
        self._logged_step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to measure. The trainer calls `training_step` and not the module itself: its forward is not seen."""
        self._meter.start()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin the stage of the forward."""
        self._meter.begin_forward()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Begin the stage of the backward."""
        self._meter.begin_backward()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Begin the stage of the optimizer."""
        self._meter.begin_optimizer()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what was measured since the last log, where the trainer logs too."""
        step = trainer.global_step
        if step != self._logged_step and step % trainer.log_every_n_steps == 0:
            self._logged_step = step  # with accumulated gradients, several batches are one step
            if figures := self._meter.read():
                for logger in trainer.loggers:
                    logger.log_metrics(figures, step=step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Explain an out-of-memory error."""
        self._meter.explain(exception)
        self._meter.stop()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop measuring."""
        self._meter.stop()
