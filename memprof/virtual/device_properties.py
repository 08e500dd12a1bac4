"""Properties of one GPU, and versions of torch and its libraries, on which the memory of kernels depends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memprof.device.catalog import Gpu


def max_threads_per_sm(compute_capability: tuple[int, int]) -> int:
    """Return the maximum threads per multiprocessor (CUDA C++ programming guide, technical specifications)."""
    major, minor = compute_capability
    if (major, minor) == (7, 5):
        return 1024
    return 1536 if major in (11, 12) or (major == 8 and minor) else 2048


def torch_release() -> tuple[int, int]:
    """Return the major and minor version of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cudnn_version(release: tuple[int, int]) -> int:
    """Return the cuDNN version of PyPI's wheel of a torch release (9.10.2 until 2.10, 9.19.0 from 2.11 on)."""
    return 91_900 if release >= (2, 11) else 91_002


def cuda_version(release: tuple[int, int]) -> str:
    """Return the CUDA version of PyPI's wheel of a torch release (12.8 until 2.10, 13.0 from 2.11 on)."""
    return "13.0" if release >= (2, 11) else "12.8"


def nccl_version(release: tuple[int, int]) -> tuple[int, int, int]:
    """Return the NCCL version of PyPI's wheel of a torch release (2.27.3 for 2.8, 2.27.5 from 2.9 on)."""
    return (2, 27, 5) if release >= (2, 9) else (2, 27, 3)


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """GPU properties by which kernels choose their launch configuration, and the torch release of the kernels."""

    compute_capability: tuple[int, int]
    num_sms: int
    threads_per_sm: int
    release: tuple[int, int]
    device_type: str = "cuda"

    @classmethod
    def from_gpu(cls, gpu: Gpu) -> DeviceProperties:
        """Return the properties of `gpu` under the installed torch release."""
        capability = gpu.compute_capability
        return cls(capability, gpu.num_sms, max_threads_per_sm(capability), torch_release(), gpu.device_type)
