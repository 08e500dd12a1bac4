"""`memprof analyze FILE`: the memory of a recorded run, its allocation sites, and the cause of an OOM."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from memprof.cli.exits import ExitCode
from memprof.cli.options import ReadingOptions, reuse_option
from memprof.cli.output import PageOptions, TableOptions, print_result
from memprof.cli.progress import show_progress

EXAMPLES = """
memprof analyze snapshot.pickle
memprof analyze snapshot.pickle --at oom --by size
memprof analyze run.memprof --alloc-conf expandable_segments:True
"""


class GroupKey(enum.StrEnum):
    """The property by which `memprof analyze` groups live blocks."""

    FRAME = "frame"
    MODULE = "module"
    CATEGORY = "category"
    SIZE = "size"


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(TableOptions, PageOptions):
    """Options of `memprof analyze`: the rows and the GPU to show, and allocator settings."""

    full: bool = reuse_option("full")
    top: int = reuse_option("top")
    shown_gpu: int | None = reuse_option("shown_gpu", unset="all of them")
    alloc_conf: str | None = reuse_option(
        "alloc_conf", note="The requests are replayed under them.", unset="those of the run"
    )


def analyze(
    request: AnalyzeOptions,
    reading_options: ReadingOptions,
    file: Annotated[
        Path, typer.Argument(help="A snapshot of torch.cuda.memory._dump_snapshot, or a capture of memprof.")
    ],
    at: Annotated[
        str, typer.Option(help="The moment to show: peak, end, oom, or the number of an event.", metavar="MOMENT")
    ] = "peak",
    by: Annotated[GroupKey, typer.Option(help="What to group the blocks live by.")] = GroupKey.FRAME,
    replay: Annotated[
        bool, typer.Option("--replay", help="Compare every address and the final layout with memprof's own allocator.")
    ] = False,
) -> None:
    """Say what a recorded run held at its peak, who made it, what is fragmented, and why it ran out of memory.

    Needs neither torch nor a GPU, and runs nothing of what the file holds. Exit code 3: the recording holds an
    out-of-memory error.
    """
    from memprof.allocator import parse_config
    from memprof.report.documents.analysis_build import AnalysisRequest

    allocator_config = None if request.alloc_conf is None else parse_config(request.alloc_conf, origin="--alloc-conf")
    analysis_request = AnalysisRequest(at=at, by=by.value, top=request.top, what_if=allocator_config)
    with show_progress(quiet=request.quiet) as progress:
        from memprof.flows.recordings import analyze_file

        document = analyze_file(file, analysis_request, request.shown_gpu, progress)
    print_result(document, request, "analysis" if request.full else "analysis_brief", replay=replay, file=file)
    raise typer.Exit(ExitCode.DOES_NOT_FIT if document.ran_out else ExitCode.DONE)
