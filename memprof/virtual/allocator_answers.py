"""Answers of the program's caching allocator: statistics and settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from memprof.trace.events import Trace
from memprof.watch.recorder import Recorder


class MemoryStatistics(Protocol):
    """The statistics of the program's caching allocator now; not known here, and given from above."""

    def stats(self) -> dict[str, int]:
        """Return the flat dictionary of `torch.cuda.memory_stats()`."""

    def reset_peak(self) -> None:
        """Reset the peaks, as `torch.cuda.reset_peak_memory_stats()` does."""

    def reset_accumulated(self) -> None:
        """Reset the totals, as `torch.cuda.reset_accumulated_memory_stats()` does."""

    def refusal(self) -> str | None:
        """Return the text of torch.OutOfMemoryError if the trace's last event is a request without room."""

    def snapshot(self) -> dict[str, Any]:
        """Return what `torch.cuda.memory._snapshot()` does."""


class AllocatorSettings(Protocol):
    """The caching allocator's settings, as the program reads and sets them."""

    def get(self) -> str:
        """Return the text that was set last; empty for torch's defaults."""

    def set(self, alloc_conf: str) -> None:
        """Take settings as PYTORCH_CUDA_ALLOC_CONF has them."""


class _LivingTensors:
    """Statistics without an allocator: the bytes of the tensors that are live."""

    def __init__(self, recorder: Recorder) -> None:
        self._storages = recorder.storages

    def stats(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for kind in ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes"):
            found[f"{kind}.all.current"] = self._storages.live_bytes
            found[f"{kind}.all.peak"] = self._storages.peak_bytes
        found["num_ooms"] = found["num_alloc_retries"] = 0
        return found

    def reset_peak(self) -> None:
        self._storages.peak_bytes = self._storages.live_bytes

    def reset_accumulated(self) -> None:
        """Do nothing: nothing is accumulated."""

    def refusal(self) -> str | None:
        return None

    def snapshot(self) -> dict[str, Any]:
        return {"segments": [], "device_traces": [], "allocator_settings": {}, "external_annotations": []}


class AllocatorAnswers:
    """The statistics of a run's GPUs, made when they are first requested, and again when the settings have changed."""

    def __init__(self, recorder: Recorder, make: Callable[[Trace], MemoryStatistics] | None) -> None:
        self._recorder = recorder
        self._make = make
        self._made: dict[str, MemoryStatistics] = {}

    def of(self, device: str) -> MemoryStatistics:
        """Return what answers for a GPU now."""
        made = self._made.get(device)
        if made is None:
            trace = self._recorder.trace
            trace = trace if device == trace.device else trace.on(device)
            made = self._made[device] = _LivingTensors(self._recorder) if self._make is None else self._make(trace)
        return made

    def settings_changed(self) -> None:
        """The next answer follows other settings."""
        self._made.clear()


class SettingsOfRun:
    """The allocator's settings; a run has one configuration, and says so where the program changes it late."""

    def __init__(
        self,
        settings: AllocatorSettings | None,
        memory: AllocatorAnswers,
        recorder: Recorder,
        assume: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._text = ""
        self._memory = memory
        self._storages = recorder.storages
        self._assume = assume

    def get(self) -> str:
        """Return the text that was set last; empty for torch's defaults."""
        return self._text if self._settings is None else self._settings.get()

    def set(self, alloc_conf: str) -> None:
        """Set them for the whole run."""
        self._text = alloc_conf
        if self._settings is not None:
            self._settings.set(alloc_conf)
        self._memory.settings_changed()
        if self._storages.peak_bytes:
            self._assume(
                f"The allocator's settings {alloc_conf!r} hold from the first allocation on; the program set them when "
                f"{self._storages.live_bytes:,} bytes were on the GPU."
            )
