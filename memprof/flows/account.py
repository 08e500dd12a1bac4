"""Accounting of a run: replay its trace through the allocator; build the ledger, the findings and the report.

    Trace -allocator-> replay -ledger-> Ledger -findings-> [Finding] -report-> Document

Simulated and measured traces, new or loaded from a file, go through the same functions.
"""

from __future__ import annotations

import dataclasses

from memprof.allocator import GpuMemory, Settings, replay_in_host_memory, replay_on_gpu
from memprof.errors import UsageError
from memprof.findings import Context, find_all
from memprof.findings.exhaustion import predict_growth
from memprof.flows.gpu_reports import merge_gpu_reports
from memprof.flows.rank_reports import merge_rank_reports, rank_index
from memprof.ledger.bridge import build_bridge
from memprof.ledger.ledger import Ledger, build_ledger
from memprof.ledger.over_time import over_time
from memprof.ledger.streams import StreamMemory
from memprof.report.documents.report import Report, build_report
from memprof.trace.events import CPU, Trace

# Fields of the target that the rules of findings read.
_TARGET_FIELDS = ("spec", "vocab_size", "asked_vocab_size", "context_length", "max_positions")


def analyze(
    trace: Trace,
    alloc_conf: str | None = None,
    *,
    explained: bool = True,
    gpu: int | None = None,
    rank: int | None = None,
) -> Report:
    """Return the report on a trace, simulated or measured, new or loaded from a file.

    Args:
        alloc_conf: settings of the caching allocator instead of those that the trace was recorded with.
        explained: include all findings and the bridge; a search over many runs leaves them out.
        gpu: index of the GPU that is shown in full, where a run has several; None: the GPU with the highest usage.
        rank: rank that is shown in full, where several ran together; None: the rank with the highest need.

    Raises:
        EmptyTraceError: nothing was allocated on the GPU.
        UsageError: torch would refuse `alloc_conf`, or there is no such GPU or rank.
    """
    if alloc_conf is not None:
        trace = with_settings(trace, alloc_conf)
    if trace.others or (trace.facts.rank is not None and trace.facts.rank.alike and rank is None):
        return merge_rank_reports(trace, lambda one: _account_process(one, explained, gpu), rank)
    if rank not in (None, rank_index(trace)):
        hint = f"leave it out: it was rank {rank_index(trace)} alone"
        raise UsageError("no such rank was run", value=f"--rank {rank}", hint=hint)
    return _account_process(trace, explained, gpu)


def _account_process(trace: Trace, explained: bool, gpu: int | None) -> Report:
    if trace.gpus:
        return merge_gpu_reports(trace, lambda one: _account_gpu(one, explained), gpu)
    if gpu:
        raise UsageError("the run had one GPU", value=f"--gpu-index {gpu}", hint="leave it out")
    return _account_gpu(trace, explained)[1]


def _account_gpu(trace: Trace, explained: bool) -> tuple[Ledger, Report]:
    """Return the ledger and the report of the GPU `trace.device`, or of host memory."""
    device, target = trace.facts.device, trace.facts.target
    settings = Settings.from_facts(trace.facts.allocator)
    if trace.device == CPU:
        run = replay_in_host_memory(trace)
    else:
        run = replay_on_gpu(trace, GpuMemory.of(device), settings.config, settings.release)
    ledger = build_ledger(trace, run)
    fields = {} if target is None else {name: getattr(target, name) for name in _TARGET_FIELDS}
    program = trace.facts.program
    fixes = () if program is None else program.fixes
    streams, usable = StreamMemory.of(ledger), device.usable_bytes
    context = Context(ledger=ledger, usable_bytes=usable, gpu=device.name, fixes=fixes, streams=streams, **fields)
    growth = predict_growth(context)
    if not explained:
        return ledger, build_report(ledger, find_all(context, for_search=True), settings, growth=growth)
    bridge = build_bridge(ledger)
    document = build_report(ledger, find_all(context), settings, bridge, streams, growth)
    return ledger, dataclasses.replace(document, ledger=ledger, over_time=over_time(ledger))


def with_settings(trace: Trace, alloc_conf: str) -> Trace:
    """Return the trace as if recorded with allocator settings `alloc_conf`; raise UsageError if torch refuses them."""
    facts = trace.facts
    settings = Settings.resolve(alloc_conf, None if facts.allocator is None else facts.allocator.torch, environ={})
    target = None if facts.target is None else dataclasses.replace(facts.target, alloc_conf=alloc_conf)
    return dataclasses.replace(
        trace,
        facts=dataclasses.replace(facts, target=target, allocator=settings.facts),
        others=[with_settings(other, alloc_conf) for other in trace.others],
    )
