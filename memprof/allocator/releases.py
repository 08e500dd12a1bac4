"""Differences between torch releases: what came with which, libraries of the wheels, error messages.

All rules that depend on the release of torch are here, each with its source. Besides the sources that are named, values
come from the strings and headers of the official wheels 2.0.1 to 2.15.0. A release between two inspected ones is
assumed to agree with the earlier one unless a note says otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from memprof.errors import UsageError

OLDEST = (2, 0)
NEWEST = (2, 15)  # the newest inspected release; later ones are assumed to agree


class Change(Enum):
    """A difference between releases of torch: the first release (major, minor) that has it, and the source.

    Pull requests are those of github.com/pytorch/pytorch.
    """

    # The caching allocator.
    EXPANDABLE_SEGMENTS = (2, 1), "c10/cuda/CUDACachingAllocator.cpp: CUDAAllocatorConfig of the release"
    # All accelerators share settings, with PYTORCH_ALLOC_CONF. The limits of max_split_size_mb and
    # max_non_split_rounding_mb became inclusive, and `>` in roundup_power2_divisions begins above the last key.
    UNIFIED_SETTINGS = (2, 9), "c10/core/AllocatorConfig.h"
    PER_PROCESS_MEMORY_FRACTION = (2, 10), "strings of the wheel: per_process_memory_fraction"
    LARGE_SEGMENT_SIZE = (2, 11), "headers of 2.12.1, not in those of 2.10.0: large_segment_size_mb"
    THROW_ON_CUDAMALLOC_OOM = (2, 12), "strings of the wheel of 2.12.1: throw_on_cudamalloc_oom"
    SEGMENTS_RESERVE = (
        (2, 15),
        "strings of the wheel: expandable_segments_reserve, expandable_segments_reserve_by_class",
    )
    # cuBLAS and cuBLASLt (aten/src/ATen/cuda/CublasHandlePool.cpp). Until then each product with a bias took 1 MiB and
    # released it, as recordings of 2.2 to 2.5 have it.
    LT_WORKSPACE_KEPT = (
        (2, 9),
        "pull request 156495; the headers of 2.8.0 lack getCUDABlasLtWorkspace; recorded with 2.9",
    )
    LT_WORKSPACE_SHARED = (2, 12), "pull requests 168175 and 175879; recorded with 2.11: not yet"
    BLACKWELL_WORKSPACE = (
        (2, 12),
        "pull request 175344: 32 MiB on compute capability 10 and 12; recorded with 2.11: not yet",
    )
    WORKSPACE_PER_CALL = (2, 15), "strings of the wheel: TORCH_CUBLAS_WORKSPACE_CACHE, off unless it is set"
    # Kernels of torch.
    CUDNN_3D_WORKAROUND = (2, 9), "native/Convolution.cpp, use_cudnn: a fault of cuDNN 9.8 to 9.14"
    TOPK_DIGIT_SUMS = (2, 10), "pull request 164459: sums of digits instead of semaphores"
    EIGENVALUES_ON_GPU = (2, 11), "native/BatchLinearAlgebra.cpp, linalg_eig_out; recorded with 2.11"
    EFFICIENT_GROUPS = (2, 15), "pull request 191085: grouped queries in the memory-efficient attention kernel"

    def __init__(self, since: tuple[int, int], source: str) -> None:
        self.since = since
        self.source = source

    def is_in(self, version: tuple[int, int]) -> bool:
        """Return whether torch `version` (major, minor) has it."""
        return version >= self.since


# Settings of the allocator that not all releases have.
_SETTINGS = {
    "per_process_memory_fraction": Change.PER_PROCESS_MEMORY_FRACTION,
    "large_segment_size_mb": Change.LARGE_SEGMENT_SIZE,
    "throw_on_cudamalloc_oom": Change.THROW_ON_CUDAMALLOC_OOM,
    "expandable_segments_reserve": Change.SEGMENTS_RESERVE,
    "expandable_segments_reserve_by_class": Change.SEGMENTS_RESERVE,
}


@dataclass(frozen=True, slots=True)
class Libraries:
    """CUDA libraries of the wheel of a torch release."""

    cuda: str  # such as "12.8"
    cudnn: int  # as torch.backends.cudnn.version() has it: 91002 for 9.10.2
    nccl: tuple[int, int, int]


# The wheel on PyPI for Linux: what its metadata requires (Requires-Dist), from this release on. That of 2.13 was not
# inspected.
_LIBRARIES = {
    (2, 0): Libraries("11.7", 8_500, (2, 14, 3)),
    (2, 1): Libraries("12.1", 8_902, (2, 18, 1)),
    (2, 2): Libraries("12.1", 8_902, (2, 19, 3)),
    (2, 3): Libraries("12.1", 8_902, (2, 20, 5)),
    (2, 4): Libraries("12.1", 90_100, (2, 20, 5)),
    (2, 5): Libraries("12.4", 90_100, (2, 21, 5)),
    (2, 7): Libraries("12.6", 90_501, (2, 26, 2)),
    (2, 8): Libraries("12.8", 91_002, (2, 27, 3)),
    (2, 9): Libraries("12.8", 91_002, (2, 27, 5)),
    (2, 11): Libraries("13.0", 91_900, (2, 28, 9)),
    (2, 12): Libraries("13.0", 92_000, (2, 29, 7)),
    (2, 14): Libraries("13.0", 92_400, (2, 30, 7)),
}


def find_libraries(version: tuple[int, int]) -> Libraries:
    """Return the CUDA libraries of the wheel of torch `version` (major, minor)."""
    return _LIBRARIES[max(since for since in _LIBRARIES if since <= version)]


@dataclass(frozen=True, slots=True)
class Release:
    """A torch release (major, minor), and what differs in it."""

    version: tuple[int, int]

    def has_setting(self, setting: str) -> bool:
        """Return whether the release has the allocator setting `setting`."""
        return setting not in _SETTINGS or _SETTINGS[setting].is_in(self.version)

    @property
    def has_expandable_segments(self) -> bool:
        """Return whether the release has `expandable_segments`."""
        return Change.EXPANDABLE_SEGMENTS.is_in(self.version)

    @property
    def has_unified_settings(self) -> bool:
        """Return whether all accelerators share settings, with PYTORCH_ALLOC_CONF."""
        return Change.UNIFIED_SETTINGS.is_in(self.version)

    @property
    def capacity_phrase(self) -> str:
        """Return the phrase before the capacity in the out-of-memory message, which torch 2.1 misspells."""
        return "has a total capacty of" if self.version == (2, 1) else "has a total capacity of"

    @property
    def oom_advice(self) -> str:
        """Return the advice at the end of the out-of-memory message."""
        head, goal = "If reserved but unallocated memory is large", "to avoid fragmentation.  See documentation for"
        if self.version < (2, 2):
            head = "If reserved memory is >> allocated memory" if self.version < (2, 1) else head
            return f" {head} try setting max_split_size_mb {goal} Memory Management and PYTORCH_CUDA_ALLOC_CONF"
        variable = "PYTORCH_ALLOC_CONF" if self.version == (2, 10) else "PYTORCH_CUDA_ALLOC_CONF"
        page = "pytorch.org/docs/stable/notes/cuda.html#environment-variables"
        if self.version >= (2, 11):
            page = "docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
        return f" {head} try setting {variable}=expandable_segments:True {goal} Memory Management  (https://{page})"


def parse_release(version: str) -> Release:
    """Return the release of a version such as "2.6.0+cu124". Raises UsageError: not a version, or older than 2.0."""
    match = re.match(r"\s*v?(\d+)\.(\d+)", version)
    if match is None:
        raise UsageError("not a torch version", value=repr(version), hint="such as 2.6 or 2.13.0+cpu")
    major_minor = (int(match[1]), int(match[2]))
    if major_minor < OLDEST:
        raise UsageError(
            "the allocator of this torch release is not known", value=version, hint="2.0 and later are simulated"
        )
    return Release(major_minor)


LATEST = Release(NEWEST)
