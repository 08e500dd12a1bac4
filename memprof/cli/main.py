"""The command line: one file per command; this one puts them together."""

from __future__ import annotations

import atexit
import errno
import importlib
import inspect
import signal
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Annotated, Any, NoReturn

import typer

import memprof
from memprof.cli.child import allow_child, tell_exit_code
from memprof.cli.completion import install_itself
from memprof.cli.exits import MEANINGS, OF_OTHERS
from memprof.cli.options import Commands, add
from memprof.cli.streams import give_up, prepare, say

# In the order of --help. Each is a module here, with a function of its name, or an `app` with commands of its own; its
# `EXAMPLES` stand in its --help, its `SETTINGS`, if it has any, are those of the command's context.
COMMANDS = (
    "profile", "run", "estimate", "recommend", "show", "analyze", "compare", "export", "doctor", "models", "gpus",
    "verify", "vocab", "monitor", "cache", "help", "recipes",
)  # fmt: skip
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"memprof.cli.{name}")


def _about(name: str) -> str:
    """Return what a command does, without making it."""
    module = _module(name)
    return str(module.app.info.help) if hasattr(module, "app") else inspect.getdoc(getattr(module, name)) or ""


def _command(name: str) -> Any:
    """Return a command of this program, as typer makes it."""
    module = _module(name)
    if hasattr(module, "app"):
        made = typer.main.get_command(module.app)
        made.name = name
        return made
    alone = typer.Typer(add_completion=False)
    add(alone, name, getattr(module, name), getattr(module, "SETTINGS", None), module.EXAMPLES)
    return typer.main.get_command(alone)


class _LazyCommands(Mapping[str, Any]):
    """The commands by name; each is made when it is requested, since making all of them takes longer than most run."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = _command(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class CommandGroup(Commands):
    """All commands, none of them made before it is needed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _LazyCommands()  # type: ignore[assignment]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take what stands before the command's name."""
        install_itself(self)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return their names."""
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write what each command does: the whole first paragraph, read off its function."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(_about(name).split("\n\n")[0].split())) for name in COMMANDS])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the exit codes, and where more is said."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), meaning) for code, meaning in MEANINGS.items()])
            formatter.write_paragraph()
            formatter.write_text(OF_OTHERS)
        formatter.write_paragraph()
        formatter.write_text(
            "Defaults of options stand in memprof.toml, or in [tool.memprof] of pyproject.toml: memprof help cli."
        )


app = typer.Typer(
    name="memprof",
    help="Where the memory of a PyTorch run goes, and whether it fits: without a GPU and with one.",
    no_args_is_help=True,
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes longer to import than all that the list of commands needs
)


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
    """Run a command: the console script. What goes wrong in it is one message and an exit code (cli/options.py)."""
    ends_process = arguments is None
    arguments = sys.argv[1:] if arguments is None else arguments
    if ends_process:
        prepare()
        allow_child()
        # The last thing at the end: who presses Ctrl-C while Python takes torch down has had an answer, and its code.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
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
            left = sys.exc_info()[1]
            if isinstance(left, SystemExit) and isinstance(left.code, int):
                tell_exit_code(left.code)
            else:
                tell_exit_code(1 if left else 0)
    sys.exit(0)
