"""The report on a run as text for a terminal: stages, verdict, categories at the peak, largest tensors, findings."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.report.documents.report import Report
from memprof.report.terminal.bridge import render_bridge, render_streams
from memprof.report.terminal.console import dim, make_heading
from memprof.report.terminal.findings import render_findings
from memprof.report.terminal.heading import render_heading
from memprof.report.terminal.ladder import render_ladder
from memprof.report.terminal.limit import render_limit
from memprof.report.terminal.next_step import choose_next_step, render_next_step
from memprof.report.terminal.peak import choose_report_unit, render_categories, render_tensors
from memprof.report.terminal.ranks import render_gpus, render_ranks
from memprof.report.terminal.stage_names import describe_moment
from memprof.report.terminal.stages import render_stages
from memprof.report.terminal.steps import render_batches, render_steps
from memprof.report.terminal.timeline import CategoryTimeline
from memprof.report.terminal.verdict import render_answer, render_certain_errors, render_verdict
from memprof.stubs.packages import NO_STUBS_HINT


def render(document: Report, *, explain: bool = False, quiet: bool = False) -> RenderableType:
    """Return a report for a terminal; `explain` adds the assumptions, `quiet` leaves only the verdict."""
    if quiet:
        return render_answer(document)
    parts = [render_heading(document), render_stages(document), Text("")]
    parts += [*render_certain_errors(document), render_verdict(document)]
    parts += _render_cause(document)
    parts += [Text(f"Note: {text}") for text in document.assumptions if text.endswith(NO_STUBS_HINT) and not explain]
    unit = choose_report_unit(document)
    parts += [render_ranks(document.ranks, unit, on_cpu=document.on_cpu)] if document.ranks else []
    parts += [render_gpus(document.gpus, unit)] if document.gpus else []
    parts += [] if document.batches is None else [render_batches(document.batches, unit)]
    parts += [render_steps(document.steps, unit)] if document.steps else []
    parts += [] if document.limit is None else [render_limit(document.limit, document.device.total_bytes or 0)]
    parts += [Text(""), render_categories(document)]
    if document.over_time is not None:
        where = describe_moment(document, document.peak.stage, document.peak.step)
        parts.append(CategoryTimeline(document.over_time, unit, where))
    parts += [] if document.bridge is None else [render_bridge(document.bridge, unit, document.device)]
    parts += [] if document.streams is None else [render_streams(document.streams, unit)]
    parts += [render_tensors(document), render_findings(document)]
    parts += [render_ladder(document)] if document.ladder else []
    if explain:
        parts += [make_heading("What this rests on"), *(Text(f"  - {sentence}") for sentence in document.assumptions)]
    else:
        parts.append(dim(f"{len(document.assumptions)} assumptions: --explain lists them."))
    return Group(*parts, *render_next_step(choose_next_step(document)))


def _render_cause(document: Report) -> list[RenderableType]:
    """Return the finding without which the run would fit, if there is one; it is shown at the verdict."""
    first = document.findings[:1]
    return [Text("Cause: ", style="bold").append(one.title, style="default") for one in first if one.is_decisive]
