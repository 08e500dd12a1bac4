"""Command-line options from the fields of dataclasses, of `TargetSpec` and of the commands.

A command is a function. Each of its parameters annotated with such a dataclass receives an instance built from the
options; each field made by `memprof.spec.option` is an option. Errors become one message and an exit code here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import inspect
import itertools
import logging
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

from memprof.cli import settings
from memprof.cli.completion import get_completer
from memprof.cli.exits import ExitCode
from memprof.cli.streams import discard_output, echo, report_error
from memprof.device.ceiling import limit_memory
from memprof.errors import MemprofError, UsageError, unknown_name
from memprof.run_spec import RunSpec
from memprof.spec import DEFAULT_GPU_TEXT, Option, TargetSpec, check_options, get_options, option, repeat_option
from memprof.units import parse_gib

OUTPUT_PANEL = "Output"
FILES_PANEL = "Files"
_LAST_PANELS = ("Fixes", settings.PANEL_NAME, FILES_PANEL, OUTPUT_PANEL)
# Loggers that print messages at import.
_QUIET_LOGGERS = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")
_MAX_NUMBER = 10**12  # Maximum of options that are not in _MAX_BY_OPTION: bytes, seconds, rows.
_MAX_BY_OPTION = {
    # Loops run over the first ones; the others have tables in host memory.
    **dict.fromkeys(("steps", "gradient_accumulation", "new_tokens", "dataset_batches", "batches", "gpus"), 10**6),
    "seeds": 10**3,
    "workers": 10**4,
    "batch_size": 1 << 24,
    "effective_batch": 1 << 24,
    "context_length": 1 << 27,
    "timeout": 10**8,
    "interval": 86_400,
}
_LONG_NUMBER = re.compile(r"\d{400}")
STDIN = Path("-")
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_HELP_ALL = "help_all"
_COMMON_OPTIONS = {
    "debug": typer.Option("--debug", help="Show the whole traceback of an error.", rich_help_panel=OUTPUT_PANEL),
    "no_color": typer.Option(
        "--no-color", help="Print without colours, as NO_COLOR=1 does.", rich_help_panel=OUTPUT_PANEL
    ),
}


@dataclass(frozen=True, kw_only=True)
class FixOptions:
    """Options of fixes: fixes by name, a ladder of fixes, or a search for the largest batch or context."""

    fix: str | None = option(
        None, "Fixes", "Run with these fixes, such as chunked-loss,activation-checkpointing or "
        "chunked-loss=2048; auto: the cheapest set that fits (`memprof help fixes` lists them). With --gpus also "
        "fsdp, ulysses, ring-attention, tensor-parallel.", metavar="NAMES",
    )  # fmt: skip
    ladder: bool = option(False, "Fixes", "Fixes one after another: what each saves, costs, and what is next.")
    largest: str | None = option(
        None, "Batch", "Search for the largest that fits: {choices}. In a script's own arguments {{}} is its place.",
        metavar="WHAT", choices=("batch-size", "context-length"),
    )  # fmt: skip

    def check_largest(self, device: str) -> None:
        """Raise UsageError if --largest is given with --ladder, --fix auto or a real device."""
        if self.largest is not None and (self.ladder or self.is_search or device not in ("auto", "virtual")):
            raise UsageError(
                "--largest is a search of its own, on the virtual GPU",
                value=f"--largest {self.largest}",
                hint="leave out --ladder, --fix auto and --device; --fix with names goes with it",
            )

    @property
    def is_search(self) -> bool:
        """Return whether `--fix` is `auto`, which searches for fixes."""
        return self.fix is not None and self.fix.strip() == "auto"


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """Options that several commands share and that are not in `TargetSpec`."""

    params: str | None = option(
        None, "Model", "A number of parameters, such as 1.2B: estimated analytically, nothing is run.", metavar="COUNT"
    )
    shown_gpu: int | None = repeat_option("shown_gpu", cls=RunSpec)
    top: int = option(10, OUTPUT_PANEL, "Rows of each table.", metavar="COUNT", is_count=True)
    full: bool = option(False, OUTPUT_PANEL, "Print the whole answer instead of its first screen.")
    force: bool = option(False, OUTPUT_PANEL, "Replace files that memprof has not written, too.")
    exact: bool = option(False, OUTPUT_PANEL, "Simulate what the analytical estimate says, too.")
    cache: bool = option(True, OUTPUT_PANEL, "Simulate again what was kept of an earlier call (`memprof cache`).")


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Options of commands that read files: the memory limit of the command."""

    max_memory: int | None = option(
        None, "Memory", "Memory that reading and analysing the files may take, such as 4GiB.", metavar="GIB",
        unset="2 GiB, or what files of their size take", parse=parse_gib,
    )  # fmt: skip


