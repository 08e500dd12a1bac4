"""`memprof compare A B`: what differs between two runs, and whether it is within a tolerance."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from memprof.cli.progress import Progress

_FILE = "A capture (--save), a report (--json) of `memprof profile`, or a snapshot of torch."


def compare(
    a: Annotated[Path, typer.Argument(help=_FILE)],
    b: Annotated[Path, typer.Argument(help="The other one, of any of these kinds.")],
    tolerance: Annotated[
        str, typer.Option(help="How much totals may differ: 0.1%, 16MiB or a number of bytes.", metavar="AMOUNT")
    ] = "0",
    top: Annotated[int, typer.Option(help="Rows of each table.", min=1)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="List the assumptions that only one has.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Say what differs between two runs: simulated and measured, before and after, one torch release and another.

    Settings first, then totals, stages, categories and tensors at the peak, largest differences first. Needs neither
    torch nor a GPU. Exit code 0: all totals are within the tolerance; 1: they are not.
    """
    from memprof.report.matching.tolerance import parse_tolerance

    allowed = parse_tolerance(tolerance)
    # As in analyze: nothing here is worth looking for garbage in.
    gc.disable()
    with Progress() as progress:
        from memprof.flows.compare import compare_files

        comparison = compare_files(a, b, allowed, progress)
    if as_json:
        json.dump(comparison.to_json(), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        from memprof.report.terminal.comparison import print_comparison

        print_comparison(comparison, top=top, explain=explain)
    raise typer.Exit(0 if comparison.within else 1)
