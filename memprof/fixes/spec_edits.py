"""Edits of the spec that the table of fixes names, where replaced fields alone do not say what a fix does.

Each takes the spec, the fix, the value of its main option (None if none was given) and what the run as it is turned
out to be (`target` of its report). It gives the spec with the fix in force, or None: the model is changed then.

Raises:
    UsageError: it does not apply to this run.
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
# Classes of modules whose results depend on all rows of a batch, as they train.
_OF_ALL_ROWS = re.compile(r"(Sync)?BatchNorm([1-3]d)?")


def useless(fix: Fix, value: object, why: str) -> UsageError:
    """Return the error that `fix` does nothing here."""
    return UsageError(f"{fix.name} does not apply", value=str(value), hint=why)


def half(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Have the parameters in the dtype that the fix is named after."""
    if target.get("dtype") in ("float16", "bfloat16"):
        raise useless(fix, f"dtype {target['dtype']}", "the parameters have two bytes each already")
    return spec.edit(dtype=fix.name)


def autocast(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Autocast to the dtype in the fix's name."""
    if target.get("dtype") in ("float16", "bfloat16"):
        raise useless(fix, f"dtype {target['dtype']}", "autocast is for parameters in float32")
    return spec.edit(amp=fix.name.removeprefix("amp-"), dtype=None)


def vocabulary_cap(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec | None:
    """Build the model with the smaller vocabulary."""
    size = target.get("vocab_size")
    if size is None:
        return None
    if value >= size:
        raise useless(fix, value, f"the vocabulary has {size:,} tokens")
    return spec.edit(vocab_size=value)


def low_rank_npt(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Build NPT components of low rank."""
    if spec.npt is None:
        raise useless(fix, "no --npt", "the model has no NPT components")
    return spec.edit(npt="low-rank")


def micro_batch(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Split the sequences of a step into smaller micro-batches, whether it trains or not."""
    of_the_batch = sorted(filter(_OF_ALL_ROWS.fullmatch, target.get("classes", ())))
    if of_the_batch and spec.mode is Mode.TRAIN:
        raise useless(fix, of_the_batch[0], "such a module's result depends on all rows of a batch")
    size = 1 if value is None else value
    if not 1 <= size < spec.batch_size or spec.batch_size % size:
        divisors = [d for d in range(1, spec.batch_size) if spec.batch_size % d == 0]
        raise useless(fix, size, f"give one of {', '.join(map(str, divisors))}")
    return spec.edit(batch_size=size, gradient_accumulation=spec.gradient_accumulation * (spec.batch_size // size))


def compiled(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec | None:
    """Compile the model, unless it is spread over GPUs."""
    if spec.parallel is not None:
        raise useless(fix, f"--parallel {spec.parallel}", "a model that is spread over GPUs is not compiled here")
    return None


def eight_bit_optimizer(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Choose the 8-bit AdamW of the library that is installed."""
    if spec.optimizer not in ("adamw", "adam"):
        raise useless(fix, f"--optimizer {spec.optimizer}", "it stands for AdamW")
    optimizer = installed_eight_bit_optimizer()
    if optimizer is None:
        raise not_installed(f"{fix.name} needs bitsandbytes or torchao", "neither is installed", "quantization")
    return spec.edit(optimizer=optimizer, optimizer_impl=None)


def installed_eight_bit_optimizer() -> str | None:
    """Return `--optimizer` for the 8-bit AdamW that is installed; None without one."""
    for package, optimizer in (("bitsandbytes", "adamw-8bit"), ("torchao", "torchao-adamw-8bit")):
        if importlib.util.find_spec(package) is not None:
            return optimizer
    return None
