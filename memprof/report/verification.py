"""A verification as text for a terminal."""

from __future__ import annotations

import io

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memprof.remedies.verification import Deviation, Verification
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
        parts.append(_precisions(found))
    if found.peaks:
        parts.append(_peaks(found))
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
    table = _table("Precision against accuracy: deviation from float32, relative")
    for name in ("precision", "model"):
        table.add_column(name)
    for name in ("logits, largest", "logits, rms", "bound", "same argmax", "layers, rms"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in found.precisions:
        layers = f"{row.layers_rms[0]:.1e} to {row.layers_rms[-1]:.1e}" if row.layers_rms else "-"
        numbers = (f"{row.logits_max:.1e}", f"{row.logits_rms:.1e}", f"{row.bound:.1e}")
        table.add_row(row.precision, row.model, *numbers, f"{row.argmax_agreement:.1%}", layers, _verdict(row.passed))
    return table


def _peaks(found: Verification) -> Table:
    table = _table(f"Simulated peak of a training step, MiB: {found.peaks[0].workload}")
    table.add_column("remedy")
    for name in ("original", "fixed", "saved"):
        table.add_column(name, justify="right")
    for row in found.peaks:
        values = (row.original_bytes, row.fixed_bytes, row.original_bytes - row.fixed_bytes)
        table.add_row(row.remedy, *(f"{value / MIB:,.2f}" for value in values))
    return table
