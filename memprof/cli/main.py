"""The command line: one file per command; this one puts them together and turns errors into exit codes.

Exit codes: 0 done, and it fits; 3 it does not fit; 2 wrong use; 1 anything else. `memprof monitor` has its command's.
"""

from __future__ import annotations

import gc
import logging
import sys
from typing import Annotated, NoReturn

import typer

import memprof
from memprof.cli import (
    analyze,
    compare,
    doctor,
    estimate,
    export,
    gpus,
    models,
    monitor,
    profile,
    recipes,
    recommend,
    show,
    verify,
    vocab,
)
from memprof.cli import (
    run as dry_run,
)
from memprof.errors import MemprofError

app = typer.Typer(
    name="memprof",
    help="Where the memory of a PyTorch run goes, and whether it fits: without a GPU and with one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("profile")(profile.profile)
# What follows the script's name is the script's, whatever it looks like.
app.command("run", context_settings={"allow_interspersed_args": False})(dry_run.run)
app.command("estimate")(estimate.estimate)
app.command("recommend")(recommend.recommend)
app.command("show")(show.show)
app.command("analyze")(analyze.analyze)
app.command("compare")(compare.compare)
app.command("export")(export.export)
app.command("doctor")(doctor.doctor)
app.command("models")(models.models)
app.command("gpus")(gpus.gpus)
app.command("verify")(verify.verify)
app.command("vocab")(vocab.vocab)
# What follows the command's name is the command's, whatever it looks like.
app.command("monitor", context_settings={"allow_interspersed_args": False})(monitor.monitor)
app.add_typer(recipes.app, name="recipes")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"memprof {memprof.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Where the memory of a PyTorch run goes, and whether it fits: without a GPU and with one."""


def run(arguments: list[str] | None = None) -> NoReturn:
    """The console script: run a command, and turn what goes wrong into one message and an exit code."""
    ends_process = arguments is None
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments[: arguments.index("--") if "--" in arguments else None]
    if arguments[:1] == ["run"]:  # it says its errors itself: what follows its script is not ours
        debug = True
    if ends_process:
        # What these have to say when a library imports them is not about the run.
        for name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
            logging.getLogger(name).setLevel(logging.ERROR)
    try:
        app(arguments, standalone_mode=True)
    except MemprofError as error:
        if debug:
            raise
        typer.echo(f"memprof: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone: not an error.
        sys.stderr.close()
        sys.exit(0)
    finally:
        if ends_process:
            # Looking for garbage among the millions of objects of torch and transformers on the way out takes as long
            # as a fifth of the whole command.
            gc.freeze()
    sys.exit(0)
