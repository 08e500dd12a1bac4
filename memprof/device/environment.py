"""Environment of a run: versions, driver, and the environment variables that affect memory use.

torch is not imported: its version is read from the installed package's metadata.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from memprof.device.gpus import NvmlSample

# Environment variables that are recorded where they are set.
VARIABLES = (
    # the caching allocator: the first is the older spelling and counts where both are set
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    # which GPUs, and in what order
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    # the context, and what libraries take beside the allocator
    *("CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"),
    *("NCCL_BUFFSIZE", "NCCL_MAX_NCHANNELS", "NCCL_CUMEM_ENABLE", "TORCH_NCCL_AVOID_RECORD_STREAMS"),
    # which kernels run
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("TORCH_CUDNN_V8_API_DISABLED", "TORCH_BLAS_PREFER_CUBLASLT"),
    # one process of several
    *("RANK", "LOCAL_RANK", "WORLD_SIZE"),
)


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions and environment variables of a run. A value is None if not installed or unknown."""

    torch_version: str | None  # such as "2.13.0+cu130".
    torch_cuda: str | None  # CUDA release of torch's build, None for a CPU build (or ROCm: `torch_hip`).
    torch_hip: str | None
    driver_version: str | None  # of NVIDIA's kernel module.
    driver_cuda: str | None  # the newest CUDA that the driver runs.
    variables: dict[str, str]  # the set variables of VARIABLES.
    notes: tuple[str, ...]  # mismatches, one line each.


def read_environment(gpus: NvmlSample | None = None, variables: Mapping[str, str] | None = None) -> Environment:
    """Return the environment of this process; if `gpus` is None, the driver version is read from /sys.

    `variables` replace `os.environ`.
    """
    sample = gpus or NvmlSample()
    environ = os.environ if variables is None else variables
    torch = _read_torch_version()
    driver = sample.driver_version or _read_loaded_driver()
    set_variables = {name: environ[name] for name in VARIABLES if name in environ}
    return Environment(
        torch_version=torch.get("__version__"),
        torch_cuda=torch.get("cuda"),
        torch_hip=torch.get("hip"),
        driver_version=driver,
        driver_cuda=sample.cuda_version,
        variables=set_variables,
        notes=tuple(_find_mismatches(torch.get("cuda"), driver, sample, set_variables)),
    )


def _find_mismatches(
    torch_cuda: str | None, driver: str | None, sample: NvmlSample, variables: Mapping[str, str]
) -> list[str]:
    notes = []
    if torch_cuda and driver is None:
        notes.append(f"torch is built for CUDA {torch_cuda}, and there is no NVIDIA driver here")
    elif torch_cuda and sample.cuda_version and _parse_major(torch_cuda) > _parse_major(sample.cuda_version):
        notes.append(f"torch is built for CUDA {torch_cuda}, and the driver runs CUDA {sample.cuda_version} at most")
    elif not torch_cuda and sample.gpus:
        notes.append("there is a GPU, and the installed torch is built without CUDA")
    if variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        notes.append("CUDA_VISIBLE_DEVICES hides every GPU")
    old_setting, new_setting = variables.get("PYTORCH_CUDA_ALLOC_CONF"), variables.get("PYTORCH_ALLOC_CONF")
    if old_setting is not None and new_setting is not None and old_setting != new_setting:
        notes.append("PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set and differ: torch reads the first")
    return notes


def _parse_major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdecimal() else 0


def _read_torch_version() -> dict[str, str]:
    """Return the string constants of the installed torch/version.py, which also name the build; empty without torch."""
    try:
        distribution = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return {}
    constants = {"__version__": distribution.version}
    try:
        tree = ast.parse(Path(str(distribution.locate_file("torch/version.py"))).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return constants
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            constants |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    return constants


def find_installed_version(name: str) -> str | None:
    """Return the version of an installed package; None if the package is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_loaded_driver() -> str | None:
    """Return the version of the loaded NVIDIA kernel module, read without NVML; None if none is loaded."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None
