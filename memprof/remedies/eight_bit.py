"""8-bit-optimizer: AdamW of bitsandbytes or torchao, over what is trained."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from memprof.errors import UsageError
from memprof.remedies.applied import Changes
from memprof.remedies.optimizers import trained_parameters


def install(model: nn.Module, changes: Changes, *, learning_rate: float = 1e-4) -> None:
    """Make the optimizer; it is the result of this remedy.

    Raises:
        UsageError: neither package is installed, or nothing is trained.
    """
    parameters = trained_parameters(model, changes.remedy)
    package, make = _find()
    changes.result(make(parameters, lr=learning_rate))
    changes.note(f"AdamW8bit of {package} for {len(parameters)} parameters; step it in place of the optimizer")


def _find() -> tuple[str, Callable[..., Any]]:
    for package in ("bitsandbytes", "torchao"):
        try:
            return package, importlib.import_module(f"{package}.optim").AdamW8bit
        except (ImportError, AttributeError):
            continue
    raise UsageError(
        "8-bit-optimizer needs bitsandbytes or torchao",
        value="neither is installed",
        hint="pip install bitsandbytes, or pip install torchao",
    )
