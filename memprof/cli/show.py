"""`memprof show FILE`: the report of a saved capture, again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from memprof.cli.options import Reading, again
from memprof.cli.output import Told, exit_code, print_document

EXAMPLES = """
memprof show run.memprof
memprof show run.memprof --alloc-conf expandable_segments:True
"""


@dataclass(frozen=True, kw_only=True)
class Shown(Told):
    """How the report is made anew."""

    alloc_conf: str | None = again("alloc_conf", unset="those of the run")
    shown_card: int | None = again("shown_card")


def show(
    file: Annotated[Path, typer.Argument(help="A capture that `memprof profile --save` wrote.")],
    shown: Shown,
    reading: Reading,
) -> None:
    """Show the report of a saved capture. Needs neither torch nor the model."""
    from memprof.flows.account import analyze
    from memprof.trace.io import load_trace

    document = analyze(load_trace(file), shown.alloc_conf, card=shown.shown_card)
    print_document(document, shown)
    raise typer.Exit(exit_code(document))
