"""The console script `memprof`: the group of all commands, each defined in a module of memprof/cli."""

from __future__ import annotations

import errno
import importlib
import inspect
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Annotated, Any, NoReturn

import typer

import memprof
from memprof.cli.child import allow_fork, send_exit_code
from memprof.cli.completion import replace_install_callback
from memprof.cli.exits import CODE_MEANINGS, EXIT_CODE_NOTE
from memprof.cli.guess import WELCOME, guess_command
from memprof.cli.interrupt import end_interrupted_imports
from memprof.cli.options import ErrorReportingGroup, add_command, report_parse_errors
from memprof.cli.streams import discard_output, echo, prepare_streams

# Commands in the order of --help. Each has a module of memprof/cli with a function of the same name, or an `app` with
# subcommands. `EXAMPLES` of the module are printed in --help; `SETTINGS` are the optional context settings,
# `MAIN_OPTIONS` the options that --help shows where --help-all shows more.
COMMANDS = (
    "profile", "run", "estimate", "recommend", "sweep", "show", "analyze", "compare", "export", "doctor", "models",
    "gpus", "verify", "vocab", "monitor", "cache", "help", "recipes", "mcp",
)  # fmt: skip
_WRITE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _import_command(name: str) -> ModuleType:
    return importlib.import_module(f"memprof.cli.{name}")


def _get_help_text(name: str) -> str:
    """Return the help text of a command, without building its parser."""
    module = _import_command(name)
    return str(module.app.info.help) if hasattr(module, "app") else inspect.getdoc(getattr(module, name)) or ""


def _build_command(name: str) -> Any:
    """Return the typer command of the module `name`."""
    module = _import_command(name)
    if hasattr(module, "app"):
        group = typer.main.get_command(module.app)
        group.name = name
        return group
    command_app = typer.Typer(add_completion=False)
    function, main_options = getattr(module, name), getattr(module, "MAIN_OPTIONS", ())
    context = getattr(module, "SETTINGS", None)
    add_command(command_app, name, function, context, module.EXAMPLES, has_rare_options=bool(main_options))
    command: Any = typer.main.get_command(command_app)
    command.main_options = main_options
    return command


class _LazyCommands(Mapping[str, Any]):
    """A mapping of names to commands, each built at its first access because building all of them is slow."""

    def __init__(self) -> None:
        self._commands: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        if name not in self._commands:
            self._commands[name] = _build_command(name)
        return self._commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class CommandGroup(ErrorReportingGroup):
    """The typer group of all memprof commands, each built at its first use."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _LazyCommands()  # type: ignore[assignment]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command's name."""
        replace_install_callback(self)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command named in `args`; for the name of a file, the command that reads it."""
        with report_parse_errors(ctx, args):
            command = None if args[0] in COMMANDS else guess_command(args[0])
        if command is not None:
            echo(f"memprof: this is `memprof {command} {shlex.quote(args[0])}`", err=True)
            args = [command, *args]
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the name of each command, and the first paragraph of its help text."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(_get_help_text(name).split("\n\n")[0].split())) for name in COMMANDS])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the exit codes, and the files that may set defaults of options."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), meaning) for code, meaning in CODE_MEANINGS.items()])
            formatter.write_paragraph()
            formatter.write_text(EXIT_CODE_NOTE)
        formatter.write_paragraph()
        formatter.write_text(
            "Defaults of options stand in memprof.toml, or in [tool.memprof] of pyproject.toml: memprof help cli."
        )


app = typer.Typer(
    name="memprof",
    help="Where the memory of a PyTorch run goes, and whether it fits: without a GPU and with one.",
    invoke_without_command=True,
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich takes longer than printing the list of commands
)


def _print_version(value: bool) -> None:
    if value:
        echo(f"memprof {memprof.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Where the memory of a PyTorch run goes, and whether it fits: without a GPU and with one."""
    if context.invoked_subcommand is None:
        echo(WELCOME)


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line (default: sys.argv) and exit the process."""
    ends_process = arguments is None
    arguments = sys.argv[1:] if arguments is None else arguments
    if ends_process:
        prepare_streams()
        allow_fork()
        end_interrupted_imports()
    try:
        try:
            app(arguments, standalone_mode=True)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # while the rest was written
        discard_output(sys.stdout)
        sys.exit(0)
    except OSError as error:
        if error.errno not in _WRITE_ERRNOS or error.filename is not None:
            raise
        discard_output(sys.stdout)
        echo(f"memprof: the output cannot be written: {error.strerror}", err=True)
        sys.exit(1)
    finally:
        if ends_process:
            # Ignored while Python shuts down torch, which has callbacks for it: the output is complete.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            exception = sys.exc_info()[1]
            if isinstance(exception, SystemExit) and isinstance(exception.code, int):
                send_exit_code(exception.code)
            else:
                send_exit_code(1 if exception else 0)
    sys.exit(0)
