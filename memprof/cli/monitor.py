"""`memprof monitor [-- COMMAND]`: GPUs and a command's allocator, live."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from memprof.cli.options import reuse_option
from memprof.cli.output import OutputOptions
from memprof.errors import MemprofError, UsageError

EXAMPLES = """
memprof monitor
memprof monitor -- python train.py --epochs 1
memprof monitor --log run.csv --quiet -- torchrun --nproc-per-node 2 train.py
"""
SETTINGS = {"allow_interspersed_args": False}  # arguments after the command's name are passed to the command
MIN_INTERVAL = 0.05


@dataclass(frozen=True, kw_only=True)
class MonitorOptions(OutputOptions):
    """Output options of `memprof monitor`."""

    force: bool = reuse_option("force")


def monitor(
    request: MonitorOptions,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="What to start and watch.", show_default="the GPUs alone"),
    ] = None,
    interval: Annotated[float, typer.Option(help="Between two samples.", metavar="SECONDS")] = 1.0,
    log: Annotated[Path | None, typer.Option(help="Write a line per sample to this CSV file.", metavar="FILE")] = None,
    once: Annotated[bool, typer.Option("--once", help="One sample of the GPUs, and no more.")] = False,
) -> None:
    """Watch the GPUs, and the memory of a PyTorch command: allocated, reserved, resident, and their peaks.

    The command runs unchanged, with its own input and output; with one, memprof prints to stderr. The exit code is the
    command's own, 128 + n if signal n killed it; without a command 1 if there is no GPU or driver.
    """
    if interval < MIN_INTERVAL:
        raise UsageError("the interval is too short", value=interval, hint=f"give {MIN_INTERVAL} seconds or more")
    if once and command:
        raise UsageError("--once is of the GPUs alone", hint="leave the command out, or give a longer --interval")
    if not hasattr(signal, "sigtimedwait"):
        raise MemprofError("memprof monitor needs Linux", value=sys.platform)
    from memprof.monitor.log import LOG_KIND
    from memprof.monitor.run import monitor as watch
    from memprof.report.terminal.monitor import make_view
    from memprof.trace.files import check_output_path

    if log is not None:
        check_output_path(log, LOG_KIND, force=request.force)
    stream = sys.stderr if command else sys.stdout
    view = make_view(stream, has_command=bool(command), as_json=request.as_json, quiet=request.quiet)
    outcome = watch(command or (), view, interval=interval, log=log, once=once)
    raise typer.Exit(outcome.exit_code)
