"""Options from the fields of dataclasses: `TargetSpec`'s, and what a command asks beside.

A command is a function. Of each of its parameters that is such a dataclass it gets one that is filled in; every field
made by `memprof.spec.option` is an option. Whatever goes wrong with it becomes one message and an exit code here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

from memprof.cli import settings
from memprof.cli.completion import names_of
from memprof.cli.exits import MEANINGS, OF_OTHERS, Exit
from memprof.cli.numbers import check_numbers
from memprof.cli.streams import give_up, say, tell
from memprof.device.ceiling import ceiling
from memprof.errors import MemprofError, UsageError, unknown_name
from memprof.run_spec import RunSpec
from memprof.spec import PRESENT, Option, TargetSpec, check_options, option, options_of, repeat_option
from memprof.units import parse_gib

OUTPUT = "Output"
FILES = "Files"
_Refused: Any = typer.BadParameter.__bases__[0]
"""Arguments that cannot be parsed; some releases of typer have a click of their own."""
_NOT_ABOUT_THE_RUN = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")
"""What these log when a library imports them."""
STDIN = Path("-")
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_DEBUG = typer.Option("--debug", help="Show the whole traceback of an error.", rich_help_panel=OUTPUT)
_NO_COLOR = typer.Option("--no-color", help="Print without colours, as NO_COLOR=1 does.", rich_help_panel=OUTPUT)


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """Which remedies a run is tried with."""

    fix: str | None = option(
        None, "Remedies", "Run with these remedies, such as chunked-loss,activation-checkpointing or "
        "chunked-loss=2048; auto: the cheapest set that fits (`memprof help remedies` lists them). With --gpus also "
        "fsdp, ulysses, ring-attention, tensor-parallel.", metavar="NAMES",
    )  # fmt: skip
    ladder: bool = option(False, "Remedies", "Remedies one after another: what each saves, costs, and what is next.")
    largest: str | None = option(
        None, "Batch", "Search for the largest that fits: {choices}. In a script's own arguments {{}} is its place.",
        metavar="WHAT", choices=("batch-size", "context-length"),
    )  # fmt: skip

    def check_largest(self, device: str) -> None:
        """Whether a search for the largest goes with what else is asked.

        Raises:
            UsageError: it does not.
        """
        if self.largest is not None and (self.ladder or self.searches or device not in ("auto", "virtual")):
            raise UsageError(
                "--largest is a search of its own, on the virtual card",
                value=f"--largest {self.largest}",
                hint="leave out --ladder, --fix auto and --device; --fix with names goes with it",
            )

    @property
    def searches(self) -> bool:
        """Whether `--fix` asks for a search, not for remedies by name."""
        return self.fix is not None and self.fix.strip() == "auto"


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Options that several commands have, and `TargetSpec` has not."""

    params: str | None = option(
        None, "Model", "A number of parameters, such as 1.2B: reckoned, nothing is run.", metavar="COUNT"
    )
    shown_card: int | None = repeat_option("shown_card", of=RunSpec)
    top: int = option(10, OUTPUT, "Rows of each table.", metavar="COUNT", is_count=True)
    force: bool = option(False, OUTPUT, "Replace files that memprof has not written, too.")
    cache: bool = option(True, OUTPUT, "Simulate again what was kept of an earlier call (`memprof cache`).")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a command may take for the files that it is given. It runs below that."""

    max_memory: int | None = option(
        None, "Memory", "Memory that reading and analysing the files may take, such as 4GiB.", metavar="GIB",
        unset="2 GiB, or what files of their size take", parse=parse_gib,
    )  # fmt: skip


def reuse_option(name: str, **changes: Any) -> Any:
    """Return an option of `TargetSpec` or `Shared` as a field of another dataclass, as `repeat_option` does."""
    return repeat_option(name, of=TargetSpec if name in TargetSpec.__dataclass_fields__ else Shared, **changes)


def spec_of(request: object, **others: object) -> TargetSpec:
    """The target of a request that has some options of `TargetSpec`, and what is not asked."""
    known: dict[str, Any] = {name: getattr(request, name, None) for name in TargetSpec.__dataclass_fields__}
    known.update(others)
    return TargetSpec(**{name: value for name, value in known.items() if value is not None})


@contextlib.contextmanager
def _parsing(ctx: Any, words: Sequence[str]) -> Iterator[None]:
    """Wrong words are an error here; where JSON is asked for, one in JSON.

    Of what cannot be parsed it is not known whether JSON was asked for: it is if the word is there.
    """
    as_json = "--json" in words
    try:
        yield
    except _Refused as error:
        if not as_json or ctx.resilient_parsing:
            raise
        tell(UsageError(error.format_message(), hint=f"{ctx.command_path} --help"), as_json=True)
        raise typer.Exit(Exit.WRONG_USE) from None
    except MemprofError as error:
        tell(error, as_json=as_json)
        raise typer.Exit(error.exit_code) from None


class Command(typer.core.TyperCommand):
    """A command whose --help has a section for each panel; typer's own needs rich, which takes as long as the rest."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the command's arguments, and what a file says of the others."""
        with _parsing(ctx, args):
            words = self._from_settings(ctx, args)
            settings.words = (str(self.name), *words, *args)
            left = super().parse_args(ctx, [*words, *args])
            if ctx.params.get("save_config") is not None and not ctx.resilient_parsing:
                self._save_settings(ctx, [*words, *args])
            return left

    def _from_settings(self, ctx: Any, args: list[str]) -> list[str]:
        """What files and a preset say of options that are not among the arguments, as words before them."""
        settings.taken = ()
        if ctx.resilient_parsing:
            return []
        asked = self.make_parser(ctx).parse_args(list(args))[0]
        given = {_excluded_by(name) for name in asked}
        found = []
        for path, values in self._sources(ctx, asked):
            words = []
            for one in self.params:
                value = values.get(_spelt(one), False)
                if value is not False and _excluded_by(str(one.name)) not in given:
                    words.append(f"--{_spelt(one)}" if value is True else f"--{_spelt(one)}={value}")
                    given.add(_excluded_by(str(one.name)))
            if words:
                found.append(settings.Taken(path, tuple(words)))
        settings.taken = tuple(reversed(found))
        return [word for one in settings.taken for word in one.words]

    def _sources(self, ctx: Any, asked: Mapping[str, Any]) -> Iterator[tuple[Path | str, Mapping[str, Any]]]:
        """Where options may come from beside the command line, the strongest first."""
        name, read = str(self.name), settings.read()
        if read is None and asked.get("config") is None and asked.get("preset") is None:
            return
        # Of all commands, each of which is imported for it.
        commands: dict[str, Any] = getattr(ctx.find_root().command, "commands", {})
        known = {name: {_spelt(one) for one in command.params} for name, command in commands.items()}
        if (config := asked.get("config")) is not None:
            path = Path(config)
            yield path, settings.defaults(path, settings.read_named(path), name, known, named=True)
        if (preset := asked.get("preset")) is not None:
            if preset not in settings.PRESETS:
                raise unknown_name("--preset", str(preset), settings.PRESETS)
            values = {key: value for key, value in settings.PRESETS[preset].items() if key in known[name]}
            if not values:
                raise UsageError(f"--preset {preset} says nothing to this command", value=name, hint="leave it out")
            yield f"preset {preset}", values
        if read is not None:
            yield read[0], settings.defaults(*read, name, known)

    def _save_settings(self, ctx: Any, words: list[str]) -> None:
        """Write the options that are in force, but those by which files are written, as a file for `--config`."""
        raw = self.make_parser(ctx).parse_args(list(words))[0]
        options = {str(one.name): one for one in self.params if one.param_type_name == "option"}
        values = {
            _spelt(options[name]): _plain(value)
            for name, value in raw.items()
            if name in options and not settings.is_for_the_command_line(_spelt(options[name]))
        }
        settings.write_named(Path(str(ctx.params["save_config"])), str(self.name), values)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and say first what was taken from a file; JSON has it, and a verdict or script is alone."""
        if not any(ctx.params.get(name) for name in ("as_json", "quiet", "snippet")):
            for one in settings.taken:
                say(str(one))
        for name in _NOT_ABOUT_THE_RUN:
            logging.getLogger(name).setLevel(logging.ERROR)
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        for title, parameters in panels_of(self, ctx).items():
            with formatter.section(title):
                formatter.write_dl([parameter.get_help_record(ctx) for parameter in parameters])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, as they are."""
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in (self.epilog or "").splitlines()))


class Commands(typer.core.TyperGroup):
    """Commands under one name; --help has their whole summaries, and of the program itself the exit codes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take what stands before the command's name."""
        with _parsing(ctx, args):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command."""
        with _parsing(ctx, args):
            return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write what each command does."""
        with formatter.section("Commands"):
            texts = {name: self.about(name).split("\n\n")[0] for name in self.commands}
            formatter.write_dl([(name, " ".join(text.split())) for name, text in texts.items()])

    def about(self, name: str) -> str:
        """What a command does; its first paragraph is the summary."""
        return self.commands[name].help or ""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the exit codes, and where more is said."""
        if ctx.parent is None:
            with formatter.section("Exit codes"):
                formatter.write_dl([(str(int(code)), meaning) for code, meaning in MEANINGS.items()])
                formatter.write_paragraph()
                formatter.write_text(OF_OTHERS)
            formatter.write_paragraph()
            formatter.write_text(
                "Defaults of options stand in memprof.toml, or in [tool.memprof] of pyproject.toml: memprof help cli."
            )


def _plain(value: Any) -> Any:
    """A word of the command line as a file has it: a number as one, where it is spelt as Python spells it."""
    for kind in (int, float):
        try:
            number = kind(value)
        except (TypeError, ValueError):
            continue
        if str(number) == value:
            return number
    return value if isinstance(value, bool) else str(value)


def _spelt(parameter: Any) -> str:
    """An option as a file of settings has it."""
    return str(parameter.opts[-1]).lstrip("-")


def _excluded_by(name: str) -> str:
    """The option that may not be given beside this one; itself if there is none."""
    about = options_of(TargetSpec).get(name)
    return _INSTEAD_OF.get(name) or (about.instead_of if about else None) or name


_INSTEAD_OF = {"params": "model", "ladder": "fix", "until_exit": "steps"}
"""Beside those of `TargetSpec`: what the command line says of one puts aside what a file says of the other."""


def panels_of(command: Any, context: Any) -> dict[str, list[Any]]:
    """A command's parameters under the headings that --help has."""
    found: dict[str, list[Any]] = {}
    for parameter in command.get_params(context):
        title = "Arguments" if parameter.param_type_name == "argument" else "Options"
        if parameter.name == "help" and OUTPUT in found:
            title = OUTPUT
        if not getattr(parameter, "hidden", False):
            found.setdefault(getattr(parameter, "rich_help_panel", None) or title, []).append(parameter)
    if found.keys() <= {"Arguments", OUTPUT, settings.PANEL}:  # nothing of its own but --debug, --help and their like
        return {"Options" if title == OUTPUT else title: rows for title, rows in found.items()}
    last = ("Remedies", settings.PANEL, FILES, OUTPUT)
    return dict(sorted(found.items(), key=lambda panel: last.index(panel[0]) if panel[0] in last else -1))


