"""Merge of the reports of a distributed program's ranks, which ran together, or one rank per kind alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from memprof.errors import UsageError
from memprof.findings import Finding
from memprof.findings.ranks_differ import RankPeak, find_differing_ranks
from memprof.flows.gpu_reports import make_peak_fields, merge_findings
from memprof.ledger.ledger import EmptyTraceError
from memprof.report.documents.ranks import RankRow
from memprof.report.documents.report import Report
from memprof.trace.events import Trace

PEER_END_REASON = "another rank"  # the end reason of a rank that was stopped because another failed
_NORMAL_END_REASONS = ("exit", "steps", "ready")
_TOGETHER_NOTE = (
    "The ranks ran together: what is known of tensors, objects and sizes was exchanged, and their calls were matched."
)
_ONE_PER_KIND_NOTE = "One rank of each kind was run, alone: the others are taken to be like it."
_PARTIAL_NOTE = (
    "Of the {} ranks {} ran together; each of the others is taken to be like the lowest of these in a group, and sends "
    "nothing that is known."
)


def merge_traces(traces: Iterable[Trace]) -> Trace:
    """Return the trace of the lowest rank, with the traces of further ranks in its field `others`."""
    merged_traces: list[Trace] = []
    for trace in sorted(traces, key=get_rank):
        equal_trace = next((one for one in merged_traces if _collect_requests(one) == _collect_requests(trace)), None)
        merged_traces.append(trace if equal_trace is None else dataclasses.replace(equal_trace, facts=trace.facts))
    return dataclasses.replace(merged_traces[0], others=merged_traces[1:])


def get_rank(trace: Trace) -> int:
    """Return the rank that recorded a trace; 0 if the trace has none."""
    return trace.facts.rank.rank if trace.facts.rank else 0


def _collect_requests(trace: Trace) -> tuple[object, ...]:
    """Return the events, storage sizes, phases, failure and program of a trace, to compare traces of two ranks."""
    sizes = [(storage.num_bytes, storage.device == "cpu") for storage in trace.storages]
    return trace.events, sizes, trace.phases, trace.failure, trace.facts.program


def merge_rank_reports(trace: Trace, report: Callable[[Trace], Report], rank: int | None = None) -> Report:
    """Return the report on `rank` (None: the rank that requires the most memory), with the verdict on all ranks.

    `report` builds the report of one rank. Raises EmptyTraceError: no rank allocated on its GPU; UsageError: `rank` was
    not run, or allocated nothing on its GPU."""
    traces = {get_rank(one): one for one in (dataclasses.replace(trace, others=[]), *trace.others)}
    if rank is not None and rank not in traces:
        raise UsageError(
            "no such rank was run", value=f"--rank {rank}", hint=f"there are {', '.join(map(str, traces))}"
        )
    firsts: dict[int, int] = {}
    made: dict[int, Report] = {}
    empty_error: EmptyTraceError | None = None
    for number, one in traces.items():
        equal_rank = next((first for first in firsts.values() if traces[first].events is one.events), number)
        firsts[number] = equal_rank
        try:
            document = made[equal_rank] if equal_rank in made else report(one)
        except EmptyTraceError as error:
            empty_error = error
            continue
        made[number] = dataclasses.replace(document, rank=one.facts.rank, program=one.facts.program)
    if not made:
        assert empty_error is not None
        raise empty_error
    decides = min(made, key=lambda number: _make_severity_key(made[number]))
    shown = decides if rank is None else rank
    if shown not in made:
        hint = "leave it out, or ask for " + ", ".join(map(str, made))
        raise UsageError("nothing was allocated on the GPU of this rank", value=f"--rank {shown}", hint=hint)
    document = made[shown]
    others = [(f"rank {number}", one) for number, one in made.items() if number != shown and firsts[number] == number]
    size = document.rank.world_size if document.rank else len(traces)
    notes: tuple[str, ...] = (
        (_TOGETHER_NOTE,) if len(traces) == size else (_TOGETHER_NOTE, _PARTIAL_NOTE.format(size, len(traces)))
    )
    if trace.source == "measured":
        notes = ()
    elif trace.facts.rank is not None and trace.facts.rank.alike:
        notes = (_ONE_PER_KIND_NOTE,)
    findings = (*_find_rank_differences(made), *merge_findings(f"rank {shown}", document.findings, others))
    return dataclasses.replace(
        document,
        verdict=made[decides].verdict,
        findings=tuple(sorted(findings, key=lambda one: one.order)),
        assumptions=(*document.assumptions, *notes),
        ranks=tuple(
            _build_row(
                one, number, made.get(number), None if firsts[number] == number else firsts[number], decides, shown
            )
            for number, one in traces.items()
        ),
    )


def _find_rank_differences(reports: dict[int, Report]) -> list[Finding]:
    """Return findings on ranks whose peaks differ, if no rank failed; a rank run for several counts for each."""
    peaks: dict[int, RankPeak] = {}
    for report_rank, report in reports.items():
        equal_ranks = report.rank.alike if report.rank else ()
        for rank in range(equal_ranks[0], equal_ranks[-1] + 1) if equal_ranks else (report_rank,):
            peaks[rank] = RankPeak(report.peak.allocated_bytes, report.peak.categories, report.peak.tensors)
    return [] if any(report.failure for report in reports.values()) else find_differing_ranks(peaks)


def _make_severity_key(document: Report) -> tuple[int, int, int]:
    """Return a sort key: failed ranks, out of memory, stopped by a peer, then by required and peak bytes."""
    verdict = document.verdict
    is_stopped = document.program is not None and document.program.ended == PEER_END_REASON
    memory_order = 1 if verdict.fits is False else 3
    order = memory_order if document.failure is None else 2 if is_stopped else 0
    return order, -verdict.required_bytes, -document.peak.allocated_bytes


def _build_row(
    trace: Trace, rank: int, document: Report | None, equal_rank: int | None, decides: int, shown: int
) -> RankRow:
    program = trace.facts.program
    return RankRow(
        rank=rank,
        like=equal_rank,
        alike=trace.facts.rank.alike if trace.facts.rank else (),
        ended=program.ended if program else "",
        peak_step=document.peak.step if document else 0,
        fits=document.verdict.fits if document else True if program and program.ended in _NORMAL_END_REASONS else None,
        categories=document.peak.categories if document else {},
        decides=rank == decides,
        shown=rank == shown,
        **make_peak_fields(document, trace.facts.device.context_bytes),
    )
