"""The peak of a run as tables for a terminal: its categories, and its largest tensors."""

from __future__ import annotations

from rich.console import RenderableType

from memprof.ledger.categories import Category
from memprof.ledger.ledger import LiveTensor
from memprof.report.documents.report import Report
from memprof.report.terminal.cells import Unit, choose_unit, format_shape
from memprof.report.terminal.console import dim, draw_bar, make_section, make_table
from memprof.report.terminal.stage_names import describe_moment
from memprof.report.terminal.tensors import merge_equal_tensors, render_origin
from memprof.trace.events import short_source
from memprof.units import MIB, format_bytes

MAX_TENSORS = 10
_BAR_WIDTH = 28
_MAX_ROUNDING_BYTES = 20 * MIB  # By which torch's message exceeds a tensor: it has the size of the segment.
_REFUSED_WORKSPACES = (
    "Convolutions without room for cuDNN's workspace: {}. torch then takes another algorithm, here without workspace."
)
# Categories as rows of the first screen: what else they have, and rounding, which is no memory between segments.
_NAMES_OF_ROWS = {
    "fragmentation": "rounding by the allocator",
    "inputs": "inputs and other tensors",
    "library workspace": "workspaces of CUDA libraries",
}
_FAILED = "failed allocation"
_MIN_PEAK_SHARE = 0.1  # Of what a run needs: a smaller peak has a unit of its own.
_MIN_UNCERTAIN_SHARE = 0.01  # Of the peak: below this share, the effect of unknown workspaces is not shown.


def choose_report_unit(document: Report) -> Unit:
    """Return the unit of sizes in a report: that of what the run needs, unless its peak is far below."""
    peak_bytes, required_bytes = document.peak.allocated_bytes, document.verdict.required_bytes
    return choose_unit(required_bytes if _MIN_PEAK_SHARE * required_bytes <= peak_bytes else peak_bytes)


def render_categories(document: Report, min_share: float = 0.0, note: str | None = None) -> RenderableType:
    """Return the categories of memory at the peak, each with its share, from the fraction `min_share` on, and below
    them a note; None: what is not known of cuDNN's workspaces. With a note, what keeps the tensors of a cause has a row
    of its own."""
    total_bytes = document.peak.allocated_bytes
    format_size = choose_report_unit(document).format
    table = make_table("", ">", ">", "|bar", optional=("bar",))
    table.show_header = False
    for category, num_bytes in (document.peak.categories if note is None else _divide_peak(document)).items():
        share = num_bytes / total_bytes
        if share < min_share:
            continue
        table.add_row(category, format_size(num_bytes), f"{share:.1%}", draw_bar(share, _BAR_WIDTH))
    title = f"{format_bytes(total_bytes)} of tensors, the failed allocation included"
    if not _is_failed_included(document):
        title = f"At the peak, {format_bytes(total_bytes)} of tensors {_describe_place(document)}"
    notes = _render_workspaces(document) if note is None else [dim(note)] if note else []
    return make_section(title, table, *notes, below=1)


def _divide_peak(document: Report) -> dict[str, int]:
    """Return the bytes at the peak of what keeps the tensors of each cause, and of the categories without these, in the
    program's terms, largest first."""
    rest = dict(document.peak.categories)
    parts: dict[str, int] = {}
    for name, categories in document.peak.culprits.items():
        parts[name] = sum(categories.values())
        for category, num_bytes in categories.items():
            rest[category] -= num_bytes
    for failed in _list_like_failed(document) if _is_failed_included(document) else ():
        each = failed.allocated_bytes // failed.count
        if rest.get(failed.category, 0) >= each:  # else it is among what a cause keeps
            parts[_FAILED] = each
            rest[failed.category] -= each
            break
    names = _NAMES_OF_ROWS | {Category.KEPT.value: _name_kept(document)}
    if document.source == "simulated":  # where each has a line, and only its use is not known
        names[Category.UNATTRIBUTED.value] = _NAMES_OF_ROWS["inputs"]
    if document.peak.stage == "backward":
        names[Category.TEMPORARIES.value] = "temporaries of the backward"
    for category, num_bytes in rest.items():
        if num_bytes:
            name = names.get(category, category)
            parts[name] = parts.get(name, 0) + num_bytes
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def _describe_place(document: Report) -> str:
    """Return where the peak is: of a program's own code its line, else the stage."""
    peak = document.peak
    rows = (row for row in document.stages if (row.name, row.step) == (peak.stage, peak.step))
    highest = max(rows, key=lambda row: row.peak_allocated_bytes, default=None)
    if highest is not None and highest.source is not None:
        return f"at {short_source(highest.source)}"
    return f"in {describe_moment(document, peak.stage, peak.step)}"