def reuse_option(name: str, **changes: Any) -> Any:
    """Return a dataclass field that repeats the option `name` of `TargetSpec` or `SharedOptions`, with `changes`."""
    return repeat_option(name, cls=TargetSpec if name in TargetSpec.__dataclass_fields__ else SharedOptions, **changes)


def build_spec(request: object, **changes: object) -> TargetSpec:
    """Return a TargetSpec with the fields of `request` that have the same names; `changes` override them."""
    values: dict[str, Any] = {name: getattr(request, name, None) for name in TargetSpec.__dataclass_fields__} | changes
    return TargetSpec(**{name: value for name, value in values.items() if value is not None})


@contextlib.contextmanager
def report_parse_errors(ctx: Any, args: Sequence[str]) -> Iterator[None]:
    """Context manager: report errors of parsing `args`, as JSON too if --json is among them."""
    as_json = "--json" in args
    try:
        yield
    except typer.TyperException as error:
        if ctx.resilient_parsing:
            raise
        names = {str(parameter.name) for parameter in ctx.command.params}
        report_error(_convert_error(error.format_message(), ctx.command_path, args, names), as_json=as_json)
        raise typer.Exit(ExitCode.USAGE_ERROR) from None
    except MemprofError as error:
        report_error(error, as_json=as_json)
        raise typer.Exit(error.exit_code) from None


