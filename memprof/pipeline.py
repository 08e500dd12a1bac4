"""The whole flow: read this first.

    TargetSpec -workload-> step -capture-> Trace -ledger-> Ledger -findings-> [Finding] -report-> Document

A run is captured once; everything else is computed from its trace. So a saved capture gives the same report again,
and a simulated and a measured run go through the same lines of code.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
    source = find_source(spec)
    progress("importing torch and the model's code")
    workload = Workload(spec, source)
    failed: RunFailedError | None = None
    try:
        trace = capture_virtual(workload, gpu, progress)
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
        },
        "device": device_facts(gpu),
    }
    progress("accounting")
    if failed is None:
        return trace, analyze(trace)
    with contextlib.suppress(EmptyTraceError):  # it failed before anything was on the card
        failed.document = analyze(trace)
        failed.hint = "the finding run-failed says what to do; --debug shows the traceback"
    raise failed


def analyze(trace: Trace) -> Document:
    """The report on a trace, simulated or measured, new or loaded from a file."""
    facts: dict[str, Any] = trace.facts
    target, device = facts["target"], facts["device"]
    ledger = build_ledger(trace)
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
    return build_document(ledger, find_all(context))


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


def virtual_gpu(name: str = "h100-80gb", *, vram: str | float | None = None) -> ProfiledGpu:
    """A context manager in which "cuda" is a virtual card: see `memprof.library.ProfiledGpu`.

    Args:
        name: a card of the catalog.
        vram: the capacity of a card that is in no catalog, in GiB or with a unit ("24GB"); replaces `name`.
    """
    from memprof.library import ProfiledGpu
    from memprof.units import parse_gib

    return ProfiledGpu(find_gpu(name) if vram is None else custom_gpu(parse_gib(vram)))