def _list_like_failed(document: Report) -> list[LiveTensor]:
    """Return the tensors at the peak that are as that of the failed allocation, which is among them."""
    verdict = document.verdict
    failed = verdict.oom_op, verdict.oom_shape, verdict.oom_dtype, verdict.oom_source
    return [one for one in document.peak.tensors if (one.op, one.shape, one.dtype, one.source) == failed]


def _name_kept(document: Report) -> str:
    """Return the category of what the program keeps, with the line that makes the largest tensor of it."""
    kept = [tensor for tensor in document.peak.tensors if tensor.category == Category.KEPT and tensor.source]
    largest = max(kept, key=lambda tensor: tensor.allocated_bytes, default=None)
    if largest is None or not largest.source:
        return Category.KEPT.value
    return f"{Category.KEPT.value}, {short_source(largest.source).rpartition('/')[2]}"


def _is_failed_included(document: Report) -> bool:
    """Return whether the peak has the allocation that failed, which is not in use in torch's message."""
    verdict, peak = document.verdict, document.peak
    is_end = document.program is not None and document.program.ended == "refused"
    live_bytes = (verdict.in_use_bytes or 0) + (verdict.tried_to_allocate_bytes or 0)
    is_same = peak.stage == verdict.oom_stage and peak.allocated_bytes > live_bytes - _MAX_ROUNDING_BYTES
    return is_end and is_same and bool(_list_like_failed(document))


def get_uncertain_peak(document: Report) -> int:
    """Return the allocated peak in bytes if cuDNN takes the most for convolutions; 0 if that makes no difference."""
    workspaces = document.peak.workspaces
    if workspaces is None:
        return 0
    difference = workspaces.max_peak_bytes - workspaces.min_peak_bytes
    return workspaces.max_peak_bytes if difference >= _MIN_UNCERTAIN_SHARE * document.peak.allocated_bytes else 0


def _render_workspaces(document: Report) -> list[RenderableType]:
    """Return notes on how much the peak depends on the unknown sizes of cuDNN's convolution workspaces."""
    workspaces = document.peak.workspaces
    if workspaces is None:
        return []
    refused_notes = [dim(_REFUSED_WORKSPACES.format(workspaces.refused))] if workspaces.refused else []
    if not get_uncertain_peak(document):
        return [*refused_notes]
    min_peak, max_peak = format_bytes(workspaces.min_peak_bytes), format_bytes(workspaces.max_peak_bytes)
    range_text = f"What cuDNN takes for convolutions is an estimate: the peak is between {min_peak} and {max_peak}."
    return [dim(range_text), *refused_notes]


def render_tensors(document: Report) -> RenderableType:
    """Return a table of the largest tensors at the peak; equal ones share a row."""
    unit = choose_report_unit(document)
    table = make_table(f">{unit.name}", ">x", "|shape", "~what it is", optional=("shape", "x"))
    for tensor in merge_equal_tensors(document.peak.tensors)[:MAX_TENSORS]:
        shape = f"{format_shape(tensor.shape)} {tensor.dtype}"
        table.add_row(unit.format(tensor.num_bytes), str(tensor.count), shape, render_origin(tensor, in_table=True))
    return make_section("Largest tensors live at the peak", table, below=1)
