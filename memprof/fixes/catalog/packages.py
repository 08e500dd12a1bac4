"""Checks, before a run, that the packages it needs besides torch and transformers are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from memprof.errors import not_installed
from memprof.fixes.catalog.fix import Fix
from memprof.spec import BITSANDBYTES_FORMATS, BITSANDBYTES_OPTIMIZERS, TORCHAO_OPTIMIZERS, TargetSpec


def check_installed(spec: TargetSpec | None, fixes: Sequence[Fix] = ()) -> None:
    """Raise UsageError, which says what to install, if a package that `spec` or `fixes` need is missing.
    Packages are not imported, so their import may still fail."""
    if spec is not None:
        _check_spec(spec)
    for fix in fixes:
        for alternatives in fix.packages:
            check_package(fix.name, *alternatives.split(" or "))


def _check_spec(spec: TargetSpec) -> None:
    if spec.adapter is not None:
        check_package(f"--adapter {spec.adapter}", "peft")
    if spec.quantize is not None:
        if spec.quantize in BITSANDBYTES_FORMATS:
            check_package(f"--quantize {spec.quantize}", "bitsandbytes")
        check_package(f"--quantize {spec.quantize}", "accelerate")  # by which transformers loads quantized weights
    if spec.optimizer in BITSANDBYTES_OPTIMIZERS:
        check_package(f"--optimizer {spec.optimizer}", "bitsandbytes")
    if spec.optimizer in TORCHAO_OPTIMIZERS:
        check_package(f"--optimizer {spec.optimizer}", "torchao")


def check_package(feature: str, *alternatives: str) -> None:
    """Raise UsageError unless one of the packages `alternatives` is installed; `feature` names what needs it."""
    if not any(importlib.util.find_spec(package) for package in alternatives):
        names = " or ".join(alternatives)
        value = f"{names} is not installed" if len(alternatives) == 1 else "neither is installed"
        raise not_installed(f"{feature} needs {names}", value, alternatives[0])
