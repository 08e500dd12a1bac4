"""Fix 8-bit-optimizer: AdamW8bit of bitsandbytes or torchao for the trained parameters."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from memprof.errors import not_installed
from memprof.fixes.applied import Changes
from memprof.fixes.catalog.fix import Fix, Numerics, Tier
from memprof.fixes.optimizers import list_trained_parameters


@Fix(
    name="8-bit-optimizer", order=250, numerics=Numerics.APPROXIMATE, saves=("optimizer state",),
    changes="use an AdamW whose two states take one byte per parameter each",
    in_code="use bitsandbytes.optim.AdamW8bit, whose two states take one byte per parameter each",
    cost="states are quantized in blocks",
    options={"learning_rate": "1e-4 if not given"},
    packages=("bitsandbytes or torchao",), training_only=True, bench="optimizer",
    conflicts={"optimizer-in-backward": "give that the 8-bit optimizer: optimizer=bitsandbytes.optim.AdamW8bit"},
    edit="memprof.fixes.spec_edits:set_8_bit_optimizer", detect=lambda spec: "8bit" in spec.optimizer,
    ladder_order=110, search_order=110, tiers=(Tier.QUANTIZED_STATES,),
    helps={"doctor: parameters": 20, "doctor: smaller": 40},
)  # fmt: skip
def install(model: nn.Module, changes: Changes, *, learning_rate: float = 1e-4) -> None:
    """Create the optimizer as the fix's result.
    Raises UsageError if neither package is installed, or no parameter is trained."""
    parameters = list_trained_parameters(model, changes.fix)
    package, optimizer_class = _find_adamw8bit()
    changes.result(optimizer_class(parameters, lr=learning_rate))
    changes.note(f"AdamW8bit of {package} for {len(parameters)} parameters; step it in place of the optimizer")


def _find_adamw8bit() -> tuple[str, Callable[..., Any]]:
    for package in ("bitsandbytes", "torchao"):
        try:
            return package, importlib.import_module(f"{package}.optim").AdamW8bit
        except (ImportError, AttributeError):
            continue
    raise not_installed("8-bit-optimizer needs bitsandbytes or torchao", "neither is installed", "bitsandbytes")
