"""The whole flow: read this first.

    TargetSpec -workload-> step -capture-> Trace -allocator-> replay -ledger-> Ledger -findings-> [Finding]
        -report-> Document

A run is captured once; everything else is computed from its trace. So a saved capture gives the same report again,
and a simulated and a measured run go through the same lines of code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memprof.allocator import CardMemory, LiveAllocator, Settings, SettingsInForce, replay_on_card, without_allocator
from memprof.catalog import Gpu, custom_gpu, find_gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.device.host import available_bytes, memory_bytes, processor_name
from memprof.errors import RunFailedError, UsageError
from memprof.findings import Context, find_all
from memprof.ledger.bridge import build_bridge
from memprof.ledger.ledger import EmptyTraceError, build_ledger
from memprof.recording.from_trace import snapshot_of
from memprof.report.documents.report import Document, build_document
from memprof.report.export.memory_viz import as_plain
from memprof.spec import Mode, TargetSpec
from memprof.trace.events import CPU, Trace
from memprof.units import format_bytes
from memprof.version import __version__

if TYPE_CHECKING:
    from memprof.workload.step import SwitchOn


def profile(
    spec: TargetSpec, progress: Callable[[str], None] = lambda doing: None, *, explained: bool = True
) -> tuple[Trace, Document]:
    """Run `spec` on its virtual card, or measure it on a real device; returns what happened and the report on it.

    Args:
        spec: what to run.
        progress: told what is being done.
        explained: see `analyze`.

    Raises:
        MemprofError: the model cannot be found or built (UsageError where the user named something wrong).
        RunFailedError: the model's code raised, or did what cannot be simulated; it carries the trace and the report
            so far.
    """
    # Here and not above: reading a capture and answering --help need no torch.
    from memprof.flows.capture import capture_measured, capture_virtual
    from memprof.workload.models import find_source
    from memprof.workload.step import Workload

    gpu = virtual_card(spec)
    device = device_facts(gpu) if spec.device == "virtual" else measured_device_facts(spec.device)
    in_force = SettingsInForce(allocator_settings(spec.alloc_conf))
    source = find_source(spec)
    progress("importing torch and the model's code")
    workload = Workload(spec, source, _switch_on(spec))
    failed: RunFailedError | None = None
    try:
        if spec.device == "virtual":
            trace = capture_virtual(
                workload, gpu, progress, lambda trace: live_allocator(trace, gpu, in_force.now), in_force
            )
        else:
            if spec.device == "cpu":
                _check_host_memory(spec, progress)
            trace = capture_measured(workload, spec.device, progress, detail=spec.detail)
    except RunFailedError as error:
        failed, trace = error, error.trace
    settings = in_force.now
    trace.facts |= {
        "command": "profile",
        "memprof_version": __version__,
        "target": {
            **dataclasses.asdict(spec),
            "model": source.name,
            "task": source.task,
            "num_parameters": workload.num_parameters,
            "num_trainable_parameters": workload.num_trainable_parameters,
            "context_length": workload.context_length,
            "dtype": workload.dtype,
            "vocab_size": source.vocab_size,
            "asked_vocab_size": source.asked_vocab_size,
            "max_positions": source.max_positions,
            "alloc_conf": settings.alloc_conf,
        },
        "device": device,
        "allocator": settings.facts(),
    }
    progress("accounting")
    if failed is None:
        return trace, analyze(trace, explained=explained)
    with contextlib.suppress(EmptyTraceError):  # it failed before anything was on the card
        failed.document = analyze(trace)
        failed.hint = "the finding run-failed says what to do; --debug shows the traceback"
    raise failed


def resolve_device(spec: TargetSpec, progress: Callable[[str], None] = lambda doing: None) -> TargetSpec:
    """`spec` on the CUDA card that is present if the run fits it by simulation; else as it is, simulated."""
    from memprof.measured.cuda import cuda_card, why_no_cuda

    if why_no_cuda() is not None:
        return spec
    progress("simulating, to see whether it fits the card that is here")
    card = cuda_card()
    _, document = profile(spec.edit(device="virtual", gpu_vram_bytes=card.total_bytes), progress)
    return spec.edit(device="cuda") if document.verdict.fits else spec.edit(gpu_vram_bytes=card.total_bytes)


def _check_host_memory(spec: TargetSpec, progress: Callable[[str], None]) -> None:
    """A run on the CPU that takes more memory than there is would take the machine down with it.

    Raises:
        UsageError: it does, by simulation.
    """
    available = available_bytes()
    if available is None:
        return
    progress("simulating, to see whether the run fits host memory")
    try:
        _, document = profile(spec.edit(device="virtual"), progress)
    except RunFailedError:
        return  # it will say so itself, if it is more than a gap of the virtual card
    needed = max(document.peak.allocated_bytes, document.host_peak_bytes)
    if needed > available:
        raise UsageError(
            "this run does not fit host memory",
            value=f"it takes {format_bytes(needed)}, {format_bytes(available)} are free",
            hint="leave out --device cpu: simulated, it takes no memory",
        )


def _switch_on(spec: TargetSpec) -> SwitchOn | None:
    """What applies the spec's remedies to the model; None if there are none."""
    if not spec.fixes:
        return None
    from memprof.remedies.on_spec import switch_on

    return switch_on


