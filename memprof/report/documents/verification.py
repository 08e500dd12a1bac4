"""The result of a verification: plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memprof.trace.json_values import JsonValue, json_name
from memprof.version import __version__

SCHEMA = 2  # 2: names (old_names.py)


class _BoundedRow(JsonValue):
    """A row with a bound; `passed` is whether the row keeps the bound."""

    @property
    def passed(self) -> bool:
        """Return whether the row is within its bound."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values, with `passed`."""
        return {**super().to_json(), "passed": self.passed}


@dataclass(frozen=True)
class Deviation(_BoundedRow):
    """The deviation of original and fixed model from a float64 run, at the worst place of all seeds and cases."""

    fix: str  # its name.
    model: str  # the model it was tried on.
    quantity: str  # "loss", "gradients" or "parameters after N steps".
    case: str  # where the worst place is.
    tensor: str  # of which parameter; empty for the loss.
    original: float  # largest absolute deviation of the unchanged model.
    fixed: float  # the same with the fix.
    bound: float  # upper bound of `fixed`.

    @property
    def passed(self) -> bool:
        """Return whether the deviation is within its bound; NaN is not."""
        return self.fixed <= self.bound


@dataclass(frozen=True)
class Precision(_BoundedRow):
    """The effect of lower precision on the same model and inputs, against float64."""

    precision: str  # "float32", "float16", "bfloat16", "amp-float16", "amp-bfloat16" or "int8 weights".
    model: str  # the model it was tried on.
    logits_max: float  # largest deviation of a logit, over the largest logit.
    logits_rms: float  # root mean square of the deviations, over that of the logits.
    argmax_agreement: float  # share of positions whose likeliest token is the same, 0 to 1.
    layers_rms: tuple[float, ...]  # as `logits_rms`, for the output of each layer.
    bound: float  # upper bound of `logits_rms`.

    @property
    def passed(self) -> bool:
        """Return whether the deviation is within its bound."""
        return self.logits_rms <= self.bound


@dataclass(frozen=True)
class OptimizerRow(_BoundedRow):
    """Some steps of an optimizer, compared with AdamW in float64 from the same weights and on the same batches."""

    optimizer: str  # "float32 AdamW", "bfloat16 AdamW" (weights and states) or that of a package.
    model: str  # what it trained.
    steps: int  # how many.
    # root mean square of the deviations of all parameters, over that of the way they went in float64.
    update_rms: float
    largest: float  # largest deviation of a parameter, over the learning rate.
    loss: float  # deviation of the loss after the steps.
    state_bytes: int  # of the optimizer's state.
    bound: float | None  # upper bound of `update_rms`; None for a row that is there for comparison.

    @property
    def passed(self) -> bool:
        """Return whether the deviation is within its bound, or has none."""
        return self.bound is None or self.update_rms <= self.bound


@dataclass(frozen=True)
class FixPeak(JsonValue):
    """Peak of a training step, in bytes: of the original model, and with the fix."""

    fix: str  # its name.
    workload: str  # what is trained.
    original_bytes: int  # simulated, as it is.
    fixed_bytes: int  # simulated, with the fix.
    measured_on: str = "cpu"  # "cpu", where GPU and host are one memory, or "cuda".
    measured_original_bytes: int | None = None  # as `original_bytes`, really run there.
    measured_fixed_bytes: int | None = None  # as `fixed_bytes`, really run there; None if it did not run.
    not_measured: str = ""  # why it did not.


@dataclass
class Verification(JsonValue):
    """The whole document of `memprof verify`."""

    seeds: int = 0
    deviations: list[Deviation] = field(default_factory=list)  # of the fixes that promise the same numbers.
    precisions: list[Precision] = field(default_factory=list)  # of those that do not.
    optimizers: list[OptimizerRow] = field(default_factory=list)  # of those that change the optimizer's numbers.
    # model to the operators of its float64 reference that gave numbers of a smaller dtype; should be none.
    narrow: dict[str, tuple[str, ...]] = field(default_factory=dict, metadata=json_name("reference_below_float64"))
    peaks: list[FixPeak] = field(default_factory=list)  # what each saves in one workload.
    notes: list[str] = field(default_factory=list)  # what the models named were taken for, and whose code was run.
    # fix and model to the reason why it was not tried there.
    skipped: dict[tuple[str, str], str] = field(default_factory=dict, metadata=json_name(None))

    def take(self, part: Verification) -> None:
        """Add the results of `part`; for keys in both, the results of this verification stay."""
        for name in ("deviations", "precisions", "optimizers", "peaks", "notes"):
            getattr(self, name).extend(getattr(part, name))
        self.narrow = {**part.narrow, **self.narrow}
        self.skipped = {**self.skipped, **{key: why for key, why in part.skipped.items() if key not in self.skipped}}

    @property
    def passed(self) -> bool:
        """Return whether all results are within their bounds, and there is a result."""
        return self.tried and all(row.passed for row in (*self.deviations, *self.precisions, *self.optimizers))

    @property
    def tried(self) -> bool:
        """Return whether there is any result."""
        return bool(self.deviations or self.precisions or self.optimizers or self.peaks)

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary of plain values; sizes in bytes."""
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
        """Return the verification of `to_json`."""
        found = super().from_json(values)
        found.skipped = {(row["fix"], row["model"]): row["reason"] for row in values["skipped"]}
        return found
