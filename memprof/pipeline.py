"""The whole flow: read this first.

    TargetSpec -workload-> step -capture-> Trace -allocator-> replay -ledger-> Ledger -findings-> [Finding]
        -report-> Document

A run is captured once; everything else is computed from its trace. So a saved capture gives the same report again,
and a simulated and a measured run go through the same lines of code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memprof.allocator import Card, LiveAllocator, Settings, replay_on_card
from memprof.catalog import Gpu, custom_gpu, find_gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.errors import RunFailedError
from memprof.findings import Context, find_all
from memprof.ledger.ledger import EmptyTraceError, build_ledger
from memprof.report.document import Document, build_document
from memprof.spec import Mode, TargetSpec
from memprof.trace.events import Trace
from memprof.version import __version__

if TYPE_CHECKING:
    from memprof.library import ProfiledGpu


def profile(spec: TargetSpec, progress: Callable[[str], None] = lambda doing: None) -> tuple[Trace, Document]:
    """Run `spec` on its virtual card; returns what happened and the report on it.

    Raises:
        MemprofError: the model cannot be found or built (UsageError where the user named something wrong).
        RunFailedError: the model's code raised, or did what cannot be simulated; it carries the trace and the report
            so far.
    """
    # Here and not above: reading a capture and answering --help need no torch.
    from memprof.capture.run import capture_virtual
    from memprof.workload.models import find_source
    from memprof.workload.step import Workload

    gpu = virtual_card(spec)
    settings = allocator_settings(spec.alloc_conf)
    source = find_source(spec)
    progress("importing torch and the model's code")
    workload = Workload(spec, source)
    failed: RunFailedError | None = None
    try:
        trace = capture_virtual(workload, gpu, progress, lambda trace: live_allocator(trace, gpu, settings))
    except RunFailedError as error:
        failed, trace = error, error.trace
    trace.facts = {
        "command": "profile",
        "memprof_version": __version__,
        "target": {
            **dataclasses.asdict(spec),
            "model": source.name,
            "num_parameters": workload.num_parameters,
            "num_trainable_parameters": workload.num_trainable_parameters,
            "context_length": workload.context_length,
            "dtype": workload.dtype,
            "vocab_size": source.vocab_size,
            "asked_vocab_size": source.asked_vocab_size,
            "max_positions": source.max_positions,
            "alloc_conf": settings.alloc_conf,
        },
        "device": device_facts(gpu),
        "allocator": settings.facts(),
    }
    progress("accounting")
    if failed is None:
        return trace, analyze(trace)
    with contextlib.suppress(EmptyTraceError):  # it failed before anything was on the card
        failed.document = analyze(trace)
        failed.hint = "the finding run-failed says what to do; --debug shows the traceback"
    raise failed


def analyze(trace: Trace, alloc_conf: str | None = None) -> Document:
    """The report on a trace, simulated or measured, new or loaded from a file.

    Args:
        trace: what happened.
        alloc_conf: settings of the caching allocator instead of those that the trace was recorded with.

    Raises:
        EmptyTraceError: nothing was allocated on the card.
        UsageError: torch would refuse `alloc_conf`.
    """
    facts: dict[str, Any] = trace.facts
    target, device = facts["target"], facts["device"]
    recorded = facts.get("allocator", {})  # captures of earlier releases say nothing
    settings = Settings.from_facts(recorded)
    if alloc_conf is not None:
        settings = Settings.resolve(alloc_conf, settings.torch, environ={})
        target = {**target, "alloc_conf": alloc_conf} if target else target
        trace = dataclasses.replace(trace, facts={**facts, "target": target, "allocator": settings.facts()})
    card = Card(device["total_bytes"], device["context_bytes"])
    ledger = build_ledger(trace, replay_on_card(trace, card, settings.config, settings.release))
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
    return build_document(ledger, find_all(context), settings)


def allocator_settings(alloc_conf: str | None, *, flag: str = "--alloc-conf") -> Settings:
    """The caching allocator of the installed torch, with `alloc_conf` or the environment's settings.

    Raises:
        UsageError: torch would refuse them.
    """
    return Settings.resolve(alloc_conf, importlib.metadata.version("torch"), flag=flag, environ=os.environ)


def live_allocator(trace: Trace, gpu: Gpu, settings: Settings) -> LiveAllocator:
    """What answers a program that asks for memory statistics while it runs."""
    return LiveAllocator(trace, Card(gpu.total_bytes, CONTEXT_BYTES), settings.config, settings.release)


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


def virtual_gpu(
    name: str = "h100-80gb", *, vram: str | float | None = None, alloc_conf: str | None = None
) -> ProfiledGpu:
    """A context manager in which "cuda" is a virtual card: see `memprof.library.ProfiledGpu`.

    Args:
        name: a card of the catalog.
        vram: the capacity of a card that is in no catalog, in GiB or with a unit ("24GB"); replaces `name`.
        alloc_conf: settings of torch's caching allocator, as in PYTORCH_CUDA_ALLOC_CONF; None: the environment's.
    """
    from memprof.library import ProfiledGpu
    from memprof.units import parse_gib

    gpu = find_gpu(name) if vram is None else custom_gpu(parse_gib(vram))
    return ProfiledGpu(gpu, allocator_settings(alloc_conf, flag="alloc_conf"))
