"""A verification as text for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memprof.report.documents.verification import Verification
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import dim, heading, table
from memprof.units import MIB

_MIB = Unit("MiB", MIB)


def view(found: Verification, *, quiet: bool = False) -> RenderableType:
    """Return all tables and the verdict; with `quiet`, only the verdict."""
    verdict = Text("passed" if found.passed else "FAILED", style="bold green" if found.passed else "bold red")
    if quiet:
        return verdict
    parts: list[RenderableType] = [heading(f"memprof verify: {found.seeds} seeds, on the CPU")]
    if found.deviations:
        failed = [(f" of {row.tensor}" if row.tensor else "", row) for row in found.deviations if not row.passed]
        lines = (f"{row.fix} on {row.model}: {row.quantity}{where}, {row.case}" for where, row in failed)
        parts += [_deviations(found), *(Text(line, style="red") for line in lines)]
    if found.precisions:
        parts += [_precisions(found), _layers(found)]
    if found.optimizers:
        parts.append(_optimizers(found))
    if found.peaks:
        parts += [_peaks(found), *_peak_notes(found)]
    parts += [
        Text(f"the float64 reference of {model} has smaller numbers: {', '.join(operators)}", style="yellow")
        for model, operators in found.narrow.items()
        if operators
    ]
    parts += [dim(note) for note in found.notes]
    parts += [dim(f"not tried: {fix} on {model}: {why}") for (fix, model), why in found.skipped.items()]
    return Group(*parts, verdict)


def _table(title: str, *headers: str) -> Table:
    made = table(*headers, ruled=True)
    made.title, made.title_justify, made.title_style = title, "left", "bold"
    for column in made.columns:  # there are many of them: long headers may break
        column.no_wrap = False
    return made


def _verdict(passed: bool) -> Text:
    return Text("ok") if passed else Text("FAILED", style="bold red")


def _deviations(found: Verification) -> Table:
    title = "Largest deviation from float64, at the worst of all seeds and cases"
    made = _table(title, "fix", "model", "of the", ">original", ">fixed", ">bound", "")
    last = ("", "")
    for row in found.deviations:
        names = (row.fix if row.fix != last[0] else "", row.model if (row.fix, row.model) != last else "")
        last = (row.fix, row.model)
        numbers = (f"{value:.1e}" for value in (row.original, row.fixed, row.bound))
        made.add_row(*names, row.quantity, *numbers, _verdict(row.passed))
    return made


def _precisions(found: Verification) -> Table:
    title = "Precision against accuracy: deviation from float64, relative"
    made = _table(title, "precision", "model", ">logits, largest", ">logits, rms", ">bound", ">same argmax", "")
    for row in found.precisions:
        numbers = (f"{row.logits_max:.1e}", f"{row.logits_rms:.1e}", f"{row.bound:.1e}")
        made.add_row(row.precision, row.model, *numbers, f"{row.argmax_agreement:.1%}", _verdict(row.passed))
    return made


_SHOWN_LAYERS = 8


def _layers(found: Verification) -> Table:
    """Return a table of every layer of a shallow model; of a deep one some, evenly, with the first and the last."""
    columns = min(_SHOWN_LAYERS, max(len(row.layers_rms) for row in found.precisions))
    made = _table("Deviation of each layer's output, rms, relative", "precision", "model", *[">layer"] * columns)
    for row in found.precisions:
        count = len(row.layers_rms)
        shown = min(count, _SHOWN_LAYERS)
        places = [index * (count - 1) // max(shown - 1, 1) for index in range(shown)]
        made.add_row(row.precision, row.model, *(f"{place}: {row.layers_rms[place]:.1e}" for place in places))
    return made


def _optimizers(found: Verification) -> Table:
    first = found.optimizers[0]
    title = f"Optimizers: {first.steps} steps of {first.model}, deviation from float64 AdamW"
    figures = (">of the way, rms", ">largest, learning rates", ">loss", ">bound", ">states, MiB")
    made = _table(title, "optimizer", *figures, "")
    for row in found.optimizers:
        bound = "-" if row.bound is None else f"{row.bound:.1e}"
        numbers = (f"{row.update_rms:.1e}", f"{row.largest:.1e}", f"{row.loss:.1e}", bound)
        made.add_row(row.optimizer, *numbers, _MIB.amount(row.state_bytes), _verdict(row.passed))
    return made


def _peaks(found: Verification) -> Table:
    first = found.peaks[0]
    where = "the CPU" if first.measured_on == "cpu" else "CUDA"
    figures = (">simulated: original", ">fixed", ">saved", f">measured on {where}: original", ">fixed", ">saved")
    made = _table(f"Peak of a training step, MiB: {first.workload}", "fix", *figures)
    for row in found.peaks:
        other = "" if row.workload == first.workload else f" ({row.workload})"
        simulated = _saving(row.original_bytes, row.fixed_bytes)
        made.add_row(row.fix + other, *simulated, *_saving(row.measured_original_bytes, row.measured_fixed_bytes))
    return made


def _saving(original: int | None, fixed: int | None) -> list[str]:
    saved = None if original is None or fixed is None else original - fixed
    return ["-" if value is None else _MIB.amount(value) for value in (original, fixed, saved)]


def _peak_notes(found: Verification) -> list[Text]:
    notes = [f"not measured: {row.fix}: {row.not_measured}" for row in found.peaks if row.not_measured]
    on_cpu = (
        "On the CPU, GPU and host are one memory: what a fix moves to the host is counted still. Kernels of "
        "the two differ in what they take for a moment: softmax's backward has a product more on CUDA."
    )
    return [dim(note) for note in ([on_cpu, *notes] if found.peaks[0].measured_on == "cpu" else notes)]
