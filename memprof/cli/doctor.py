"""`memprof doctor [FILE]`: explain an error message and suggest fixes; `--env`: check the installation."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from memprof.cli.options import STDIN, ReadingOptions, reuse_option
from memprof.cli.output import OutputOptions, print_json
from memprof.cli.progress import Progress
from memprof.cli.streams import echo
from memprof.errors import MemprofError, UsageError
from memprof.units import format_bytes

EXAMPLES = """
memprof doctor train.log
memprof doctor train.log --model llama-3.1-8b --batch-size 4
memprof doctor --env
"""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(OutputOptions):
    """Options of `memprof doctor`: dimensions of the failed run, to identify the tensor."""

    model: str | None = reuse_option(
        "model", default=None, note="The one that ran. Here no code: its sizes alone are read."
    )
    batch_size: int | None = reuse_option("batch_size", default=None, unset="not known")
    context_length: int | None = reuse_option("context_length", unset="not known")


def doctor(
    request: DoctorOptions,
    reading_options: ReadingOptions,
    file: Annotated[
        Path | None, typer.Argument(help="An error message or a whole log; - or nothing: standard input.")
    ] = None,
    env: Annotated[bool, typer.Option("--env", help="Check this installation instead.")] = False,
) -> None:
    """Say why a run ran out of memory, or had tensors on two devices, which tensor it was, and what to do in order.

    The start-up log of vLLM, SGLang or llama.cpp becomes a table of its memory, also if it started. Needs neither torch
    nor a GPU; a log of any length is read in one pass. Exit code 1: no such error is in it, and no such start.
    """
    if env:
        for name, value in (("FILE", file), ("--model", request.model), ("--batch-size", request.batch_size)):
            if value is not None:
                raise UsageError("--env looks at this machine, not at a log", value=name, hint="leave out one of them")
        _check_installation(request)
        return
    with _open_log(file) as stream, Progress(quiet=request.quiet) as progress:
        # Imported here: a file that does not exist needs none of it.
        from memprof.doctor import ReportedRun, diagnose_log
        from memprof.flows.progress import report_progress_with

        reported_run = ReportedRun(request.model, request.batch_size, request.context_length)
        size = 0 if file is None or file == STDIN or not file.is_file() else file.stat().st_size
        progress(f"reading {_describe_source(file)}")
        with report_progress_with(lambda: f"{format_bytes(stream.tell())} of {format_bytes(size)}" if size else ""):
            diagnoses, budget = diagnose_log(stream, _describe_source(file), reported_run)
    if not diagnoses and budget is None:
        hint = "paste the whole traceback; of a process that vanished, its exit code (137 is a kill)"
        raise MemprofError("no memory or device error is in it", value=_describe_source(file), hint=hint)
    if request.as_json:
        from memprof.report.documents.command_results import DiagnosisList

        print_json(DiagnosisList(file=_describe_source(file), diagnoses=tuple(diagnoses), budget=budget))
        return
    if diagnoses:
        from memprof.report.terminal.doctor import render_diagnoses

        echo(render_diagnoses(diagnoses, quiet=request.quiet), nl=False)
    if budget is not None:
        from memprof.report.terminal.engine_budget import render_budget_table, render_engine_budget

        if not diagnoses:
            echo(render_engine_budget(budget, quiet=request.quiet), nl=False)
        elif not request.quiet:
            echo(f"\nIts memory until then\n{render_budget_table(budget)}", nl=False)


def _check_installation(output: OutputOptions) -> None:
    from memprof.doctor.installation import check_installation
    from memprof.report.terminal.doctor import render_installation

    installation = check_installation()
    if output.as_json:
        from memprof.report.documents.command_results import InstallationResult

        print_json(InstallationResult(facts=dict(installation.facts), findings=installation.findings))
    else:
        echo(render_installation(installation, quiet=output.quiet), nl=False)


def _describe_source(file: Path | None) -> str:
    return "standard input" if file in (None, STDIN) else str(file)


def _open_log(file: Path | None) -> AbstractContextManager[BinaryIO]:
    if file is None or file == STDIN:
        stream: BinaryIO = sys.stdin.buffer
        if sys.stdin.isatty():
            echo("paste the error, then press Ctrl-D on an empty line", err=True)
        return nullcontext(stream)
    if file.is_dir():
        raise UsageError("this is a folder, not a log", value=str(file), hint="name a file in it")
    try:
        return file.open("rb")
    except FileNotFoundError:
        raise UsageError(
            "no such file", value=str(file), hint="an error message itself goes to standard input"
        ) from None
    except OSError as error:
        raise UsageError("the file cannot be read", value=f"{file}: {error.strerror}") from None
