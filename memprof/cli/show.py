"""`memprof show FILE`: the report of a saved capture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from memprof.cli.options import ReadingOptions, reuse_option
from memprof.cli.output import RunReportOptions, choose_exit_code, print_json, print_report
from memprof.cli.streams import echo

EXAMPLES = """
memprof show run.memprof
memprof show run.memprof --alloc-conf expandable_segments:True
"""


@dataclass(frozen=True, kw_only=True)
class ShowOptions(RunReportOptions):
    """Options of `memprof show`: allocator settings, GPU and rank of the report."""

    alloc_conf: str | None = reuse_option("alloc_conf", unset="those of the run")
    shown_gpu: int | None = reuse_option("shown_gpu")
    rank: int | None = reuse_option("rank")


def show(
    file: Annotated[Path, typer.Argument(help="A capture (--save) or a report (--json).")],
    options: ShowOptions,
    reading_options: ReadingOptions,
) -> None:
    """Show the report of a saved capture, or one in JSON. Needs neither torch nor the model."""
    from memprof.flows.saved_files import load

    document = load(file, alloc_conf=options.alloc_conf, gpu=options.shown_gpu, rank=options.rank)
    from memprof.report.documents.report import Report

    if isinstance(document, Report):
        print_report(document, options)
        raise typer.Exit(choose_exit_code(document))
    if options.as_json:
        print_json(document)
    else:
        echo(str(document).removesuffix("\n"))
    options.write_tables(document)
    options.write_page(document)