def add(
    app: typer.Typer,
    name: str,
    function: Callable[..., None],
    settings: dict[str, Any] | None = None,
    examples: str = "",
) -> None:
    """Make `function` the command `name`; `settings` are click's for its context, each line of `examples` one use."""
    app.command(name, cls=Command, context_settings=settings, epilog=examples.strip())(_flat(function))


def _flat(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with an option in place of each field of the dataclasses that it takes, for typer to read."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters = {
        parameter.name: parameter.replace(kind=_KEYWORD, annotation=hints[parameter.name])
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in groups
    }
    owners: dict[str, str] = {}
    for group, kind in groups.items():
        types = get_type_hints(kind)
        for name, about in options_of(kind).items():
            owners[name] = group  # of two that have the same option, the later
            parameters[name] = _parameter(name, types[name], about, kind.__dataclass_fields__[name].default)
    for name, about in settings.OPTIONS.items():
        parameters[name] = inspect.Parameter(name, _KEYWORD, default=None, annotation=Annotated[str | None, about])
    parameters["debug"] = inspect.Parameter("debug", _KEYWORD, default=False, annotation=Annotated[bool, _DEBUG])
    parameters["no_color"] = inspect.Parameter(
        "no_color", _KEYWORD, default=False, annotation=Annotated[bool, _NO_COLOR]
    )

    @functools.wraps(function)
    def call(*, debug: bool, no_color: bool, **values: Any) -> None:
        for name in settings.OPTIONS:
            values.pop(name)  # was seen to where arguments are parsed
        asked = dict(values)
        given = {group: {name: values.pop(name) for name in owners if owners[name] == group} for group in groups}
        try:
            check_numbers(asked)
            built = {group: _build(kind, given[group]) for group, kind in groups.items()}
            reading = next((one for one in built.values() if isinstance(one, Reading)), None)
            files = [value for value in values.values() if isinstance(value, Path) and value != STDIN]
            limited = contextlib.nullcontext() if reading is None else ceiling(reading.max_memory, files)
            with limited, _colours(wanted=not no_color):
                function(**values, **built)
        except BrokenPipeError:  # the reader of our output (`| head`) has gone: not an error
            give_up(sys.stdout)
            raise typer.Exit(0) from None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            say(f"memprof: {UsageError('a name is too long for a file', value=str(error.filename)[:80])}", err=True)
            raise typer.Exit(UsageError.exit_code) from None
        except MemprofError as error:
            if debug:
                raise
            # Of a run that failed, as its report.
            is_told = error.follows_answer or getattr(error, "document", None) is not None
            tell(error, as_json=not is_told and any(values.get("as_json") for values in given.values()))
            raise typer.Exit(error.exit_code) from None

    call.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    call.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return call


