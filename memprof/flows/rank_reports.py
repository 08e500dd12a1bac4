"""Merge of the reports of a distributed program's ranks, which ran together, or one rank per kind alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from memprof.errors import UsageError
from memprof.findings import Finding, Severity
from memprof.findings.ranks_differ import RankPeak, find_differing_ranks
from memprof.flows.gpu_reports import make_peak_fields, merge_findings
from memprof.ledger.ledger import EmptyTraceError
from memprof.report.documents.ranks import RankRow
from memprof.report.documents.report import Report
from memprof.trace.events import Trace

PEER = "another rank"  # the end reason of a rank that was stopped because another failed
_NORMAL_ENDS = ("exit", "steps")
_TOGETHER = (
    "The ranks ran together: what is known of tensors, objects and sizes was exchanged, and their calls were matched."
)
_ONE_OF_EACH = "One rank of each kind was run, alone: the others are taken to be like it."
_IN_PART = (
    "Of the {} ranks {} ran together; each of the others is taken to be like the lowest of these in a group, and sends "
    "nothing that is known."
)


def merge_traces(traces: Iterable[Trace]) -> Trace:
    """Return the trace of the lowest rank, with the other traces in `others`; equal traces share their data."""
    found: list[Trace] = []
    for trace in sorted(traces, key=rank_index):
        like = next((one for one in found if _collect_requests(one) == _collect_requests(trace)), None)
        found.append(trace if like is None else dataclasses.replace(like, facts=trace.facts))
    return dataclasses.replace(found[0], others=found[1:])


def rank_index(trace: Trace) -> int:
    """Return the rank that recorded a trace; 0 if the trace has none."""
    return trace.facts.rank.rank if trace.facts.rank else 0


def _collect_requests(trace: Trace) -> tuple[object, ...]:
    """Return the requests of a rank in order, with phases, failure and program: equal for ranks that ran alike."""
    sizes = [(storage.num_bytes, storage.device == "cpu") for storage in trace.storages]
    return trace.events, sizes, trace.phases, trace.failure, trace.facts.program


def merge_rank_reports(trace: Trace, report: Callable[[Trace], Report], rank: int | None = None) -> Report:
    """Return the report on rank `rank` (None: the rank with the highest need), with the verdict on all ranks.

    `report` returns the report of one rank. Raises EmptyTraceError: no rank allocated on its GPU; UsageError: rank
    `rank` was not run, or allocated nothing on its GPU.
    """
    traces = {rank_index(one): one for one in (dataclasses.replace(trace, others=[]), *trace.others)}
    if rank is not None and rank not in traces:
        raise UsageError(
            "no such rank was run", value=f"--rank {rank}", hint=f"there are {', '.join(map(str, traces))}"
        )
    firsts: dict[int, int] = {}
    made: dict[int, Report] = {}
    empty: EmptyTraceError | None = None
    for number, one in traces.items():
        like = next((first for first in firsts.values() if traces[first].events is one.events), number)
        firsts[number] = like
        try:
            document = made[like] if like in made else report(one)
        except EmptyTraceError as error:
            empty = error
            continue
        made[number] = dataclasses.replace(document, rank=one.facts.rank, program=one.facts.program)
    if not made:
        assert empty is not None
        raise empty
    decides = min(made, key=lambda number: _severity_key(made[number]))
    shown = decides if rank is None else rank
    if shown not in made:
        hint = "leave it out, or ask for " + ", ".join(map(str, made))
        raise UsageError("nothing was allocated on the GPU of this rank", value=f"--rank {shown}", hint=hint)
    document = made[shown]
    others = [(f"rank {number}", one) for number, one in made.items() if number != shown and firsts[number] == number]
    size = document.rank.world_size if document.rank else len(traces)
    notes: tuple[str, ...] = (_TOGETHER,) if len(traces) == size else (_TOGETHER, _IN_PART.format(size, len(traces)))
    if trace.source == "measured":
        notes = ()
    elif trace.facts.rank is not None and trace.facts.rank.alike:
        notes = (_ONE_OF_EACH,)
    findings = (*_find_differences(made), *merge_findings(f"rank {shown}", document.findings, others))
    return dataclasses.replace(
        document,
        verdict=made[decides].verdict,
        findings=tuple(sorted(findings, key=lambda one: one.severity is not Severity.ERROR)),
        assumptions=(*document.assumptions, *notes),
        ranks=tuple(
            _row(one, number, made.get(number), None if firsts[number] == number else firsts[number], decides, shown)
            for number, one in traces.items()
        ),
    )


def _find_differences(made: dict[int, Report]) -> list[Finding]:
    """Return findings on ranks whose peaks differ, if no rank failed; a rank run for several counts as each of them."""
    peaks: dict[int, RankPeak] = {}
    for number, one in made.items():
        alike = one.rank.alike if one.rank else ()
        for rank in range(alike[0], alike[-1] + 1) if alike else (number,):
            peaks[rank] = RankPeak(one.peak.allocated_bytes, one.peak.categories, one.peak.tensors)
    return [] if any(one.failure for one in made.values()) else find_differing_ranks(peaks)


def _severity_key(document: Report) -> tuple[int, int, int]:
    """Return a sort key: failed ranks, out of memory, stopped by a peer, then by required and peak bytes."""
    verdict = document.verdict
    is_stopped = document.program is not None and document.program.ended == PEER
    memory_order = 1 if verdict.fits is False else 3
    order = memory_order if document.failure is None else 2 if is_stopped else 0
    return order, -verdict.required_bytes, -document.peak.allocated_bytes


def _row(trace: Trace, number: int, document: Report | None, like: int | None, decides: int, shown: int) -> RankRow:
    program = trace.facts.program
    return RankRow(
        rank=number,
        like=like,
        alike=trace.facts.rank.alike if trace.facts.rank else (),
        ended=program.ended if program else "",
        peak_step=document.peak.step if document else 0,
        fits=document.verdict.fits if document else True if program and program.ended in _NORMAL_ENDS else None,
        categories=document.peak.categories if document else {},
        decides=number == decides,
        shown=number == shown,
        **make_peak_fields(document, trace.facts.device.context_bytes),
    )
