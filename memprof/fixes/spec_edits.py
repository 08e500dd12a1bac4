"""Functions that edit the spec for a fix (`Fix.edit`), where replacing fields (`Fix.edits`) is not enough.

Each function takes the spec, the fix, the value of the fix's main option (None if not given) and the `target` of the
baseline run's report. The result is the edited spec, or None if the fix is to be applied to the model instead.

Raises:
    UsageError: the fix does not apply to this run.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from memprof.errors import UsageError, not_installed
from memprof.fixes.catalog import Fix
from memprof.spec import Mode, TargetSpec

Target = Mapping[str, Any]
# Classes of modules whose results depend on all rows of a batch in training.
_BATCH_NORM = re.compile(r"(Sync)?BatchNorm([1-3]d)?")


def useless(fix: Fix, value: object, why: str) -> UsageError:
    """Return the error for a fix that does nothing in this run."""
    return UsageError(f"{fix.name} does not apply", value=str(value), hint=why)


def half(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Set the dtype of the parameters to the dtype that the fix is named after."""
    if target.get("dtype") in ("float16", "bfloat16"):
        raise useless(fix, f"dtype {target['dtype']}", "the parameters have two bytes each already")
    return spec.edit(dtype=fix.name)


def autocast(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Set autocast to the dtype in the fix's name."""
    if target.get("dtype") in ("float16", "bfloat16"):
        raise useless(fix, f"dtype {target['dtype']}", "autocast is for parameters in float32")
    return spec.edit(amp=fix.name.removeprefix("amp-"), dtype=None)


def vocabulary_cap(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec | None:
    """Set the vocabulary size of a model that memprof builds to `value`."""
    size = target.get("vocab_size")
    if size is None:
        return None
    if value >= size:
        raise useless(fix, value, f"the vocabulary has {size:,} tokens")
    return spec.edit(vocab_size=value)


def low_rank_npt(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Set the mode of NPT components to low-rank."""
    if spec.npt is None:
        raise useless(fix, "no --npt", "the model has no NPT components")
    return spec.edit(npt="low-rank")


def micro_batch(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Set a smaller batch size, and more gradient accumulation, for the same sequences in a step."""
    batch_norms = sorted(filter(_BATCH_NORM.fullmatch, target.get("classes", ())))
    if batch_norms and spec.mode is Mode.TRAIN:
        raise useless(fix, batch_norms[0], "such a module's result depends on all rows of a batch")
    size = 1 if value is None else value
    if not 1 <= size < spec.batch_size or spec.batch_size % size:
        divisors = [d for d in range(1, spec.batch_size) if spec.batch_size % d == 0]
        raise useless(fix, size, f"give one of {', '.join(map(str, divisors))}")
    return spec.edit(batch_size=size, gradient_accumulation=spec.gradient_accumulation * (spec.batch_size // size))


def compiled(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec | None:
    """Leave the spec unchanged, so that the fix compiles the layers. Raises UsageError: `--parallel` is given."""
    if spec.parallel is not None:
        raise useless(fix, f"--parallel {spec.parallel}", "a model that is spread over GPUs is not compiled here")
    return None


def eight_bit_optimizer(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Set the optimizer to the 8-bit AdamW of an installed package."""
    if spec.optimizer not in ("adamw", "adam"):
        raise useless(fix, f"--optimizer {spec.optimizer}", "it stands for AdamW")
    optimizer = installed_eight_bit_optimizer()
    if optimizer is None:
        raise not_installed(f"{fix.name} needs bitsandbytes or torchao", "neither is installed", "quantization")
    return spec.edit(optimizer=optimizer, optimizer_impl=None)


def installed_eight_bit_optimizer() -> str | None:
    """Return the value of `--optimizer` for an installed 8-bit AdamW; None if no package has it."""
    for package, optimizer in (("bitsandbytes", "adamw-8bit"), ("torchao", "torchao-adamw-8bit")):
        if importlib.util.find_spec(package) is not None:
            return optimizer
    return None
