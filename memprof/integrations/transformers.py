"""`MemprofCallback` for the `Trainer` of transformers, and those of TRL."""

from __future__ import annotations

import os
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memprof.integrations.steps import DEFAULT_SNAPSHOT, StepMeter


class MemprofCallback(TrainerCallback):
    """Adds measured memory to everything that a `Trainer` logs (`StepMeter.read` has the names).

    `MemprofCallback.add_to(trainer)` places it before the callbacks that report to Weights & Biases and others, so that
    they get the figures too. With `Trainer(callbacks=[MemprofCallback()])`, which places it behind them, the figures
    are in `trainer.state.log_history` and in what the trainer prints.

    Args:
        snapshot: the snapshot that an out-of-memory error leaves (`StepMeter`); None: none.

    Raises:
        UsageError: `snapshot` cannot be written, or is another file than a snapshot.
    """

    def __init__(self, snapshot: str | os.PathLike[str] | None = DEFAULT_SNAPSHOT) -> None:
        self._meter = StepMeter(snapshot)

    @classmethod
    def add_to(cls, trainer: Trainer, snapshot: str | os.PathLike[str] | None = DEFAULT_SNAPSHOT) -> None:
        """Add a callback to `trainer`, before all others."""
        trainer.callback_handler.callbacks.insert(0, cls(snapshot))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Begin to measure."""
        self._meter.start(model)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add what was measured since the last log to `logs`, and to the trainer's history."""
        figures = self._meter.read()
        state.log_history[-1].update(figures)  # which has a copy of `logs`
        if logs is not None:
            logs.update(figures)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop measuring."""
        self._meter.stop()
