"""`memprof export FILE --to OTHER`: a recorded run as a file for memory_viz or Perfetto."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from memprof.cli.options import ReadingOptions, reuse_option
from memprof.cli.output import OutputOptions, print_json
from memprof.cli.progress import show_progress
from memprof.cli.streams import echo

EXAMPLES = """
memprof export run.memprof --to run.pickle
memprof export snapshot.pickle --to run.json
"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(OutputOptions):
    """Output options of `memprof export`."""

    force: bool = reuse_option("force")


def export(
    request: ExportOptions,
    reading_options: ReadingOptions,
    file: Annotated[
        Path, typer.Argument(help="A capture of memprof, or a snapshot of torch.cuda.memory._dump_snapshot.")
    ],
    to: Annotated[
        Path,
        typer.Option(help="name.pickle for pytorch.org/memory_viz, name.json for ui.perfetto.dev.", metavar="FILE"),
    ],
) -> None:
    """Write a run, simulated or recorded, as a snapshot for pytorch.org/memory_viz or as a trace for Perfetto.

    The file is written whole or not at all.
    """
    with show_progress(quiet=request.quiet) as progress:
        from memprof.flows.recordings import export_file

        viewer = export_file(file, to, progress, force=request.force)
    if request.as_json:
        from memprof.report.documents.command_results import ExportResult

        print_json(ExportResult(file=str(to), viewer=viewer))
    elif not request.quiet:
        echo(f"Wrote {to}: open it at {viewer}", err=True)