def analyze(trace: Trace, alloc_conf: str | None = None, *, explained: bool = True) -> Document:
    """The report on a trace, simulated or measured, new or loaded from a file.

    Args:
        trace: what happened.
        alloc_conf: settings of the caching allocator instead of those that the trace was recorded with.
        explained: whether the report has findings and the bridge. A search over many runs asks for the figures alone.

    Raises:
        EmptyTraceError: nothing was allocated on the card.
        UsageError: torch would refuse `alloc_conf`.
    """
    if alloc_conf is not None:
        trace = with_settings(trace, alloc_conf)
    facts: dict[str, Any] = trace.facts
    target, device = facts["target"], facts["device"]
    settings = _recorded_settings(trace)
    if trace.device == CPU:
        run = without_allocator(trace)
    else:
        card = CardMemory(device["total_bytes"], device["context_bytes"])
        run = replay_on_card(trace, card, settings.config, settings.release)
    ledger = build_ledger(trace, run)
    if not explained:
        return build_document(ledger, [], settings)
    fields = {field.name for field in dataclasses.fields(TargetSpec)}
    spec = (
        TargetSpec(**{**{k: v for k, v in target.items() if k in fields}, "mode": Mode(target["mode"])})
        if target
        else None
    )
    context = Context(
        ledger=ledger,
        usable_bytes=device["usable_bytes"],
        card=device["name"],
        spec=spec,
        vocab_size=target.get("vocab_size"),
        asked_vocab_size=target.get("asked_vocab_size"),
        num_parameters=target.get("num_parameters"),
        context_length=target.get("context_length"),
        max_positions=target.get("max_positions"),
    )
    bridge = build_bridge(ledger)
    return build_document(ledger, find_all(context), settings, bridge)


def with_settings(trace: Trace, alloc_conf: str) -> Trace:
    """The same requests under these settings of the caching allocator, as if it had been recorded with them.

    Raises:
        UsageError: torch would refuse them.
    """
    settings = Settings.resolve(alloc_conf, _recorded_settings(trace).torch, environ={})
    facts: dict[str, Any] = trace.facts
    target = facts["target"]
    target = {**target, "alloc_conf": alloc_conf} if target else target
    return dataclasses.replace(trace, facts={**facts, "target": target, "allocator": settings.facts()})


def _recorded_settings(trace: Trace) -> Settings:
    facts: dict[str, Any] = trace.facts
    return Settings.from_facts(facts.get("allocator", {}))  # captures of earlier releases say nothing


def allocator_settings(alloc_conf: str | None, *, flag: str = "--alloc-conf") -> Settings:
    """The caching allocator of the installed torch, with `alloc_conf` or the environment's settings.

    Raises:
        UsageError: torch would refuse them.
    """
    return Settings.resolve(alloc_conf, importlib.metadata.version("torch"), flag=flag, environ=os.environ)


def live_allocator(trace: Trace, gpu: Gpu, settings: Settings) -> _Statistics:
    """What answers a program that asks for memory statistics while it runs."""
    return _Statistics(trace, gpu, settings)


class _Statistics(LiveAllocator):
    """The allocator of a run, which is also written down as torch would."""

    def __init__(self, trace: Trace, gpu: Gpu, settings: Settings) -> None:
        card = CardMemory(gpu.total_bytes, CONTEXT_BYTES)
        super().__init__(trace, card, settings.config, settings.release)
        self._snapshot = functools.partial(
            snapshot_of, trace, settings.config, usable_bytes=card.usable_bytes, total_bytes=card.total_bytes
        )

    def snapshot(self) -> dict[str, Any]:
        """torch.cuda.memory._snapshot() now, with the history since the run began."""
        return as_plain(self._snapshot().snapshot)


def virtual_card(spec: TargetSpec) -> Gpu:
    """The card that `spec` asks for."""
    return find_gpu(spec.gpu) if spec.gpu_vram_bytes is None else custom_gpu(spec.gpu_vram_bytes)


def device_facts(gpu: Gpu) -> dict[str, object]:
    """What the report says of a card: capacity, and what is left of it for tensors."""
    return {
        "name": gpu.name,
        "total_bytes": gpu.total_bytes,
        "usable_bytes": gpu.total_bytes - CONTEXT_BYTES,
        "context_bytes": CONTEXT_BYTES,
    }


def measured_device_facts(name: str) -> dict[str, object]:
    """What the report says of the device that a run was measured on.

    Raises:
        MemprofError: there is no such device.
    """
    if name == "cpu":
        total = memory_bytes()
        return {"name": processor_name(), "total_bytes": total, "usable_bytes": total, "context_bytes": 0}
    from memprof.measured.cuda import cuda_card

    card = cuda_card()
    return {
        "name": card.name,
        "total_bytes": card.total_bytes,
        "usable_bytes": card.total_bytes - card.context_bytes,
        "context_bytes": card.context_bytes,
    }
