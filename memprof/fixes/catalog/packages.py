"""The libraries that a run needs beside torch and transformers: whether they are there, asked before all else."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from memprof.errors import not_installed
from memprof.fixes.catalog.fix import Fix
from memprof.spec import BITSANDBYTES_FORMATS, BITSANDBYTES_OPTIMIZERS, TORCHAO_OPTIMIZERS, TargetSpec

# Package -> the extra of memprof that brings it.
EXTRAS = {
    "peft": "adapters", "bitsandbytes": "quantization", "torchao": "quantization", "accelerate": "quantization",
    "pyarrow": "parquet", "plotly": "html",
}  # fmt: skip


def check_installed(spec: TargetSpec | None, fixes: Sequence[Fix] = ()) -> None:
    """Check that what `spec` and `fixes` need is installed, importing nothing: a package may still fail to import.
    Raises UsageError: something is missing; it names the extra to install."""
    if spec is not None:
        _check_spec(spec)
    for fix in fixes:
        for either in fix.packages:
            check_package(fix.name, *either.split(" or "))


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


def check_package(what: str, *either: str) -> None:
    """Check that one of these packages, which `what` needs, is installed. Raises UsageError: none is."""
    if not any(importlib.util.find_spec(package) for package in either):
        names = " or ".join(either)
        missing = f"{names} is not installed" if len(either) == 1 else "neither is installed"
        raise not_installed(f"{what} needs {names}", missing, EXTRAS[either[0]])
