"""What a verification found: plain data, without torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from memprof.version import __version__

SCHEMA = 1


@dataclass(frozen=True)
class Deviation:
    """How far original and fixed are from a float64 run, at the worst place of all seeds and cases.

    Args:
        remedy: its name.
        model: the model it was tried on.
        quantity: "loss", "gradients" or "parameters after N steps".
        case: where the worst place is.
        tensor: of which parameter; empty for the loss.
        original: largest absolute deviation of the model as it is.
        fixed: the same with the remedy.
        bound: what `fixed` may be.
    """

    remedy: str
    model: str
    quantity: str
    case: str
    tensor: str
    original: float
    fixed: float
    bound: float

    @property
    def passed(self) -> bool:
        """Within the bound; a deviation that is no number is not."""
        return self.fixed <= self.bound


@dataclass(frozen=True)
class Precision:
    """What lower precision does to the same model and inputs, against float32.

    Args:
        precision: "float16", "bfloat16" or "int8 weights".
        model: the model it was tried on.
        logits_max: largest deviation of a logit, over the largest logit.
        logits_rms: root mean square of the deviations, over that of the logits.
        argmax_agreement: share of positions whose likeliest token is the same, 0 to 1.
        layers_rms: as `logits_rms`, for the output of each layer.
        bound: what `logits_rms` may be.
    """

    precision: str
    model: str
    logits_max: float
    logits_rms: float
    argmax_agreement: float
    layers_rms: tuple[float, ...]
    bound: float

    @property
    def passed(self) -> bool:
        """Within the bound."""
        return self.logits_rms <= self.bound


@dataclass(frozen=True)
class Peak:
    """Simulated peak of a training step, in bytes: as the model is, and with the remedy."""

    remedy: str
    workload: str
    original_bytes: int
    fixed_bytes: int


@dataclass
class Verification:
    """All of it.

    Args:
        deviations: of the remedies that promise the same numbers.
        precisions: of those that do not.
        peaks: what each saves in one workload.
        skipped: remedy and model to the reason why it was not tried there.
    """

    deviations: list[Deviation] = field(default_factory=list)
    precisions: list[Precision] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)
    skipped: dict[tuple[str, str], str] = field(default_factory=dict)
    seeds: int = 0

    @property
    def passed(self) -> bool:
        """Everything that was tried is within its bound, and something was tried."""
        rows: list[Deviation | Precision] = [*self.deviations, *self.precisions]
        return bool(rows or self.peaks) and all(row.passed for row in rows)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values; sizes in bytes."""
        return {
            "schema": SCHEMA,
            "memprof_version": __version__,
            "command": "verify",
            "source": "measured on the CPU; peaks simulated",
            "passed": self.passed,
            "seeds": self.seeds,
            "deviations": [{**dataclasses.asdict(row), "passed": row.passed} for row in self.deviations],
            "precisions": [{**dataclasses.asdict(row), "passed": row.passed} for row in self.precisions],
            "peaks": [dataclasses.asdict(row) for row in self.peaks],
            "skipped": [
                {"remedy": remedy, "model": model, "reason": why} for (remedy, model), why in self.skipped.items()
            ],
        }
