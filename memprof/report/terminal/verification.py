"""A verification as text for a terminal."""

from __future__ import annotations

import io

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memprof.report.documents.verification import Deviation, Verification
from memprof.units import MIB


def render_verification(found: Verification, *, width: int = 110) -> str:
    """The tables without colour, `width` columns wide."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False, legacy_windows=False)
    console.print(_renderable(found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def print_verification(found: Verification) -> None:
    """Print the tables to standard output, in colour if it is a terminal."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(_renderable(found))
    else:
        console.file.write(render_verification(found))


def _renderable(found: Verification) -> RenderableType:
    parts: list[RenderableType] = [Text(f"memprof verify: {found.seeds} seeds, on the CPU", style="bold")]
    if found.deviations:
        parts += [_deviations(found), *(_failure(row) for row in found.deviations if not row.passed)]
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
    parts += [
        Text(f"not tried: {remedy} on {model}: {why}", style="dim") for (remedy, model), why in found.skipped.items()
    ]
    parts.append(Text("passed" if found.passed else "FAILED", style="bold green" if found.passed else "bold red"))
    return Group(*parts)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)


def _verdict(passed: bool) -> Text:
    return Text("ok") if passed else Text("FAILED", style="bold red")


def _deviations(found: Verification) -> Table:
    table = _table("Largest deviation from float64, at the worst of all seeds and cases")
    for name in ("remedy", "model", "of the"):
        table.add_column(name)
    for name in ("original", "fixed", "bound"):
        table.add_column(name, justify="right")
    table.add_column("")
    last = ("", "")
    for row in found.deviations:
        names = (row.remedy if row.remedy != last[0] else "", row.model if (row.remedy, row.model) != last else "")
        last = (row.remedy, row.model)
        numbers = (f"{value:.1e}" for value in (row.original, row.fixed, row.bound))
        table.add_row(*names, row.quantity, *numbers, _verdict(row.passed))
    return table


def _failure(row: Deviation) -> Text:
    where = f" of {row.tensor}" if row.tensor else ""
    return Text(f"{row.remedy} on {row.model}: {row.quantity}{where}, {row.case}", style="red")


def _precisions(found: Verification) -> Table:
    table = _table("Precision against accuracy: deviation from float64, relative")
    for name in ("precision", "model"):
        table.add_column(name)
    for name in ("logits, largest", "logits, rms", "bound", "same argmax"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in found.precisions:
        numbers = (f"{row.logits_max:.1e}", f"{row.logits_rms:.1e}", f"{row.bound:.1e}")
        table.add_row(row.precision, row.model, *numbers, f"{row.argmax_agreement:.1%}", _verdict(row.passed))
    return table


_SHOWN_LAYERS = 8


def _layers(found: Verification) -> Table:
    """Every layer of a shallow model; of a deep one some, evenly, with the first and the last."""
    table = _table("Deviation of each layer's output, rms, relative")
    for name in ("precision", "model"):
        table.add_column(name)
    for _ in range(min(_SHOWN_LAYERS, max(len(row.layers_rms) for row in found.precisions))):
        table.add_column("layer", justify="right")
    for row in found.precisions:
        count = len(row.layers_rms)
        shown = min(count, _SHOWN_LAYERS)
        places = [index * (count - 1) // max(shown - 1, 1) for index in range(shown)]
        table.add_row(row.precision, row.model, *(f"{place}: {row.layers_rms[place]:.1e}" for place in places))
    return table


def _optimizers(found: Verification) -> Table:
    first = found.optimizers[0]
    table = _table(f"Optimizers: {first.steps} steps of {first.model}, deviation from float64 AdamW")
    table.add_column("optimizer")
    for name in ("of the way, rms", "largest, learning rates", "loss", "bound", "states, MiB"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in found.optimizers:
        bound = "-" if row.bound is None else f"{row.bound:.1e}"
        numbers = (f"{row.update_rms:.1e}", f"{row.largest:.1e}", f"{row.loss:.1e}", bound)
        table.add_row(row.optimizer, *numbers, f"{row.state_bytes / MIB:,.2f}", _verdict(row.passed))
    return table


def _peaks(found: Verification) -> Table:
    first = found.peaks[0]
    table = _table(f"Peak of a training step, MiB: {first.workload}")
    table.add_column("remedy")
    where = "the CPU" if first.measured_on == "cpu" else "CUDA"
    for name in ("simulated: original", "fixed", "saved", f"measured on {where}: original", "fixed", "saved"):
        table.add_column(name, justify="right")
    for row in found.peaks:
        other = "" if row.workload == first.workload else f" ({row.workload})"
        simulated = _saving(row.original_bytes, row.fixed_bytes)
        table.add_row(row.remedy + other, *simulated, *_saving(row.measured_original_bytes, row.measured_fixed_bytes))
    return table


def _saving(original: int | None, fixed: int | None) -> list[str]:
    saved = None if original is None or fixed is None else original - fixed
    return ["-" if value is None else f"{value / MIB:,.2f}" for value in (original, fixed, saved)]


def _peak_notes(found: Verification) -> list[Text]:
    notes = [f"not measured: {row.remedy}: {row.not_measured}" for row in found.peaks if row.not_measured]
    if found.peaks[0].measured_on == "cpu":
        notes.insert(
            0,
            "On the CPU, card and host are one memory: what a remedy moves to the host is counted still. Kernels of "
            "the two differ in what they take for a moment: softmax's backward has a product more on CUDA.",
        )
    return [Text(note, style="dim") for note in notes]
