"""Functions that edit the spec for a fix (`Fix.edit`), where replacing fields (`Fix.edits`) is not enough.

Each function takes the spec, the fix, the value of the fix's main option (None if not given) and `target`, the facts
about the model in the baseline run's report. It returns the edited spec, or None if the fix changes the model instead,
and raises UsageError if the fix does not apply to this run.
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


def make_error(fix: Fix, value: object, why: str) -> UsageError:
    """Return the error for a fix that has no effect in this run, with the offending `value` and the reason `why`."""
    return UsageError(f"{fix.name} does not apply", value=str(value), hint=why)


def set_half_precision(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Return `spec` with the parameter dtype in the name of `fix`, float16 or bfloat16."""
    if target.get("dtype") in ("float16", "bfloat16"):
        raise make_error(fix, f"dtype {target['dtype']}", "the parameters have two bytes each already")
    return spec.edit(dtype=fix.name)


def set_autocast(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Return `spec` with autocast to the dtype in the name of `fix`."""
    if target.get("dtype") in ("float16", "bfloat16"):
        raise make_error(fix, f"dtype {target['dtype']}", "autocast is for parameters in float32")
    return spec.edit(amp=fix.name.removeprefix("amp-"), dtype=None)


def set_vocabulary_size(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec | None:
    """Return `spec` with a vocabulary of `value` tokens, or None for a model that memprof does not build."""
    size = target.get("vocab_size")
    if size is None:
        return None
    if value >= size:
        raise make_error(fix, value, f"the vocabulary has {size:,} tokens")
    return spec.edit(vocab_size=value)


def set_low_rank_npt(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Return `spec` with NPT components in mode low-rank."""
    if spec.npt is None:
        raise make_error(fix, "no --npt", "the model has no NPT components")
    return spec.edit(npt="low-rank")


def split_batch(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Return `spec` with batch size `value` (None: 1) and more gradient accumulation, with equal sequences per step."""
    batch_norms = sorted(filter(_BATCH_NORM.fullmatch, target.get("classes", ())))
    if batch_norms and spec.mode is Mode.TRAIN:
        raise make_error(fix, batch_norms[0], "such a module's result depends on all rows of a batch")
    size = 1 if value is None else value
    if not 1 <= size < spec.batch_size or spec.batch_size % size:
        divisors = [d for d in range(1, spec.batch_size) if spec.batch_size % d == 0]
        raise make_error(fix, size, f"give one of {', '.join(map(str, divisors))}")
    return spec.edit(batch_size=size, gradient_accumulation=spec.gradient_accumulation * (spec.batch_size // size))


def check_parallel(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec | None:
    """Return None, so that the fix changes the model; raise UsageError if `spec` has a parallel plan."""
    if spec.parallel is not None:
        raise make_error(fix, f"--parallel {spec.parallel}", "a model that is spread over GPUs is not compiled here")
    return None


def set_8_bit_optimizer(spec: TargetSpec, fix: Fix, value: Any, target: Target) -> TargetSpec:
    """Return `spec` with the 8-bit AdamW of an installed package as optimizer."""
    if spec.optimizer not in ("adamw", "adam"):
        raise make_error(fix, f"--optimizer {spec.optimizer}", "it stands for AdamW")
    optimizer = find_8_bit_optimizer()
    if optimizer is None:
        raise not_installed(f"{fix.name} needs bitsandbytes or torchao", "neither is installed", "bitsandbytes")
    return spec.edit(optimizer=optimizer, optimizer_impl=None)


def find_8_bit_optimizer() -> str | None:
    """Return the `--optimizer` value of an installed package's 8-bit AdamW; None if no such package is installed."""
    for package, optimizer in (("bitsandbytes", "adamw-8bit"), ("torchao", "torchao-adamw-8bit")):
        if importlib.util.find_spec(package) is not None:
            return optimizer
    return None
