"""memprof as a library: `with memprof.virtual_gpu(...) as gpu: …; print(gpu.report())`."""

from __future__ import annotations

import dataclasses

from memprof.allocator import Settings, SettingsInForce
from memprof.capture.virtual import VirtualGpu
from memprof.catalog import Gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.errors import UsageError
from memprof.pipeline import allocator_settings, analyze, device_facts, live_allocator
from memprof.report.document import Document
from memprof.trace.events import Trace
from memprof.units import format_bytes


class ProfiledGpu:
    """A virtual GPU for the user's own code.

    Inside the `with` block `torch.device("cuda")` is the virtual card; forward, backward and optimizer steps are
    recognised as they happen. Afterwards, also when the block raised, `report()` and `trace` say what happened.
    """

    def __init__(self, gpu: Gpu, settings: Settings | None = None) -> None:
        self._gpu = gpu
        self._settings = SettingsInForce(allocator_settings(None) if settings is None else settings)
        self._virtual = VirtualGpu(
            gpu,
            context_bytes=CONTEXT_BYTES,
            memory=lambda trace: live_allocator(trace, gpu, self._settings.now),
            allocator_settings=self._settings,
        )

    def __enter__(self) -> ProfiledGpu:
        self._virtual.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._virtual.__exit__(kind, error, traceback)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that tensors hold on the card now (inside the block)."""
        return self._virtual.recorder.live_bytes

    @property
    def trace(self) -> Trace:
        """What was recorded."""
        trace = self._virtual.trace
        trace.facts = {
            "command": "virtual_gpu",
            "target": {},
            "device": device_facts(self._gpu),
            "allocator": self._settings.now.facts(),
        }
        return trace

    def report(self, limit_bytes: int | None = None) -> Document:
        """The report so far; `print` shows it, `.to_json()` is a dictionary.

        Args:
            limit_bytes: of device memory, CUDA context included: judged as if the card had no more. None: the card's.

        Raises:
            EmptyTraceError: nothing was allocated on the card.
            UsageError: no card can be held to `limit_bytes`.
        """
        self.check_limit(limit_bytes)
        trace = self.trace
        if limit_bytes is not None:
            name = f"{self._gpu.name} held to {format_bytes(limit_bytes)}"
            trace.facts["device"] = device_facts(dataclasses.replace(self._gpu, name=name, total_bytes=limit_bytes))
        return analyze(trace)

    def check_limit(self, limit_bytes: int | None) -> None:
        """Whether the card can be held to so much.

        Raises:
            UsageError: it has not as much, or that is less than the CUDA context takes.
        """
        if limit_bytes is None:
            return
        if limit_bytes > self._gpu.total_bytes:
            raise UsageError(
                "the limit is more than the card has",
                value=f"{format_bytes(limit_bytes)}; {self._gpu.name} has {format_bytes(self._gpu.total_bytes)}",
                hint="leave the limit out, or choose another card",
            )
        if limit_bytes <= CONTEXT_BYTES:
            raise UsageError(
                "the limit leaves nothing beside the CUDA context",
                value=f"{format_bytes(limit_bytes)}; the context takes {format_bytes(CONTEXT_BYTES)}",
                hint="the limit is device memory with the context, as nvidia-smi shows it",
            )
