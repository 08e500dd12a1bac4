"""torch's peak counters, shared by the program and memprof.

There is one set of them for a process and a card. Whoever resets them takes away what the other would have read: so
what a reset takes away is kept here for the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from memprof.patching.patch_set import Patch
from memprof.torch_private import cuda

_READ = (cuda.memory_stats, cuda.accelerator_get_device_stats)
_RESET = (cuda.reset_peak_memory_stats, cuda.accelerator_reset_peak_stats)
"""What `torch.cuda.memory` and `torch.accelerator.memory` call, both for the same counters."""


class SharedPeaks:
    """memprof's own reading of the counters, and patches in which the program's go on as if it were alone."""

    def __init__(self) -> None:
        self._read: Callable[[int], dict[str, Any]] = _READ[0].get(lambda device: {})
        self._reset: Callable[[int], None] = _RESET[0].get(lambda device: None)
        self._ours: dict[int, int] = {}
        """By card, bytes: the peak that the program's resets took from memprof."""
        self._programs: dict[int, dict[str, Any]] = {}
        """By card: the peaks that memprof's resets took from the program."""

    def take(self, device: int) -> int:
        """The most that was allocated on the card since this was last called, in bytes."""
        stats = self._read(device)
        self._programs[device] = _highest(stats, self._programs.get(device, {}))
        self._reset(device)
        return max(_peak(stats), self._ours.pop(device, 0))

    def requested_bytes(self, device: int) -> int:
        """Return what is allocated on the GPU now, as it was asked for, in bytes."""
        requested: int = self._read(device)["requested_bytes"]["all"]["current"]
        return requested

    def patches(self) -> Iterator[Patch]:
        """The functions that a program's calls come down to."""
        for name in (one for one in _READ if one.exists()):
            yield name.patch(self._wrap_read(name.get()))
        for name in (one for one in _RESET if one.exists()):
            yield name.patch(self._wrap_reset(name.get()))

    def _wrap_read(self, original: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
        return lambda device: _highest(original(device), self._programs.get(device, {}))

    def _wrap_reset(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def reset(device: int) -> None:
            self._ours[device] = max(_peak(self._read(device)), self._ours.get(device, 0))
            self._programs.pop(device, None)
            original(device)

        return reset


def _peak(stats: dict[str, Any]) -> int:
    peak: int = stats["allocated_bytes"]["all"]["peak"]
    return peak


def _highest(stats: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """`stats` with each peak at least as high as in `kept`."""
    found = {}
    for name, value in stats.items():
        if isinstance(value, dict):
            value = _highest(value, kept.get(name, {}))
        elif name == "peak":
            value = max(value, kept.get(name, 0))
        found[name] = value
    return found
