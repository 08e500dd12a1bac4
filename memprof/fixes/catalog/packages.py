"""Checks, before a run, that the packages it needs besides torch and transformers are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from memprof.device.catalog import find_gpu
from memprof.errors import UsageError, not_installed
from memprof.fixes.catalog.fix import Fix
from memprof.spec import BITSANDBYTES_FORMATS, BITSANDBYTES_OPTIMIZERS, TORCHAO_OPTIMIZERS, TargetSpec

_WITHOUT_MPS = ("bitsandbytes", "torchao")  # packages without kernels for Metal: what they save there is not known


def check_installed(spec: TargetSpec | None, fixes: Sequence[Fix] = ()) -> None:
    """Raise UsageError, which says what to install, if a package that `spec` or `fixes` need is missing, or if it has
    no kernels for the GPU of `spec`. Packages are not imported, so their import may still fail."""
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
            _check_option(spec, f"--quantize {spec.quantize}", "bitsandbytes")
        check_package(f"--quantize {spec.quantize}", "accelerate")  # by which transformers loads quantized weights
    if spec.optimizer in BITSANDBYTES_OPTIMIZERS:
        _check_option(spec, f"--optimizer {spec.optimizer}", "bitsandbytes")
    if spec.optimizer in TORCHAO_OPTIMIZERS:
        _check_option(spec, f"--optimizer {spec.optimizer}", "torchao")


def _check_option(spec: TargetSpec, option: str, package: str) -> None:
    is_mps = spec.device == "virtual" and spec.gpu_vram_bytes is None and find_gpu(spec.gpu).backend == "mps"
    if is_mps and (reason := find_missing_backend(package)) is not None:
        raise UsageError(reason, value=f"{option} --gpu {spec.gpu}", hint=f"leave out {option.split()[0]}")
    check_package(option, package)


def find_missing_backend(packages: str) -> str | None:
    """Return that `packages` ("one or other") have no kernels for MPS; None if one of them has, or needs none."""
    names = packages.split(" or ")
    return (
        f"{packages} {'has' if len(names) == 1 else 'have'} no kernels for MPS" if {*names} <= {*_WITHOUT_MPS} else None
    )


def check_package(feature: str, *alternatives: str) -> None:
    """Raise UsageError unless one of the packages `alternatives` is installed; `feature` names what needs it."""
    if not any(importlib.util.find_spec(package) for package in alternatives):
        names = " or ".join(alternatives)
        value = f"{names} is not installed" if len(alternatives) == 1 else "neither is installed"
        raise not_installed(f"{feature} needs {names}", value, alternatives[0])