@contextlib.contextmanager
def _colours(*, wanted: bool) -> Iterator[None]:
    if wanted:
        yield
        return
    from memprof.report.terminal.widths import COLOURLESS

    before = COLOURLESS.set(True)
    try:
        yield
    finally:
        COLOURLESS.reset(before)


def _parameter(name: str, kind: Any, about: Option, default: object) -> inspect.Parameter:
    """The parameter that typer makes an option of. What is not given is None, or False for a flag."""
    is_flag = kind is bool and about.instead_of is None
    text = about.help.format(choices=(" or " if len(about.choices) == 2 else ", ").join(about.choices))
    unset = about.unset or (None if default is None or kind is bool else str(default)) or None
    info = typer.Option(
        *filter(None, (about.short, about.flag)),
        help=text if unset is None else f"{text} [default: {unset}]",
        metavar=about.metavar,
        rich_help_panel=about.panel,
        hidden=not about.panel,
        autocompletion=names_of(name, about.choices),
    )
    kind = str if about.parse or kind is bool else kind
    annotation = Annotated[bool, info] if is_flag else Annotated[kind | None, info]
    return inspect.Parameter(name, _KEYWORD, default=False if is_flag else None, annotation=annotation)


def _build(kind: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass of the options that were given; its own defaults are those of the others.

    Raises:
        UsageError: a value is none of the option's, or two options exclude each other.
    """
    options = options_of(kind)
    given: dict[str, Any] = {}
    for name, value in values.items():
        about = options[name]
        if value is None or value is False:
            continue
        other = about.instead_of
        if other is not None and other in given:
            flags = options[other].flag, about.flag
            raise UsageError(
                "give {} or {}, not both".format(*flags),
                value=f"{flags[0]} {given[other]} {flags[1]} {value}",
                hint="leave one out",
            )
        if value is True:
            given[name] = not kind.__dataclass_fields__[name].default
        elif other is not None and about.parse is None:
            given[other], given[name] = value, True
        else:
            given[name] = about.parse(value) if about.parse else value
    if "gpu" in options and options["gpu"].unset == PRESENT and not given.keys() & {"gpu", "gpu_vram_bytes"}:
        from memprof.flows.present import present_card

        given |= present_card()
    made = kind(**given)
    check_options(made)
    return made
