"""`memprof compare A B`: what differs between two runs, and whether it is within a tolerance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memprof.cli.output import Told, print_json
from memprof.cli.progress import long_work

_FILE = "A capture (--save), a report (--json) of `memprof profile`, or a snapshot of torch."


def compare(
    output: Told,
    a: Annotated[Path, typer.Argument(help=_FILE)],
    b: Annotated[Path, typer.Argument(help="The other one, of any of these kinds.")],
    tolerance: Annotated[
        str, typer.Option(help="How much totals may differ: 0.1%, 16MiB or a number of bytes.", metavar="AMOUNT")
    ] = "0",
    top: Annotated[int, typer.Option(help="Rows of each table.", min=1)] = 10,
) -> None:
    """Say what differs between two runs: simulated and measured, before and after, one torch release and another.

    Settings first, then totals, stages, categories and tensors at the peak, largest differences first. Needs neither
    torch nor a GPU. Exit code 0: all totals are within the tolerance; 1: they are not.
    """
    from memprof.report.matching.tolerance import parse_tolerance

    allowed = parse_tolerance(tolerance)
    with long_work() as progress:
        from memprof.flows.compare import compare_files

        comparison = compare_files(a, b, allowed, progress)
    if output.as_json:
        print_json(comparison)
    else:
        from memprof.report.terminal.comparison import view
        from memprof.report.terminal.console import show

        show(view(comparison, top=top, explain=output.explain))
    output.write_tables(comparison)
    raise typer.Exit(0 if comparison.within else 1)
