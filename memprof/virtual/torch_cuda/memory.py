"""What a program is told of its caching allocator: statistics, settings, and the history of a snapshot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from memprof.trace.events import Trace
from memprof.watch.recorder import Recorder


class MemoryStatistics(Protocol):
    """What the program's caching allocator would say now; it is not known here, and given from above."""

    def stats(self) -> dict[str, int]:
        """The flat dictionary of `torch.cuda.memory_stats()`."""

    def reset_peak(self) -> None:
        """As `torch.cuda.reset_peak_memory_stats()`."""

    def reset_accumulated(self) -> None:
        """As `torch.cuda.reset_accumulated_memory_stats()`."""

    def refusal(self) -> str | None:
        """What torch.OutOfMemoryError says if there is no room for the request that is the trace's last event."""

    def snapshot(self) -> dict[str, Any]:
        """As `torch.cuda.memory._snapshot()`."""


class AllocatorSettings(Protocol):
    """The caching allocator's settings, as the program reads and sets them."""

    def get(self) -> str:
        """The text that was set last; empty for torch's defaults."""

    def set(self, alloc_conf: str) -> None:
        """As PYTORCH_CUDA_ALLOC_CONF."""


class _LivingTensors:
    """Statistics without an allocator: the bytes of the tensors that are alive."""

    def __init__(self, recorder: Recorder) -> None:
        self._storages = recorder.storages

    def stats(self) -> dict[str, int]:
        """Allocated, active, requested and reserved are the same."""
        found: dict[str, int] = {}
        for kind in ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes"):
            found[f"{kind}.all.current"] = self._storages.live_bytes
            found[f"{kind}.all.peak"] = self._storages.peak_bytes
        found["num_ooms"] = found["num_alloc_retries"] = 0
        return found

    def reset_peak(self) -> None:
        """From here on."""
        self._storages.peak_bytes = self._storages.live_bytes

    def reset_accumulated(self) -> None:
        """Nothing is accumulated."""

    def refusal(self) -> str | None:
        """There is always room."""
        return None

    def snapshot(self) -> dict[str, Any]:
        """There are no segments."""
        return {"segments": [], "device_traces": [], "allocator_settings": {}, "external_annotations": []}


class AllocatorAnswers:
    """The statistics of a run's cards, made when they are first asked for, and again when the settings have changed.

    Args:
        recorder: who writes the trace.
        make: see VirtualGpu.
    """

    def __init__(self, recorder: Recorder, make: Callable[[Trace], MemoryStatistics] | None) -> None:
        self._recorder = recorder
        self._make = make
        self._made: dict[str, MemoryStatistics] = {}

    def of(self, device: str) -> MemoryStatistics:
        """What answers for a card now."""
        made = self._made.get(device)
        if made is None:
            trace = self._recorder.trace
            trace = trace if device == trace.device else trace.on(device)
            made = self._made[device] = _LivingTensors(self._recorder) if self._make is None else self._make(trace)
        return made

    def settings_changed(self) -> None:
        """The next answer follows other settings."""
        self._made.clear()


class History:
    """What `torch.cuda.memory._record_memory_history` asks for: nothing before it is called, a ring of the last
    entries, and nothing once it is disabled (torch/csrc/cuda/memory_snapshot.cpp; c10/cuda/CUDACachingAllocator.cpp,
    recordHistory)."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._begin: int | None = None
        self._most = 0

    def record(
        self,
        enabled: str | bool | None = "all",
        context: Any = "all",
        stacks: Any = "all",
        max_entries: int = sys.maxsize,
        device: Any = None,
        clear_history: bool = False,
        trace_alloc_max_entries: int = 1,
        **unused: object,
    ) -> None:
        """As torch's; a boolean chooses the signature that it had before, with one entry unless told."""
        if not enabled:
            self._begin = None
            return
        if self._begin is None or clear_history:
            self._begin = len(self._trace.events)
        self._most = max_entries if enabled == "all" else trace_alloc_max_entries if enabled is True else 1

    def cut(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """The snapshot with as much of the history as was asked for; `time_us` counts the trace's events."""
        begin = len(self._trace.events) if self._begin is None else self._begin
        traces = [[e for e in trace if e["time_us"] >= begin][-self._most :] for trace in snapshot["device_traces"]]
        return {**snapshot, "device_traces": traces}


class SettingsOfRun:
    """The allocator's settings; a run has one configuration, and says so where the program changes it late.

    Args:
        settings: of an allocator; None: there is none, and they are a text.
        memory: told that they are others than before.
        recorder: who writes the trace.
        assume: told what the run rests on.
    """

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
                f"{self._storages.live_bytes:,} bytes were on the card."
            )
