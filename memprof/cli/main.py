"""The command line: one file per command; this one puts them together."""

from __future__ import annotations

import errno
import gc
import importlib
import logging
import sys
from typing import Annotated, NoReturn

import typer

import memprof
from memprof.cli.options import Commands, add
from memprof.cli.streams import give_up, prepare, say

COMMANDS = (
    "profile", "run", "estimate", "recommend", "show", "analyze", "compare", "export", "doctor", "models", "gpus",
    "verify", "vocab", "monitor", "help", "recipes",
)  # fmt: skip
"""In the order of --help. Each is a module here, with a function of its name, or an `app` with commands of its own; its
`EXAMPLES` stand in its --help, its `SETTINGS`, if it has any, are click's for the command's context."""

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

app = typer.Typer(
    name="memprof",
    help="Where the memory of a PyTorch run goes, and whether it fits: without a GPU and with one.",
    no_args_is_help=True,
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _name in COMMANDS:
    _module = importlib.import_module(f"memprof.cli.{_name}")
    if hasattr(_module, "app"):
        app.add_typer(_module.app, name=_name)
    else:
        add(app, _name, getattr(_module, _name), getattr(_module, "SETTINGS", None), _module.EXAMPLES)


def _version(value: bool) -> None:
    if value:
        say(f"memprof {memprof.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Where the memory of a PyTorch run goes, and whether it fits: without a GPU and with one."""


def run(arguments: list[str] | None = None) -> NoReturn:
    """The console script: run a command. What goes wrong in it is one message and an exit code (cli/options.py)."""
    ends_process = arguments is None
    arguments = sys.argv[1:] if arguments is None else arguments
    if ends_process:
        prepare()
        # What these have to say when a library imports them is not about the run.
        for name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
            logging.getLogger(name).setLevel(logging.ERROR)
    try:
        try:
            app(arguments, standalone_mode=True)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # what was left to write
        give_up(sys.stdout)
        sys.exit(0)
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        give_up(sys.stdout)
        say(f"memprof: the output cannot be written: {error.strerror}", err=True)
        sys.exit(1)
    finally:
        if ends_process:
            # Looking for garbage among the millions of objects of torch and transformers on the way out takes as long
            # as a fifth of the whole command. But nanobind (Triton's, from release 3.9) says of what is left: leaked.
            by_nanobind = any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type))
            (gc.unfreeze if by_nanobind else gc.freeze)()
    sys.exit(0)
