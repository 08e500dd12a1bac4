"""Properties of one GPU, and the release of torch, on which the memory of kernels depends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memprof.allocator.releases import find_libraries
from memprof.device.catalog import Gpu


def max_threads_per_sm(compute_capability: tuple[int, int], gcn_arch: str = "") -> int:
    """Return the maximum threads per multiprocessor (CUDA C++ programming guide, technical specifications). On AMD
    2048, as HIP's maxThreadsPerMultiProcessor has it."""
    if gcn_arch:
        return 2048
    major, minor = compute_capability
    if (major, minor) == (7, 5):
        return 1024
    return 1536 if major in (11, 12) or (major == 8 and minor) else 2048


def torch_release() -> tuple[int, int]:
    """Return the major and minor version of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """GPU properties by which kernels choose their launch configuration, and the torch release of the kernels."""

    compute_capability: tuple[int, int]
    num_sms: int
    threads_per_sm: int
    release: tuple[int, int]
    device_type: str = "cuda"
    gcn_arch: str = ""  # of AMD's GPUs

    @classmethod
    def from_gpu(cls, gpu: Gpu, release: tuple[int, int] | None = None) -> DeviceProperties:
        """Return the properties of `gpu` under a torch release (None: the installed one)."""
        capability = gpu.compute_capability
        threads = max_threads_per_sm(capability, gpu.gcn_arch)
        return cls(capability, gpu.num_sms, threads, release or torch_release(), gpu.device_type, gpu.gcn_arch)

    @property
    def cudnn_version(self) -> int:
        """Return the cuDNN version of the release's wheel, as torch.backends.cudnn.version() has it."""
        return find_libraries(self.release).cudnn
