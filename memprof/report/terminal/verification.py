"""The result of `memprof verify` as text for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memprof.report.documents.verification import Verification
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import dim, make_heading, make_table
from memprof.units import MIB

_MIB = Unit("MiB", MIB)


def render(document: Verification, *, quiet: bool = False) -> RenderableType:
    """Return the result of `memprof verify` for a terminal: tables and verdict; `quiet` leaves only the verdict."""
    verdict = Text("passed" if document.passed else "FAILED", style="bold green" if document.passed else "bold red")
    if quiet:
        return verdict
    parts: list[RenderableType] = [make_heading(f"memprof verify: {document.seeds} seeds, on the CPU")]
    if document.deviations:
        failed = [(f" of {row.tensor}" if row.tensor else "", row) for row in document.deviations if not row.passed]
        lines = (f"{row.fix} on {row.model}: {row.quantity}{where}, {row.case}" for where, row in failed)
        parts += [_render_deviations(document), *(Text(line, style="red") for line in lines)]
    if document.precisions:
        parts += [_render_precisions(document), _render_layers(document)]
    if document.optimizers:
        parts.append(_render_optimizers(document))
    if document.peaks:
        parts += [_render_peaks(document), *_render_peak_notes(document)]
    parts += [
        Text(f"the float64 reference of {model} has smaller numbers: {', '.join(operators)}", style="yellow")
        for model, operators in document.narrow.items()
        if operators
    ]
    parts += [dim(note) for note in document.notes]
    parts += [dim(f"not tried: {fix} on {model}: {why}") for (fix, model), why in document.skipped.items()]
    return Group(*parts, verdict)


def _make_table(title: str, *headers: str) -> Table:
    table = make_table(*headers, ruled=True)
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    for column in table.columns:  # there are many of them: long headers may break
        column.no_wrap = False
    return table


def _render_verdict(passed: bool) -> Text:
    return Text("ok") if passed else Text("FAILED", style="bold red")


def _render_deviations(document: Verification) -> Table:
    title = "Largest deviation from float64, at the worst of all seeds and cases"
    table = _make_table(title, "fix", "model", "of the", ">original", ">fixed", ">bound", "")
    previous = ("", "")
    for row in document.deviations:
        names = (row.fix if row.fix != previous[0] else "", row.model if (row.fix, row.model) != previous else "")
        previous = (row.fix, row.model)
        numbers = (f"{value:.1e}" for value in (row.original, row.fixed, row.bound))
        table.add_row(*names, row.quantity, *numbers, _render_verdict(row.passed))
    return table


def _render_precisions(document: Verification) -> Table:
    title = "Precision against accuracy: deviation from float64, relative"
    table = _make_table(title, "precision", "model", ">logits, largest", ">logits, rms", ">bound", ">same argmax", "")
    for row in document.precisions:
        numbers = (f"{row.logits_max:.1e}", f"{row.logits_rms:.1e}", f"{row.bound:.1e}")
        table.add_row(row.precision, row.model, *numbers, f"{row.argmax_agreement:.1%}", _render_verdict(row.passed))
    return table


_MAX_LAYERS = 8


def _render_layers(document: Verification) -> Table:
    """Return a table of deviations by layer: of at most 8 layers, evenly spaced, with the first and the last."""
    columns = min(_MAX_LAYERS, max(len(row.layers_rms) for row in document.precisions))
    table = _make_table("Deviation of each layer's output, rms, relative", "precision", "model", *[">layer"] * columns)
    for row in document.precisions:
        num_layers = len(row.layers_rms)
        num_shown = min(num_layers, _MAX_LAYERS)
        indices = [index * (num_layers - 1) // max(num_shown - 1, 1) for index in range(num_shown)]
        table.add_row(row.precision, row.model, *(f"{i}: {row.layers_rms[i]:.1e}" for i in indices))
    return table


def _render_optimizers(document: Verification) -> Table:
    first = document.optimizers[0]
    title = f"Optimizers: {first.steps} steps of {first.model}, deviation from float64 AdamW"
    headers = (">of the way, rms", ">largest, learning rates", ">loss", ">bound", ">states, MiB")
    table = _make_table(title, "optimizer", *headers, "")
    for row in document.optimizers:
        bound = "-" if row.bound is None else f"{row.bound:.1e}"
        numbers = (f"{row.update_rms:.1e}", f"{row.largest:.1e}", f"{row.loss:.1e}", bound)
        table.add_row(row.optimizer, *numbers, _MIB.format(row.state_bytes), _render_verdict(row.passed))
    return table


def _render_peaks(document: Verification) -> Table:
    first = document.peaks[0]
    device = "the CPU" if first.measured_on == "cpu" else "CUDA"
    headers = (">simulated: original", ">fixed", ">saved", f">measured on {device}: original", ">fixed", ">saved")
    table = _make_table(f"Peak of a training step, MiB: {first.workload}", "fix", *headers)
    for row in document.peaks:
        suffix = "" if row.workload == first.workload else f" ({row.workload})"
        measured = _format_peaks(row.measured_original_bytes, row.measured_fixed_bytes)
        table.add_row(row.fix + suffix, *_format_peaks(row.original_bytes, row.fixed_bytes), *measured)
    return table


def _format_peaks(original: int | None, fixed: int | None) -> list[str]:
    saved = None if original is None or fixed is None else original - fixed
    return ["-" if value is None else _MIB.format(value) for value in (original, fixed, saved)]


def _render_peak_notes(document: Verification) -> list[Text]:
    notes = [f"not measured: {row.fix}: {row.not_measured}" for row in document.peaks if row.not_measured]
    on_cpu = (
        "On the CPU, GPU and host are one memory: what a fix moves to the host is counted still. Kernels of "
        "the two differ in what they take for a moment: softmax's backward has a product more on CUDA."
    )
    return [dim(note) for note in ([on_cpu, *notes] if document.peaks[0].measured_on == "cpu" else notes)]
