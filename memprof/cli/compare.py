"""`memprof compare A B`: the differences between two runs, and whether totals are within a tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from memprof.cli.exits import ExitCode
from memprof.cli.options import ReadingOptions, reuse_option
from memprof.cli.output import FullReportOptions, print_result
from memprof.cli.progress import show_progress
from memprof.spec import option

EXAMPLES = """
memprof compare before.memprof after.memprof
memprof compare simulated.memprof measured.memprof --tolerance 2%
"""

_FILE_HELP = "A capture (--save), a report (--json) of `memprof profile`, or a snapshot of torch."


@dataclass(frozen=True, kw_only=True)
class CompareOptions(FullReportOptions):
    """Options of `memprof compare`: the tolerance, and the number of rows."""

    tolerance: str = option(
        "0", "Comparison", "How much totals may differ: 0.1%, 16MiB or a number of bytes.", metavar="AMOUNT"
    )
    top: int = reuse_option("top")


def compare(
    request: CompareOptions,
    reading_options: ReadingOptions,
    a: Annotated[Path, typer.Argument(help=_FILE_HELP)],
    b: Annotated[Path, typer.Argument(help="The other one, of any of these kinds.")],
) -> None:
    """Say what differs between two runs: simulated and measured, before and after, one torch release and another.

    What B takes instead of A, the settings that differ, and the tensors and stages that differ most. Needs neither
    torch nor a GPU. Exit code 0: all totals are within the tolerance; 4: they are not.
    """
    from memprof.report.matching.tolerance import parse_tolerance

    tolerance = parse_tolerance(request.tolerance)
    with show_progress(quiet=request.quiet) as progress:
        from memprof.flows.compare import compare_files

        comparison = compare_files(a, b, tolerance, progress)
    if request.full or request.explain:
        print_result(comparison, request, "comparison", top=request.top, explain=request.explain, files=(a, b))
    else:
        print_result(comparison, request, "comparison_brief", top=request.top, files=(a, b))
    raise typer.Exit(ExitCode.DONE if comparison.within else ExitCode.DIFFERS)
