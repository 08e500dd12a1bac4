"""The stages of a run as a table for a terminal: memory after each stage and at its peak."""

from __future__ import annotations

import re

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.ledger.stages import OWN_CODE, describe_name
from memprof.report.documents.report import Report
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import dim, make_table
from memprof.report.terminal.device_readings import describe_gpu_differences, find_gpu_columns
from memprof.report.terminal.folding import ShownStage, choose_full_step, find_peak_row, fold_stages
from memprof.report.terminal.peak import choose_report_unit
from memprof.report.terminal.stage_names import describe_step
from memprof.trace.events import short_source
from memprof.units import MIB, format_bytes

MIN_HOST_BYTES = 64 * MIB  # Host memory below this has no column.
_RANGE = re.compile(r"\d-\d+$")  # Of numbers, which ends the name of merged layers.
# Columns of the stage table in the order in which a narrow terminal drops them.
_OPTIONAL_COLUMNS = (
    "host peak",
    "seconds",
    "delta",
    "torch.cuda\nreserved",
    "NVML\nused",
    "reserved",
    "torch.cuda\npeak",
)


def render_stages(document: Report) -> RenderableType:
    """Return the table of stages; equal layers, and the steps other than that of the peak, are one row each."""
    usable, unit = document.device.usable_bytes, choose_report_unit(document)
    step = describe_step(document, choose_full_step(document))
    format_size = unit.format
    on_cpu, is_measured, gpu_columns = document.on_cpu, document.source == "measured", find_gpu_columns(document)
    shows_host = document.host_peak_bytes >= MIN_HOST_BYTES
    headers = ["allocated", "delta", "peak", "resident" if on_cpu else "reserved", *gpu_columns]
    headers += ["seconds" if is_measured else "on this GPU", *(["host peak"] * shows_host)]
    title = f"stage ({step})" if step else "stage"
    table = make_table(title, *(f">{header}" for header in headers), ruled=True, optional=_OPTIONAL_COLUMNS)
    rows = fold_stages(document)
    peak_index = find_peak_row(document, rows)
    for i, row in enumerate(rows):
        resident = document.device.resident_bytes
        name, verdict = format_stage(row, usable, unit, is_peak=i == peak_index, resident_bytes=resident)
        held_bytes = row.resident_bytes if on_cpu else row.peak_reserved_bytes
        sizes = (held_bytes, *(getattr(row, attribute) for attribute in gpu_columns.values()))
        table.add_row(
            name,
            format_size(row.allocated_bytes),
            format_size(row.delta_bytes, sign=True),
            format_size(row.peak_allocated_bytes),
            *("" if size is None else format_size(size) for size in sizes),
            verdict if not is_measured else "" if row.seconds is None else f"{row.seconds:,.3f}",
            *([format_size(row.peak_host_bytes)] * shows_host),
        )
    rounds_note = ""
    if any(row.num_rounds > 1 for row in rows):
        rounds_note = " N times: such rows came in turn; allocated and delta are of the last time."
    if on_cpu:
        legend = "allocated: by torch's CPU allocator; resident: of the whole process, as last read in the stage"
        return Group(table, dim(f"{unit.name}. {legend}.{rounds_note}"))
    note = f"{unit.name}; peak: most allocated, reserved: most held from the driver in the stage"
    excluded = f" beside the CUDA context{' and other processes' * is_measured}"
    excluded *= document.device.has_cuda_context
    note += f"; {format_bytes(usable or 0)} usable{excluded}.{rounds_note}"
    return Group(table, dim(note), *describe_gpu_differences(document))


def format_stage(
    row: ShownStage, usable_bytes: int | None, unit: Unit, *, is_peak: bool, resident_bytes: int | None = None
) -> tuple[Text, Text]:
    """Return the name of a row, and whether it fits `usable_bytes`; above `resident_bytes` it pages.

    The name has the number of stages and repetitions in the row, and a mark at the peak of the run.
    """
    pages = resident_bytes is not None and row.peak_allocated_bytes > resident_bytes
    fit = Text("pages", style="yellow") if pages else Text("fits")
    if row.oom or (usable_bytes is not None and row.peak_allocated_bytes > usable_bytes):
        fit = Text("out of memory" if row.oom else "does not fit", style="red")
    name, outside = Text(describe_name(row.name)), describe_name(OWN_CODE[0])
    if row.source is not None and name.plain.endswith(outside):  # its line says where
        name = Text(name.plain.replace(outside, short_source(row.source)))
    elif row.source is not None:
        name.append(f", {short_source(row.source)}", style="dim")
    if row.num_merged > 1:
        mean_bytes = row.delta_bytes // row.num_merged
        growth = unit.format(mean_bytes, sign=True)
        number = "" if row.is_step or _RANGE.search(row.name) else f", {row.num_merged} times"  # else the name has it
        each = "a step" if row.is_step else "each" if row.has_equal_deltas else "on average"
        name.append(f"{number}, {growth} {each}" if growth != "+0.00" else number, style="dim")
    if row.num_rounds > 1 and not row.is_step:
        name.append(f", {row.num_rounds} times", style="dim")
    if is_peak:
        name.append("  <- peak", style="bold red" if fit.style else "bold")
    return name, fit
