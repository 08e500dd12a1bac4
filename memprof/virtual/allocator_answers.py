"""Answers to the program's queries of its caching allocator: statistics and settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from memprof.trace.events import Trace
from memprof.watch.recorder import Recorder


class MemoryStatistics(Protocol):
    """Current statistics of a caching allocator; the caller of `VirtualGpu` provides the implementation."""

    def stats(self) -> dict[str, int]:
        """Return the flat dictionary of `torch.cuda.memory_stats()`."""

    def reset_peak(self) -> None:
        """Reset the peak statistics, as `torch.cuda.reset_peak_memory_stats()` does."""

    def reset_accumulated(self) -> None:
        """Reset the accumulated statistics, as `torch.cuda.reset_accumulated_memory_stats()` does."""

    def find_oom_message(self) -> str | None:
        """Return the message of torch.OutOfMemoryError if the trace's last event is a failed allocation, else None."""

    def snapshot(self) -> dict[str, Any]:
        """Return the snapshot that `torch.cuda.memory._snapshot()` returns."""

    def change_settings(self, other: Any) -> None:
        """Use the allocator settings of `other`, statistics of the same GPU, for requests from now on."""


class AllocatorSettings(Protocol):
    """The caching allocator's settings, as the program reads and sets them."""

    def get(self) -> str:
        """Return the settings that were set last, as a string; empty for torch's defaults."""

    def set(self, alloc_conf: str) -> None:
        """Apply settings in the syntax of PYTORCH_CUDA_ALLOC_CONF."""


class _LiveStatistics:
    """Memory statistics without a simulated allocator: the bytes of live tensors."""

    def __init__(self, recorder: Recorder) -> None:
        self._storages = recorder.storages

    def stats(self) -> dict[str, int]:
        stats: dict[str, int] = {}
        for kind in ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes"):
            stats[f"{kind}.all.current"] = self._storages.live_bytes
            stats[f"{kind}.all.peak"] = self._storages.peak_bytes
        stats["num_ooms"] = stats["num_alloc_retries"] = 0
        return stats

    def reset_peak(self) -> None:
        self._storages.peak_bytes = self._storages.live_bytes

    def reset_accumulated(self) -> None:
        """Do nothing: no accumulated statistics exist here."""

    def find_oom_message(self) -> str | None:
        return None

    def snapshot(self) -> dict[str, Any]:
        return {"segments": [], "device_traces": [], "allocator_settings": {}, "external_annotations": []}

    def change_settings(self, other: Any) -> None:
        """Do nothing: these statistics do not depend on settings."""


class AllocatorAnswers:
    """Memory statistics of each GPU, created at the first query."""

    def __init__(self, recorder: Recorder, make_statistics: Callable[[Trace], MemoryStatistics] | None) -> None:
        self._recorder = recorder
        self._make = make_statistics
        self._stats: dict[str, MemoryStatistics] = {}

    def get_statistics(self, device: str) -> MemoryStatistics:
        """Return the current statistics of the GPU `device`."""
        stats = self._stats.get(device)
        if stats is None:
            trace = self._recorder.trace
            trace = trace if device == trace.device else trace.select_device(device)
            stats = self._stats[device] = _LiveStatistics(self._recorder) if self._make is None else self._make(trace)
        return stats

    def change_settings(self) -> None:
        """Make what has been queried so far use the current settings for requests from now on."""
        old_stats, self._stats = self._stats, {}
        for device, stats in old_stats.items():
            stats.change_settings(self.get_statistics(device))
        self._stats = old_stats


class RunSettings:
    """The allocator's settings as the program sets them; a change after the first allocation becomes an assumption."""

    def __init__(
        self,
        settings: AllocatorSettings | None,
        statistics: AllocatorAnswers,
        recorder: Recorder,
        assume: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._alloc_conf = ""
        self._statistics = statistics
        self._storages = recorder.storages
        self._assume = assume

    def get(self) -> str:
        """Return the settings that were set last, as a string; empty for torch's defaults."""
        return self._alloc_conf if self._settings is None else self._settings.get()

    def set(self, alloc_conf: str) -> None:
        """Set the allocator's settings for the entire run."""
        self._alloc_conf = alloc_conf
        if self._settings is not None:
            self._settings.set(alloc_conf)
        self._statistics.change_settings()
        if self._storages.peak_bytes:
            self._assume(
                f"The program set allocator settings {alloc_conf!r} when {self._storages.live_bytes:,} bytes were "
                "on the GPU: its queries follow that, and this report has the last settings from the beginning on."
            )
