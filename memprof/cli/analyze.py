"""`memprof analyze FILE`: what a recorded run held, who made it, and why it ran out."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from memprof.cli.output import Tabled, print_json
from memprof.cli.progress import long_work


class By(enum.StrEnum):
    """What blocks are grouped by."""

    FRAME = "frame"
    MODULE = "module"
    CATEGORY = "category"
    SIZE = "size"


def analyze(
    output: Tabled,
    file: Annotated[
        Path, typer.Argument(help="A snapshot of torch.cuda.memory._dump_snapshot, or a capture of memprof.")
    ],
    at: Annotated[
        str, typer.Option(help="The moment to show: peak, end, oom, or the number of an event.", metavar="MOMENT")
    ] = "peak",
    by: Annotated[By, typer.Option(help="What to group the blocks alive by.")] = By.FRAME,
    top: Annotated[int, typer.Option(help="Rows of each table.", min=1)] = 10,
    device: Annotated[int | None, typer.Option(help="One device of several.", min=0, metavar="N")] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Compare every address and the final layout with memprof's own allocator.")
    ] = False,
    what_if: Annotated[
        str | None,
        typer.Option(help='Replay the requests under other settings, as "expandable_segments:True".', metavar="CONF"),
    ] = None,
) -> None:
    """Say what a recorded run held at its peak, who made it, what is fragmented, and why it ran out of memory.

    Needs neither torch nor a GPU, and runs nothing of what the file holds. Exit code 3: the recording holds an
    out-of-memory error.
    """
    from memprof.allocator import parse_config
    from memprof.report.documents.analysis_build import Question

    other = None if what_if is None else parse_config(what_if, origin="--what-if")
    question = Question(at=at, by=by.value, top=top, what_if=other)
    with long_work() as progress:
        from memprof.flows.recordings import analyze_file

        document = analyze_file(file, question, device, progress)
    if output.as_json:
        print_json(document)
    else:
        from memprof.report.terminal.analysis import view
        from memprof.report.terminal.console import show

        show(view(document, replay=replay), pipe_width=None)
    output.write_tables(document)
    raise typer.Exit(3 if document.ran_out else 0)
