"""The result of `memprof verify`, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memprof.trace.json_values import JsonValue, json_name
from memprof.version import __version__

SCHEMA = 2  # 2: names (old_names.py)


class _BoundedRow(JsonValue):
    """Base of a row with a measured deviation and its upper bound."""

    @property
    def passed(self) -> bool:
        """Return whether the result is within its bound."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values, including `passed`."""
        return {**super().to_json(), "passed": self.passed}


@dataclass(frozen=True)
class Deviation(_BoundedRow):
    """The largest deviation of the original and the fixed model from a float64 run, over all seeds and cases."""

    fix: str  # Name of the fix.
    model: str  # Name of the model.
    quantity: str  # "loss", "gradients" or "parameters after N steps".
    case: str  # Case with the largest deviation.
    tensor: str  # Parameter with the largest deviation; empty for the loss.
    original: float  # Largest absolute deviation of the unchanged model.
    fixed: float  # Largest absolute deviation with the fix.
    bound: float  # Upper bound of `fixed`.

    @property
    def passed(self) -> bool:
        """Return whether the deviation is within its bound; NaN is not."""
        return self.fixed <= self.bound


@dataclass(frozen=True)
class Precision(_BoundedRow):
    """The deviation of a model in lower precision from float64, on the same inputs."""

    precision: str  # "float32", "float16", "bfloat16", "amp-float16", "amp-bfloat16" or "int8 weights".
    model: str  # Name of the model.
    logits_max: float  # Largest deviation of a logit, over the largest logit.
    logits_rms: float  # Root mean square of the deviations, over that of the logits.
    argmax_agreement: float  # Share of positions whose likeliest token is the same, 0 to 1.
    layers_rms: tuple[float, ...]  # `logits_rms` of the output of each layer.
    bound: float  # Upper bound of `logits_rms`.

    @property
    def passed(self) -> bool:
        """Return whether the deviation is within its bound."""
        return self.logits_rms <= self.bound


@dataclass(frozen=True)
class OptimizerRow(_BoundedRow):
    """The deviation of an optimizer's steps from AdamW in float64, with the same weights and batches."""

    optimizer: str  # "float32 AdamW", "bfloat16 AdamW" (weights and states) or that of a package.
    model: str  # Name of the trained model.
    steps: int  # Optimizer steps.
    # Root mean square of the deviations of all parameters, over that of their changes in float64.
    update_rms: float
    largest: float  # Largest deviation of a parameter, over the learning rate.
    loss: float  # Deviation of the loss after the steps.
    state_bytes: int  # Bytes of the optimizer's state.
    bound: float | None  # Upper bound of `update_rms`; None for a row that is there for comparison.

    @property
    def passed(self) -> bool:
        """Return whether the deviation is within its bound, or has none."""
        return self.bound is None or self.update_rms <= self.bound


@dataclass(frozen=True)
class FixPeak(JsonValue):
    """The peak of a training step in bytes, of the original model and with the fix."""

    fix: str  # Name of the fix.
    workload: str  # Description of model and batch.
    original_bytes: int  # Simulated, without the fix.
    fixed_bytes: int  # Simulated, with the fix.
    measured_on: str = "cpu"  # "cpu", where GPU and host are one memory, or "cuda".
    measured_original_bytes: int | None = None  # `original_bytes`, measured there.
    measured_fixed_bytes: int | None = None  # `fixed_bytes`, measured there; None: not measured.
    not_measured: str = ""  # Why the fix was not measured.


@dataclass
class Verification(JsonValue):
    """The result of `memprof verify`."""

    seeds: int = 0
    deviations: list[Deviation] = field(default_factory=list)  # For exact fixes.
    precisions: list[Precision] = field(default_factory=list)  # For fixes of lower precision.
    optimizers: list[OptimizerRow] = field(default_factory=list)  # For fixes that change the optimizer.
    # Model -> operators of its float64 reference with results of a smaller dtype; should be empty.
    narrow: dict[str, tuple[str, ...]] = field(default_factory=dict, metadata=json_name("reference_below_float64"))
    peaks: list[FixPeak] = field(default_factory=list)  # Saved bytes of each fix in one workload.
    notes: list[str] = field(default_factory=list)  # How the named models were resolved, and whose code was run.
    # (fix, model) -> why the fix was not tried on the model.
    skipped: dict[tuple[str, str], str] = field(default_factory=dict, metadata=json_name(None))

    def merge(self, other: Verification) -> None:
        """Add the results of `other`; where both have a reason or operators under the same key, keep this one's."""
        for name in ("deviations", "precisions", "optimizers", "peaks", "notes"):
            getattr(self, name).extend(getattr(other, name))
        self.narrow = {**other.narrow, **self.narrow}
        self.skipped = {**self.skipped, **{key: why for key, why in other.skipped.items() if key not in self.skipped}}

    @property
    def passed(self) -> bool:
        """Return whether all results are within their bounds, and there is a result."""
        return self.has_results and all(row.passed for row in (*self.deviations, *self.precisions, *self.optimizers))

    @property
    def has_results(self) -> bool:
        """Return whether there is any result."""
        return bool(self.deviations or self.precisions or self.optimizers or self.peaks)

    def to_json(self) -> dict[str, Any]:
        """Return the verification as JSON values; sizes are bytes."""
        return {
            "schema": SCHEMA,
            "memprof_version": __version__,
            "command": "verify",
            "source": "measured on the CPU; peaks simulated and measured",
            "passed": self.passed,
            **super().to_json(),
            "skipped": [{"fix": fix, "model": model, "reason": why} for (fix, model), why in self.skipped.items()],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Verification:
        """Return the verification whose `to_json` is `values`."""
        verification = super().from_json(values)
        verification.skipped = {(row["fix"], row["model"]): row["reason"] for row in values["skipped"]}
        return verification
