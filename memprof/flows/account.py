"""Accounting of a run: replay its trace through the allocator; build the ledger, the findings and the report.

    Trace -allocator-> replay -ledger-> Ledger -findings-> [Finding] -report-> Report

All traces, simulated, measured or loaded from a file, go through the same functions.
"""

from __future__ import annotations

import dataclasses

from memprof.allocator import GpuMemory, Settings, replay_in_host_memory, replay_on_gpu
from memprof.errors import UsageError
from memprof.findings import Context, find_all
from memprof.findings.exhaustion import predict_growth
from memprof.flows.gpu_reports import merge_gpu_reports
from memprof.flows.rank_reports import get_rank, merge_rank_reports
from memprof.ledger.bridge import build_bridge
from memprof.ledger.ledger import Ledger, build_ledger
from memprof.ledger.over_time import build_over_time
from memprof.ledger.streams import StreamMemory
from memprof.report.documents.report import Report, build_report
from memprof.trace.events import CPU, Trace

# Fields of the target that the rules of findings read.
_TARGET_FIELDS = ("spec", "vocab_size", "asked_vocab_size", "context_length", "max_positions")


def analyze(
    trace: Trace,
    alloc_conf: str | None = None,
    *,
    with_details: bool = True,
    gpu: int | None = None,
    rank: int | None = None,
) -> Report:
    """Return the report on a trace, which may be simulated, measured or loaded from a file.

    `alloc_conf` replaces the allocator settings of the run. `with_details` adds all findings and the bridge. `gpu` and
    `rank` select what is shown in full; None: the GPU with the highest usage, the rank with the highest need. Raises
    EmptyTraceError: nothing was allocated on the GPU; UsageError: torch would refuse `alloc_conf`, or there is no such
    GPU or rank."""
    if alloc_conf is not None:
        trace = replace_allocator_settings(trace, alloc_conf)
    if trace.others or (trace.facts.rank is not None and trace.facts.rank.alike and rank is None):
        return merge_rank_reports(trace, lambda rank_trace: _account_process(rank_trace, with_details, gpu), rank)
    if rank not in (None, get_rank(trace)):
        hint = f"leave it out: it was rank {get_rank(trace)} alone"
        raise UsageError("no such rank was run", value=f"--rank {rank}", hint=hint)
    return _account_process(trace, with_details, gpu)


def _account_process(trace: Trace, with_details: bool, gpu: int | None) -> Report:
    if trace.gpus:
        return merge_gpu_reports(trace, lambda gpu_trace: _account_gpu(gpu_trace, with_details), gpu)
    if gpu:
        raise UsageError("the run had one GPU", value=f"--gpu-index {gpu}", hint="leave it out")
    return _account_gpu(trace, with_details)[1]


def _account_gpu(trace: Trace, with_details: bool) -> tuple[Ledger, Report]:
    """Return the ledger and the report of the GPU `trace.device`, or of host memory."""
    device, target = trace.facts.device, trace.facts.target
    settings = Settings.from_facts(trace.facts.allocator)
    if trace.device == CPU:
        replay = replay_in_host_memory(trace)
    else:
        replay = replay_on_gpu(trace, GpuMemory.of(device), settings.config, settings.release)
    ledger = build_ledger(trace, replay)
    fields = {} if target is None else {name: getattr(target, name) for name in _TARGET_FIELDS}
    program = trace.facts.program
    fixes = () if program is None else program.fixes
    streams, usable_bytes = StreamMemory.from_ledger(ledger), device.usable_bytes
    context = Context(ledger=ledger, usable_bytes=usable_bytes, gpu=device.name, fixes=fixes, streams=streams, **fields)
    growth = predict_growth(context)
    if not with_details:
        return ledger, build_report(ledger, find_all(context, for_search=True), settings, growth=growth)
    bridge = build_bridge(ledger)
    document = build_report(ledger, find_all(context), settings, bridge, streams, growth)
    return ledger, dataclasses.replace(document, ledger=ledger, over_time=build_over_time(ledger))


def replace_allocator_settings(trace: Trace, alloc_conf: str) -> Trace:
    """Return the trace as if recorded with allocator settings `alloc_conf`; raise UsageError if torch refuses them."""
    facts = trace.facts
    settings = Settings.resolve(alloc_conf, None if facts.allocator is None else facts.allocator.torch, environ={})
    target = None if facts.target is None else dataclasses.replace(facts.target, alloc_conf=alloc_conf)
    return dataclasses.replace(
        trace,
        facts=dataclasses.replace(facts, target=target, allocator=settings.facts),
        others=[replace_allocator_settings(other, alloc_conf) for other in trace.others],
    )
