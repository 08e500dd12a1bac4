"""Differences between torch releases: error messages, allowed values of settings, lifetime of cuBLAS workspaces.

The values come from the sources and the strings of the official wheels 2.0.1 to 2.15.0. A release between two
inspected ones is assumed to agree with the earlier one unless a note says otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memprof.errors import UsageError

OLDEST = (2, 0)
NEWEST = (2, 15)  # the newest inspected release; later ones are assumed to agree


# Settings of the allocator that not all releases have, and the first release with the setting.
_FIRST_RELEASES = {
    "per_process_memory_fraction": (2, 10),
    "large_segment_size_mb": (2, 11),  # in the headers of 2.12.1, not in those of 2.10.0
    "throw_on_cudamalloc_oom": (2, 12),  # seen in 2.12.1
    "expandable_segments_reserve": (2, 15),
    "expandable_segments_reserve_by_class": (2, 15),
}


@dataclass(frozen=True, slots=True)
class Release:
    """A torch release (major, minor), and what differs in it."""

    version: tuple[int, int]

    def has_setting(self, setting: str) -> bool:
        """Return whether the release has the allocator setting `setting`."""
        return self.version >= _FIRST_RELEASES.get(setting, OLDEST)

    @property
    def has_expandable_segments(self) -> bool:
        """Return whether the release has `expandable_segments`, which came with 2.1."""
        return self.version >= (2, 1)

    @property
    def has_unified_settings(self) -> bool:
        """Return whether all accelerators share settings (c10/core/AllocatorConfig.h), with PYTORCH_ALLOC_CONF.

        The limits of max_split_size_mb and max_non_split_rounding_mb became inclusive, and `>` in
        roundup_power2_divisions begins above the last key instead of at it.
        """
        return self.version >= (2, 9)

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