def _convert_error(message: str, command: str, words: Sequence[str], parameters: Container[str]) -> UsageError:
    """Return an error message of typer as a UsageError with problem, value and hint; `parameters` of the command."""
    number_match = re.match(r"Invalid value for '(--[\w-]+)': Input should be a valid (number|integer)", message)
    if number_match is not None:
        flag, kind = number_match.groups()
        given_values = [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
        given_values += [next_word for word, next_word in itertools.pairwise(words) if word == flag]
        kind, example = ("a number", "0.5") if kind == "number" else ("a whole number", "8")
        return UsageError(f"{flag}: not {kind}", value=repr(given_values[-1]), hint=f"write it like {example}")
    help_hint = f"{command} --help lists what there is"
    unknown_match = re.match(r"No such (option|command):? '?([^\s'.]+)'?", message)
    if unknown_match is not None:
        suggestions = re.findall(r"--[\w-]+|(?<=')\w[\w-]*(?=')", message[unknown_match.end() :])
        hint = f"did you mean {' or '.join(suggestions[:3])}? {help_hint}" if suggestions else help_hint
        return UsageError(f"no such {unknown_match[1]}", value=unknown_match[2], hint=hint)
    extra_match = re.match(r"Got unexpected extra arguments? ?(?:\(s\) )?\((.+)\)", message)
    if extra_match is not None:
        extra = extra_match[1]
        model_hint = f"a model is named by --model: {command} --model {extra.split()[0]}; " * ("model" in parameters)
        return UsageError("unexpected extra argument", value=extra, hint=model_hint + help_hint)
    return UsageError(message[:1].lower() + message[1:].rstrip("."), hint=help_hint)


class Command(typer.core.TyperCommand):
    """A command whose options may also come from settings files and presets."""

    # Names of the parameters that --help shows; --help-all shows the others too. Empty: there are no others.
    main_options: tuple[str, ...] = ()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help text, without the rarer options unless --help-all requests it."""
        shows_all = not self.main_options or ctx.meta.get(_HELP_ALL, False)
        rare: list[Any] = [p for p in self.params if not shows_all and p.name not in self.main_options]
        rare = [parameter for parameter in rare if not parameter.hidden]
        try:
            for parameter in rare:
                parameter.hidden = parameter.param_type_name == "option"
            super().format_help(ctx, formatter)
        finally:
            for parameter in rare:
                parameter.hidden = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, and the options of files and presets that the command line does not set."""
        with report_parse_errors(ctx, args):
            settings.sources = ()
            words: list[str] = []
            remaining = super().parse_args(ctx, [*args])
            if not ctx.resilient_parsing:
                words = self._load_settings(ctx)
                if words:
                    remaining = super().parse_args(ctx, [*words, *args])
                if ctx.params["save_config"] is not None:
                    self._save_settings(ctx)
            settings.command_line = (str(self.name), *words, *args)
            return remaining

    def _load_settings(self, ctx: Any) -> list[str]:
        """Return the options of files and presets that the command line does not set, as command-line arguments."""
        set_names = {_get_exclusive_name(name) for name in _list_given_names(ctx)}
        sources = []
        for path, values in self._iter_sources(ctx):
            words = []
            for parameter in _list_options(self):
                value = values.get(_get_option_name(parameter), False)
                if _get_option_name(parameter) in values:
                    _check_kind(path, parameter, value)
                if value is not False and _get_exclusive_name(str(parameter.name)) not in set_names:
                    words += _build_option_words(parameter, value)
                    set_names.add(_get_exclusive_name(str(parameter.name)))
            if words:
                sources.append(settings.LoadedSettings(path, tuple(words)))
        settings.sources = tuple(reversed(sources))
        return [word for source in settings.sources for word in source.arguments]

    def _iter_sources(self, ctx: Any) -> Iterator[tuple[Path | str, Mapping[str, Any]]]:
        """Yield name and option values of each settings file and preset, highest priority first."""
        name, settings_file = str(self.name), settings.read_settings()
        config, preset = ctx.params["config"], ctx.params["preset"]
        if settings_file is None and config is None and preset is None:
            return
        # The options of all commands, which imports the module of each.
        commands: dict[str, Any] = getattr(ctx.find_root().command, "commands", {})
        known = {name: {_get_option_name(p) for p in _list_options(command)} for name, command in commands.items()}
        replaces = {_get_option_name(option): _get_exclusive_name(str(option.name)) for option in _list_options(self)}
        if config is not None:
            path = Path(config)
            table = settings.read_config(path)
            yield path, settings.select_options(path, table, name, known, replaces, is_config=True)
        if preset is not None:
            if preset not in settings.PRESETS:
                raise unknown_name("--preset", str(preset), settings.PRESETS)
            values = {key: value for key, value in settings.PRESETS[preset].items() if key in known[name]}
            if not values:
                raise UsageError(f"--preset {preset} says nothing to this command", value=name, hint="leave it out")
            yield f"preset {preset}", values
        if settings_file is not None:
            yield settings_file[0], settings.select_options(*settings_file, name, known, replaces)

    def _save_settings(self, ctx: Any) -> None:
        """Write the options in effect, except those that name output files, to the file of `--save-config`."""
        options = {str(option.name): _get_option_name(option) for option in _list_options(self)}
        values = {
            options[name]: _parse_value(ctx.params[name])
            for name in _list_given_names(ctx)
            if name in options and not settings.is_command_line_only(options[name])
        }
        settings.write_config(Path(str(ctx.params["save_config"])), str(self.name), values)

    def invoke(self, ctx: Any) -> Any:
        """Print the options set by files and presets (not with --json, --quiet or --snippet), and run the command."""
        if not any(ctx.params.get(name) for name in ("as_json", "quiet", "snippet")):
            for source in settings.sources:
                echo(str(source))
        for name in _QUIET_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        return super().invoke(ctx)


def _print_all_help(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta[_HELP_ALL] = True
        echo(ctx.get_help())
        raise typer.Exit


class ErrorReportingGroup(typer.core.TyperGroup):
    """A group of commands whose usage errors are printed in memprof's form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command's name."""
        with report_parse_errors(ctx, args):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command named in `args`, as typer does."""
        with report_parse_errors(ctx, args):
            return super().resolve_command(ctx, args)


def _list_given_names(ctx: Any) -> list[str]:
    """Return the names of the parameters that are set on the command line."""
    return [name for name in ctx.params if ctx.get_parameter_source(name).name == "COMMANDLINE"]


def _parse_value(value: Any) -> Any:
    """Return an option's value as written to a settings file: a boolean, number or string; lists joined by commas."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    for kind in (int, float):
        with contextlib.suppress(TypeError, ValueError):
            if str(kind(value)) == value:
                return kind(value)
    return str(value)


def _list_options(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "option"]


def _get_option_name(parameter: Any) -> str:
    """Return the name of an option without dashes, as in settings files."""
    return str(parameter.opts[-1]).lstrip("-")


def _check_kind(path: Path | str, parameter: Any, value: Any) -> None:
    """Raise UsageError if a settings file has true or false for an option with a value, or a value for a flag."""
    if isinstance(value, bool) is parameter.is_flag:
        return
    name, hint = _get_option_name(parameter), "write true or false"
    if not parameter.is_flag:
        hint = "give it a value" + (
            "" if str(path).endswith(".toml") else "; YAML takes yes, no, on and off for true and false"
        )
    problem = f"{name} is a flag" if parameter.is_flag else f"{name} takes a value, which true and false are not"
    raise UsageError(problem, value=f"{path}: {name}: {value}", hint=hint)


def _build_option_words(parameter: Any, value: Any) -> list[str]:
    """Return the command-line arguments that set the option `parameter` to a value of a settings file."""
    if value is True:
        return [f"--{_get_option_name(parameter)}"]
    parts = str(value).split(",") if parameter.multiple else [value]
    return [f"--{_get_option_name(parameter)}={part}" for part in parts]


def _get_exclusive_name(name: str) -> str:
    """Return the option that `name` replaces on the command line (`params` replaces `model`); `name` if none."""
    opt = get_options(TargetSpec).get(name)
    return _EXCLUSIVE_OPTIONS.get(name) or (opt.instead_of if opt else None) or name


# Options that exclude each other, besides those of `TargetSpec`: the command line overrides files.
_EXCLUSIVE_OPTIONS = {"params": "model", "ladder": "fix", "until_exit": "steps"}


def add_command(
    app: typer.Typer,
    name: str,
    function: Callable[..., None],
    context: dict[str, Any] | None = None,
    examples: str = "",
    *,
    has_rare_options: bool = False,
) -> None:
    """Add `function` to `app` as the command `name`; `examples` are command lines, one per line. With
    `has_rare_options` it has an option --help-all."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    app.command(
        name,
        cls=Command,
        context_settings=context,
        help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),
        epilog=f"Examples:\n{examples.strip()}",
    )(_flatten_parameters(function, has_rare_options=has_rare_options))


def _flatten_parameters(function: Callable[..., None], *, has_rare_options: bool) -> Callable[..., None]:
    """Return `function` with each dataclass parameter replaced by one parameter per field, for typer."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters = {
        parameter.name: parameter.replace(kind=_KEYWORD_ONLY, annotation=hints[parameter.name])
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in groups
    }
    owners: dict[str, str] = {}
    panels: dict[str, str] = {}
    for group, kind in groups.items():
        types = get_type_hints(kind)
        for name, opt in get_options(kind).items():
            owners[name] = group  # the last group that has the option
            panels[name] = opt.panel
            parameters[name] = _build_parameter(name, types[name], opt, kind.__dataclass_fields__[name].default)
    for name, opt in settings.SETTINGS_OPTIONS.items():
        panels[name] = settings.PANEL_NAME
        parameters[name] = inspect.Parameter(name, _KEYWORD_ONLY, default=None, annotation=Annotated[str | None, opt])
    for name, opt in _COMMON_OPTIONS.items():
        panels[name] = OUTPUT_PANEL
        parameters[name] = inspect.Parameter(name, _KEYWORD_ONLY, default=False, annotation=Annotated[bool, opt])
    if has_rare_options:
        opt = typer.Option(
            "--help-all", help="Show all options and exit.", rich_help_panel=OUTPUT_PANEL, is_eager=True,
            expose_value=False, callback=_print_all_help,
        )  # fmt: skip
        panels[_HELP_ALL] = OUTPUT_PANEL
        parameters[_HELP_ALL] = inspect.Parameter(
            _HELP_ALL, _KEYWORD_ONLY, default=False, annotation=Annotated[bool, opt]
        )
    # --help has the panels in the order of their first options.
    panel_order = {panel: position for position, panel in enumerate(_LAST_PANELS)}
    sorted_parameters = sorted(parameters.values(), key=lambda p: panel_order.get(panels.get(p.name, ""), -1))

    @functools.wraps(function)
    def call(*, debug: bool, no_color: bool, **values: Any) -> None:
        for name in settings.SETTINGS_OPTIONS:
            values.pop(name)  # handled in Command.parse_args
        values.pop(_HELP_ALL, None)  # which ends the command before
        all_values = dict(values)
        kwargs = {group: {name: values.pop(name) for name in owners if owners[name] == group} for group in groups}
        try:
            _check_numbers(all_values)
            instances = {group: _build_options(kind, kwargs[group]) for group, kind in groups.items()}
            reading = next((options for options in instances.values() if isinstance(options, ReadingOptions)), None)
            files = [value for value in values.values() if isinstance(value, Path) and value != STDIN]
            limit = contextlib.nullcontext() if reading is None else limit_memory(reading.max_memory, files)
            with limit, _set_colors(enabled=not no_color):
                function(**values, **instances)
        except BrokenPipeError:  # the reader of the output (`| head`) has closed it: not an error
            discard_output(sys.stdout)
            raise typer.Exit(0) from None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            echo(f"memprof: {UsageError('a name is too long for a file', value=str(error.filename)[:80])}", err=True)
            raise typer.Exit(UsageError.exit_code) from None
        except MemprofError as error:
            if debug:
                raise
            # The report of a failed run has the error already.
            is_reported = error.follows_answer or getattr(error, "document", None) is not None
            report_error(error, as_json=not is_reported and any(values.get("as_json") for values in kwargs.values()))
            raise typer.Exit(error.exit_code) from None

    call.__signature__ = inspect.Signature(sorted_parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in sorted_parameters}
    return call


def _check_numbers(numbers: Mapping[str, Any]) -> None:
    """Raise UsageError if a value in `numbers`, by option name, is out of range or has hundreds of digits."""
    for name, value in numbers.items():
        limit = _MAX_BY_OPTION.get(name, _MAX_NUMBER)
        is_out_of_range = isinstance(value, int | float) and not abs(value) <= limit  # also true for NaN
        if is_out_of_range or (isinstance(value, str) and _LONG_NUMBER.search(value)):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is out of range", value=str(value)[:40], hint=f"give a number, at most {limit:,}")


@contextlib.contextmanager
def _set_colors(*, enabled: bool) -> Iterator[None]:
    if enabled:
        yield
        return
    from memprof.report.terminal.layout import NO_COLOR

    token = NO_COLOR.set(True)
    try:
        yield
    finally:
        NO_COLOR.reset(token)


def _build_parameter(name: str, kind: Any, opt: Option, default: object) -> inspect.Parameter:
    """Return typer's parameter for an option.

    The default is False for a flag, None if `about.unset` describes the default, else the field's default.
    """
    is_flag = kind is bool and opt.instead_of is None
    default_text = opt.unset or (str(default) if opt.parse and not opt.is_count and default is not None else None)
    info = typer.Option(
        *filter(None, (opt.short, opt.flag)),
        help=opt.help.format(choices=(" or " if len(opt.choices) == 2 else ", ").join(opt.choices)),
        show_default=default_text or True,
        metavar=opt.metavar,
        rich_help_panel=opt.panel,
        hidden=not opt.panel,
        autocompletion=get_completer(name, opt.choices),
    )
    if is_flag:
        return inspect.Parameter(name, _KEYWORD_ONLY, default=False, annotation=Annotated[bool, info])
    value = None if default_text or kind is bool or default == "" else default
    if opt.parse or kind is bool:
        kind, value = str, None if value is None else str(value)
    return inspect.Parameter(name, _KEYWORD_ONLY, default=value, annotation=Annotated[kind | None, info])


def _parse_option(opt: Option, value: str) -> Any:
    """Return the parsed value of an option. Raises UsageError, which names the option."""
    assert opt.parse is not None
    try:
        return opt.parse(value)
    except UsageError as error:
        raise UsageError(f"{opt.flag}: {error.problem}", value=error.value, hint=error.hint) from error


def _build_options(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return an instance of dataclass `kind` from option values. Raises UsageError: wrong or conflicting values."""
    options = get_options(kind)
    kwargs: dict[str, Any] = {}
    for name, value in values.items():
        opt = options[name]
        if value is None or value is False:
            continue
        replaced = opt.instead_of
        if replaced is not None and replaced in kwargs:
            flags = options[replaced].flag, opt.flag
            problem = "give {} or {}, not both".format(*flags)
            raise UsageError(problem, value=f"{flags[0]} {kwargs[replaced]} {flags[1]} {value}", hint="leave one out")
        if value is True:
            kwargs[name] = not kind.__dataclass_fields__[name].default
        elif replaced is not None and opt.parse is None:
            kwargs[replaced], kwargs[name] = value, True
        else:
            kwargs[name] = _parse_option(opt, value) if opt.parse else value
            _check_numbers({name: kwargs[name]})
    if "gpu" in options and options["gpu"].unset == DEFAULT_GPU_TEXT and not kwargs.keys() & {"gpu", "gpu_vram_bytes"}:
        from memprof.flows.local_gpu import find_local_gpu_options

        kwargs |= find_local_gpu_options()
    instance = kind(**kwargs)
    check_options(instance)
    return instance
