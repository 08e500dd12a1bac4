"""`memprof show FILE`: the report of a saved capture, again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memprof.cli.profile import exit_code, print_document


def show(
    file: Annotated[Path, typer.Argument(help="A capture that `memprof profile --save` wrote.")],
    alloc_conf: Annotated[
        str | None,
        typer.Option(
            help="The caching allocator's, such as expandable_segments:True. [default: those of the run]",
            metavar="SETTINGS",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="List what was assumed.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Show the report of a saved capture. Needs neither torch nor the model."""
    from memprof.flows import profile as pipeline
    from memprof.trace.io import load_trace

    document = pipeline.analyze(load_trace(file), alloc_conf)
    print_document(document, as_json=as_json, explain=explain)
    raise typer.Exit(exit_code(document))
